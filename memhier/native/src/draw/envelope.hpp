// Upper bounds of all logits of a hidden state, and draws of rows in proportion to exp of their bounds.
//
// Draws are taken in ascending order, so that those of one chunk share its sums. A draw that is kept with the
// probability exp(logit - bound) has the distribution of the softmax.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "decode/exact.hpp"
#include "decode/query.hpp"
#include "decode/scan.hpp"

namespace memhier {

// The change of a logit before its exp: a cap, none at zero, as cap * tanh(logit / cap); then a factor.
struct Shape {
  float cap, inverse;
};

class Envelope {
 public:
  // Bounds of all rows for up to four queries; the first `rows` are rows of the layer.
  static void bound(const BlockCodes& blocks, std::size_t rows, std::span<const CodedQuery* const> queries,
                    std::span<Envelope> envelopes);
  // Takes the given rows out, and caps the bounds.
  void open(std::span<const std::int64_t> out, const Shape& shape);
  // Takes the `limit` of the largest bounds that are left out, too, whose rows go to `head`, ascending; adds up exp of
  // the others.
  void take(std::size_t limit, Largest& largest, std::vector<Logit>& head);
  bool is_empty() const { return largest_ == -kInfinity; }
  // The largest bound that is left, capped; minus infinity for none.
  float largest() const { return largest_; }
  // log of the sum of exp of all bounds that are left.
  double log_sum() const;
  // The rows that uniform numbers in [0, 1) fall on, in ascending order of the numbers; keys are bounds. Some row is
  // left. `order` begins with the places of the numbers in that order.
  void draw(const double* uniforms, std::size_t count, std::vector<std::uint32_t>& order,
            std::vector<Logit>& drawn) const;
  std::size_t held_bytes() const {
    return bounds_.capacity() * sizeof(float) + ends_.capacity() * sizeof(double) +
           taken_.capacity() * sizeof(std::uint64_t);
  }
  // The bytes held after a call, for so many rows.
  static std::size_t planned_bytes(std::size_t rows) {
    const std::size_t padded = padded_rows(rows);
    return padded * sizeof(float) + padded / kChunkRows * sizeof(double) + padded / 64 * sizeof(std::uint64_t);
  }

 private:
  std::vector<float> bounds_;
  std::vector<std::uint64_t> taken_;  // a bit for each row of the head that was taken last
  std::vector<double> ends_;          // sums of the chunks up to each
  float largest_ = -kInfinity, inverse_ = 1;
};

}  // namespace memhier
