// Digits are taken apart once for all queries; the sums of some rows stay in registers.
#include "scan/digit_dot.hpp"

#include <cstring>

#include "bind/simd.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace memhier {
namespace {

constexpr std::size_t kLanes = 16;
constexpr std::size_t kAhead = 8192;  // bytes on their way from memory

MEMHIER_CLONES
void dot_digits_plain(const std::uint8_t* codes, std::size_t count, const std::int8_t* query, std::int32_t* sums) {
  std::memset(sums, 0, kDigitRows * sizeof *sums);
  for (std::size_t t = 0; t < count; t += kDigits)
    for (std::size_t byte = 0; byte < 4; ++byte) {
      const std::int8_t* own = query + t + byte;
      const std::uint8_t* four = codes + t / 4 * kDigitRows + byte;
#pragma omp simd
      for (std::size_t row = 0; row < kDigitRows; ++row) {
        const std::int32_t code = four[4 * row];
        sums[row] += (code & 3) * own[0] + (code >> 2 & 3) * own[4] + (code >> 4 & 3) * own[8] + (code >> 6) * own[12];
      }
    }
}

#if defined(__x86_64__)
const bool kHasVnni = __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bw");

template <std::size_t vectors, std::size_t count>
__attribute__((target("avx512f,avx512bw,avx512vnni"))) void dot_digits_vnni(const std::uint8_t* codes,
                                                                            std::size_t digits,
                                                                            const std::int8_t* const* queries,
                                                                            DigitSums out) {
  const __m512i low = _mm512_set1_epi8(3);
  for (std::size_t first = 0; first < kDigitRows; first += vectors * kLanes) {
    __m512i sums[vectors][count];
    for (auto& row : sums)
      for (auto& sum : row) sum = _mm512_setzero_si512();
    for (std::size_t t = 0; t < digits; t += kDigits) {
      __m512i query[count][4];
      for (std::size_t q = 0; q < count; ++q)
        for (std::size_t m = 0; m < 4; ++m) {
          std::int32_t four;
          std::memcpy(&four, queries[q] + t + 4 * m, 4);
          query[q][m] = _mm512_set1_epi32(four);
        }
      for (std::size_t v = 0; v < vectors; ++v) {
        const std::uint8_t* at = codes + t / 4 * kDigitRows + 4 * (first + v * kLanes);
        __builtin_prefetch(at + kAhead, 0, 2);
        const __m512i code = _mm512_loadu_si512(at);
        const __m512i digit[4] = {_mm512_and_si512(code, low), _mm512_and_si512(_mm512_srli_epi16(code, 2), low),
                                  _mm512_and_si512(_mm512_srli_epi16(code, 4), low),
                                  _mm512_and_si512(_mm512_srli_epi16(code, 6), low)};
        for (std::size_t q = 0; q < count; ++q)
          for (std::size_t m = 0; m < 4; ++m) sums[v][q] = _mm512_dpbusd_epi32(sums[v][q], digit[m], query[q][m]);
      }
    }
    for (std::size_t v = 0; v < vectors; ++v)
      for (std::size_t q = 0; q < count; ++q) _mm512_storeu_si512(out[q] + first + v * kLanes, sums[v][q]);
  }
}
#endif

}  // namespace

void dot_digits(const std::uint8_t* codes, std::size_t count, std::span<const std::int8_t* const> queries,
                DigitSums sums) {
#if defined(__x86_64__)
  if (kHasVnni) {
    switch (queries.size()) {
      case 1:
        return dot_digits_vnni<16, 1>(codes, count, queries.data(), sums);
      case 2:
        return dot_digits_vnni<8, 2>(codes, count, queries.data(), sums);
      case 3:
        return dot_digits_vnni<4, 3>(codes, count, queries.data(), sums);
      default:
        return dot_digits_vnni<4, 4>(codes, count, queries.data(), sums);
    }
  }
#endif
  for (std::size_t q = 0; q < queries.size(); ++q) dot_digits_plain(codes, count, queries[q], sums[q]);
}

}  // namespace memhier
