// The best-first walk over a graph of centroids in half precision.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "bind/array.hpp"
#include "bind/simd.hpp"
#include "route/half_rows.hpp"

namespace memhier {

constexpr std::int32_t kNone = -1;
constexpr std::size_t kSteps = 4;  // at a time, so that rows arrive while others are measured

template <class T>
MEMHIER_INLINE void fetch(const T* values, std::size_t count) {
  constexpr std::size_t kLineBytes = 64;
  const auto* first = reinterpret_cast<const char*>(values);
  for (std::size_t byte = 0; byte < count * sizeof(T); byte += kLineBytes) __builtin_prefetch(first + byte);
}

// Links int32 [lists, degree]: lists near each, then kNone. The last may be kNone - 1 - c: list c has the same
// centroid; no list links to c by other means.
struct ListGraph {
  const std::uint16_t* rows;  // [lists, dimension]
  std::size_t lists, dimension;
  const std::int32_t* links;
  std::size_t degree;

  const std::int32_t* of(std::size_t list) const { return links + list * degree; }
  std::size_t checked(std::int32_t list) const {
    require(list >= 0 && static_cast<std::size_t>(list) < lists, "walk_lists: a link leads beyond the lists");
    return static_cast<std::size_t>(list);
  }
  // The next list of the same centroid, or kNone.
  std::int32_t copy_of(std::size_t list) const {
    const std::int32_t last = of(list)[degree - 1];
    return last < kNone ? kNone - 1 - last : kNone;
  }
};

// The walk of one query at a time: it goes on from the nearest list that it has not gone on from, and ends after as
// many steps as the sight beyond the nearest list of all.
class Walk {
 public:
  Walk(const ListGraph& graph, std::size_t sight) : graph_(graph), sight_(sight), seen_((graph.lists + 63) / 64) {}

  void run(const float* query, const std::int32_t* seeds, std::size_t count) {
    std::fill(seen_.begin(), seen_.end(), std::uint64_t{0});
    near_.clear();
    ahead_.clear();
    gather(seeds, count);
    std::uint64_t nearest = UINT64_MAX;
    for (std::size_t left = sight_; !fresh_.empty() || (left > 0 && !ahead_.empty());) {
      // Rows arrive while those before are measured.
      std::swap(fresh_, arrived_);
      fresh_.clear();
      std::array<std::size_t, kSteps> lists;
      std::size_t steps = 0;
      for (; steps < kSteps && left > 0 && !ahead_.empty(); ++steps, --left) {
        const std::uint64_t key = ahead_.front();
        std::pop_heap(ahead_.begin(), ahead_.end(), std::greater<>{});
        ahead_.pop_back();
        lists[steps] = key & UINT32_MAX;
        fetch(graph_.of(lists[steps]), graph_.degree);
        if (key < nearest) nearest = key, left = sight_;
      }
      for (std::size_t i = 0; i < steps; ++i) gather(graph_.of(lists[i]), graph_.degree);
      look(query);
    }
  }

  // Fills nearest[wanted] with the lists found, by distance and at equal ones by number, each followed by those of the
  // same centroid; -1 where there are fewer.
  void finish(std::int64_t* nearest, std::size_t wanted) {
    const std::size_t some = std::min(wanted, near_.size());
    const auto last = near_.begin() + static_cast<std::ptrdiff_t>(some);
    if (last != near_.end()) std::nth_element(near_.begin(), last, near_.end());
    std::sort(near_.begin(), last);
    std::size_t at = 0;
    for (std::size_t i = 0; i < some && at < wanted; ++i)
      for (std::int32_t list = static_cast<std::int32_t>(near_[i] & UINT32_MAX); list != kNone && at < wanted;
           list = graph_.copy_of(graph_.checked(list)))
        nearest[at++] = list;
    std::fill(nearest + at, nearest + wanted, kNone);
  }

 private:
  // Takes down the lists that were not yet seen.
  void gather(const std::int32_t* lists, std::size_t count) {
    for (std::size_t i = 0; i < count && lists[i] >= 0; ++i) {
      const std::size_t list = graph_.checked(lists[i]);
      const std::uint64_t bit = std::uint64_t{1} << (list % 64);
      if ((seen_[list / 64] & bit) != 0) continue;
      seen_[list / 64] |= bit;
      fresh_.push_back(lists[i]);
      fetch(graph_.rows + list * graph_.dimension, graph_.dimension);
    }
  }

  // Measures the lists whose rows have arrived.
  void look(const float* query) {
    away_.resize(arrived_.size());
    measure_some(query, graph_.rows, graph_.dimension, arrived_.data(), arrived_.size(), away_.data());
    for (std::size_t i = 0; i < arrived_.size(); ++i) {
      const std::uint64_t key = std::uint64_t{order_of(away_[i])} << 32 | static_cast<std::uint32_t>(arrived_[i]);
      near_.push_back(key);
      ahead_.push_back(key);
      std::push_heap(ahead_.begin(), ahead_.end(), std::greater<>{});
    }
  }

  const ListGraph& graph_;
  const std::size_t sight_;
  std::vector<std::uint64_t> seen_;    // a bit for each list
  std::vector<std::uint64_t> near_;    // distance above, list below, of all seen
  std::vector<std::uint64_t> ahead_;   // a heap of those to go on from, the nearest first
  std::vector<std::int32_t> fresh_;    // lists to measure
  std::vector<std::int32_t> arrived_;  // and those of the steps before
  std::vector<float> away_;            // their distances
};

}  // namespace memhier
