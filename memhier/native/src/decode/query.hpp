// A hidden state as the decoder's codes see it: projected on the leading directions and rounded to signed bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "rank/floats.hpp"

namespace memhier {

// Takes hidden states to coordinates z = turn (h - mean), leading directions first. The logit of row i is
// offset[i] + <a_i, z> + <common, h - mean>, with a_i the row's own coordinates.
struct Projection {
  const float* mean;    // [dimension]
  const float* turn;    // [turned, dimension]
  const float* common;  // [dimension]: the mean row, taken out of every row's coordinates
  std::size_t dimension;
  std::size_t turned;  // `dimension`, or no more than the codes' width where bounds are not wanted
};

// The numbers of a query that bounds at one width of codes need.
struct Spread {
  float inside;   // |z| within the width
  float rounded;  // the loss by rounding to bytes
  float outside;  // |z| beyond the width
};

class CodedQuery {
 public:
  // Projects one hidden state, [dimension]; bounds need all coordinates.
  void assign(const Projection& projection, const float* hidden, std::size_t width, bool bounds);
  // Takes coordinates as they are, [width].
  void assign_coordinates(const float* z, std::size_t width);

  const std::int8_t* bytes() const { return bytes_.data(); }
  const float* z() const { return z_.data(); }
  float step() const { return step_; }
  float shift() const { return shift_; }  // the part of every logit that the codes leave out
  // Codes are bytes with 128 added, which adds this to a product over the first `width` directions.
  std::int32_t excess(std::size_t width) const;
  Spread spread(std::size_t width) const;
  // For directions that are all turned; codes are no wider, except where padding rounds them up.
  static std::size_t planned_bytes(const Projection& projection) {
    return (3 * projection.dimension + projection.turned + 4) * sizeof(float) + projection.turned + 64;
  }
  std::size_t held_bytes() const {
    return (away_.capacity() + z_.capacity()) * sizeof(float) + precise_.capacity() * sizeof(double) +
           bytes_.capacity();
  }

 private:
  void round(std::size_t width);

  std::vector<float> away_, z_;
  std::vector<double> precise_;     // away_ without a loss, for bounds
  std::vector<std::int8_t> bytes_;  // [width], zeros up to a multiple of 64
  std::size_t turned_ = 0, width_ = 0;
  float step_ = 0, shift_ = 0;
};

// sums[i] = sum over directions of code * byte, for the codes [*, width] of the given rows.
void dot_codes(const std::uint8_t* codes, std::size_t width, const std::uint32_t* rows, std::size_t count,
               const std::int8_t* query, std::int32_t* sums);

}  // namespace memhier
