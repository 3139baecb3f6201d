// Exact ranking of rows on SSD, in rounds: of each query the rows whose lower bound may still beat its k-th nearest.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "io/context.hpp"
#include "rank/distance.hpp"
#include "rank/top_k.hpp"

namespace memhier {

// A page of any file: its handle, then 40 bits of page number, as page_keys of memhier.rows.rank_request makes it.
using PageKey = std::int64_t;
inline PageKey page_key_of(std::int32_t file, std::uint64_t page) {
  return static_cast<PageKey>(file) << 40 | static_cast<PageKey>(page);
}

// Pages held in DRAM: keys ascend, page i lies at bytes + i * kPageBytes.
struct HotPages {
  std::span<const PageKey> keys;
  const std::byte* bytes;

  const std::byte* find(std::int32_t file, std::uint64_t page) const;
};

// The rows of a file that packs them in pages: row i lies in page i / per_page. Every row of a page that was
// read is ranked, a candidate or not.
struct PageRows {
  std::int32_t file;
  std::int64_t rows;
  const std::uint32_t* short_ids;  // [rows] of one kind or the other, or neither where ids ascend from `first`
  const std::int64_t* long_ids;
  std::int64_t first;
  const std::uint64_t* allowed;  // a bit for each row that may be found, or null for all

  std::int64_t id(std::int64_t row) const {
    if (short_ids != nullptr) return std::int64_t{short_ids[row]};
    return long_ids != nullptr ? long_ids[row] : first + row;
  }
  bool allows(std::int64_t row) const {
    return allowed == nullptr || (allowed[row >> 6] >> (static_cast<std::uint64_t>(row) & 63) & 1) != 0;
  }
};

enum class Stop : std::int64_t { bound, all_read, max_reads, deadline };

// RANK_TALLY of memhier.rows.rank_request, for each query.
struct RankTally {
  std::int64_t ranked, page_requests, hot_pages, rounds;
  Stop stopped;
};
static_assert(sizeof(RankTally) == 40 && offsetof(RankTally, page_requests) == 8 &&
              offsetof(RankTally, hot_pages) == 16 && offsetof(RankTally, rounds) == 24 &&
              offsetof(RankTally, stopped) == 32);

// The caller keeps all of it alive. Candidates of query q are those from first[q] to first[q + 1], by ascending bound.
struct RankBatch {
  const float* queries;  // [count, dimension]
  std::size_t count, dimension;
  RowType type;
  Metric metric;
  std::size_t row_bytes;
  const std::int64_t* first;    // [count + 1]
  const std::int32_t* files;    // of each candidate, its file,
  const std::int64_t* offsets;  // where in it its row starts,
  const float* lower;           // the least distance it may have,
  const std::int64_t* ids;      // and its id in the result
  const float* thresholds;      // [count]: a distance that the k-th nearest is sure not to exceed
  std::size_t k;
  std::size_t first_round;            // candidates of it
  std::size_t max_reads;              // pages a query
  std::chrono::nanoseconds deadline;  // for the whole call
  std::span<std::byte> workspace;     // for rows on their way that straddle pages; empty where none does
  HotPages hot;
  std::size_t per_page;  // rows of a page, where whole pages are ranked; 0 where only candidates are
  std::span<const std::span<const PageRows>> page_rows;  // then those of every file: of each query, or one for all
  std::int64_t* out_ids;                                 // [count, k], -1 where there is none
  float* out_distances;                                  // [count, k], infinity where there is none
  std::int32_t* out_files;                               // [count, k]: where each lies, -1 where there is none; or null
  std::int64_t* out_offsets;
  RankTally* out_tally;      // [count]
  std::int32_t* out_rounds;  // of each candidate, the round that took it, or its page as the first there; or null
};

class Rounds {
 public:
  // Reads one batch; a fault ends it all.
  using Read = std::function<std::optional<Fault>(const Batch&)>;

  Rounds(const RankBatch& batch, Read read);
  std::optional<Fault> run();

 private:
  struct Nearest {
    float distance;
    std::int32_t file;
    std::int64_t id, offset;
    bool operator<(const Nearest& other) const {
      return distance < other.distance || (distance == other.distance && id < other.id);
    }
  };
  struct Wanted {
    std::uint32_t query;
    std::int64_t candidate;
  };

  bool choose(std::uint32_t query);
  bool want(std::uint32_t query, std::int64_t candidate);
  bool want_page(std::uint32_t query, std::int64_t candidate);
  void add_page_mates(std::uint32_t query, float threshold);
  std::optional<Fault> rank_as_they_land();
  std::optional<Fault> rank_by_parts();
  std::optional<Fault> rank_part(std::span<const Wanted> wanted);
  void rank_row(const Wanted& item, const std::byte* row);
  void rank_page(const Wanted& item, const std::byte* page);
  void compare(const Wanted& item, float distance);
  void offer(std::uint32_t query, const Nearest& item);
  float threshold(std::uint32_t query) const;
  PageKey page_key(std::int64_t candidate) const;
  bool in_one_page(std::int64_t candidate) const;
  bool is_hot(PageKey key) const;
  RankTally& tally(std::uint32_t query) { return batch_.out_tally[query]; }
  void finish();

  const RankBatch& batch_;
  Read fetch_;
  std::vector<TopK<Nearest>> nearest_;      // by query
  std::vector<std::int64_t> next_;          // by query, the first candidate not looked at
  std::vector<bool> taken_;                 // by candidate
  std::vector<bool> misled_;                // by query, whether each candidate read lies nearer than its bound
  std::vector<std::vector<PageKey>> read_;  // by query, the pages that are ranked whole, ascending
  std::vector<Wanted> wanted_, cold_;       // of this round; and those of them not held in DRAM
  std::vector<PageKey> pages_;  // that the query being chosen for is to have in this round: the ends of its rows
  std::vector<std::int32_t> files_;
  std::vector<std::int64_t> offsets_;
  std::vector<float> distances_;
};

}  // namespace memhier
