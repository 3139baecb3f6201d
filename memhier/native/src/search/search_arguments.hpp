// The arguments of a search in one call, as Python hands them to the core.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "bind/array.hpp"
#include "search/candidate_search.hpp"

namespace memhier {

// Queries [q, d], and of each the largest distance wanted, [q], or None.
struct SearchRequest {
  Array<const float, 2> queries;
  Routes routes;
  SearchEffort effort;
  std::optional<Array<const float, 1>> radius;

  void check(const IndexState& state) const {
    require(queries.shape(1) == state.space.dimension() && (!radius || radius->size() == queries.shape(0)),
            "queries, radius: [q, d] and [q]");
  }
};

// Checks requests that are searched together, each in a state of the same index, and returns the number of queries.
inline std::size_t check_together(const std::vector<const IndexState*>& states,
                                  const std::vector<const SearchRequest*>& requests) {
  require(!states.empty() && states.size() == requests.size(), "states, requests: as many of both");
  const SearchRequest& first = *requests.front();
  std::size_t count = 0;
  for (std::size_t i = 0; i < states.size(); ++i) {
    const SearchRequest& each = *requests[i];
    each.check(*states[i]);
    require(&states[i]->space == &states[0]->space && &states[i]->stored == &states[0]->stored, "states: of one index");
    require(each.queries.data() == first.queries.data() + count * first.queries.shape(1),
            "queries: one request behind the other");
    require(each.effort.k == first.effort.k && each.effort.first_round == first.effort.first_round &&
                each.effort.max_reads == first.effort.max_reads && each.effort.deadline == first.effort.deadline,
            "efforts: of the same k, first round and limits");
    count += each.queries.shape(0);
  }
  return count;
}

// Queries that follow one another, and how they are searched for.
struct AskedQueries {
  const IndexState* state;
  const SearchEffort* effort;
  const Routes* routes;
  const float* queries;  // [count, d]
  std::size_t count;
  const float* radius;  // [count], or null
};

// Where the results of all go: [q, k], and of the work [q]. Files and offsets may be null.
struct SearchAnswers {
  std::int64_t* ids;
  float* distances;
  std::int32_t* files;
  std::int64_t* offsets;
  ScanTally* scanned;
  std::int64_t* admitted;
  RankTally* ranked;
};

// The work done for one query: the numbers of memhier.ann.zoom.search.plain.
struct PlainWork {
  ScanTally scanned;
  RankTally ranked;
  ReadTally read;
  std::int64_t candidates;
};

// The nearest of each query and where they lie, [q, k]; and [q]: the work done, and the number of its candidates.
struct SearchOutput {
  Array<std::int64_t, 2> ids;
  Array<float, 2> distances;
  Array<std::int32_t, 2> files;
  Array<std::int64_t, 2> offsets;
  Array<ScanTally, 1> scanned;
  Array<std::int64_t, 1> admitted;
  Array<RankTally, 1> ranked;

  SearchAnswers view() const {
    return {ids.data(), distances.data(), files.data(), offsets.data(), scanned.data(), admitted.data(), ranked.data()};
  }
  void check(std::size_t count, std::size_t k) const {
    require(ids.has_shape(count, k) && distances.has_shape(count, k) && files.has_shape(count, k) &&
                offsets.has_shape(count, k),
            "the results: k of each query");
    require(scanned.size() == count && admitted.size() == count && ranked.size() == count, "the work: of each query");
  }
};

}  // namespace memhier
