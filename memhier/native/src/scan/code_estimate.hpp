// From inner products of codes to estimated distances and their margins, a block of rows at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>

#include "scan/code_dot.hpp"

namespace memhier {

constexpr std::size_t kLanes = CodeFormat::kBlockRows;
constexpr std::size_t kGroups = 8;  // of so many rows, whose distances are made together
constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Residual {
  float squared;   // |q - c|^2
  float distance;  // its root
  float largest;   // magnitude of the numbers put out
};

// out[dimension] = (query - centroid) * by, of which the centroid is fp16.
Residual subtract_centroid(const float* query, const std::uint16_t* centroid, const float* by, std::size_t dimension,
                           float* out, Instructions use);

// The inner product of a query with a centroid of fp16.
float centroid_product(const float* query, const std::uint16_t* centroid, std::size_t dimension, Instructions use);

// The radius of every row, fp16 in units, and in two bytes the ratios of factor and error to it, the factor's lower.
// The numbers of 16 rows lie together; those of the next 16 begin 16 times `step` bytes after them.
struct Numbers {
  const std::uint16_t *radius, *ratios;
  std::size_t step, rows;

  const std::uint16_t* radius_of(std::size_t first) const { return at(radius, first); }
  const std::uint16_t* ratios_of(std::size_t first) const { return at(ratios, first); }

 private:
  const std::uint16_t* at(const std::uint16_t* numbers, std::size_t first) const {
    return reinterpret_cast<const std::uint16_t*>(reinterpret_cast<const std::byte*>(numbers) + first * step);
  }
};

// A byte u is the float whose bits are `least + u step`: steps of about one ratio, for one addition. 255 is an error of
// which nothing is known.
struct RatioScale {
  std::int32_t least, step;
};
constexpr std::int32_t kUnknown = 255;

// The terms that the estimates of a list's rows have in common. They are of |q - x|^2, or of -2 <q, x>, where q stands
// for q - c.
struct Terms {
  float squared;   // |q - c|^2, or -2 <q, c>
  float squares;   // how often a row's squared radius counts: 1, or 0
  float terms;     // magnitude of `squared`
  float lengths;   // how often a row's radius counts among the terms: 0, or 2 |q|
  float distance;  // |q - c|, or its stand-in for |q|, times the errors of a margin
  float nearest;   // the least distance by a row's radius, likewise
  float scale, offset, unit;
  RatioScale factor, error;
};

struct Block {
  RowGroup groups[kGroups];
  std::size_t count = 0;  // of the groups
  std::int32_t sums[kGroups * kLanes];
  float estimate[kGroups * kLanes], margin[kGroups * kLanes];
  std::uint16_t near[kGroups];  // a bit for each row
};

// Fills estimates and margins from the sums, and notes which of the rows wanted have a lower bound of at most
// `threshold`: most have not.
void estimate_block(Block& block, const Numbers& numbers, const Terms& of, float threshold, Instructions use);

}  // namespace memhier
