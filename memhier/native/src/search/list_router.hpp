// The lists of a few queries, in the order in which they are scanned, found as they are asked for.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "bind/array.hpp"
#include "route/list_graph.hpp"
#include "route/nearest_rows.hpp"
#include "search/index_state.hpp"

namespace memhier {

// The lists that a query is routed to at first, and then each time that they do not suffice: their number, and how they
// are found, [s, 2]. A number above 0 is the sight of a walk.
using Routes = Array<const std::int64_t, 2>;
constexpr std::int64_t kEveryList = -2;                           // in the order of their numbers
constexpr std::int64_t kComparedChosen = -1, kComparedEvery = 0;  // those that count, or all

class ListRouter {
 public:
  ListRouter(const IndexState& state, const Routes& routes);

  std::size_t steps() const { return routes_.shape(0); }

  // Finds those of a step for up to kTogether points of the router's space, [together, dimension].
  void find(const float* aims, std::size_t together, std::size_t step);

  // Lists of a query.
  std::size_t count() const { return count_; }
  // The i-th of them for one of the points, or -1.
  std::int64_t at(std::size_t which, std::size_t i) {
    if (kind_ > kComparedEvery) return walked_[which * count_ + i];
    return compared_.number(kind_ == kEveryList ? i : nearest_[which].at(i));
  }

 private:
  const IndexState& state_;
  const Routes& routes_;
  std::size_t count_ = 0;
  std::int64_t kind_ = kEveryList;
  ComparedRows compared_{};
  ComparisonRoom room_;
  std::vector<NearestRows> nearest_;
  std::vector<std::int64_t> walked_;
};

}  // namespace memhier
