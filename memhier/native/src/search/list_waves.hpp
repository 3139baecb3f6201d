// The scan of lists whose codes lie on SSD: wave by wave, the nearest first, as long as a list may hold a neighbour.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "io/context.hpp"
#include "scan/scanner.hpp"
#include "search/index_state.hpp"
#include "search/list_router.hpp"

namespace memhier {

// Of a query: itself, turned; which of the router's; and how far its scan has come.
struct QueryScan {
  const float* turned;
  const Spread* spread;  // of inner products, or null
  std::size_t which;
  Progress* progress;
  float threshold = 0;      // remoteness, beyond which candidates are refused; at the end
  std::size_t done = 0;     // lists, with those passed over
  std::size_t count = 0;    // of the wave
  std::size_t scanned = 0;  // without those passed over
};

// Each wave reads the next lists of some queries in one submission: of a query at most as many as it had before, and
// none that lies beyond its end as far as it is known. A query scans the lists that it would scan if all codes were in
// DRAM.
class ListWaves {
 public:
  ListWaves(const IndexState& state, const ScanLimits& limits);

  // Scans the lists of queries whose scan has not begun.
  std::optional<Fault> run(std::span<QueryScan> queries, ListRouter& lists, const ReadBatch& read);

 private:
  struct Freed {
    void operator()(std::byte* bytes) const { std::free(bytes); }
  };
  // The lists of a wave in a part.
  struct Placed {
    std::vector<std::int64_t> counts, shifts, places;
  };

  bool choose(std::span<QueryScan> queries, ListRouter& lists);
  bool choose_near(QueryScan& query, ListRouter& lists, std::size_t& pages);
  void plan();
  void plan_list(std::size_t part, std::int64_t list);
  std::optional<Fault> fetch(const ReadBatch& read);
  bool has_room(std::int64_t pages) const {
    return offsets_.size() + static_cast<std::size_t>(pages) <= state_.wave_pages;
  }
  void scan(std::span<QueryScan> queries, ListRouter& lists);
  const std::uint16_t* centroid(std::int64_t list) const {
    return state_.lists.centroids.data() + static_cast<std::size_t>(list) * state_.space.padded();
  }
  float radius(std::int64_t list) const { return state_.lists.radii[static_cast<std::size_t>(list)]; }

  const IndexState& state_;
  const ScanLimits& limits_;
  Scanner scanner_;
  std::vector<std::int64_t> chosen_, zeros_;  // lists of the wave, ascending
  std::vector<Placed> placed_;                // by part
  std::vector<std::int32_t> files_;           // of the pages of the wave
  std::vector<std::int64_t> offsets_;
  std::unique_ptr<std::byte, Freed> pages_;
  std::size_t room_ = 0;  // pages
};

}  // namespace memhier
