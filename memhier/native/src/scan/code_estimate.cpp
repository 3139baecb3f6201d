// Estimates and margins by three instruction sets.
#include "scan/code_estimate.hpp"

#include <algorithm>
#include <bit>
#include <cmath>

#include "bind/simd.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace memhier {
namespace {

// Single precision loses as much of the terms of an estimate; only where codes are all but exact does it matter.
constexpr float kRounding = 4e-6F;

MEMHIER_CLONES
Residual subtract_plain(const float* query, const std::uint16_t* centroid, const float* by, std::size_t dimension,
                        float* out) {
  float squared = 0, largest = 0;
#pragma omp simd reduction(+ : squared) reduction(max : largest)
  for (std::size_t t = 0; t < dimension; ++t) {
    const float difference = query[t] - half_to_float(centroid[t]);
    squared += difference * difference;
    out[t] = difference * by[t];
    largest = std::max(largest, std::fabs(out[t]));
  }
  return {squared, std::sqrt(squared), largest};
}

MEMHIER_CLONES
float product_plain(const float* query, const std::uint16_t* centroid, std::size_t dimension) {
  float product = 0;
#pragma omp simd reduction(+ : product)
  for (std::size_t t = 0; t < dimension; ++t) product += query[t] * half_to_float(centroid[t]);
  return product;
}

MEMHIER_CLONES
void estimate_plain(Block& block, std::size_t group, const Numbers& numbers, const Terms& of) {
  const std::size_t first = block.groups[group].first, lanes = std::min(kLanes, numbers.rows - first);
  const std::int32_t* sums = block.sums + group * kLanes;
  const std::uint16_t *radii = numbers.radius_of(first), *ratios = numbers.ratios_of(first);
  float *estimates = block.estimate + group * kLanes, *margins = block.margin + group * kLanes;
#pragma omp simd
  for (std::size_t i = 0; i < lanes; ++i) {
    const float units = half_to_float(radii[i]), radius = of.unit * units;
    const std::int32_t factor = ratios[i] & 255, error = ratios[i] >> 8;
    const float product = units * std::bit_cast<float>(of.factor.least + factor * of.factor.step) * of.scale *
                          (static_cast<float>(sums[i]) - of.offset);
    const float squared = of.squares * radius, sum = of.squared + radius * squared;
    const float terms = of.terms + radius * (squared + of.lengths);
    estimates[i] = sum - 2 * of.unit * product;
    const float wrong =
        error == kUnknown ? kInfinity : units * std::bit_cast<float>(of.error.least + error * of.error.step);
    const float margin = std::max(of.distance, of.nearest * radius) * wrong + kRounding * terms;
    margins[i] = margin == margin ? margin : kInfinity;  // nothing is known where no errors meet an infinite one
  }
}

// Whether any of 16 rows has a lower bound of at most `threshold`.
MEMHIER_CLONES
bool any_near(const float* estimate, const float* margin, float threshold) {
  int any = 0;
#pragma omp simd reduction(| : any)
  for (std::size_t i = 0; i < kLanes; ++i) any |= estimate[i] - margin[i] <= threshold ? 1 : 0;
  return any != 0;
}

std::uint16_t near_of(const Block& block, std::size_t group, float threshold) {
  const float *estimate = block.estimate + group * kLanes, *margin = block.margin + group * kLanes;
  std::uint32_t wanted = block.groups[group].wanted, near = 0;
  if (wanted == 0xffff && !any_near(estimate, margin, threshold)) return 0;
  for (; wanted != 0; wanted &= wanted - 1) {
    const int i = std::countr_zero(wanted);
    near |= (estimate[i] - margin[i] <= threshold ? 1u : 0u) << i;
  }
  return static_cast<std::uint16_t>(near);
}

#if defined(__x86_64__)
// GCC does not vectorise half precision by itself.
#define MEMHIER_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl")))

MEMHIER_AVX512 __m512 take_halves(__mmask16 present, const std::uint16_t* halves) {
  return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(present, halves));
}

__mmask16 first_of(std::size_t left) { return static_cast<__mmask16>(left >= 16 ? 0xffff : (1u << left) - 1); }

MEMHIER_AVX512 Residual subtract_avx512(const float* query, const std::uint16_t* centroid, const float* by,
                                        std::size_t dimension, float* out) {
  __m512 squares = _mm512_setzero_ps(), largest = _mm512_setzero_ps();
  for (std::size_t t = 0; t < dimension; t += 16) {
    const __mmask16 present = first_of(dimension - t);
    const __m512 difference =
        _mm512_sub_ps(_mm512_maskz_loadu_ps(present, query + t), take_halves(present, centroid + t));
    const __m512 scaled = _mm512_mul_ps(difference, _mm512_maskz_loadu_ps(present, by + t));
    _mm512_mask_storeu_ps(out + t, present, scaled);
    squares = _mm512_fmadd_ps(difference, difference, squares);
    largest = _mm512_max_ps(largest, _mm512_abs_ps(scaled));
  }
  const float squared = _mm512_reduce_add_ps(squares);
  return {squared, std::sqrt(squared), _mm512_reduce_max_ps(largest)};
}

MEMHIER_AVX512 float product_avx512(const float* query, const std::uint16_t* centroid, std::size_t dimension) {
  __m512 product = _mm512_setzero_ps();
  for (std::size_t t = 0; t < dimension; t += 16) {
    const __mmask16 present = first_of(dimension - t);
    product = _mm512_fmadd_ps(_mm512_maskz_loadu_ps(present, query + t), take_halves(present, centroid + t), product);
  }
  return _mm512_reduce_add_ps(product);
}

MEMHIER_AVX512 void estimate_avx512(Block& block, const Numbers& numbers, const Terms& of, float threshold) {
  const __m512i factor_least = _mm512_set1_epi32(of.factor.least), factor_step = _mm512_set1_epi32(of.factor.step);
  const __m512i error_least = _mm512_set1_epi32(of.error.least), error_step = _mm512_set1_epi32(of.error.step);
  const __m512i low = _mm512_set1_epi32(255);
  const __m512 scale = _mm512_set1_ps(2 * of.unit * of.scale), offset = _mm512_set1_ps(of.offset);
  for (std::size_t group = 0; group < block.count; ++group) {
    const std::size_t first = block.groups[group].first, i = group * kLanes;
    const __mmask16 present = first_of(numbers.rows - first);
    const __m512 units = take_halves(present, numbers.radius_of(first));
    const __m512 radius = _mm512_mul_ps(_mm512_set1_ps(of.unit), units);
    const __m512i ratios = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(present, numbers.ratios_of(first)));
    const __m512i factor_byte = _mm512_and_si512(ratios, low), error_byte = _mm512_srli_epi32(ratios, 8);
    const __m512 factor = _mm512_mul_ps(
        units, _mm512_castsi512_ps(_mm512_add_epi32(factor_least, _mm512_mullo_epi32(factor_byte, factor_step))));
    const __m512 known = _mm512_mul_ps(
        units, _mm512_castsi512_ps(_mm512_add_epi32(error_least, _mm512_mullo_epi32(error_byte, error_step))));
    const __m512 error = _mm512_mask_mov_ps(known, _mm512_cmpeq_epi32_mask(error_byte, low), _mm512_set1_ps(kInfinity));
    const __m512 field = _mm512_sub_ps(_mm512_cvtepi32_ps(_mm512_loadu_si512(block.sums + i)), offset);
    const __m512 product = _mm512_mul_ps(_mm512_mul_ps(factor, scale), field);
    const __m512 squared = _mm512_mul_ps(_mm512_set1_ps(of.squares), radius);
    const __m512 sum = _mm512_fmadd_ps(radius, squared, _mm512_set1_ps(of.squared));
    const __m512 terms =
        _mm512_fmadd_ps(radius, _mm512_add_ps(squared, _mm512_set1_ps(of.lengths)), _mm512_set1_ps(of.terms));
    const __m512 estimate = _mm512_sub_ps(sum, product);
    const __m512 apart = _mm512_max_ps(_mm512_set1_ps(of.distance), _mm512_mul_ps(_mm512_set1_ps(of.nearest), radius));
    const __m512 wrong = _mm512_fmadd_ps(apart, error, _mm512_mul_ps(_mm512_set1_ps(kRounding), terms));
    const __mmask16 unknown = _mm512_cmp_ps_mask(wrong, wrong, _CMP_UNORD_Q);
    const __m512 margin = _mm512_mask_mov_ps(wrong, unknown, _mm512_set1_ps(kInfinity));
    _mm512_storeu_ps(block.estimate + i, estimate);
    _mm512_storeu_ps(block.margin + i, margin);
    block.near[group] = _mm512_mask_cmp_ps_mask(block.groups[group].wanted, _mm512_sub_ps(estimate, margin),
                                                _mm512_set1_ps(threshold), _CMP_LE_OQ);
  }
}
#endif

}  // namespace

Residual subtract_centroid(const float* query, const std::uint16_t* centroid, const float* by, std::size_t dimension,
                           float* out, Instructions use) {
#if defined(__x86_64__)
  if (use == Instructions::kAvx512) return subtract_avx512(query, centroid, by, dimension, out);
#endif
  return subtract_plain(query, centroid, by, dimension, out);
}

float centroid_product(const float* query, const std::uint16_t* centroid, std::size_t dimension, Instructions use) {
#if defined(__x86_64__)
  if (use == Instructions::kAvx512) return product_avx512(query, centroid, dimension);
#endif
  return product_plain(query, centroid, dimension);
}

void estimate_block(Block& block, const Numbers& numbers, const Terms& of, float threshold, Instructions use) {
#if defined(__x86_64__)
  if (use == Instructions::kAvx512) return estimate_avx512(block, numbers, of, threshold);
#endif
  for (std::size_t group = 0; group < block.count; ++group) {
    estimate_plain(block, group, numbers, of);
    block.near[group] = near_of(block, group, threshold);
  }
}

}  // namespace memhier
