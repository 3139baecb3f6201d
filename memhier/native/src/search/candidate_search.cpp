// Routing, scan and bounds, a few queries at a time.
#include "search/candidate_search.hpp"

#include <array>
#include <span>

#include "search/likely.hpp"

namespace memhier {

CandidateSearch::CandidateSearch(const IndexState& state, const SearchEffort& effort, const Routes& routes)
    : state_(state), effort_(effort), limits_{effort.k, effort.eps, effort.least, effort.gap, effort.clear},
      router_(state, routes), wider_(state, routes),
      scanner_(state.book, state.space.padded(), state.coded, limits_, Instructions::kAvx512),
      progress_(effort.k, effort.limit), mapped_(kTogether * state.space.padded()), turned_(mapped_.size()),
      aims_(mapped_.size()) {
  effort.check();
}

void CandidateSearch::run(const float* queries, std::size_t count, const float* radius, ScanTally* tally,
                          std::int64_t* admitted, RankedRows& found) {
  const std::size_t dimension = state_.space.dimension(), padded = state_.space.padded();
  for (std::size_t first = 0; first < count; first += kTogether) {
    const std::size_t together = std::min(kTogether, count - first);
    state_.space.turn(queries + first * dimension, together, mapped_.data(), turned_.data());
    std::array<Spread, kTogether> spreads{};
    const float* aims = turned_.data();
    for (std::size_t q = 0; q < together && state_.space.is_inner(); ++q) {
      spreads[q] = state_.space.spread(turned_.data() + q * padded);
      state_.space.aim(turned_.data() + q * padded, spreads[q], aims_.data() + q * padded);
      aims = aims_.data();
    }
    router_.find(aims, together, 0);
    for (std::size_t q = 0; q < together; ++q) {
      scanned_ = 0;
      scan(turned_.data() + q * padded, spreads[q], router_, q);
      for (std::size_t step = 1; step < router_.steps() && is_short(); ++step) {
        wider_.find(aims + q * padded, 1, step);
        scan(turned_.data() + q * padded, spreads[q], wider_, 0);
      }
      const std::size_t query = first + q;
      tally[query] = {progress_.reach.probed, scanned_, progress_.admitted.truncated() ? 1 : 0,
                      progress_.closed ? 0 : 1};
      take(queries + query * dimension, radius == nullptr ? nullptr : radius + query, admitted + query, found);
    }
  }
}

// Scans the lists of one query anew.
void CandidateSearch::scan(const float* turned, const Spread& spread, ListRouter& lists, std::size_t which) {
  progress_.clear(kInfinity);
  scanner_.go_on(turned, progress_, state_.space.is_inner() ? &spread : nullptr);
  scan_lists(scanner_, progress_, state_.lists, lists.count(), [&](std::size_t i) { return lists.at(which, i); });
  scanned_ += progress_.scanned;
  threshold_ = progress_.admitted.finish();
}

// Whether the lists held too few rows, or ended before one lay far enough beyond the first.
bool CandidateSearch::is_short() const {
  return progress_.admitted.items().size() < effort_.k || (effort_.gap < kInfinity && !progress_.closed);
}

// Adds the candidates of the present query.
void CandidateSearch::take(const float* query, const float* radius, std::int64_t* admitted, RankedRows& found) {
  const std::vector<Found>& items = progress_.admitted.items();
  const std::size_t count = kept();
  *admitted = static_cast<std::int64_t>(count);
  const QuerySpace::Distances distance(state_.space, query);
  for (const Found& item : std::span(items).first(count)) {
    const auto part = static_cast<std::size_t>(item.row.position >> kPartShift);
    const std::int64_t row = item.row.position & ((std::int64_t{1} << kPartShift) - 1);
    found.files.push_back(state_.rows[part].file);
    found.offsets.push_back(state_.stored.offset(row));
    found.ids.push_back(state_.rows[part].id(row));
    found.lower.push_back(distance(item.key));
  }
  const float threshold = distance(threshold_);
  found.thresholds.push_back(radius == nullptr ? threshold : std::min(threshold, *radius));
  found.first.push_back(static_cast<std::int64_t>(found.ids.size()));
}

// How many candidates of the present query are ranked.
std::size_t CandidateSearch::kept() {
  const std::vector<Found>& items = progress_.admitted.items();
  const bool cut_short = progress_.admitted.truncated();
  if (cut_short && effort_.put_off) return 0;
  const auto all = static_cast<std::size_t>(effort_.kept(static_cast<std::int64_t>(items.size()), cut_short));
  if (!(effort_.loss > 0)) return all;
  return likely(std::span(items).first(all), effort_.k, effort_.eps, effort_.loss, estimates_);
}

}  // namespace memhier
