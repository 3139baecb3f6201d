// Inner products and squared distances of float32 vectors.
#pragma once

#include <cstddef>

namespace memhier {

float dot_floats(const float* left, const float* right, std::size_t count);
float squared_floats(const float* left, const float* right, std::size_t count);

}  // namespace memhier
