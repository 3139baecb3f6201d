// The arguments of a ranking, as Python hands them to the core.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <variant>

#include "bind/array.hpp"
#include "rank/rounds.hpp"

namespace memhier {

using Ids = std::variant<Array<const std::uint32_t, 1>, Array<const std::int64_t, 1>>;

// A limit in seconds, which may be infinite.
inline std::chrono::nanoseconds time_limit(double seconds) {
  return seconds < 1e9 ? std::chrono::nanoseconds(static_cast<std::int64_t>(seconds * 1e9))
                       : std::chrono::nanoseconds::max();
}

// The rows of a file that packs them whole in its pages: ids [rows] of four or eight bytes, or None where they ascend
// from `first`; and a bit for each row that may be found, or None for all.
struct PageRowArrays {
  std::int32_t file;
  std::optional<Ids> ids;
  std::int64_t first;
  std::size_t rows;
  std::optional<Array<const std::uint64_t, 1>> allowed;

  PageRows view() const {
    const auto has_all = [this](const auto& array) { return array.size() == rows; };
    require(!ids || std::visit(has_all, *ids), "page_rows: an id for each row");
    require(!allowed || allowed->size() >= (rows + 63) / 64, "page_rows: a bit for each row");
    const auto* short_ids = ids ? std::get_if<0>(&*ids) : nullptr;
    const auto* long_ids = ids ? std::get_if<1>(&*ids) : nullptr;
    return {file,
            static_cast<std::int64_t>(rows),
            short_ids != nullptr ? short_ids->data() : nullptr,
            long_ids != nullptr ? long_ids->data() : nullptr,
            first,
            allowed ? allowed->data() : nullptr};
  }
};

// The candidates of one call and their limits; see RankBatch.
struct RankRequest {
  Array<const float, 2> queries;
  int type, metric;
  std::size_t row_bytes;
  Array<const std::int64_t, 1> first;
  Array<const std::int32_t, 1> files;
  Array<const std::int64_t, 1> offsets;
  Array<const float, 1> lower;
  Array<const std::int64_t, 1> ids;
  Array<const float, 1> thresholds;
  std::size_t k, first_round, max_reads;
  double deadline;

  void check() const {
    const std::size_t count = queries.shape(0), total = offsets.size();
    require(first.size() == count + 1 && first[0] == 0 && std::is_sorted(first.data(), first.data() + count + 1) &&
                first[count] == static_cast<std::int64_t>(total),
            "first: ascending, from 0 to the number of candidates");
    require(queries.shape(1) > 0 && thresholds.size() == count, "queries, thresholds: [q, d] and [q]");
    require(files.size() == total && lower.size() == total && ids.size() == total,
            "files, lower, ids: one for each candidate");
    require(k > 0 && first_round > 0 && row_bytes > 0, "k, first_round, row_bytes: at least 1");
    require(type >= 0 && type < kRowTypes && metric >= 0 && metric < kMetrics, "type, metric: known");
  }
};

// The nearest of each query, [q, k] and [q], and the rounds of all candidates; see RankBatch.
struct RankResult {
  Array<std::int64_t, 2> ids;
  Array<float, 2> distances;
  Array<std::int32_t, 2> files;
  Array<std::int64_t, 2> offsets;
  Array<RankTally, 1> tally;
  std::optional<Array<std::int32_t, 1>> rounds;

  void check(std::size_t count, std::size_t k, std::size_t candidates) const {
    require(ids.has_shape(count, k) && distances.has_shape(count, k) && files.has_shape(count, k) &&
                offsets.has_shape(count, k) && tally.shape(0) == count,
            "the results: k and a tally for each query");
    require(!rounds || rounds->size() == candidates, "rounds: one for each candidate");
  }
};

}  // namespace memhier
