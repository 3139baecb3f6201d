// Choice, reads and scan of each wave.
#include "search/list_waves.hpp"

#include <algorithm>
#include <new>

namespace memhier {
namespace {

constexpr std::size_t kFirst = 4;     // lists of the first wave, at least
constexpr std::size_t kGrowth = 8;    // times as many lists as before in the next wave, at most
constexpr std::size_t kWindow = 128;  // lists of a query in one wave, at most
constexpr std::int64_t kBetween = 5;  // pages between two lists that are read with them

}  // namespace

ListWaves::ListWaves(const IndexState& state, const ScanLimits& limits)
    : state_(state), limits_(limits), scanner_(state.book, state.space.padded(), {}, limits, Instructions::kAvx512),
      placed_(state.stored_lists.size()) {}

std::optional<Fault> ListWaves::run(std::span<QueryScan> queries, ListRouter& lists, const ReadBatch& read) {
  for (const QueryScan& query : queries) {
    scanner_.go_on(query.turned, *query.progress, query.spread);
    scanner_.begin_among(lists.count(), [&](std::size_t i) {
      const std::int64_t list = lists.at(query.which, i);
      return list < 0 ? nullptr : centroid(list);
    });
  }
  while (choose(queries, lists)) {
    plan();
    if (auto fault = fetch(read)) return fault;
    scan(queries, lists);
  }
  return std::nullopt;
}

// Fills the counts of all queries and the lists of the wave, as many as there is room for; false at the end of all.
bool ListWaves::choose(std::span<QueryScan> queries, ListRouter& lists) {
  chosen_.clear();
  std::size_t pages = 0;
  bool full = false;
  for (QueryScan& query : queries) {
    query.count = 0;
    if (full || query.progress->closed) continue;
    full = !choose_near(query, lists, pages);
  }
  std::sort(chosen_.begin(), chosen_.end());
  chosen_.erase(std::unique(chosen_.begin(), chosen_.end()), chosen_.end());
  return !chosen_.empty();
}

// Adds the next lists that a query scans before one ends it, if none of them brings nearer rows; false where there is
// no room for a list. `pages` counts those of the wave.
bool ListWaves::choose_near(QueryScan& query, ListRouter& lists, std::size_t& pages) {
  const auto least = static_cast<std::size_t>(std::max(limits_.least, std::int64_t{0}));
  const std::size_t most = std::min(std::max({kFirst, least, kGrowth * query.scanned}), kWindow);
  const std::size_t before = query.scanned;
  scanner_.go_on(query.turned, *query.progress, query.spread);
  Reach reach = query.progress->reach;
  for (; query.scanned < before + most && query.done + query.count < lists.count(); ++query.count) {
    const std::int64_t list = lists.at(query.which, query.done + query.count);
    if (list < 0) break;
    if (scanner_.would_end(centroid(list), radius(list), reach)) {
      query.progress->closed = query.scanned == before;
      break;
    }
    if (scanner_.is_beyond(centroid(list))) continue;
    for (const StoredLists* part : state_.stored_lists)
      pages += static_cast<std::size_t>(part->last_page(static_cast<std::size_t>(list)) + 1 -
                                        part->first_page(static_cast<std::size_t>(list)));
    if (pages > state_.wave_pages && !chosen_.empty()) return false;
    chosen_.push_back(list);
    ++query.scanned;
  }
  return true;
}

// Gives the lists their places among the pages to read: neighbours share their pages, and have those between them.
void ListWaves::plan() {
  files_.clear();
  offsets_.clear();
  zeros_.assign(chosen_.size(), 0);
  for (std::size_t p = 0; p < placed_.size(); ++p) {
    Placed& placed = placed_[p];
    placed.counts.clear();
    placed.shifts.clear();
    placed.places.clear();
    for (const std::int64_t list : chosen_) plan_list(p, list);
  }
}

void ListWaves::plan_list(std::size_t part, std::int64_t list) {
  const StoredLists& lists = *state_.stored_lists[part];
  const auto number = static_cast<std::size_t>(list);
  Placed& placed = placed_[part];
  placed.counts.push_back(lists.starts[number + 1] - lists.starts[number]);
  placed.shifts.push_back(lists.starts[number]);
  placed.places.push_back(0);
  if (placed.counts.back() == 0) return;
  const std::int64_t first = lists.first_page(number), last = lists.last_page(number);
  const bool follows = !files_.empty() && files_.back() == lists.file;
  std::int64_t next = follows ? offsets_.back() / StoredLists::kPage + 1 : first;  // the first page that is not planned
  if (first > next && (first - next > kBetween || !has_room(first - next))) next = first;
  for (; next <= last; ++next) {
    files_.push_back(lists.file);
    offsets_.push_back(next * StoredLists::kPage);
  }
  const auto end = static_cast<std::int64_t>(offsets_.size());
  placed.places.back() = (end - (next - first)) * StoredLists::kPage + lists.offsets[number] % StoredLists::kPage;
}

std::optional<Fault> ListWaves::fetch(const ReadBatch& read) {
  if (room_ == 0 || files_.size() > room_) {
    room_ = std::max(files_.size(), std::size_t{1});
    pages_.reset(static_cast<std::byte*>(std::aligned_alloc(kPageBytes, room_ * kPageBytes)));
    if (pages_ == nullptr) throw std::bad_alloc();
  }
  if (files_.empty()) return std::nullopt;
  return read({{}, files_.data(), 0, offsets_.data(), offsets_.size(), kPageBytes, pages_.get(), nullptr});
}

void ListWaves::scan(std::span<QueryScan> queries, ListRouter& lists) {
  std::vector<Part> parts;
  for (std::size_t p = 0; p < placed_.size(); ++p) {
    parts.push_back(state_.stored_lists[p]->part(pages_.get(), zeros_.data(), placed_[p].counts.data(),
                                                 placed_[p].shifts.data(), placed_[p].places.data()));
    parts.back().allowed = state_.allowed[p].data();
    parts.back().words = state_.allowed[p].size();
  }
  scanner_.take(std::move(parts));
  for (QueryScan& query : queries) {
    scanner_.go_on(query.turned, *query.progress, query.spread);
    for (std::size_t i = 0; i < query.count && !query.progress->closed; ++i) {
      const std::int64_t list = lists.at(query.which, query.done + i);
      const auto place = std::lower_bound(chosen_.begin(), chosen_.end(), list);
      if (place == chosen_.end() || *place != list) continue;  // passed over
      scanner_.scan(centroid(list), place - chosen_.begin(), radius(list), list);
    }
    query.done += query.count;
  }
}

}  // namespace memhier
