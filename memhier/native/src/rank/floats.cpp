// Plain loops, cloned for several instruction sets.
#include "rank/floats.hpp"

#include "bind/simd.hpp"

namespace memhier {

MEMHIER_CLONES
float dot_floats(const float* left, const float* right, std::size_t count) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (std::size_t i = 0; i < count; ++i) sum += left[i] * right[i];
  return sum;
}

MEMHIER_CLONES
float squared_floats(const float* left, const float* right, std::size_t count) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (std::size_t i = 0; i < count; ++i) {
    const float difference = left[i] - right[i];
    sum += difference * difference;
  }
  return sum;
}

}  // namespace memhier
