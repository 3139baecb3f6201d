// The distances by AVX-512, or by the loops of rank/distance.
#include "route/half_rows.hpp"

#include <cstring>

#include "rank/distance.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace memhier {
namespace {

#if defined(__x86_64__)
const bool kHasAvx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq");

// Each distance is summed in the same order whatever n is.
template <std::size_t n>
__attribute__((target("avx512f,avx512dq"))) void measure_avx512(const float* queries, const std::uint16_t* rows,
                                                                std::size_t count, std::size_t dimension, float* away,
                                                                std::size_t stride) {
  const std::size_t whole = dimension / 16 * 16;
  const auto rest = static_cast<__mmask16>((1u << (dimension - whole)) - 1);
  for (std::size_t row = 0; row < count; ++row) {
    const std::uint16_t* x = rows + row * dimension;
    __m512 sums[n];
#pragma GCC unroll 4
    for (__m512& sum : sums) sum = _mm512_setzero_ps();
    for (std::size_t t = 0; t < whole; t += 16) {
      const __m512 value = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + t)));
#pragma GCC unroll 4
      for (std::size_t q = 0; q < n; ++q) {
        const __m512 difference = _mm512_sub_ps(_mm512_loadu_ps(queries + q * dimension + t), value);
        sums[q] = _mm512_fmadd_ps(difference, difference, sums[q]);
      }
    }
    if (rest != 0) {
      __m256i halves = _mm256_setzero_si256();
      std::memcpy(&halves, x + whole, (dimension - whole) * sizeof(std::uint16_t));
      const __m512 value = _mm512_cvtph_ps(halves);
#pragma GCC unroll 4
      for (std::size_t q = 0; q < n; ++q) {
        const __m512 difference = _mm512_sub_ps(_mm512_maskz_loadu_ps(rest, queries + q * dimension + whole), value);
        sums[q] = _mm512_fmadd_ps(difference, difference, sums[q]);
      }
    }
#pragma GCC unroll 4
    for (std::size_t q = 0; q < n; ++q) away[q * stride + row] = _mm512_reduce_add_ps(sums[q]);
  }
}
#endif

}  // namespace

void measure_rows(const float* queries, std::size_t together, const std::uint16_t* rows, std::size_t count,
                  std::size_t dimension, float* away, std::size_t stride) {
#if defined(__x86_64__)
  if (kHasAvx512 && together == kTogether)
    return measure_avx512<kTogether>(queries, rows, count, dimension, away, stride);
  if (kHasAvx512) {
    for (std::size_t q = 0; q < together; ++q)
      measure_avx512<1>(queries + q * dimension, rows, count, dimension, away + q * stride, stride);
    return;
  }
#endif
  for (std::size_t q = 0; q < together; ++q)
    distances(
        {queries + q * dimension, reinterpret_cast<const std::byte*>(rows),
         static_cast<std::ptrdiff_t>(dimension * sizeof(std::uint16_t)), count, dimension, nullptr, away + q * stride},
        RowType::float16, Metric::l2);
}

void measure_some(const float* query, const std::uint16_t* rows, std::size_t dimension, const std::int32_t* numbers,
                  std::size_t count, float* away) {
  const auto row = [=](std::size_t i) { return rows + static_cast<std::size_t>(numbers[i]) * dimension; };
#if defined(__x86_64__)
  if (kHasAvx512) {
    for (std::size_t i = 0; i < count; ++i) measure_avx512<1>(query, row(i), 1, dimension, away + i, 1);
    return;
  }
#endif
  for (std::size_t i = 0; i < count; ++i) measure_rows(query, 1, row(i), 1, dimension, away + i, 1);
}

}  // namespace memhier
