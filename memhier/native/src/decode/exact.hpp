// Candidates of a hidden state, and their exact logits.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "rank/distance.hpp"
#include "rank/floats.hpp"
#include "rank/top_k.hpp"

namespace memhier {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// A row is chosen by its key: an estimate, an upper bound, or the exact logit.
using Logit = Candidate<std::uint32_t>;

// The `limit` largest of the candidates offered. Holds at most twice as many.
class Largest {
 public:
  // Candidates that are not above the threshold are known to be too many.
  void start(std::size_t limit, float threshold = -kInfinity) {
    limit_ = limit;
    items_.clear();
    items_.reserve(2 * limit);
    threshold_ = threshold;
  }
  std::size_t limit() const { return limit_; }
  std::size_t size() const { return items_.size(); }
  // A candidate that is not above it need not be offered.
  float threshold() const { return threshold_; }
  void offer(const Logit& candidate) {
    if (items_.size() == 2 * limit_) shrink();
    if (candidate.key > threshold_) items_.push_back(candidate);
  }
  // Leaves at most `limit`, in any order. The others are at most threshold().
  std::vector<Logit>& finish() {
    if (items_.size() > limit_) shrink();
    return items_;
  }
  static std::size_t planned_bytes(std::size_t limit) { return 2 * limit * sizeof(Logit); }
  std::size_t bytes() const { return items_.capacity() * sizeof(Logit); }

 private:
  void shrink() { threshold_ = keep_first(items_, limit_, Larger{}); }

  std::size_t limit_ = 0;
  float threshold_ = -kInfinity;
  std::vector<Logit> items_;
};

// The layer's own weights, in DRAM.
struct ExactRows {
  const std::byte* rows;
  RowType type;
  std::size_t row_bytes;
  std::size_t dimension;
  const float* bias;   // [rows]
  const float* norms;  // [rows]: upper bounds
  float largest_norm;
  float least_error;  // the loss of any logit, however near to zero, where numbers lie no closer

  float logit(const float* hidden, std::uint32_t row) const;
};

// The `count` largest of all logits, or all, in any order. `lanes` is room to work in.
std::vector<Logit>& largest_of(std::span<const float> logits, std::size_t count, Largest& largest,
                               std::vector<float>& lanes);

// The norm of a hidden state, or more: of small numbers single precision may lose the squares.
inline float norm_above(const float* state, std::size_t dimension) {
  return std::sqrt(dot_floats(state, state, dimension) +
                   static_cast<float>(dimension) * std::numeric_limits<float>::min());
}

// The most by which sums of products in single precision, in any order and rounded at last, may be wrong.
struct Rounding {
  float per_norm;   // of a row's norm
  float per_logit;  // of the logit
};

// Exact logits of candidates, all of them, or in descending order of the key until none left can be among the k
// largest. Returns a bound that no candidate left out exceeds: minus infinity when there is none.
float rank_candidates(const ExactRows& exact, const float* hidden, std::vector<Logit>& candidates, std::size_t k,
                      bool by_bound, const Rounding& rounding, std::vector<Logit>& scored);

inline float error_of(const ExactRows& exact, const Rounding& rounding, const Logit& scored) {
  return rounding.per_norm * exact.norms[scored.row] + rounding.per_logit * std::abs(scored.key) + exact.least_error;
}

// Whether the first k of the scored, which are in order, are the k largest of all rows, no other being above `left`.
bool is_proven(const ExactRows& exact, const Rounding& rounding, const std::vector<Logit>& scored, std::size_t k,
               float left);

}  // namespace memhier
