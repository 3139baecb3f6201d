// Routing, scan and bounds, a few queries at a time.
#include "search/candidate_search.hpp"

#include <array>

#include "search/likely.hpp"

namespace memhier {

CandidateSearch::CandidateSearch(const IndexState& state, const SearchEffort& effort, const Routes& routes)
    : state_(state), effort_(effort),
      limits_{effort.k, effort.eps, effort.least, effort.gap, effort.clear, effort.border}, router_(state, routes),
      scanner_(state.book, state.space.padded(), state.coded, limits_, Instructions::kAvx512), waves_(state, limits_),
      mapped_(kTogether * state.space.padded()), turned_(mapped_.size()),
      aims_(state.space.is_inner() ? mapped_.size() : 0) {
  effort.check();
}

std::optional<Fault> CandidateSearch::run(const float* queries, std::size_t count, const float* radius,
                                          ScanTally* tally, std::int64_t* admitted, const ReadBatch& read,
                                          RankedRows& found) {
  const std::size_t dimension = state_.space.dimension(), padded = state_.space.padded();
  const bool inner = state_.space.is_inner();
  while (progress_.size() < std::min(count, kTogether)) progress_.emplace_back(effort_.k, effort_.limit);
  for (std::size_t first = 0; first < count; first += kTogether) {
    const std::size_t together = std::min(kTogether, count - first);
    state_.space.turn(queries + first * dimension, together, mapped_.data(), turned_.data());
    std::array<Spread, kTogether> spreads{};
    std::array<QueryScan, kTogether> scans{};
    const float* aims = inner ? aims_.data() : turned_.data();
    for (std::size_t q = 0; q < together; ++q) {
      const float* turned = turned_.data() + q * padded;
      if (inner) {
        spreads[q] = state_.space.spread(turned);
        state_.space.aim(turned, spreads[q], aims_.data() + q * padded);
      }
      scans[q] = {turned, inner ? &spreads[q] : nullptr, q, &progress_[q]};
    }
    router_.find(aims, together, 0);
    if (auto fault = scan(std::span(scans).first(together), router_, read)) return fault;
    for (std::size_t q = 0; q < together; ++q) {
      Progress& progress = progress_[q];
      std::int64_t scanned = progress.scanned;
      for (std::size_t step = 1; step < router_.steps() && is_short(progress); ++step) {
        router_.find(aims + q * padded, 1, step);
        scans[q] = {scans[q].turned, scans[q].spread, 0, &progress};
        if (auto fault = scan(std::span(scans).subspan(q, 1), router_, read)) return fault;
        scanned += progress.scanned;
      }
      const std::size_t query = first + q;
      tally[query] = ScanTally::of(progress, scanned);
      take(scans[q], queries + query * dimension, radius == nullptr ? nullptr : radius + query, admitted + query,
           found);
    }
  }
  return std::nullopt;
}

// Scans the lists of queries anew.
std::optional<Fault> CandidateSearch::scan(std::span<QueryScan> queries, ListRouter& lists, const ReadBatch& read) {
  for (const QueryScan& query : queries) query.progress->clear(kInfinity);
  if (!state_.stored_lists.empty()) {
    if (auto fault = waves_.run(queries, lists, read)) return fault;
  } else {
    for (const QueryScan& query : queries) {
      scanner_.go_on(query.turned, *query.progress, query.spread);
      scan_lists(scanner_, *query.progress, state_.lists, lists.count(),
                 [&](std::size_t i) { return lists.at(query.which, i); });
    }
  }
  for (QueryScan& query : queries) query.threshold = query.progress->admitted.finish();
  return std::nullopt;
}

// Whether the lists held too few rows, or ended before one lay far enough beyond the first.
bool CandidateSearch::is_short(const Progress& progress) const {
  return progress.admitted.items().size() < effort_.k || (effort_.gap < kInfinity && !progress.closed);
}

// Adds the candidates of a query.
void CandidateSearch::take(const QueryScan& scanned, const float* query, const float* radius, std::int64_t* admitted,
                           RankedRows& found) {
  const std::size_t count = kept(scanned.progress->admitted);
  *admitted = static_cast<std::int64_t>(count);
  const QuerySpace::Distances distance(state_.space, query);
  for (const Found& item : std::span(scanned.progress->admitted.items()).first(count)) {
    const auto part = static_cast<std::size_t>(item.row.position >> kPartShift);
    const std::int64_t row = item.row.position & kRowMask;
    found.files.push_back(state_.rows[part].file);
    found.offsets.push_back(state_.stored.offset(row));
    found.ids.push_back(state_.rows[part].id(row));
    if (!state_.stored_lists.empty()) found.names.push_back(item.row);
    found.lower.push_back(distance(item.key));
  }
  const float threshold = distance(scanned.threshold);
  found.thresholds.push_back(radius == nullptr ? threshold : std::min(threshold, *radius));
  found.first.push_back(static_cast<std::int64_t>(found.ids.size()));
}

// How many candidates of a query are ranked.
std::size_t CandidateSearch::kept(const Admitted& admitted) {
  const std::vector<Found>& items = admitted.items();
  if (admitted.truncated() && effort_.put_off) return 0;
  const auto all =
      static_cast<std::size_t>(effort_.kept(static_cast<std::int64_t>(items.size()), admitted.truncated()));
  if (!(effort_.loss > 0)) return all;
  return likely(std::span(items).first(all), effort_.k, effort_.eps, effort_.loss, estimates_);
}

std::optional<Fault> name_rows(const IndexState& state, RankedRows& found, std::int64_t* ids, std::size_t count,
                               const ReadBatch& read) {
  if (state.stored_lists.empty()) return std::nullopt;
  std::sort(found.names.begin(), found.names.end());
  std::vector<std::vector<std::int64_t*>> absent(state.stored_lists.size());  // by part
  for (std::int64_t* id = ids; id != ids + count; ++id) {
    if (*id < 0) continue;
    const auto place = std::lower_bound(found.names.begin(), found.names.end(), Place{*id, 0});
    if (place != found.names.end() && place->position == *id)
      *id = place->id;
    else
      absent[static_cast<std::size_t>(*id >> kPartShift)].push_back(id);
  }
  std::vector<std::int64_t> offsets;
  std::vector<std::byte> bytes;
  for (std::size_t p = 0; p < absent.size(); ++p) {
    const StoredLists& part = *state.stored_lists[p];
    if (absent[p].empty()) continue;
    offsets.clear();
    for (const std::int64_t* id : absent[p]) offsets.push_back(part.id_offset(*id & kRowMask));
    bytes.resize(offsets.size() * part.id_bytes);
    if (auto fault =
            read({{}, nullptr, part.file, offsets.data(), offsets.size(), part.id_bytes, bytes.data(), nullptr}))
      return fault;
    for (std::size_t i = 0; i < absent[p].size(); ++i)
      *absent[p][i] = id_at(bytes.data() + i * part.id_bytes, part.id_bytes);
  }
  return std::nullopt;
}

}  // namespace memhier
