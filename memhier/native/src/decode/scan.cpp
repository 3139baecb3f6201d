// The scan of all rows, a chunk of 256 at a time.
#include "decode/scan.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "bind/simd.hpp"
#include "decode/exp.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace memhier {
namespace {

constexpr std::size_t kLanes = 16;
constexpr std::size_t kSampled = 16;

// Plain products of a chunk's first `width` directions: for a compiler to vectorise over the rows.
MEMHIER_CLONES
void dot_chunk_plain(const std::uint8_t* codes, std::size_t width, const std::int8_t* query, std::int32_t* dots) {
  for (std::size_t first = 0; first < kChunkRows; first += kLanes) {
    std::int32_t sums[kLanes] = {};
    for (std::size_t t = 0; t < width; t += 4) {
      const std::uint8_t* four = codes + t * kChunkRows + 4 * first;
#pragma omp simd
      for (std::size_t row = 0; row < kLanes; ++row)
        sums[row] += four[4 * row] * query[t] + four[4 * row + 1] * query[t + 1] + four[4 * row + 2] * query[t + 2] +
                     four[4 * row + 3] * query[t + 3];
    }
    std::memcpy(dots + first, sums, sizeof sums);
  }
}

#if defined(__x86_64__)
const bool kHasVnni = __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
#define MEMHIER_VNNI __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")))

// `vectors` times 16 rows against `count` queries: as many sums as stay in registers, so that codes are loaded once.
template <std::size_t vectors, std::size_t count>
MEMHIER_VNNI void dot_chunk_vnni(const std::uint8_t* codes, std::size_t width, const std::int8_t* const* queries,
                                 Dots dots) {
  for (std::size_t first = 0; first < kChunkRows; first += vectors * kLanes) {
    __m512i sums[vectors][count];
    for (auto& row : sums)
      for (auto& sum : row) sum = _mm512_setzero_si512();
    for (std::size_t t = 0; t < width; t += 4) {
      __m512i query[count];
      for (std::size_t q = 0; q < count; ++q) {
        std::int32_t four;
        std::memcpy(&four, queries[q] + t, 4);
        query[q] = _mm512_set1_epi32(four);
      }
      for (std::size_t v = 0; v < vectors; ++v) {
        const __m512i code = _mm512_loadu_si512(codes + t * kChunkRows + 4 * (first + v * kLanes));
        for (std::size_t q = 0; q < count; ++q) sums[v][q] = _mm512_dpbusd_epi32(sums[v][q], code, query[q]);
      }
    }
    for (std::size_t v = 0; v < vectors; ++v)
      for (std::size_t q = 0; q < count; ++q) _mm512_store_si512(dots[q] + first + v * kLanes, sums[v][q]);
  }
}

MEMHIER_VNNI std::size_t above_vnni(const float* values, float threshold, const AllowedRows& allowed, std::size_t first,
                                    std::uint16_t* at) {
  std::size_t found = 0;
  const __m512 limit = _mm512_set1_ps(threshold);
  for (std::size_t i = 0; i < kChunkRows; i += 16) {
    std::uint32_t mask = _mm512_cmp_ps_mask(_mm512_loadu_ps(values + i), limit, _CMP_GT_OQ);
    if (mask != 0) mask &= allowed.sixteen(first + i);
    for (; mask != 0; mask &= mask - 1) at[found++] = static_cast<std::uint16_t>(i + std::countr_zero(mask));
  }
  return found;
}
#endif

}  // namespace

void dot_chunk(const std::uint8_t* codes, std::size_t width, std::span<const CodedQuery* const> queries, Dots dots) {
  const std::int8_t* bytes[BlockScan::kQueries];
  for (std::size_t q = 0; q < queries.size(); ++q) bytes[q] = queries[q]->bytes();
#if defined(__x86_64__)
  if (kHasVnni) {
    switch (queries.size()) {
      case 1:
        return dot_chunk_vnni<16, 1>(codes, width, bytes, dots);
      case 2:
        return dot_chunk_vnni<8, 2>(codes, width, bytes, dots);
      case 3:
        return dot_chunk_vnni<4, 3>(codes, width, bytes, dots);
      default:
        return dot_chunk_vnni<4, 4>(codes, width, bytes, dots);
    }
  }
#endif
  for (std::size_t q = 0; q < queries.size(); ++q) dot_chunk_plain(codes, width, bytes[q], dots[q]);
}

namespace {

// The places of allowed rows whose values are above a threshold, in the chunk from row `first` on.
std::size_t above(const float* values, float threshold, const AllowedRows& allowed, std::size_t first,
                  std::uint16_t* at) {
#if defined(__x86_64__)
  if (kHasVnni) return above_vnni(values, threshold, allowed, first, at);
#endif
  std::size_t found = 0;
  for (std::size_t i = 0; i < kChunkRows; ++i)
    if (values[i] > threshold && allowed.has(first + i)) at[found++] = static_cast<std::uint16_t>(i);
  return found;
}

MEMHIER_CLONES
void estimate_chunk(const std::int32_t* dots, const float* offsets, const float* scales, float step,
                    std::int32_t excess, float shift, float* estimates) {
#pragma omp simd
  for (std::size_t i = 0; i < kChunkRows; ++i)
    estimates[i] = (offsets[i] + shift) + scales[i] * (step * static_cast<float>(dots[i] - excess));
}

MEMHIER_CLONES
void margins_of_chunk(const RowNumbers& rows, std::size_t first, const Spread& spread, float shift, float* margins) {
#pragma omp simd
  for (std::size_t i = 0; i < kChunkRows; ++i)
    margins[i] = margin_of(rows, static_cast<std::uint32_t>(first + i), spread, shift);
}

// Numbers of a chunk, on their way from memory while its codes are multiplied.
void prefetch_chunk(const float* numbers) {
  for (std::size_t i = 0; i < kChunkRows; i += kLanes) __builtin_prefetch(numbers + i, 0, 2);
}

// Estimates by the sums of both parts of the digits.
MEMHIER_CLONES
void estimate_digits(const std::int32_t* leading, const std::int32_t* others, const RowNumbers& rows, std::size_t first,
                     const DigitQuery& query, float shift, float* estimates) {
  const float step = query.step(0), fine = query.step(1), excess = query.excess();
  const float *offsets = rows.offsets + first, *norms = rows.coded + first;
#pragma omp simd
  for (std::size_t i = 0; i < kChunkRows; ++i)
    estimates[i] = (offsets[i] + shift) +
                   norms[i] * (step * static_cast<float>(leading[i]) + fine * static_cast<float>(others[i]) - excess);
}

struct Three {
  float middle, low, high;
};

MEMHIER_CLONES
float largest_of(const float* values) {
  float largest = -kInfinity;
#pragma omp simd reduction(max : largest)
  for (std::size_t i = 0; i < kChunkRows; ++i) largest = std::max(largest, values[i]);
  return largest;
}

MEMHIER_CLONES
Three sum_exps(const float* estimates, const float* outside, const float* margins, float inverse, float half_variance,
               float reference) {
  float middle = 0, low = 0, high = 0;
#pragma omp simd reduction(+ : middle, low, high)
  for (std::size_t i = 0; i < kChunkRows; ++i) {
    const float expected = inverse * estimates[i] + half_variance * outside[i] * outside[i] - reference;
    middle += exp_of(std::min(expected, 80.F));  // beyond, the bounds say all that is known
    low += exp_of(inverse * (estimates[i] - margins[i]) - reference);
    const float above = inverse * (estimates[i] + margins[i]) - reference;
    high += above > 80 ? kInfinity : exp_of(above);
  }
  return {middle, low, high};
}

MEMHIER_CLONES
float sum_expected(const float* estimates, const float* outside, float inverse, float half_variance, float reference) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (std::size_t i = 0; i < kChunkRows; ++i)
    sum += exp_of(std::min(inverse * estimates[i] + half_variance * outside[i] * outside[i] - reference, 80.F));
  return sum;
}

void add_chunk(ExpSums& sums, const float* estimates, const float* margins, const float* outside,
               const ScanOptions& options, float half_variance) {
  const float largest = options.inverse * largest_of(estimates);
  if (largest > sums.reference) {
    const double factor = std::exp(sums.reference - static_cast<double>(largest));
    for (double& sum : sums.sums) sum *= factor;
    sums.reference = largest;
  }
  const auto reference = static_cast<float>(sums.reference);
  if (!options.interval) {
    sums.sums[0] += sum_expected(estimates, outside, options.inverse, half_variance, reference);
    return;
  }
  const auto [middle, low, high] = sum_exps(estimates, outside, margins, options.inverse, half_variance, reference);
  sums.sums[0] += middle;
  sums.sums[1] += low;
  sums.sums[2] += high;
}

}  // namespace

// Takes rows that are not allowed out of the sums of exp.
void BlockScan::exclude(const AllowedRows& allowed, std::size_t first) {
  constexpr float kExcluded = -1e30F;  // as padding
  for (std::size_t i = 0; i < kChunkRows; ++i)
    if (!allowed.has(first + i)) {
      estimates_[i] = kExcluded;
      margins_[i] = 0;
    }
}

void DigitQuery::assign(const DigitCodes& digits, const CodedQuery& query) {
  bytes_.resize(digits.count);
  excess_ = 0;
  std::size_t first = 0;
  for (std::size_t part = 0; part < kParts; ++part) {
    const std::size_t end = first + count(digits, part);
    const auto number = [&](std::size_t i) { return digits.values[i] * query.z()[digits.directions[i]]; };
    float largest = 0;
    for (std::size_t i = first; i < end; ++i) largest = std::max(largest, std::fabs(number(i)));
    steps_[part] = largest / 127;
    const float inverse = largest > 0 ? 127 / largest : 0;
    std::int32_t sum = 0;
    for (std::size_t i = first; i < end; ++i) {
      bytes_[i] = static_cast<std::int8_t>(std::clamp(std::nearbyint(number(i) * inverse), -127.F, 127.F));
      sum += bytes_[i];
    }
    excess_ += steps_[part] * 1.5F * static_cast<float>(sum);
    first = end;
  }
}

// One chunk in 16 is scanned before all others. It tells a key that few more rows than are wanted exceed.
void BlockScan::run(const BlockCodes& rows, const DigitCodes& digits, std::span<const DigitQuery> own,
                    const ScanQueries& queries) {
  const std::size_t chunks = rows.padded_rows / kChunkRows, sampled = (chunks + kSampled - 1) / kSampled;
  std::size_t limits[kQueries];
  for (std::size_t q = 0; q < own.size(); ++q) {
    limits[q] = queries.largest[q].limit();
    const double expected = static_cast<double>(limits[q] * sampled) / static_cast<double>(chunks);
    queries.largest[q].start(static_cast<std::size_t>(expected + 4 * std::sqrt(expected) + 8));
  }
  pass(rows, digits, own, queries, Chunks::sampled);
  for (std::size_t q = 0; q < own.size(); ++q) {
    Largest& largest = queries.largest[q];
    sampled_[q] = largest.finish();
    std::sort(sampled_[q].begin(), sampled_[q].end(), [](const Logit& a, const Logit& b) { return a.row < b.row; });
    largest.start(limits[q], largest.threshold());
  }
  pass(rows, digits, own, queries, Chunks::others);
  for (std::size_t q = 0; q < own.size(); ++q) {
    Largest& largest = queries.largest[q];
    if (largest.size() >= limits[q] || largest.threshold() == -kInfinity) continue;
    largest.start(limits[q]);  // the sampled chunks have more than their share of the largest
    pass(rows, digits, own.subspan(q, 1),
         {queries.coded.subspan(q, 1), queries.allowed.subspan(q, 1), queries.largest.subspan(q, 1), {}}, Chunks::all);
  }
}

// Offers the rows of chunks in their order; of sampled ones, if the others are scanned, those that were found.
void BlockScan::pass(const BlockCodes& rows, const DigitCodes& digits, std::span<const DigitQuery> own,
                     const ScanQueries& queries, Chunks wanted) {
  const std::int8_t* bytes[DigitQuery::kParts][kQueries];
  const Logit* found[kQueries];
  for (std::size_t q = 0; q < own.size(); ++q) {
    for (std::size_t part = 0; part < DigitQuery::kParts; ++part) bytes[part][q] = own[q].bytes(part);
    found[q] = sampled_[q].data();
  }
  const std::size_t leading = DigitQuery::count(digits, 0);
  for (std::size_t first = 0; first < rows.padded_rows; first += kChunkRows) {
    if (wanted != Chunks::all && (first / kChunkRows % kSampled == 0) != (wanted == Chunks::sampled)) {
      for (std::size_t q = 0; wanted == Chunks::others && q < own.size(); ++q)
        for (; found[q] != sampled_[q].data() + sampled_[q].size() && found[q]->row < first + kChunkRows; ++found[q])
          queries.largest[q].offer(*found[q]);
      continue;
    }
    const auto reaches = [first](const AllowedRows& allowed) { return allowed.reaches(first); };
    if (std::none_of(queries.allowed.begin(), queries.allowed.end(), reaches)) continue;
    const std::uint8_t* codes = digits.codes + first * (digits.count / 4);
    prefetch_chunk(rows.numbers.offsets + first);
    prefetch_chunk(rows.numbers.coded + first);
    dot_digits(codes, leading, {bytes[0], own.size()}, leading_);
    dot_digits(codes + kChunkRows * (leading / 4), digits.count - leading, {bytes[1], own.size()}, dots_);
    for (std::size_t q = 0; q < own.size(); ++q) {
      if (!queries.allowed[q].reaches(first)) continue;
      estimate_digits(leading_[q], dots_[q], rows.numbers, first, own[q], queries.coded[q]->shift(), estimates_);
      offer(rows, first, queries.allowed[q], estimates_, queries.largest[q]);
    }
  }
}

// Offers the allowed rows of a chunk by their keys.
void BlockScan::offer(const BlockCodes& rows, std::size_t first, const AllowedRows& allowed, const float* keys,
                      Largest& largest) {
  std::uint16_t at[kChunkRows];
  const std::size_t found = above(keys, largest.threshold(), allowed, first, at);
  // The last chunk's padding is below most rows, but not below one whose logit is about -1e30.
  for (std::size_t i = 0; i < found && first + at[i] < rows.rows; ++i)
    largest.offer({keys[at[i]], estimates_[at[i]], static_cast<std::uint32_t>(first + at[i])});
}

void BlockScan::run(const BlockCodes& rows, std::size_t width, const ScanQueries& queries, const ScanOptions& options) {
  const std::size_t count = queries.coded.size();
  Spread spreads[kQueries];
  std::int32_t excess[kQueries];
  for (std::size_t q = 0; q < count; ++q) {
    spreads[q] = queries.coded[q]->spread(width);
    excess[q] = queries.coded[q]->excess(width);
  }
  for (std::size_t first = 0; first < rows.padded_rows; first += kChunkRows) {
    const auto reaches = [first](const AllowedRows& allowed) { return allowed.reaches(first); };
    if (std::none_of(queries.allowed.begin(), queries.allowed.end(), reaches)) continue;
    dot_chunk(rows.codes + first * rows.width, width, queries.coded, dots_);
    for (std::size_t q = 0; q < count; ++q) {
      const AllowedRows& allowed = queries.allowed[q];
      if (!allowed.reaches(first)) continue;
      const CodedQuery& query = *queries.coded[q];
      estimate_chunk(dots_[q], rows.numbers.offsets + first, rows.numbers.scales + first, query.step(), excess[q],
                     query.shift(), estimates_);
      if (options.bounds || options.interval)
        margins_of_chunk(rows.numbers, first, spreads[q], query.shift(), margins_);
      if (options.partition) {
        if (!allowed.all()) exclude(allowed, first);
        const float outside = options.inverse * spreads[q].outside;
        add_chunk(queries.sums[q], estimates_, margins_, rows.numbers.outside + first, options,
                  0.5F * options.variance * outside * outside);
      }
      if (options.bounds) {
#pragma omp simd
        for (std::size_t i = 0; i < kChunkRows; ++i) margins_[i] += estimates_[i];
      }
      offer(rows, first, allowed, options.bounds ? margins_ : estimates_, queries.largest[q]);
    }
  }
}

}  // namespace memhier
