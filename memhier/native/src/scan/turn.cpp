// The product of vectors with a matrix by AVX-512, or by plain loops.
#include "scan/turn.hpp"

#include <algorithm>
#include <cstddef>

#include "bind/array.hpp"
#include "bind/module.hpp"
#include "bind/simd.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace nb = nanobind;

namespace memhier {
namespace {

MEMHIER_CLONES
void turn_plain(const Product& of, std::size_t row) {
  float* out = of.out + row * of.dimension;
  std::fill_n(out, of.dimension, 0.0F);
  for (std::size_t i = 0; i < of.dimension; ++i) {
    const float value = of.vectors[row * of.dimension + i];
    const float* axis = of.matrix + i * of.dimension;
#pragma omp simd
    for (std::size_t j = 0; j < of.dimension; ++j) out[j] += value * axis[j];
  }
}

#if defined(__x86_64__)
#define MEMHIER_AVX512 __attribute__((target("avx512f")))

constexpr std::size_t kLanes = 16, kWide = 4;  // columns of a register, registers of a tile
constexpr std::size_t kTogether = 4;           // rows of a tile
constexpr std::size_t kAxes = 64;              // rows of the matrix at a time: few pages of it, which lie side by side

template <std::size_t n>
MEMHIER_AVX512 void turn_tile(const Product& of, std::size_t row, std::size_t column, std::size_t first) {
  __mmask16 present[kWide];
  for (std::size_t w = 0; w < kWide; ++w) {
    const std::size_t at = std::min(of.dimension, column + w * kLanes), left = of.dimension - at;
    present[w] = static_cast<__mmask16>(left >= kLanes ? 0xffff : (1u << left) - 1);
  }
  __m512 sums[n][kWide];
#pragma GCC unroll 4
  for (std::size_t r = 0; r < n; ++r)
#pragma GCC unroll 4
    for (std::size_t w = 0; w < kWide; ++w)
      sums[r][w] =
          _mm512_maskz_loadu_ps(first == 0 ? 0 : present[w], of.out + (row + r) * of.dimension + column + w * kLanes);
  const float *values = of.vectors + row * of.dimension, *axis = of.matrix + first * of.dimension + column;
  for (std::size_t i = first; i < std::min(first + kAxes, of.dimension); ++i, axis += of.dimension) {
#pragma GCC unroll 4
    for (std::size_t w = 0; w < kWide; ++w) __builtin_prefetch(axis + (kWide + w) * kLanes);  // of the next tile
    __m512 columns[kWide];
#pragma GCC unroll 4
    for (std::size_t w = 0; w < kWide; ++w) columns[w] = _mm512_maskz_loadu_ps(present[w], axis + w * kLanes);
#pragma GCC unroll 4
    for (std::size_t r = 0; r < n; ++r) {
      const __m512 value = _mm512_set1_ps(values[r * of.dimension + i]);
#pragma GCC unroll 4
      for (std::size_t w = 0; w < kWide; ++w) sums[r][w] = _mm512_fmadd_ps(value, columns[w], sums[r][w]);
    }
  }
#pragma GCC unroll 4
  for (std::size_t r = 0; r < n; ++r)
#pragma GCC unroll 4
    for (std::size_t w = 0; w < kWide; ++w)
      _mm512_mask_storeu_ps(of.out + (row + r) * of.dimension + column + w * kLanes, present[w], sums[r][w]);
}

void turn_avx512(const Product& of, std::size_t count) {
  for (std::size_t first = 0; first < of.dimension; first += kAxes)
    for (std::size_t column = 0; column < of.dimension; column += kLanes * kWide) {
      std::size_t row = 0;
      for (; row + kTogether <= count; row += kTogether) turn_tile<kTogether>(of, row, column, first);
      if (count - row == 3) turn_tile<3>(of, row, column, first);
      if (count - row == 2) turn_tile<2>(of, row, column, first);
      if (count - row == 1) turn_tile<1>(of, row, column, first);
    }
}
#endif

// vectors [n, d]; matrix [d, d]; fills out [n, d] with their product.
void turn_rows(const Array<const float, 2>& vectors, const Array<const float, 2>& matrix, const Array<float, 2>& out) {
  const std::size_t count = vectors.shape(0), dimension = vectors.shape(1);
  require(matrix.has_shape(dimension, dimension) && out.has_shape(count, dimension),
          "turn_rows: array shapes do not fit together");

  nb::gil_scoped_release released;
  turn({vectors.data(), matrix.data(), dimension, out.data()}, count);
}

}  // namespace

void turn(const Product& of, std::size_t count) {
#if defined(__x86_64__)
  static const bool has_avx512 = __builtin_cpu_supports("avx512f");
  if (has_avx512) return turn_avx512(of, count);
#endif
  for (std::size_t row = 0; row < count; ++row) turn_plain(of, row);
}

}  // namespace memhier

void register_turn(nb::module_& m) {
  m.def("turn_rows", &memhier::turn_rows, nb::kw_only(), nb::arg("vectors"), nb::arg("matrix"), nb::arg("out"));
}
