// The first half of a search: from queries to the rows that may be among their nearest.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "bind/array.hpp"
#include "search/index_state.hpp"
#include "search/list_router.hpp"

namespace memhier {

// How hard a search looks; see Effort of memhier.ann.zoom.preview. `most` is 0 for as many as the limit lets in. A query
// with more candidates than the limit has none at all where it is `put_off`: to be searched once more, with more room.
struct SearchEffort {
  std::size_t k;
  float eps;
  std::int64_t least;
  float gap, clear;
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

// Candidates of all queries, one query after the other: those of query q from first[q] to first[q + 1].
struct RankedRows {
  std::vector<std::int64_t> first{0};
  std::vector<std::int32_t> files;
  std::vector<std::int64_t> offsets, ids;
  std::vector<float> lower, thresholds;
};

class CandidateSearch {
 public:
  CandidateSearch(const IndexState& state, const SearchEffort& effort, const Routes& routes);

  // Finds the candidates of queries [count, d]; `radius` [count] is the largest distance wanted, or null. Fills tally
  // and admitted [count], the number of candidates.
  void run(const float* queries, std::size_t count, const float* radius, ScanTally* tally, std::int64_t* admitted,
           RankedRows& found);

 private:
  void scan(const float* turned, const Spread& spread, ListRouter& lists, std::size_t which);
  bool is_short() const;
  void take(const float* query, const float* radius, std::int64_t* admitted, RankedRows& found);
  std::size_t kept();

  const IndexState& state_;
  const SearchEffort& effort_;
  const ScanLimits limits_;
  ListRouter router_, wider_;
  Scanner scanner_;
  Progress progress_;
  std::int64_t scanned_ = 0;  // codes of the present query
  float threshold_ = 0;       // remoteness, beyond which its candidates are refused
  std::vector<float> mapped_, turned_, aims_, estimates_;
};

}  // namespace memhier
