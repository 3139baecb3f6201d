// A few vectors times a square matrix, by the calling thread alone: a BLAS wakes threads of its own for every product,
// and those of several searches at a time wait for each other longer than the product takes.
#pragma once

#include <cstddef>

namespace memhier {

// The operands of one call: vectors [n, d] by matrix [d, d]. Every number of the product is summed in the same order,
// whatever n is.
struct Product {
  const float *vectors, *matrix;
  std::size_t dimension;
  float* out;
};

void turn(const Product& of, std::size_t count);

}  // namespace memhier
