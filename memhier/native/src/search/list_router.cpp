// Comparison and walk, as the routes tell.
#include "search/list_router.hpp"

namespace memhier {

ListRouter::ListRouter(const IndexState& state, const Routes& routes) : state_(state), routes_(routes) {
  require(steps() >= 1 && routes.shape(1) == 2, "routes: [s, 2]");
  for (std::size_t step = 0; step < steps(); ++step) {
    const std::int64_t wanted = routes[2 * step], kind = routes[2 * step + 1];
    const std::size_t lists = kind >= kComparedEvery ? state.lists.centroids.shape(0) : state.compared.count;
    require(wanted >= 1 && wanted <= static_cast<std::int64_t>(lists) && kind >= kEveryList && kind <= UINT32_MAX &&
                (kind <= kComparedEvery || state.routing.links),
            "routes: no more than there are lists, and known ways");
  }
}

void ListRouter::find(const float* aims, std::size_t together, std::size_t step) {
  count_ = static_cast<std::size_t>(routes_[2 * step]);
  kind_ = routes_[2 * step + 1];
  compared_ = state_.compared;
  if (kind_ == kEveryList) return;
  if (kind_ > kComparedEvery) {
    const Array<const std::int32_t, 2>& links = *state_.routing.links;
    const ListGraph graph{compared_.rows, links.shape(0), compared_.dimension, links.data(), links.shape(1)};
    Walk walk(graph, static_cast<std::size_t>(kind_));
    walked_.resize(together * count_);
    for (std::size_t q = 0; q < together; ++q) {
      walk.run(aims + q * compared_.dimension, state_.routing.seeds->data(), state_.routing.seeds->size());
      walk.finish(walked_.data() + q * count_, count_);
    }
    return;
  }
  if (kind_ == kComparedEvery) compared_ = {compared_.rows, compared_.dimension, nullptr, state_.lists.radii.size()};
  if (nearest_.size() < together || !nearest_.front().fits(count_, compared_.count))
    nearest_.assign(together, NearestRows(count_, compared_.count));
  compare_rows(aims, together, compared_, nearest_.data(), room_);
}

}  // namespace memhier
