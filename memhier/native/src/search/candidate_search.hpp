// The search in one call: from queries to the rows that may be among their nearest, and from these to ids.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "bind/array.hpp"
#include "search/index_state.hpp"
#include "search/list_router.hpp"
#include "search/list_waves.hpp"

namespace memhier {

// How hard a search looks; see Effort of memhier.ann.zoom.preview. `most` is 0 for as many as the limit lets in. A
// query with more candidates than the limit has none at all where it is `put_off`: to be searched once more, with more
// room.
struct SearchEffort {
  std::size_t k;
  float eps;
  std::int64_t least;
  float gap, clear, border;
  std::int64_t most, usual, most_times;
  std::size_t limit, first_round, max_reads;
  double deadline;
  float loss;
  bool put_off;

  void check() const {
    require(k >= 1 && limit >= k && most >= 0 && usual >= 1 && most_times >= 1 && first_round >= 1 && max_reads >= 1,
            "effort: k of at least 1 and at most limit; usual, most_times, first_round, max_reads: at least 1");
  }
  // How many of a query's candidates are ranked: where some were dropped for lack of room their number is unknown.
  std::int64_t kept(std::int64_t count, bool cut_short) const {
    if (most == 0) return count;
    const double times =
        cut_short ? static_cast<double>(most_times) : static_cast<double>(count) / static_cast<double>(usual);
    const double within = std::clamp(times, 1.0, static_cast<double>(most_times));
    const auto wanted = static_cast<std::int64_t>(static_cast<double>(most) * within);
    return std::min(count, std::max(static_cast<std::int64_t>(k), wanted));
  }
};

// Candidates of all queries, one query after the other: those of query q from first[q] to first[q + 1]. With codes on
// SSD the ranking calls them by their positions, and `names` has the id of each.
struct RankedRows {
  std::vector<std::int64_t> first{0};
  std::vector<std::int32_t> files;
  std::vector<std::int64_t> offsets, ids;
  std::vector<Place> names;
  std::vector<float> lower, thresholds;
};

// Puts ids [count] in the place of positions in a state whose codes lie on SSD, -1 aside; those that lie beside no
// candidate are read.
std::optional<Fault> name_rows(const IndexState& state, RankedRows& found, std::int64_t* ids, std::size_t count,
                               const ReadBatch& read);

class CandidateSearch {
 public:
  CandidateSearch(const IndexState& state, const SearchEffort& effort, const Routes& routes);

  // Finds the candidates of queries [count, d]; `radius` [count] is the largest distance wanted, or null. Fills tally
  // and admitted [count], the number of candidates. `read` brings codes that lie on SSD.
  std::optional<Fault> run(const float* queries, std::size_t count, const float* radius, ScanTally* tally,
                           std::int64_t* admitted, const ReadBatch& read, RankedRows& found);

 private:
  std::optional<Fault> scan(std::span<QueryScan> queries, ListRouter& lists, const ReadBatch& read);
  bool is_short(const Progress& progress) const;
  void take(const QueryScan& scanned, const float* query, const float* radius, std::int64_t* admitted,
            RankedRows& found);
  std::size_t kept(const Admitted& admitted);

  const IndexState& state_;
  const SearchEffort& effort_;
  const ScanLimits limits_;
  ListRouter router_;
  Scanner scanner_;
  ListWaves waves_;
  std::vector<Progress> progress_;  // of the queries together
  std::vector<float> mapped_, turned_, aims_, estimates_;
};

}  // namespace memhier
