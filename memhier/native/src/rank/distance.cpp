// Plain loops that the compiler turns into SIMD, cloned for three levels of x86-64 and chosen when the module is
// loaded.
//
// `omp simd reduction` allows a float sum to be split over lanes; -ffast-math on a cloned function does not
// (GCC 12 leaves such a loop scalar). Half precision is the one type GCC does not vectorise by itself: it has its own
// function with F16C intrinsics. GCC keeps the lanes of such a sum in memory, and adds what is left of a row one by
// one, so all types have functions with AVX-512 intrinsics.
#include "rank/distance.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <optional>

#include <nanobind/stl/optional.h>

#include "bind/array.hpp"
#include "bind/module.hpp"
#include "bind/simd.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace nb = nanobind;

namespace memhier {
namespace {

constexpr std::array<std::size_t, kRowTypes> kBytesOf = {4, 2, 2, 1, 1};  // an element

// A row is a field of a record, so its elements may lie at any address.
template <class T>
struct Unaligned {
  typedef T type __attribute__((aligned(1), may_alias));
};

template <class T>
struct Plain {
  static MEMHIER_INLINE float at(const std::byte* row, std::size_t index) {
    return static_cast<float>(reinterpret_cast<const typename Unaligned<T>::type*>(row)[index]);
  }
};

struct Bfloat16 {
  static MEMHIER_INLINE float at(const std::byte* row, std::size_t index) {
    const std::uint32_t upper = reinterpret_cast<const Unaligned<std::uint16_t>::type*>(row)[index];
    return std::bit_cast<float>(upper << 16);
  }
};

struct Float16 {
  static MEMHIER_INLINE float at(const std::byte* row, std::size_t index) {
    return half_to_float(reinterpret_cast<const Unaligned<std::uint16_t>::type*>(row)[index]);
  }
};

MEMHIER_INLINE const float* query_of(const DistanceBatch& batch, std::size_t row) {
  const std::size_t query = batch.query_of_row == nullptr ? 0 : static_cast<std::size_t>(batch.query_of_row[row]);
  return batch.queries + query * batch.dimension;
}

MEMHIER_INLINE float cosine_distance(float product, float query_norm, float row_norm) {
  // Two roots, not the root of a product, which would overflow first.
  const float norms = std::sqrt(query_norm) * std::sqrt(row_norm);
  return norms > 0 ? 1 - product / norms : 1;
}

template <class Element, Metric metric>
MEMHIER_INLINE void compare(const DistanceBatch& batch) {
  for (std::size_t row = 0; row < batch.count; ++row) {
    const float* query = query_of(batch, row);
    const std::byte* x = batch.rows + static_cast<std::ptrdiff_t>(row) * batch.row_stride;
    float sum = 0;
    float query_norm = 0;
    float row_norm = 0;
    if constexpr (metric == Metric::l2) {
#pragma omp simd reduction(+ : sum)
      for (std::size_t i = 0; i < batch.dimension; ++i) {
        const float difference = query[i] - Element::at(x, i);
        sum += difference * difference;
      }
      batch.out[row] = sum;
    } else if constexpr (metric == Metric::ip) {
#pragma omp simd reduction(+ : sum)
      for (std::size_t i = 0; i < batch.dimension; ++i) sum += query[i] * Element::at(x, i);
      batch.out[row] = -sum;
    } else {
#pragma omp simd reduction(+ : sum, query_norm, row_norm)
      for (std::size_t i = 0; i < batch.dimension; ++i) {
        const float value = Element::at(x, i);
        sum += query[i] * value;
        query_norm += query[i] * query[i];
        row_norm += value * value;
      }
      batch.out[row] = cosine_distance(sum, query_norm, row_norm);
    }
  }
}

// Clones must be plain functions: GCC makes none of a template.
#define MEMHIER_KERNELS(name, Element)                                                       \
  MEMHIER_CLONES void name##_l2(const DistanceBatch& b) { compare<Element, Metric::l2>(b); } \
  MEMHIER_CLONES void name##_ip(const DistanceBatch& b) { compare<Element, Metric::ip>(b); } \
  MEMHIER_CLONES void name##_cosine(const DistanceBatch& b) { compare<Element, Metric::cosine>(b); }
MEMHIER_KERNELS(float32, Plain<float>)
MEMHIER_KERNELS(float16, Float16)
MEMHIER_KERNELS(bfloat16, Bfloat16)
MEMHIER_KERNELS(int8, Plain<std::int8_t>)
MEMHIER_KERNELS(uint8, Plain<std::uint8_t>)
#undef MEMHIER_KERNELS

using Kernel = void (*)(const DistanceBatch&);
using KernelsOfType = std::array<Kernel, kMetrics>;
constexpr std::array<KernelsOfType, kRowTypes> kKernels = {{
    {float32_l2, float32_ip, float32_cosine},
    {float16_l2, float16_ip, float16_cosine},
    {bfloat16_l2, bfloat16_ip, bfloat16_cosine},
    {int8_l2, int8_ip, int8_cosine},
    {uint8_l2, uint8_ip, uint8_cosine},
}};

#if defined(__x86_64__)
#define MEMHIER_F16C __attribute__((target("avx2,fma,f16c")))

MEMHIER_F16C inline float lane_sum(__m256 lanes) {
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(lanes), _mm256_extractf128_ps(lanes, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

template <Metric metric>
MEMHIER_F16C void compare_by_f16c(const DistanceBatch& batch) {
  const std::size_t whole = batch.dimension / 8 * 8;
  for (std::size_t row = 0; row < batch.count; ++row) {
    const float* query = query_of(batch, row);
    const std::byte* x = batch.rows + static_cast<std::ptrdiff_t>(row) * batch.row_stride;
    __m256 sums = _mm256_setzero_ps();
    __m256 query_norms = _mm256_setzero_ps();
    __m256 row_norms = _mm256_setzero_ps();
    for (std::size_t i = 0; i < whole; i += 8) {
      const __m256 q = _mm256_loadu_ps(query + i);
      const __m256 value = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x + 2 * i)));
      const __m256 difference = _mm256_sub_ps(q, value);
      sums = metric == Metric::l2 ? _mm256_fmadd_ps(difference, difference, sums) : _mm256_fmadd_ps(q, value, sums);
      if constexpr (metric == Metric::cosine) {
        query_norms = _mm256_fmadd_ps(q, q, query_norms);
        row_norms = _mm256_fmadd_ps(value, value, row_norms);
      }
    }
    float sum = lane_sum(sums);
    float query_norm = lane_sum(query_norms);
    float row_norm = lane_sum(row_norms);
    for (std::size_t i = whole; i < batch.dimension; ++i) {
      const float value = Float16::at(x, i);
      const float difference = query[i] - value;
      sum += metric == Metric::l2 ? difference * difference : query[i] * value;
      query_norm += query[i] * query[i];
      row_norm += value * value;
    }
    batch.out[row] = metric == Metric::l2   ? sum
                     : metric == Metric::ip ? -sum
                                            : cosine_distance(sum, query_norm, row_norm);
  }
}

#define MEMHIER_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl")))

// Up to 16 elements of a row as numbers.
template <RowType type>
MEMHIER_AVX512 inline __m512 take(const std::byte* at, __mmask16 present) {
  if constexpr (type == RowType::float32) return _mm512_maskz_loadu_ps(present, at);
  if constexpr (type == RowType::float16) return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(present, at));
  if constexpr (type == RowType::bfloat16)
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(present, at)), 16));
  if constexpr (type == RowType::int8)
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(present, at)));
  if constexpr (type == RowType::uint8)
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(present, at)));
}

template <RowType type, Metric metric>
MEMHIER_AVX512 void compare_wide(const DistanceBatch& batch) {
  constexpr std::size_t kElementBytes = kBytesOf[static_cast<std::size_t>(type)];
  for (std::size_t row = 0; row < batch.count; ++row) {
    const float* query = query_of(batch, row);
    const std::byte* x = batch.rows + static_cast<std::ptrdiff_t>(row) * batch.row_stride;
    __m512 sums = _mm512_setzero_ps(), query_norms = _mm512_setzero_ps(), row_norms = _mm512_setzero_ps();
    for (std::size_t i = 0; i < batch.dimension; i += 16) {
      const std::size_t left = batch.dimension - i;
      const auto present = static_cast<__mmask16>(left >= 16 ? 0xffff : (1u << left) - 1);
      const __m512 q = _mm512_maskz_loadu_ps(present, query + i), value = take<type>(x + i * kElementBytes, present);
      const __m512 difference = _mm512_sub_ps(q, value);
      sums = metric == Metric::l2 ? _mm512_fmadd_ps(difference, difference, sums) : _mm512_fmadd_ps(q, value, sums);
      if constexpr (metric == Metric::cosine) {
        query_norms = _mm512_fmadd_ps(q, q, query_norms);
        row_norms = _mm512_fmadd_ps(value, value, row_norms);
      }
    }
    const float sum = _mm512_reduce_add_ps(sums);
    if constexpr (metric == Metric::cosine)
      batch.out[row] = cosine_distance(sum, _mm512_reduce_add_ps(query_norms), _mm512_reduce_add_ps(row_norms));
    else
      batch.out[row] = metric == Metric::l2 ? sum : -sum;
  }
}

template <RowType type>
constexpr KernelsOfType kWideKernels = {compare_wide<type, Metric::l2>, compare_wide<type, Metric::ip>,
                                        compare_wide<type, Metric::cosine>};
constexpr std::array<KernelsOfType, kRowTypes> kAvx512Kernels = {
    kWideKernels<RowType::float32>, kWideKernels<RowType::float16>, kWideKernels<RowType::bfloat16>,
    kWideKernels<RowType::int8>, kWideKernels<RowType::uint8>};

constexpr KernelsOfType kF16cKernels = {compare_by_f16c<Metric::l2>, compare_by_f16c<Metric::ip>,
                                        compare_by_f16c<Metric::cosine>};
#endif

const KernelsOfType& kernels_of(RowType type) {
#if defined(__x86_64__)
  static const bool has_f16c =
      __builtin_cpu_supports("f16c") && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  static const bool has_avx512 =
      __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
  if (has_avx512) return kAvx512Kernels[static_cast<std::size_t>(type)];
  if (type == RowType::float16 && has_f16c) return kF16cKernels;
#endif
  return kKernels[static_cast<std::size_t>(type)];
}

// queries [q, d]; rows [n, d] of a type, with adjacent elements; query_of_row [n], needed for several queries; out [n].
void distances_of_arrays(const Array<const float, 2>& queries, const StridedRows& rows, int type, int metric,
                         const std::optional<Array<const std::int32_t, 1>>& query_of_row, const Array<float, 1>& out,
                         bool portable) {
  require(type >= 0 && type < kRowTypes && metric >= 0 && metric < kMetrics, "dtype or metric out of range");
  require(queries.shape(1) == rows.shape(1), "queries, rows: [*, d]");
  const std::size_t count = rows.shape(0);
  const std::size_t dimension = rows.shape(1);
  const auto element = kBytesOf[static_cast<std::size_t>(type)];
  const bool adjacent = dimension < 2 || count == 0 || rows.stride(1) == static_cast<std::ptrdiff_t>(element);
  require(adjacent, "rows: elements must be adjacent");
  require(out.size() == count, "out: one float32 per row");
  const std::int32_t* indices = query_of_row ? query_of_row->data() : nullptr;
  if (indices != nullptr) {
    require(query_of_row->size() == count, "query_of_row: one int32 per row");
    const auto limit = static_cast<std::int64_t>(queries.shape(0));
    require(std::all_of(indices, indices + count, [=](auto i) { return i >= 0 && i < limit; }),
            "query_of_row: out of range");
  } else {
    require(queries.shape(0) == 1, "query_of_row: needed for several queries");
  }
  const DistanceBatch batch{queries.data(), rows.data(), rows.stride(0), count, dimension, indices, out.data()};
  nb::gil_scoped_release released;
  const auto& kernels = portable ? kKernels[static_cast<std::size_t>(type)] : kernels_of(RowType{type});
  kernels[static_cast<std::size_t>(metric)](batch);
}

}  // namespace

void distances(const DistanceBatch& batch, RowType type, Metric metric) {
  kernels_of(type)[static_cast<std::size_t>(metric)](batch);
}

}  // namespace memhier

void register_distance(nb::module_& m) {
  m.def("distances", &memhier::distances_of_arrays, nb::kw_only(), nb::arg("queries"), nb::arg("rows"),
        nb::arg("dtype"), nb::arg("metric"), nb::arg("query_of_row").none(), nb::arg("out"),
        nb::arg("portable") = false, "portable: half precision as on machines without F16C, for tests.");
}
