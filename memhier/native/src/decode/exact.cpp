#include "decode/exact.hpp"

namespace memhier {
namespace {

constexpr std::size_t kAhead = 4;  // rows on their way from memory while one is multiplied

void prefetch(const ExactRows& exact, std::uint32_t row) {
  const std::byte* start = exact.rows + std::size_t{row} * exact.row_bytes;
  // The first lines start the hardware's own prefetcher.
  for (std::size_t at = 0; at < std::min<std::size_t>(exact.row_bytes, 512); at += 64)
    __builtin_prefetch(start + at);
}

}  // namespace

float ExactRows::logit(const float* hidden, std::uint32_t row) const {
  float product;
  distances({hidden, rows + std::size_t{row} * row_bytes, static_cast<std::ptrdiff_t>(row_bytes), 1, dimension, nullptr,
             &product},
            type, Metric::ip);
  return bias[row] - product;
}

float rank_candidates(const ExactRows& exact, const float* hidden, std::vector<Candidate>& candidates, std::size_t k,
                      bool by_bound, const Rounding& rounding, std::vector<Scored>& scored) {
  scored.clear();
  if (!by_bound) {
    for (std::size_t i = 0; i < candidates.size(); ++i) {
      if (i + kAhead < candidates.size()) prefetch(exact, candidates[i + kAhead].row);
      scored.push_back({exact.logit(hidden, candidates[i].row), candidates[i].estimate, candidates[i].row});
    }
    return -kInfinity;
  }
  std::vector<float> kth;  // a min-heap of the k largest logits
  const auto greater = [](float a, float b) { return a > b; };
  float slack = 0;  // so that what is left out is below by more than rounding
  std::make_heap(candidates.begin(), candidates.end());
  auto end = candidates.end();
  for (; end != candidates.begin(); --end) {
    if (kth.size() == k && candidates.front().key < kth.front() - slack) return candidates.front().key;
    const Candidate best = candidates.front();
    std::pop_heap(candidates.begin(), end);
    if (end - candidates.begin() > 1) prefetch(exact, candidates.front().row);
    const float logit = exact.logit(hidden, best.row);
    scored.push_back({logit, best.estimate, best.row});
    slack = std::max(slack, 2 * error_of(exact, rounding, scored.back()));
    if (kth.size() < k) {
      kth.push_back(logit);
      std::push_heap(kth.begin(), kth.end(), greater);
    } else if (logit > kth.front()) {
      std::pop_heap(kth.begin(), kth.end(), greater);
      kth.back() = logit;
      std::push_heap(kth.begin(), kth.end(), greater);
    }
  }
  return -kInfinity;
}

bool is_proven(const ExactRows& exact, const Rounding& rounding, const std::vector<Scored>& scored, std::size_t k,
               float left) {
  if (scored.size() < k) return false;
  const float least = scored[k - 1].logit - error_of(exact, rounding, scored[k - 1]);
  if (!(left < least)) return false;
  return std::all_of(scored.begin() + static_cast<std::ptrdiff_t>(k), scored.end(), [&](const Scored& other) {
    return other.logit + error_of(exact, rounding, other) < least;
  });
}

}  // namespace memhier
