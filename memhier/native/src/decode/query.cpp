// Projection and rounding of a hidden state.
#include "decode/query.hpp"

#include <algorithm>
#include <cmath>

#include "bind/simd.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace memhier {
namespace {

constexpr std::size_t kLane = 64;

MEMHIER_CLONES
void subtract(const float* left, const float* right, std::size_t count, float* out) {
#pragma omp simd
  for (std::size_t i = 0; i < count; ++i) out[i] = left[i] - right[i];
}

// For bounds, in double precision: its losses do not matter, whatever the directions' scales.
MEMHIER_CLONES
double dot_away(const float* left, const float* hidden, const float* mean, std::size_t count) {
  double sum = 0;
#pragma omp simd reduction(+ : sum)
  for (std::size_t i = 0; i < count; ++i)
    sum += static_cast<double>(left[i]) * (static_cast<double>(hidden[i]) - static_cast<double>(mean[i]));
  return sum;
}

// Products of four rows of `left` at once, as one sum alone waits for each addition.
template <class Number>
MEMHIER_INLINE void dot_four(const float* left, const Number* away, std::size_t count, float* dots) {
  Number a = 0, b = 0, c = 0, d = 0;
  const float *second = left + count, *third = second + count, *fourth = third + count;
#pragma omp simd reduction(+ : a, b, c, d)
  for (std::size_t i = 0; i < count; ++i) {
    a += static_cast<Number>(left[i]) * away[i];
    b += static_cast<Number>(second[i]) * away[i];
    c += static_cast<Number>(third[i]) * away[i];
    d += static_cast<Number>(fourth[i]) * away[i];
  }
  dots[0] = static_cast<float>(a);
  dots[1] = static_cast<float>(b);
  dots[2] = static_cast<float>(c);
  dots[3] = static_cast<float>(d);
}

// Clones must be plain functions: GCC makes none of a template.
MEMHIER_CLONES
void dot_four_precise(const float* left, const double* away, std::size_t count, float* dots) {
  dot_four(left, away, count, dots);
}

MEMHIER_CLONES
void dot_four_floats(const float* left, const float* away, std::size_t count, float* dots) {
  dot_four(left, away, count, dots);
}

MEMHIER_CLONES
float largest_of(const float* values, std::size_t count) {
  float largest = 0;
#pragma omp simd reduction(max : largest)
  for (std::size_t i = 0; i < count; ++i) largest = std::max(largest, std::fabs(values[i]));
  return largest;
}

MEMHIER_CLONES
void dot_codes_plain(const std::uint8_t* codes, std::size_t width, const std::uint32_t* rows, std::size_t count,
                     const std::int8_t* query, std::int32_t* sums) {
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint8_t* code = codes + std::size_t{rows[i]} * width;
    std::int32_t sum = 0;
#pragma omp simd reduction(+ : sum)
    for (std::size_t t = 0; t < width; ++t) sum += std::int32_t{code[t]} * query[t];
    sums[i] = sum;
  }
}

#if defined(__x86_64__)
const bool kHasVnni =
    __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");

// Four rows at a time: their sums are added up together.
__attribute__((target("avx512f,avx512bw,avx512vl,avx512vnni"))) void dot_codes_vnni(
    const std::uint8_t* codes, std::size_t width, const std::uint32_t* rows, std::size_t count,
    const std::int8_t* query, std::int32_t* sums) {
  for (std::size_t i = 0; i < count; i += 4) {
    const std::uint8_t* code[4];
    for (std::size_t j = 0; j < 4; ++j) code[j] = codes + std::size_t{rows[std::min(i + j, count - 1)]} * width;
    __m512i sum[4] = {_mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512()};
    for (std::size_t t = 0; t < width; t += kLane) {
      const __mmask64 present = width - t >= kLane ? ~0ull : (1ull << (width - t)) - 1;
      const __m512i values = _mm512_loadu_si512(query + t);
      for (std::size_t j = 0; j < 4; ++j)
        sum[j] = _mm512_dpbusd_epi32(sum[j], _mm512_maskz_loadu_epi8(present, code[j] + t), values);
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

}  // namespace

void dot_codes(const std::uint8_t* codes, std::size_t width, const std::uint32_t* rows, std::size_t count,
               const std::int8_t* query, std::int32_t* sums) {
#if defined(__x86_64__)
  if (kHasVnni) return dot_codes_vnni(codes, width, rows, count, query, sums);
#endif
  dot_codes_plain(codes, width, rows, count, query, sums);
}

void CodedQuery::assign(const Projection& projection, const float* hidden, std::size_t width, bool bounds) {
  const std::size_t dimension = projection.dimension;
  turned_ = bounds ? projection.turned : width;
  away_.resize(dimension);
  z_.resize(std::max(turned_, z_.size()));
  subtract(hidden, projection.mean, dimension, away_.data());
  if (bounds) {
    precise_.resize(dimension);
    for (std::size_t i = 0; i < dimension; ++i)
      precise_[i] = static_cast<double>(hidden[i]) - static_cast<double>(projection.mean[i]);
  }
  std::size_t done = 0;
  for (; done + 4 <= turned_; done += 4) {
    const float* rows = projection.turn + done * dimension;
    if (bounds)
      dot_four_precise(rows, precise_.data(), dimension, z_.data() + done);
    else
      dot_four_floats(rows, away_.data(), dimension, z_.data() + done);
  }
  shift_ = static_cast<float>(dot_away(projection.common, hidden, projection.mean, dimension));
  round(width);
}

void CodedQuery::assign_coordinates(const float* z, std::size_t width) {
  z_.resize(std::max(width, z_.size()));
  std::copy_n(z, width, z_.begin());
  turned_ = width;
  shift_ = 0;
  round(width);
}

void CodedQuery::round(std::size_t width) {
  width_ = width;
  bytes_.assign((width + kLane - 1) / kLane * kLane, 0);
  const float largest = largest_of(z_.data(), width);
  step_ = largest / 127;
  const float inverse = largest > 0 ? 127 / largest : 0;
  for (std::size_t j = 0; j < width; ++j)
    bytes_[j] = static_cast<std::int8_t>(std::clamp(std::nearbyint(z_[j] * inverse), -127.F, 127.F));
}

std::int32_t CodedQuery::excess(std::size_t width) const {
  std::int32_t sum = 0;
  for (std::size_t j = 0; j < width; ++j) sum += bytes_[j];
  return 128 * sum;
}

Spread CodedQuery::spread(std::size_t width) const {
  double inside = 0, rounded = 0, outside = 0;
  for (std::size_t j = 0; j < width; ++j) {
    const double value = z_[j], lost = value - static_cast<double>(step_) * bytes_[j];
    inside += value * value;
    rounded += lost * lost;
  }
  for (std::size_t j = width; j < turned_; ++j) outside += static_cast<double>(z_[j]) * static_cast<double>(z_[j]);
  constexpr double kUp = 1 + 1e-6;  // the roots stay above once they are single precision
  return {static_cast<float>(std::sqrt(inside) * kUp), static_cast<float>(std::sqrt(rounded) * kUp),
          static_cast<float>(std::sqrt(outside) * kUp)};
}

}  // namespace memhier
