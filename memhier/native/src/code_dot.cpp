#include "code_dot.hpp"

#include <algorithm>
#include <bit>
#include <cmath>

#include "simd.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace memhier {
namespace {

constexpr std::size_t kLane = 64;

#if defined(__x86_64__)
const bool kHasVnni = __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl");
#endif

}  // namespace

ByteQuery::ByteQuery(const CodeFormat& format) : format_(format), code_bytes_(format.bytes()) {
  std::uint32_t at = 0, query = 0;
  for (std::size_t group = 0; group < 4; ++group) {
    const auto width = static_cast<std::uint32_t>(CodeFormat::kWidths[group]);
    const auto end = at + static_cast<std::uint32_t>(format.group_bytes(group));
    for (; at < end; at += chunks_.back().bytes) {
      chunks_.push_back({at, std::min<std::uint32_t>(kLane, end - at), width, query});
      query += 8 / width;
    }
  }
  bytes_.resize(query * kLane);
}

namespace {

MEMHIER_CLONES
float largest_of(const float* values, std::size_t count) {
  float largest = 0;
#pragma omp simd reduction(max : largest)
  for (std::size_t i = 0; i < count; ++i) largest = std::max(largest, std::fabs(values[i]));
  return largest;
}

// Rounds values times a factor, all within 127, to the nearest; returns the sum.
MEMHIER_CLONES
std::int32_t round_to_bytes(const float* values, float factor, std::size_t count, std::int8_t* bytes) {
  constexpr float kMagic = 12582912;  // 1.5 * 2^23: adding it leaves the rounded value in the low bits
  std::int32_t sum = 0;
#pragma omp simd reduction(+ : sum)
  for (std::size_t i = 0; i < count; ++i) {
    const auto rounded = std::bit_cast<std::int32_t>(values[i] * factor + kMagic) - std::bit_cast<std::int32_t>(kMagic);
    bytes[i] = static_cast<std::int8_t>(rounded);
    sum += rounded;
  }
  return sum;
}

}  // namespace

void ByteQuery::assign(const float* values) {
  const float largest = largest_of(values, format_.coded_dimensions());
  scale_ = largest / 127;
  const float inverse = largest > 0 ? 127 / largest : 0;
  offset_ = 0;
  std::size_t chunk = 0, next = 0;
  for (std::size_t group = 0; group < 4; ++group) {
    std::size_t left = format_.dimensions[group];
    const float half = static_cast<float>((1 << CodeFormat::kWidths[group]) - 1) / 2;
    std::int32_t sum = 0;
    for (std::size_t bytes = format_.group_bytes(group); bytes > 0; bytes -= chunks_[chunk++].bytes) {
      const Chunk& part = chunks_[chunk];
      for (std::uint32_t field = 0; field < 8 / part.width; ++field) {
        // What lies past the last dimension was zeroed once and stays so.
        const std::size_t filled = std::min<std::size_t>(part.bytes, left);
        sum += round_to_bytes(values + next, inverse, filled, bytes_.data() + (part.query + field) * kLane);
        next += filled;
        left -= filled;
      }
    }
    offset_ += half * static_cast<float>(sum);
  }
}

void ByteQuery::dot(const std::uint8_t* base, const std::uint32_t* rows, std::size_t count,
                    std::int32_t* sums) const {
#if defined(__x86_64__)
  if (kHasVnni) return dot_vnni(base, rows, count, sums);
#endif
  dot_plain(base, rows, count, sums);
}

MEMHIER_CLONES
void ByteQuery::dot_plain(const std::uint8_t* base, const std::uint32_t* rows, std::size_t count,
                          std::int32_t* sums) const {
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint8_t* code = base + rows[i] * code_bytes_;
    std::int32_t sum = 0;
    for (const Chunk& chunk : chunks_) {
      const std::uint8_t* bytes = code + chunk.at;
      const std::uint32_t mask = (1u << chunk.width) - 1;
      for (std::uint32_t field = 0; field < 8 / chunk.width; ++field) {
        const std::int8_t* query = bytes_.data() + (chunk.query + field) * kLane;
        const std::uint32_t shift = field * chunk.width;
#pragma omp simd reduction(+ : sum)
        for (std::uint32_t b = 0; b < chunk.bytes; ++b)
          sum += static_cast<std::int32_t>(bytes[b] >> shift & mask) * query[b];
      }
    }
    sums[i] = sum;
  }
}

#if defined(__x86_64__)
// Four codes at a time, so that each row of the query is loaded once for them and their sums are added up together.
__attribute__((target("avx512f,avx512bw,avx512vl,avx512vnni"))) void ByteQuery::dot_vnni(
    const std::uint8_t* base, const std::uint32_t* rows, std::size_t count, std::int32_t* sums) const {
  for (std::size_t i = 0; i < count; i += 4) {
    const std::uint8_t* code[4];
    for (std::size_t j = 0; j < 4; ++j) code[j] = base + rows[std::min(i + j, count - 1)] * code_bytes_;
    __m512i sum[4] = {_mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512()};
    for (const Chunk& chunk : chunks_) {
      const __mmask64 present = chunk.bytes == kLane ? ~0ull : (1ull << chunk.bytes) - 1;
      __m512i bytes[4];
      for (std::size_t j = 0; j < 4; ++j) bytes[j] = _mm512_maskz_loadu_epi8(present, code[j] + chunk.at);
      const __m512i mask = _mm512_set1_epi8(static_cast<char>((1u << chunk.width) - 1));
      const std::int8_t* query = bytes_.data() + chunk.query * kLane;
      for (std::uint32_t shift = 0; shift < 8; shift += chunk.width, query += kLane) {
        const __m512i values = _mm512_loadu_si512(query);
        const __m128i by = _mm_cvtsi32_si128(static_cast<int>(shift));
        for (std::size_t j = 0; j < 4; ++j) {
          const __m512i field = _mm512_and_si512(_mm512_srl_epi16(bytes[j], by), mask);
          sum[j] = _mm512_dpbusd_epi32(sum[j], field, values);
        }
      }
    }
    __m256i half[4];
    for (std::size_t j = 0; j < 4; ++j)
      half[j] = _mm256_add_epi32(_mm512_castsi512_si256(sum[j]), _mm512_extracti64x4_epi64(sum[j], 1));
    const __m256i pairs = _mm256_hadd_epi32(_mm256_hadd_epi32(half[0], half[1]), _mm256_hadd_epi32(half[2], half[3]));
    alignas(16) std::int32_t four[4];
    _mm_store_si128(reinterpret_cast<__m128i*>(four),
                    _mm_add_epi32(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1)));
    std::copy_n(four, std::min<std::size_t>(4, count - i), sums + i);
  }
}
#endif

}  // namespace memhier
