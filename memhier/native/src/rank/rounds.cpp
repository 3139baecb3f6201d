// The rounds of reads: choice of rows or pages, their ranking as they land, and the stop.
#include "rank/rounds.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

namespace memhier {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
// After the first round, as many at a time as are worth a wait: fewer would cost rounds, more reads that a bound would
// save. In proportion to the rows ranked before, so that even a hard query takes few rounds.
constexpr std::size_t kLeastRound = 8;

// Of a bound, beyond which a candidate lies nearer than it: less may be rounding.
constexpr float kRounding = 1.0F / 1024;

std::size_t next_round(std::int64_t ranked) { return std::max(kLeastRound, static_cast<std::size_t>(ranked) / 2); }

}  // namespace

const std::byte* HotPages::find(std::int32_t file, std::uint64_t page) const {
  if (keys.empty()) return nullptr;
  const PageKey wanted = page_key_of(file, page);
  const auto found = std::lower_bound(keys.begin(), keys.end(), wanted);
  if (found == keys.end() || *found != wanted) return nullptr;
  return bytes + static_cast<std::size_t>(found - keys.begin()) * kPageBytes;
}

Rounds::Rounds(const RankBatch& batch, Read read)
    : batch_(batch), fetch_(std::move(read)), nearest_(batch.count), next_(batch.first, batch.first + batch.count),
      taken_(batch.per_page > 0 ? 0 : static_cast<std::size_t>(batch.first[batch.count])), misled_(batch.count, true),
      read_(batch.per_page > 0 ? batch.count : 0) {
  for (auto& heap : nearest_) heap = TopK<Nearest>(batch.k);
  distances_.resize(batch.per_page);  // now: nothing may throw while reads are on their way
  std::fill_n(batch.out_tally, batch.count, RankTally{});
}

std::optional<Fault> Rounds::run() {
  const Clock::time_point end =
      batch_.deadline == std::chrono::nanoseconds::max() ? Clock::time_point::max() : Clock::now() + batch_.deadline;
  std::vector<std::uint32_t> active(batch_.count);
  for (std::uint32_t query = 0; query < batch_.count; ++query) active[query] = query;
  while (!active.empty()) {
    wanted_.clear();
    std::erase_if(active, [this](std::uint32_t query) { return !choose(query); });
    // In the order of the files, so that rows that share a page are read together.
    std::sort(wanted_.begin(), wanted_.end(), [this](const Wanted& a, const Wanted& b) {
      const std::int32_t file_a = batch_.files[a.candidate], file_b = batch_.files[b.candidate];
      return file_a != file_b ? file_a < file_b : batch_.offsets[a.candidate] < batch_.offsets[b.candidate];
    });
    if (auto fault = batch_.workspace.empty() ? rank_as_they_land() : rank_by_parts()) return fault;
    if (end != Clock::time_point::max() && Clock::now() >= end) {
      for (const std::uint32_t query : active) tally(query).stopped = Stop::deadline;
      break;
    }
  }
  finish();
  return std::nullopt;
}

float Rounds::threshold(std::uint32_t query) const {
  const auto& heap = nearest_[query];
  return std::min(batch_.thresholds[query], heap.is_full() ? heap.last().distance : kInfinity);
}

PageKey Rounds::page_key(std::int64_t candidate) const {
  return page_key_of(batch_.files[candidate], static_cast<std::uint64_t>(batch_.offsets[candidate]) / kPageBytes);
}

bool Rounds::in_one_page(std::int64_t candidate) const {
  return static_cast<std::uint64_t>(batch_.offsets[candidate]) % kPageBytes + batch_.row_bytes <= kPageBytes;
}

bool Rounds::is_hot(PageKey key) const {
  return std::binary_search(batch_.hot.keys.begin(), batch_.hot.keys.end(), key);
}

// Adds to wanted_ the candidates that this round reads for a query; false once it needs nothing more.
bool Rounds::choose(std::uint32_t query) {
  const std::int64_t stop = batch_.first[query + 1];
  const float most = threshold(query);
  // Of pages, where these are ranked whole: of each, only the first candidate is wanted.
  RankTally& done = tally(query);
  const std::int64_t before_now = batch_.per_page > 0 ? done.page_requests + done.hot_pages : done.ranked;
  const std::size_t quota = done.rounds == 0 ? batch_.first_round : next_round(before_now);
  const std::size_t before = wanted_.size();
  // Errors of near codes may all point one way: bounds that failed for all that was read stop nothing.
  const bool bounded = done.rounds == 0 || !misled_[query];
  pages_.clear();
  Stop reason = Stop::all_read;
  for (std::int64_t& at = next_[query]; at < stop && wanted_.size() - before < quota; ++at) {
    if (bounded && batch_.lower[at] > most) {
      reason = Stop::bound;
      break;
    }
    if (batch_.per_page == 0 && taken_[static_cast<std::size_t>(at)]) continue;
    if (!(batch_.per_page > 0 ? want_page(query, at) : want(query, at))) {
      reason = Stop::max_reads;
      break;
    }
  }
  if (wanted_.size() == before) {
    done.stopped = reason;
    return false;
  }
  if (batch_.per_page == 0) add_page_mates(query, most);
  ++done.rounds;
  if (batch_.out_rounds != nullptr)
    for (std::size_t i = before; i < wanted_.size(); ++i)
      batch_.out_rounds[wanted_[i].candidate] = static_cast<std::int32_t>(done.rounds);
  return true;
}

// Takes a candidate, unless its pages are more than may be read.
bool Rounds::want(std::uint32_t query, std::int64_t candidate) {
  const auto start = static_cast<std::uint64_t>(batch_.offsets[candidate]) % kPageBytes;
  const PageKey first = page_key(candidate);
  const PageKey last = first + static_cast<std::int64_t>((start + batch_.row_bytes - 1) / kPageBytes);
  const auto chosen = [this](PageKey key) { return std::find(pages_.begin(), pages_.end(), key) != pages_.end(); };
  const bool had_first = chosen(first), had_last = first == last || chosen(last);
  std::int64_t pages = had_first ? 0 : 1;
  // A row that straddles pages is read whole, whatever of it is held. Those between its ends are of no other row.
  if (first != last)
    pages = last - first + 1 - (had_first && !is_hot(first) ? 1 : 0) - (had_last && !is_hot(last) ? 1 : 0);
  const bool hot = first == last && is_hot(first);
  if (!hot && static_cast<std::size_t>(tally(query).page_requests + pages) > batch_.max_reads) return false;
  (hot ? tally(query).hot_pages : tally(query).page_requests) += pages;
  if (!had_first) pages_.push_back(first);
  if (!had_last) pages_.push_back(last);
  taken_[static_cast<std::size_t>(candidate)] = true;
  wanted_.push_back({query, candidate});
  return true;
}

// Takes the page of a candidate, unless it was taken before or is more than may be read.
bool Rounds::want_page(std::uint32_t query, std::int64_t candidate) {
  const PageKey key = page_key(candidate);
  auto& pages = read_[query];
  const auto place = std::lower_bound(pages.begin(), pages.end(), key);
  if (place != pages.end() && *place == key) return true;
  const bool hot = is_hot(key);
  if (!hot && static_cast<std::size_t>(tally(query).page_requests) >= batch_.max_reads) return false;
  ++(hot ? tally(query).hot_pages : tally(query).page_requests);
  pages.insert(place, key);
  wanted_.push_back({query, candidate});
  return true;
}

// Rows that will lie in DRAM anyway, next to one that was asked for, are ranked at no cost.
void Rounds::add_page_mates(std::uint32_t query, float most) {
  const std::int64_t stop = batch_.first[query + 1];
  for (std::int64_t at = next_[query]; at < stop && batch_.lower[at] <= most; ++at) {
    if (taken_[static_cast<std::size_t>(at)] || !in_one_page(at)) continue;
    if (std::find(pages_.begin(), pages_.end(), page_key(at)) == pages_.end()) continue;
    taken_[static_cast<std::size_t>(at)] = true;
    wanted_.push_back({query, at});
  }
}

// Ranks the rows or whole pages wanted, each as soon as it is read, while the rest is on its way.
std::optional<Fault> Rounds::rank_as_they_land() {
  const bool whole = batch_.per_page > 0;
  const auto rank = [this, whole](const Wanted& item, const std::byte* at) {
    if (whole)
      rank_page(item, at);
    else
      rank_row(item, at);
  };
  files_.clear();
  offsets_.clear();
  cold_.clear();
  for (const Wanted& item : wanted_) {
    const std::int32_t file = batch_.files[item.candidate];
    const auto offset = static_cast<std::uint64_t>(batch_.offsets[item.candidate]);
    const std::uint64_t within = whole ? 0 : offset % kPageBytes;
    // Arrays are the caller's: a row that straddles pages is left to the reader, which refuses it.
    const bool inside = whole || in_one_page(item.candidate);
    if (const std::byte* page = inside ? batch_.hot.find(file, offset / kPageBytes) : nullptr) {
      rank(item, page + within);
      continue;
    }
    files_.push_back(file);
    offsets_.push_back(static_cast<std::int64_t>(offset / kPageBytes * kPageBytes + within));
    cold_.push_back(item);
  }
  if (cold_.empty()) return std::nullopt;
  const Landed landed = [&](std::uint32_t number, const std::byte* at) { rank(cold_[number], at); };
  const std::size_t length = whole ? kPageBytes : batch_.row_bytes;
  return fetch_({{}, files_.data(), 0, offsets_.data(), offsets_.size(), length, nullptr, nullptr, &landed});
}

// Ranks rows that may straddle pages: read as many at a time as there is room for, then compared.
std::optional<Fault> Rounds::rank_by_parts() {
  const std::size_t step = batch_.workspace.size() / batch_.row_bytes;
  for (std::size_t at = 0; at < wanted_.size(); at += step) {
    const auto part = std::span(wanted_).subspan(at, std::min(step, wanted_.size() - at));
    if (auto fault = rank_part(part)) return fault;
  }
  return std::nullopt;
}

std::optional<Fault> Rounds::rank_part(std::span<const Wanted> wanted) {
  files_.clear();
  offsets_.clear();
  cold_.clear();
  for (const Wanted& item : wanted) {
    const auto offset = static_cast<std::uint64_t>(batch_.offsets[item.candidate]);
    const std::byte* page =
        in_one_page(item.candidate) ? batch_.hot.find(batch_.files[item.candidate], offset / kPageBytes) : nullptr;
    if (page != nullptr) {
      rank_row(item, page + offset % kPageBytes);
      continue;
    }
    files_.push_back(batch_.files[item.candidate]);
    offsets_.push_back(batch_.offsets[item.candidate]);
    cold_.push_back(item);
  }
  if (cold_.empty()) return std::nullopt;
  std::byte* rows = batch_.workspace.data();
  const Batch reads{{}, files_.data(), 0, offsets_.data(), offsets_.size(), batch_.row_bytes, rows, nullptr};
  if (auto fault = fetch_(reads)) return fault;
  for (std::size_t i = 0; i < cold_.size(); ++i) rank_row(cold_[i], rows + i * batch_.row_bytes);
  return std::nullopt;
}

void Rounds::rank_row(const Wanted& item, const std::byte* row) {
  ++tally(item.query).ranked;
  float distance = 0;
  distances(
      {batch_.queries + std::size_t{item.query} * batch_.dimension, row, 0, 1, batch_.dimension, nullptr, &distance},
      batch_.type, batch_.metric);
  compare(item, distance);
  offer(item.query,
        {distance, batch_.files[item.candidate], batch_.ids[item.candidate], batch_.offsets[item.candidate]});
}

void Rounds::rank_page(const Wanted& item, const std::byte* page) {
  const std::int32_t file = batch_.files[item.candidate];
  const auto of_file = [file](const PageRows& rows) { return rows.file == file; };
  const std::span<const PageRows> files = batch_.page_rows[batch_.page_rows.size() == 1 ? 0 : item.query];
  const PageRows& rows = *std::find_if(files.begin(), files.end(), of_file);
  const auto per_page = static_cast<std::int64_t>(batch_.per_page);
  const std::int64_t start = batch_.offsets[item.candidate] / static_cast<std::int64_t>(kPageBytes);
  const std::int64_t first = start * per_page;
  const auto count = static_cast<std::size_t>(std::min(per_page, rows.rows - first));
  distances({batch_.queries + std::size_t{item.query} * batch_.dimension, page,
             static_cast<std::ptrdiff_t>(batch_.row_bytes), count, batch_.dimension, nullptr, distances_.data()},
            batch_.type, batch_.metric);
  const std::int64_t within = batch_.offsets[item.candidate] - start * static_cast<std::int64_t>(kPageBytes);
  compare(item, distances_[static_cast<std::size_t>(within) / batch_.row_bytes]);
  const TopK<Nearest>& nearest = nearest_[item.query];
  for (std::size_t i = 0; i < count; ++i) {
    const std::int64_t row = first + static_cast<std::int64_t>(i);
    if (!rows.allows(row)) continue;
    ++tally(item.query).ranked;
    if (nearest.is_full() && distances_[i] > nearest.last().distance) continue;  // most: their ids stay unread
    const auto offset = start * static_cast<std::int64_t>(kPageBytes) + static_cast<std::int64_t>(i * batch_.row_bytes);
    offer(item.query, {distances_[i], file, rows.id(row), offset});
  }
}

// Notes whether a candidate that was read keeps its bound.
void Rounds::compare(const Wanted& item, float distance) {
  const float lower = batch_.lower[item.candidate];
  if (!(lower - distance > kRounding * std::abs(lower))) misled_[item.query] = false;
}

void Rounds::offer(std::uint32_t query, const Nearest& found) {
  Nearest item = found;
  // Rounding takes equal directions just below.
  if (batch_.metric == Metric::cosine) item.distance = std::max(item.distance, 0.0F);
  nearest_[query].offer(item);
}

void Rounds::finish() {
  for (std::size_t query = 0; query < batch_.count; ++query) {
    const std::vector<Nearest>& found = nearest_[query].sort();
    for (std::size_t i = 0; i < batch_.k; ++i) {
      batch_.out_ids[query * batch_.k + i] = i < found.size() ? found[i].id : -1;
      batch_.out_distances[query * batch_.k + i] = i < found.size() ? found[i].distance : kInfinity;
      if (batch_.out_files == nullptr) continue;
      batch_.out_files[query * batch_.k + i] = i < found.size() ? found[i].file : -1;
      batch_.out_offsets[query * batch_.k + i] = i < found.size() ? found[i].offset : -1;
    }
  }
}

}  // namespace memhier
