// From inner products of codes to estimated distances and their margins, a block of rows at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>

#include "code_dot.hpp"

namespace memhier {

constexpr std::size_t kBlock = 128;  // codes whose distances are made together
constexpr std::size_t kLanes = 16;   // of them, that are looked at together
constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Residual {
  float squared;   // |q - c|^2
  float distance;  // its root
  float largest;   // magnitude of what was put out
};

// out[dimension] = (query - centroid) * by, of which the centroid is fp16.
Residual subtract_centroid(const float* query, const std::uint16_t* centroid, const float* by, std::size_t dimension,
                           float* out, Instructions use);

// Of some rows the radius, fp16 in units, and in two bytes what factor and error are of it: the factor's in the lower.
struct Numbers {
  const std::uint16_t *radius, *ratios;
};

// A byte u is the float whose bits are `least + u step`: steps of about one ratio, for one addition. 255 is an error of
// which nothing is known.
struct RatioScale {
  std::int32_t least, step;
};
constexpr std::int32_t kUnknown = 255;

// What the estimates of a list's rows have in common.
struct Terms {
  float squared;   // |q - c|^2
  float distance;  // its root, times what a margin is in errors
  float nearest;   // the least distance by a row's radius, likewise
  float scale, offset, unit;
  RatioScale factor, error;
};

struct Block {
  std::uint32_t rows[kBlock];
  std::int32_t sums[kBlock + 2 * CodeFormat::kBlockRows];
  std::uint16_t radius[kBlock], ratios[kBlock];
  float estimate[kBlock], margin[kBlock];
  std::uint16_t near[kBlock / kLanes];  // a bit for each row
};

// Fills the first `count` estimates and margins from their sums, and notes which have a lower bound of at most
// `threshold`: most have not.
void estimate_block(Block& block, std::size_t count, const std::int32_t* sums, const Numbers& numbers, const Terms& of,
                    float threshold, Instructions use);

}  // namespace memhier
