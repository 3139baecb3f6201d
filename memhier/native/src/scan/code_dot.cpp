// The inner products by three instruction sets, with equal results.
#include "scan/code_dot.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "bind/simd.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace memhier {
namespace {

constexpr std::size_t kStride = 64;  // bytes of a chunk
constexpr std::size_t kWord = 4;     // bytes of a code that are multiplied at a time
constexpr std::size_t kRows = CodeFormat::kBlockRows;
constexpr std::size_t kTogether = 4;  // blocks: as many chains of additions, none waiting for another

}  // namespace

Instructions instructions(Instructions most) {
#if defined(__x86_64__)
  static const bool wide =
      __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
  static const bool some = __builtin_cpu_supports("avx2");
  return std::min(most, wide ? Instructions::kAvx512 : some ? Instructions::kAvx2 : Instructions::kPlain);
#else
  return std::min(most, Instructions::kPlain);
#endif
}

ByteQuery::ByteQuery(const CodeFormat& format, Instructions most)
    : format_(format), use_(instructions(most)), code_bytes_(format.bytes()) {
  std::uint32_t at = 0, axis = 0;
  for (std::size_t group = 0; group < 4; ++group) {
    const auto width = static_cast<std::uint32_t>(CodeFormat::kWidths[group]);
    const auto end = at + static_cast<std::uint32_t>(format.group_bytes(group));
    const auto last = axis + static_cast<std::uint32_t>(format.dimensions[group]);
    for (; at < end; at += chunks_.back().bytes) {
      chunks_.push_back({at, std::min<std::uint32_t>(kStride, end - at), width, axis});
      axis = std::min(last, axis + chunks_.back().bytes * (8 / width));
    }
  }
  // Fields past the last dimension are zero in every code, so it does not matter which of the query's bytes they meet.
  bytes_.resize(format.coded_dimensions() + kStride);
}

namespace {

// Rounds values times a factor, all within 127, to the nearest.
MEMHIER_CLONES
void round_to_bytes(const float* values, float factor, std::size_t count, std::int8_t* bytes) {
  constexpr float kMagic = 12582912;  // 1.5 * 2^23: adding it leaves the rounded value in the low bits
#pragma omp simd
  for (std::size_t i = 0; i < count; ++i)
    bytes[i] = static_cast<std::int8_t>(std::bit_cast<std::int32_t>(values[i] * factor + kMagic) -
                                        std::bit_cast<std::int32_t>(kMagic));
}

MEMHIER_CLONES
std::int32_t sum_of(const std::int8_t* bytes, std::size_t count) {
  std::int32_t sum = 0;
#pragma omp simd reduction(+ : sum)
  for (std::size_t i = 0; i < count; ++i) sum += bytes[i];
  return sum;
}

// The sum over dimensions of (2^width - 1) * byte.
std::int32_t weighted_sum(const std::int8_t* bytes, const CodeFormat& format) {
  std::int32_t sum = 0;
  for (std::size_t group = 0; group < 4; bytes += format.dimensions[group++])
    sum += ((1 << CodeFormat::kWidths[group]) - 1) * sum_of(bytes, format.dimensions[group]);
  return sum;
}

#if defined(__x86_64__)
#define MEMHIER_VNNI __attribute__((target("avx512f,avx512bw,avx512vl,avx512vnni")))

MEMHIER_VNNI void round_avx512(const float* values, float factor, std::size_t count, std::int8_t* bytes) {
  const __m512 by = _mm512_set1_ps(factor);
  for (std::size_t i = 0; i < count; i += 16) {
    const auto present = static_cast<__mmask16>(count - i >= 16 ? 0xffff : (1u << (count - i)) - 1);
    const __m512 value = _mm512_mul_ps(_mm512_maskz_loadu_ps(present, values + i), by);
    _mm512_mask_cvtepi32_storeu_epi8(bytes + i, present, _mm512_cvtps_epi32(value));
  }
}

MEMHIER_VNNI std::int32_t weighted_sum_vnni(const std::int8_t* bytes, const CodeFormat& format) {
  const __m512i one = _mm512_set1_epi8(1);
  __m512i sum = _mm512_setzero_si512();
  for (std::size_t group = 0; group < 4; bytes += format.dimensions[group++]) {
    const std::size_t count = format.dimensions[group];
    __m512i of_group = _mm512_setzero_si512();
    for (std::size_t i = 0; i < count; i += kStride) {
      const __mmask64 present = count - i >= kStride ? ~__mmask64{0} : (__mmask64{1} << (count - i)) - 1;
      of_group = _mm512_dpbusd_epi32(of_group, one, _mm512_maskz_loadu_epi8(present, bytes + i));
    }
    // 2^width - 1 times it.
    sum = _mm512_add_epi32(sum, _mm512_sub_epi32(_mm512_slli_epi32(of_group, CodeFormat::kWidths[group]), of_group));
  }
  return _mm512_reduce_add_epi32(sum);
}
#endif

}  // namespace

void ByteQuery::assign(const float* values, float largest) {
  scale_ = largest / 127;
  const float factor = largest > 0 ? 127 / largest : 0;
#if defined(__x86_64__)
  if (use_ == Instructions::kAvx512) {
    round_avx512(values, factor, format_.coded_dimensions(), bytes_.data());
    offset_ = static_cast<float>(weighted_sum_vnni(bytes_.data(), format_)) / 2;
    return;
  }
#endif
  round_to_bytes(values, factor, format_.coded_dimensions(), bytes_.data());
  offset_ = static_cast<float>(weighted_sum(bytes_.data(), format_)) / 2;
}

void ByteQuery::dot(const std::uint8_t* base, std::size_t step, std::size_t total, const RowGroup* groups,
                    std::size_t count, std::int32_t* sums) const {
  const std::size_t whole = total / kRows * kRows;
  std::size_t g = 0;
  while (g < count && groups[g].first < whole) {
    const std::uint8_t* block[kTogether];
    const std::size_t start = g;
    for (; g - start < kTogether && g < count && groups[g].first < whole; ++g)
      block[g - start] = base + groups[g].first * step;
    dot_blocks(block, g - start, sums + start * kRows);
  }
  for (; g < count; ++g)
    for (std::uint32_t wanted = groups[g].wanted; wanted != 0; wanted &= wanted - 1) {
      const auto i = static_cast<std::size_t>(std::countr_zero(wanted));
      sums[g * kRows + i] = dot_row(base + (groups[g].first + i) * code_bytes_);
    }
}

void ByteQuery::dot_blocks(const std::uint8_t* const* block, std::size_t blocks, std::int32_t* sums) const {
#if defined(__x86_64__)
  if (use_ == Instructions::kAvx512) return dot_vnni(block, blocks, sums);
  if (use_ == Instructions::kAvx2) {
    for (std::size_t b = 0; b < blocks; ++b) dot_avx2(block[b], sums + b * kRows);
    return;
  }
#endif
  for (std::size_t b = 0; b < blocks; ++b) dot_plain(block[b], sums + b * kRows);
}

std::int32_t ByteQuery::dot_row(const std::uint8_t* code) const {
  std::int32_t sum = 0;
  for (const Chunk& chunk : chunks_) {
    const std::uint32_t mask = (1u << chunk.width) - 1;
    for (std::uint32_t field = 0; field < 8 / chunk.width; ++field) {
      const std::int8_t* query = bytes_.data() + chunk.query + field * chunk.bytes;
      for (std::uint32_t b = 0; b < chunk.bytes; ++b)
        sum += static_cast<std::int32_t>(code[chunk.at + b] >> (field * chunk.width) & mask) * query[b];
    }
  }
  return sum;
}

namespace {

// The same up to four bytes of all rows of a block, and how many there are.
std::size_t take_words(const std::uint8_t* bytes, std::size_t left, std::uint32_t* words) {
  const std::size_t taken = left >= 4 ? 4 : left >= 2 ? 2 : 1;
  for (std::size_t r = 0; r < kRows; ++r) {
    words[r] = 0;
    std::memcpy(words + r, bytes + r * taken, taken);
  }
  return taken;
}

MEMHIER_CLONES
void add_products(const std::uint32_t* words, std::uint32_t shift, std::uint32_t mask, std::int32_t value,
                  std::int32_t* sums) {
#pragma omp simd
  for (std::size_t r = 0; r < kRows; ++r) sums[r] += static_cast<std::int32_t>(words[r] >> shift & mask) * value;
}

}  // namespace

void ByteQuery::dot_plain(const std::uint8_t* block, std::int32_t* sums) const {
  std::fill_n(sums, kRows, 0);
  for (const Chunk& chunk : chunks_) {
    for (std::uint32_t at = 0; at < chunk.bytes;) {
      std::uint32_t words[kRows];
      const std::size_t taken = take_words(block + (chunk.at + at) * kRows, chunk.bytes - at, words);
      for (std::uint32_t byte = 0; byte < taken; ++byte, ++at) {
        for (std::uint32_t field = 0; field < 8 / chunk.width; ++field)
          add_products(words, 8 * byte + field * chunk.width, (1u << chunk.width) - 1,
                       bytes_[chunk.query + field * chunk.bytes + at], sums);
      }
    }
  }
}

#if defined(__x86_64__)
#define MEMHIER_AVX2 __attribute__((target("avx2")))
#define MEMHIER_AVX2_INLINE MEMHIER_AVX2 __attribute__((always_inline)) inline

namespace {

// The products of all fields of up to four bytes of eight codes. For most, 16 bits hold the sum of a pair of bytes.
template <int width>
MEMHIER_AVX2_INLINE __m256i products(__m256i bytes, const std::int8_t* query, std::size_t stride) {
  constexpr int kField = width == 8 ? 4 : width;  // of 8 bits they do not: by halves
  const __m256i mask = _mm256_set1_epi8(static_cast<char>((1u << kField) - 1)), one = _mm256_set1_epi16(1);
  __m256i sum = _mm256_setzero_si256();
#pragma GCC unroll 8
  for (int field = 0; field < 8 / kField; ++field) {
    std::int32_t word;
    std::memcpy(&word, query + (width == 8 ? 0 : field) * stride, kWord);
    const __m256i values = _mm256_and_si256(_mm256_srli_epi16(bytes, field * kField), mask);
    const __m256i pairs = _mm256_maddubs_epi16(values, _mm256_set1_epi32(word));
    if constexpr (width == 8)
      sum = _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, field == 0 ? one : _mm256_set1_epi16(16)));
    else
      sum = _mm256_add_epi16(sum, pairs);
  }
  return width == 8 ? sum : _mm256_madd_epi16(sum, one);
}

template <int width>
MEMHIER_AVX2_INLINE void add_chunk_avx2(const std::uint8_t* bytes, std::size_t count, const std::int8_t* query,
                                        __m256i* sums) {
  constexpr std::size_t kHalf = kRows / 2;
#pragma GCC unroll 2
  for (std::size_t half = 0; half < 2; ++half) {
    std::size_t done = 0;
    for (; done + 4 <= count; done += 4) {
      const auto* at = reinterpret_cast<const __m256i*>(bytes + done * kRows + half * kHalf * 4);
      sums[half] = _mm256_add_epi32(sums[half], products<width>(_mm256_loadu_si256(at), query + done, count));
    }
    if (count & 2) {
      const auto* at = reinterpret_cast<const __m128i*>(bytes + done * kRows + half * kHalf * 2);
      const __m256i words = _mm256_cvtepu16_epi32(_mm_loadu_si128(at));
      sums[half] = _mm256_add_epi32(sums[half], products<width>(words, query + done, count));
      done += 2;
    }
    if (count & 1) {
      const auto* at = reinterpret_cast<const __m128i*>(bytes + done * kRows + half * kHalf);
      const __m256i words = _mm256_cvtepu8_epi32(_mm_loadl_epi64(at));
      sums[half] = _mm256_add_epi32(sums[half], products<width>(words, query + done, count));
    }
  }
}

}  // namespace

MEMHIER_AVX2 void ByteQuery::dot_avx2(const std::uint8_t* block, std::int32_t* sums) const {
  __m256i sum[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
  for (const Chunk& chunk : chunks_) {
    const std::int8_t* query = bytes_.data() + chunk.query;
    const std::uint8_t* bytes = block + chunk.at * kRows;
    if (chunk.width == 8)
      add_chunk_avx2<8>(bytes, chunk.bytes, query, sum);
    else if (chunk.width == 4)
      add_chunk_avx2<4>(bytes, chunk.bytes, query, sum);
    else if (chunk.width == 2)
      add_chunk_avx2<2>(bytes, chunk.bytes, query, sum);
    else
      add_chunk_avx2<1>(bytes, chunk.bytes, query, sum);
  }
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(sums), sum[0]);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(sums + kRows / 2), sum[1]);
}

#define MEMHIER_VNNI_INLINE MEMHIER_VNNI __attribute__((always_inline)) inline

namespace {

// Adds the products of one field of the bytes, then those of the fields above it.
template <int blocks, int width, int shift = 0>
MEMHIER_VNNI_INLINE void add_fields(const __m512i* bytes, const std::int8_t* query, std::size_t stride, __m512i* sums) {
  std::int32_t word;
  std::memcpy(&word, query, kWord);
  const __m512i values = _mm512_set1_epi32(word);
  const __m512i mask = _mm512_set1_epi8(static_cast<char>((1u << width) - 1));
#pragma GCC unroll kTogether  // the sums stay in registers
  for (int j = 0; j < blocks; ++j)
    sums[j] = _mm512_dpbusd_epi32(sums[j], _mm512_and_si512(_mm512_srli_epi16(bytes[j], shift), mask), values);
  if constexpr (shift + width < 8) add_fields<blocks, width, shift + width>(bytes, query + stride, stride, sums);
}

template <int blocks, int width>
MEMHIER_VNNI_INLINE void add_chunk(const std::uint8_t* const* block, std::size_t at, std::size_t count,
                                   const std::int8_t* query, __m512i* sums) {
  __m512i bytes[blocks];
  std::size_t done = 0;
  for (; done + 4 <= count; done += 4) {
#pragma GCC unroll kTogether
    for (int j = 0; j < blocks; ++j) bytes[j] = _mm512_loadu_si512(block[j] + (at + done) * kRows);
    add_fields<blocks, width>(bytes, query + done, count, sums);
  }
  if (count & 2) {
#pragma GCC unroll kTogether
    for (int j = 0; j < blocks; ++j)
      bytes[j] = _mm512_maskz_cvtepu16_epi32(
          0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(block[j] + (at + done) * kRows)));
    add_fields<blocks, width>(bytes, query + done, count, sums);
    done += 2;
  }
  if (count & 1) {
#pragma GCC unroll kTogether
    for (int j = 0; j < blocks; ++j)
      bytes[j] = _mm512_maskz_cvtepu8_epi32(
          0xffff, _mm_loadu_si128(reinterpret_cast<const __m128i*>(block[j] + (at + done) * kRows)));
    add_fields<blocks, width>(bytes, query + done, count, sums);
  }
}

template <int blocks, class Chunks>
MEMHIER_VNNI_INLINE void dot_together(const std::uint8_t* const* block, const Chunks& chunks, const std::int8_t* bytes,
                                      std::int32_t* sums) {
  __m512i sum[blocks];
#pragma GCC unroll kTogether
  for (int j = 0; j < blocks; ++j) sum[j] = _mm512_setzero_si512();
  for (const auto& chunk : chunks) {
    const std::int8_t* query = bytes + chunk.query;
    if (chunk.width == 8)
      add_chunk<blocks, 8>(block, chunk.at, chunk.bytes, query, sum);
    else if (chunk.width == 4)
      add_chunk<blocks, 4>(block, chunk.at, chunk.bytes, query, sum);
    else if (chunk.width == 2)
      add_chunk<blocks, 2>(block, chunk.at, chunk.bytes, query, sum);
    else
      add_chunk<blocks, 1>(block, chunk.at, chunk.bytes, query, sum);
  }
#pragma GCC unroll kTogether
  for (int j = 0; j < blocks; ++j) _mm512_storeu_si512(sums + static_cast<std::size_t>(j) * kRows, sum[j]);
}

}  // namespace

MEMHIER_VNNI void ByteQuery::dot_vnni(const std::uint8_t* const* block, std::size_t blocks, std::int32_t* sums) const {
  if (blocks == 4) return dot_together<4>(block, chunks_, bytes_.data(), sums);
  if (blocks >= 2) dot_together<2>(block, chunks_, bytes_.data(), sums);
  if (blocks % 2 == 1) dot_together<1>(block + blocks - 1, chunks_, bytes_.data(), sums + (blocks - 1) * kRows);
}
#endif

}  // namespace memhier
