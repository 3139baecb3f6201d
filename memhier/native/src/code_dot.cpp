#include "code_dot.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "simd.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace memhier {
namespace {

constexpr std::size_t kStride = 64;  // between the fields of a query
constexpr std::size_t kPiece = 16;   // bytes of a code that are worked on at a time

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
      chunks_.push_back({at, std::min<std::uint32_t>(kStride, end - at), width, query});
      query += 8 / width;
    }
  }
  bytes_.resize(query * kStride);
  rounded_.resize(format.coded_dimensions() + kStride);
}

namespace {

MEMHIER_CLONES
float largest_of(const float* values, std::size_t count) {
  float largest = 0;
#pragma omp simd reduction(max : largest)
  for (std::size_t i = 0; i < count; ++i) largest = std::max(largest, std::fabs(values[i]));
  return largest;
}

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

}  // namespace

void ByteQuery::assign(const float* values) {
  const float largest = largest_of(values, format_.coded_dimensions());
  scale_ = largest / 127;
  round_to_bytes(values, largest > 0 ? 127 / largest : 0, format_.coded_dimensions(), rounded_.data());
  offset_ = 0;
  const std::int8_t* next = rounded_.data();
  std::size_t chunk = 0;
  for (std::size_t group = 0; group < 4; ++group) {
    std::size_t left = format_.dimensions[group];
    const float half = static_cast<float>((1 << CodeFormat::kWidths[group]) - 1) / 2;
    offset_ += half * static_cast<float>(sum_of(next, left));
    for (std::size_t bytes = format_.group_bytes(group); bytes > 0; bytes -= chunks_[chunk++].bytes) {
      const Chunk& part = chunks_[chunk];
      for (std::uint32_t field = 0; field < 8 / part.width; ++field) {
        std::int8_t* to = bytes_.data() + (part.query + field) * kStride;
        const std::size_t filled = std::min<std::size_t>(part.bytes, left);
        // Whole pieces are copied: what lies past the chunk meets no code, what lies past the last dimension is zeroed.
        for (std::size_t at = 0; at < filled; at += kPiece) std::memcpy(to + at, next + at, kPiece);
        if (filled < part.bytes) std::memset(to + filled, 0, part.bytes - filled);
        next += filled;
        left -= filled;
      }
    }
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
        const std::int8_t* query = bytes_.data() + (chunk.query + field) * kStride;
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
#define MEMHIER_VNNI __attribute__((target("avx512f,avx512bw,avx512vl,avx512vnni")))
#define MEMHIER_VNNI_INLINE MEMHIER_VNNI __attribute__((always_inline)) inline

namespace {

constexpr std::size_t kQuads = 4;    // of four codes: as many chains of additions, none waiting for another
constexpr std::size_t kCodes = 4 * kQuads;

// The same 16 bytes, or fewer, of four codes, one after the other.
MEMHIER_VNNI_INLINE __m512i load_four(const std::uint8_t* const* codes, std::size_t at, __mmask16 present) {
  __m512i four = _mm512_castsi128_si512(_mm_maskz_loadu_epi8(present, codes[0] + at));
  four = _mm512_inserti32x4(four, _mm_maskz_loadu_epi8(present, codes[1] + at), 1);
  four = _mm512_inserti32x4(four, _mm_maskz_loadu_epi8(present, codes[2] + at), 2);
  return _mm512_inserti32x4(four, _mm_maskz_loadu_epi8(present, codes[3] + at), 3);
}

// Adds the products of one field of the bytes, then those of the fields above it.
template <int width, int shift>
MEMHIER_VNNI_INLINE void add_fields(const __m512i* bytes, const std::int8_t* query, std::size_t stride, __m512i* sums) {
  const __m512i values = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(query)));
  const __m512i mask = _mm512_set1_epi8(static_cast<char>((1u << width) - 1));
#pragma GCC unroll kQuads  // the sums stay in registers
  for (std::size_t j = 0; j < kQuads; ++j)
    sums[j] = _mm512_dpbusd_epi32(sums[j], _mm512_and_si512(_mm512_srli_epi16(bytes[j], shift), mask), values);
  if constexpr (shift + width < 8) add_fields<width, shift + width>(bytes, query + stride, stride, sums);
}

}  // namespace

// Sixteen codes at a time, 16 bytes of each: groups are a few bytes wide, so that wider pieces would be half empty.
MEMHIER_VNNI void ByteQuery::dot_vnni(const std::uint8_t* base, const std::uint32_t* rows, std::size_t count,
                                      std::int32_t* sums) const {
  for (std::size_t i = 0; i < count; i += kCodes) {
    const std::uint8_t* code[kCodes];
    for (std::size_t j = 0; j < kCodes; ++j) code[j] = base + rows[std::min(i + j, count - 1)] * code_bytes_;
    __m512i sum[kQuads];
#pragma GCC unroll kQuads
    for (__m512i& each : sum) each = _mm512_setzero_si512();
    for (const Chunk& chunk : chunks_) {
      for (std::uint32_t at = 0; at < chunk.bytes; at += kPiece) {
        const std::size_t left = chunk.bytes - at;
        const auto present = static_cast<__mmask16>(left >= kPiece ? 0xffff : (1u << left) - 1);
        __m512i bytes[kQuads];
#pragma GCC unroll kQuads
        for (std::size_t j = 0; j < kQuads; ++j) bytes[j] = load_four(code + 4 * j, chunk.at + at, present);
        const std::int8_t* query = bytes_.data() + chunk.query * kStride + at;
        if (chunk.width == 8) add_fields<8, 0>(bytes, query, kStride, sum);
        else if (chunk.width == 4) add_fields<4, 0>(bytes, query, kStride, sum);
        else if (chunk.width == 2) add_fields<2, 0>(bytes, query, kStride, sum);
        else add_fields<1, 0>(bytes, query, kStride, sum);
      }
    }
#pragma GCC unroll kQuads
    for (std::size_t j = 0; j < kQuads; ++j) {
      const __m512i pairs = _mm512_add_epi32(sum[j], _mm512_shuffle_epi32(sum[j], _MM_PERM_BADC));
      const __m512i all = _mm512_add_epi32(pairs, _mm512_shuffle_epi32(pairs, _MM_PERM_CDAB));
      // The sum of each code stands four times in its quarter.
      const __m128i four = _mm512_castsi512_si128(_mm512_maskz_compress_epi32(0x1111, all));
      const std::size_t first = std::min(count, i + 4 * j), wanted = std::min<std::size_t>(4, count - first);
      _mm_mask_storeu_epi32(sums + first, static_cast<__mmask8>((1u << wanted) - 1), four);
    }
  }
}
#endif

}  // namespace memhier
