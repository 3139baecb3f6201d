// Exact logits of candidates, by the kernels of rank/distance.
#include "decode/exact.hpp"

namespace memhier {
namespace {

constexpr std::size_t kAhead = 4;  // rows on their way from memory while one is multiplied

void prefetch(const ExactRows& exact, std::uint32_t row) {
  const std::byte* start = exact.rows + std::size_t{row} * exact.row_bytes;
  // To the second level of caches, which waits for more lines at a time than the first.
  for (std::size_t at = 0; at < exact.row_bytes; at += 64) __builtin_prefetch(start + at, 0, 2);
}

}  // namespace

float ExactRows::logit(const float* hidden, std::uint32_t row) const {
  float product;
  distances({hidden, rows + std::size_t{row} * row_bytes, static_cast<std::ptrdiff_t>(row_bytes), 1, dimension, nullptr,
             &product},
            type, Metric::ip);
  return bias[row] - product;
}

float rank_candidates(const ExactRows& exact, const float* hidden, std::vector<Logit>& candidates, std::size_t k,
                      bool by_bound, const Rounding& rounding, std::vector<Logit>& scored) {
  scored.clear();
  if (!by_bound) {
    scored.reserve(candidates.size());
    for (std::size_t i = 0; i < candidates.size(); ++i) {
      if (i + kAhead < candidates.size()) prefetch(exact, candidates[i + kAhead].row);
      scored.push_back({exact.logit(hidden, candidates[i].row), candidates[i].estimate, candidates[i].row});
    }
    return -kInfinity;
  }
  TopK<float, std::greater<>> kth(k);
  float slack = 0;  // so that the rows left out are below by more than rounding
  const auto goes_later = [](const Logit& a, const Logit& b) { return Larger{}(b, a); };
  std::make_heap(candidates.begin(), candidates.end(), goes_later);
  // Popped candidates stand at the end, the best one last; some rows are on their way before they are multiplied.
  auto left = candidates.end();
  for (auto at = candidates.end(); at != candidates.begin(); --at) {
    for (; left != candidates.begin() && at - left <= static_cast<std::ptrdiff_t>(kAhead); --left) {
      std::pop_heap(candidates.begin(), left, goes_later);
      prefetch(exact, (left - 1)->row);
    }
    const Logit best = *(at - 1);
    if (kth.is_full() && best.key < kth.last() - slack) return best.key;
    const float logit = exact.logit(hidden, best.row);
    scored.push_back({logit, best.estimate, best.row});
    slack = std::max(slack, 2 * error_of(exact, rounding, scored.back()));
    kth.offer(logit);
  }
  return -kInfinity;
}

bool is_proven(const ExactRows& exact, const Rounding& rounding, const std::vector<Logit>& scored, std::size_t k,
               float left) {
  if (scored.size() < k) return left == -kInfinity;  // they are all there are
  const float least = scored[k - 1].key - error_of(exact, rounding, scored[k - 1]);
  if (!(left < least)) return false;
  return std::all_of(scored.begin() + static_cast<std::ptrdiff_t>(k), scored.end(),
                     [&](const Logit& other) { return other.key + error_of(exact, rounding, other) < least; });
}

}  // namespace memhier
