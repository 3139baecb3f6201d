// The arguments of scans, as Python hands them to the core.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "bind/array.hpp"
#include "scan/scanner.hpp"

namespace memhier {

// Queries and the lists to look at: [q, d]; [q, p] list numbers, nearest first, -1 for none; [q], the largest distance
// wanted; and for inner products a Spread of each query, [q, 2].
struct ScanQueries {
  Array<const float, 2> queries;
  Array<const std::int64_t, 2> probes;
  Array<const float, 1> most;
  std::optional<Array<const float, 2>> inner;

  void check() const {
    const std::size_t count = queries.shape(0);
    require(probes.shape(0) == count && most.shape(0) == count, "code_scan: array shapes do not fit together");
    require(!inner || inner->has_shape(count, 2), "code_scan: inner has two numbers of each query");
  }
};

// Centroids fp16 [lists, d] and radii [lists].
struct CodeLists {
  Array<const std::uint16_t, 2> centroids;
  Array<const float, 1> radii;
};

// Scans `count` lists, at(i) being the i-th or -1 for none, until one ends the search.
template <class ListAt>
void scan_lists(Scanner& scanner, const Progress& progress, const CodeLists& lists, std::size_t count, ListAt at) {
  const std::size_t dimension = lists.centroids.shape(1);
  const auto centroid_of = [&](std::int64_t list) {
    return lists.centroids.data() + static_cast<std::size_t>(list) * dimension;
  };
  scanner.begin_among(count, [&](std::size_t i) { return at(i) < 0 ? nullptr : centroid_of(at(i)); });
  for (std::size_t i = 0; i < count && !progress.closed; ++i) {
    const std::int64_t list = at(i), next = i + 2 < count ? at(i + 2) : -1;
    if (list < 0) continue;
    if (next >= 0) scanner.prefetch(centroid_of(next), next);
    scanner.scan(centroid_of(list), list, lists.radii[static_cast<std::size_t>(list)], list);
    scanner.prefetch_rest();
  }
}

// Rows that were written together: starts [lists + 1], codes [n, bytes], numbers [2, n], allowed: a bit for each row.
struct CodedPart {
  Array<const std::int64_t, 1> starts;
  Array<const std::uint8_t, 2> codes;
  Array<const std::uint16_t, 2> numbers;
  std::optional<Array<const std::uint64_t, 1>> allowed;

  Part part(std::size_t lists, std::size_t code_bytes) const {
    const std::size_t rows = codes.shape(0);
    require(starts.shape(0) == lists + 1 && codes.shape(1) == code_bytes && numbers.has_shape(2, rows) &&
                rows <= UINT32_MAX,
            "code_scan: the arrays of a part do not fit together");
    for (std::size_t list = 0; list < lists; ++list)
      require(
          starts[list] >= 0 && starts[list] <= starts[list + 1] && starts[list + 1] <= static_cast<std::int64_t>(rows),
          "code_scan: list starts must ascend within the codes");
    require(!allowed || allowed->shape(0) >= (rows + 63) / 64, "code_scan: allowed needs a bit for each row");
    return {.starts = starts.data(),
            .stops = starts.data() + 1,
            .codes = codes.data(),
            .radius = numbers.data(),
            .ratios = numbers.data() + rows,
            .code_step = code_bytes,
            .number_step = sizeof(std::uint16_t),
            .rows = static_cast<std::int64_t>(rows),
            .allowed = allowed ? allowed->data() : nullptr,
            .words = allowed ? allowed->shape(0) : 0,
            .shifts = nullptr,
            .ids = nullptr,
            .id_bytes = 0,
            .id_step = 0,
            .places = nullptr};
  }
};

// Some lists of rows that were written together: starts and stops [n] of their rows among the codes [r, bytes], numbers
// [2, r] and ids [r] that were read; shifts [n] from these to the rows written, of which there are `written`; allowed:
// a bit for each of these.
struct WavePart {
  Array<const std::int64_t, 1> starts, stops, shifts;
  Array<const std::uint8_t, 2> codes;
  Array<const std::uint16_t, 2> numbers;
  Array<const std::int64_t, 1> ids;
  std::int64_t written;
  std::optional<Array<const std::uint64_t, 1>> allowed;

  Part part(std::size_t lists, std::size_t code_bytes) const {
    const std::size_t rows = codes.shape(0);
    require(starts.shape(0) == lists && stops.shape(0) == lists && shifts.shape(0) == lists &&
                codes.shape(1) == code_bytes && numbers.has_shape(2, rows) && ids.shape(0) == rows &&
                rows <= UINT32_MAX && written >= 0,
            "code_waves: the arrays of a part do not fit together");
    for (std::size_t list = 0; list < lists; ++list)
      require(starts[list] >= 0 && starts[list] % kRowsOfGroup == 0 && starts[list] <= stops[list] &&
                  stops[list] <= static_cast<std::int64_t>(rows) && starts[list] + shifts[list] >= 0 &&
                  stops[list] + shifts[list] <= written,
              "code_waves: lists must lie within the codes");
    require(!allowed || allowed->shape(0) >= (static_cast<std::size_t>(written) + 63) / 64,
            "code_waves: allowed needs a bit for each row");
    return {.starts = starts.data(),
            .stops = stops.data(),
            .codes = codes.data(),
            .radius = numbers.data(),
            .ratios = numbers.data() + rows,
            .code_step = code_bytes,
            .number_step = sizeof(std::uint16_t),
            .rows = static_cast<std::int64_t>(rows),
            .allowed = allowed ? allowed->data() : nullptr,
            .words = allowed ? allowed->shape(0) : 0,
            .shifts = shifts.data(),
            .ids = reinterpret_cast<const std::byte*>(ids.data()),
            .id_bytes = sizeof(std::int64_t),
            .id_step = sizeof(std::int64_t),
            .places = nullptr};
  }
};

// SCAN_TALLY of memhier.ann.zoom.preview.code_scan, for each query.
struct ScanTally {
  std::int64_t probed, scanned, cut_short, open, nearest;

  static ScanTally of(const Progress& progress, std::int64_t scanned) {
    const Reach& reach = progress.reach;
    const std::int64_t cut_short = progress.admitted.truncated() ? 1 : 0, open = progress.closed ? 0 : 1;
    return {reach.probed, scanned, cut_short, open, reach.nearest};
  }
};
static_assert(sizeof(ScanTally) == 40 && offsetof(ScanTally, scanned) == 8 && offsetof(ScanTally, cut_short) == 16 &&
              offsetof(ScanTally, open) == 24 && offsetof(ScanTally, nearest) == 32);

// The candidates of each query, [q, limit] in ascending order of the lower bound, with their ids where they are known;
// and [q]: how many they are, the threshold they passed, and the work done.
struct ScanResult {
  Array<std::int64_t, 2> positions;
  Array<float, 2> lower, estimates;
  Array<std::int64_t, 1> counts;
  Array<float, 1> thresholds;
  Array<ScanTally, 1> tally;
  std::optional<Array<std::int64_t, 2>> ids;

  void check(std::size_t count) const {
    const std::size_t limit = positions.shape(1);
    require(positions.shape(0) == count && lower.has_shape(count, limit) && estimates.has_shape(count, limit) &&
                counts.shape(0) == count && thresholds.shape(0) == count && tally.shape(0) == count &&
                (!ids || ids->has_shape(count, limit)),
            "code_scan: the arrays of a result do not fit together");
  }

  void fill(std::size_t q, Progress& progress) const {
    const std::size_t limit = positions.shape(1);
    thresholds[q] = progress.admitted.finish();
    const std::vector<Found>& items = progress.admitted.items();
    for (std::size_t i = 0; i < items.size(); ++i) {
      positions[q * limit + i] = items[i].row.position;
      if (ids) (*ids)[q * limit + i] = items[i].row.id;
      lower[q * limit + i] = items[i].key;
      estimates[q * limit + i] = items[i].estimate;
    }
    counts[q] = static_cast<std::int64_t>(items.size());
    tally[q] = ScanTally::of(progress, progress.scanned);
  }
};

}  // namespace memhier
