// Exact logits of candidates, by the kernels of rank/distance.
#include "decode/exact.hpp"

#include "bind/simd.hpp"

namespace memhier {
namespace {

constexpr std::size_t kTogether = 16;
constexpr std::size_t kLanes = 8;  // for each logit that is wanted
constexpr std::size_t kAhead = 4;  // rows on their way from memory while one is multiplied

// The highest logit of each lane: logit i belongs to lane i % lanes.size(). Those left at the end do not count.
MEMHIER_CLONES
void find_highest(std::span<const float> logits, std::span<float> lanes) {
  std::fill(lanes.begin(), lanes.end(), -kInfinity);  // no lane is NaN then
  for (std::size_t at = 0; at + lanes.size() <= logits.size(); at += lanes.size())
    for (std::size_t i = 0; i < lanes.size(); ++i) lanes[i] = logits[at + i] > lanes[i] ? logits[at + i] : lanes[i];
}

// The first place from `at` on where some logits that lie together hold one above a threshold; or where fewer are left.
MEMHIER_CLONES
std::size_t pass_low(std::span<const float> logits, std::size_t at, float threshold) {
  for (; at + kTogether <= logits.size(); at += kTogether) {
    int above = 0;
    for (std::size_t i = 0; i < kTogether; ++i) above |= logits[at + i] > threshold ? 1 : 0;
    if (above != 0) break;
  }
  return at;
}

void prefetch(const ExactRows& exact, std::uint32_t row) {
  const std::byte* start = exact.rows + std::size_t{row} * exact.row_bytes;
  // To the second level of caches, which waits for more lines at a time than the first.
  for (std::size_t at = 0; at < exact.row_bytes; at += 64) __builtin_prefetch(start + at, 0, 2);
}

}  // namespace

std::vector<Logit>& largest_of(std::span<const float> logits, std::size_t count, Largest& largest,
                               std::vector<float>& lanes) {
  float low = -kInfinity;
  lanes.resize((kLanes * count + kTogether - 1) / kTogether * kTogether);
  if (2 * lanes.size() <= logits.size()) {  // as many lanes as logits are wanted have one that is not below it
    find_highest(logits, lanes);
    const auto last = lanes.begin() + static_cast<std::ptrdiff_t>(count) - 1;
    std::nth_element(lanes.begin(), last, lanes.end(), std::greater<>());
    low = std::nextafter(*last, -kInfinity);
  }
  largest.start(std::min(count, logits.size()), low);
  for (std::size_t at = 0; at < logits.size();) {
    at = pass_low(logits, at, largest.threshold());
    for (const std::size_t end = std::min(at + kTogether, logits.size()); at < end; ++at)
      if (logits[at] > largest.threshold()) largest.offer({logits[at], logits[at], static_cast<std::uint32_t>(at)});
  }
  std::vector<Logit>& found = largest.finish();
  count = std::min(count, logits.size());
  // Those that are NaN or minus infinity are above nothing, and the last.
  for (std::size_t at = 0; found.size() < count; ++at)
    if (!(logits[at] > -kInfinity)) found.push_back({-kInfinity, -kInfinity, static_cast<std::uint32_t>(at)});
  return found;
}

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
