// Codes, numbers and ids of a part on SSD, list after list, in blocks of 16 rows; see memhier.ann.zoom.preview.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "bind/array.hpp"
#include "io/engine.hpp"
#include "scan/scanner.hpp"

namespace memhier {

// starts [lists + 1] of their rows, offsets [lists + 1] of their blocks in the file, allowed: a bit for each row, or
// None.
struct StoredLists {
  std::int32_t file;
  Array<const std::int64_t, 1> starts, offsets;
  std::size_t block_bytes, id_bytes;
  std::optional<Array<const std::uint64_t, 1>> allowed;

  void check(std::size_t lists, std::size_t code_bytes) const {
    require((id_bytes == sizeof(std::uint32_t) || id_bytes == sizeof(std::int64_t)) &&
                block_bytes == kLanes * (code_bytes + kNumberBytes + id_bytes),
            "stored lists: ids of 4 or 8 bytes, in blocks of 16 rows");
    require(starts.size() == lists + 1 && offsets.size() == lists + 1 && starts[0] == 0 && offsets[0] >= 0,
            "stored lists: starts and offsets of each");
    for (std::size_t list = 0; list < lists; ++list)
      require(starts[list] <= starts[list + 1] && starts[list + 1] - starts[list] <= UINT32_MAX &&
                  offsets[list + 1] - offsets[list] >= bytes(list),
              "stored lists: they ascend, with room for their blocks");
    require(!allowed || allowed->size() >= (static_cast<std::size_t>(rows()) + 63) / 64,
            "stored lists: allowed needs a bit for each row");
  }

  std::int64_t rows() const { return starts[starts.size() - 1]; }
  std::int64_t bytes(std::size_t list) const {
    return (starts[list + 1] - starts[list] + kRowsOfGroup - 1) / kRowsOfGroup * static_cast<std::int64_t>(block_bytes);
  }
  // The pages of a list: the first, and the one after the last.
  std::int64_t first_page(std::size_t list) const { return offsets[list] / kPage; }
  std::int64_t last_page(std::size_t list) const { return (offsets[list] + bytes(list) - 1) / kPage; }
  // Where the id of a row lies in the file.
  std::int64_t id_offset(std::int64_t row) const {
    const std::int64_t* const next = std::upper_bound(starts.data(), starts.data() + starts.size(), row);
    const auto list = static_cast<std::size_t>(next - starts.data()) - 1;
    const std::int64_t within = row - starts[list], lane = within % kRowsOfGroup;
    return offsets[list] + (within / kRowsOfGroup + 1) * static_cast<std::int64_t>(block_bytes) -
           (kRowsOfGroup - lane) * static_cast<std::int64_t>(id_bytes);
  }

  // The rows of some lists in `pages`: of each `zeros`, its rows, and where they begin among the rows and the bytes.
  Part part(const std::byte* pages, const std::int64_t* zeros, const std::int64_t* counts, const std::int64_t* shifts,
            const std::int64_t* places) const {
    const std::size_t numbers = kLanes * (block_bytes / kLanes - kNumberBytes - id_bytes), step = block_bytes / kLanes;
    const auto* const radius = reinterpret_cast<const std::uint16_t*>(pages + numbers);
    return {.starts = zeros,
            .stops = counts,
            .codes = reinterpret_cast<const std::uint8_t*>(pages),
            .radius = radius,
            .ratios = radius + kLanes,
            .code_step = step,
            .number_step = step,
            .rows = INT64_MAX / kRowsOfGroup * kRowsOfGroup,  // all of them in whole blocks
            .allowed = nullptr,                               // which the state of a search tells
            .words = 0,
            .shifts = shifts,
            .ids = pages + numbers + kLanes * kNumberBytes,
            .id_bytes = id_bytes,
            .id_step = step,
            .places = places};
  }

  static constexpr std::int64_t kPage = static_cast<std::int64_t>(kPageBytes);
  static constexpr std::size_t kNumberBytes = 2 * sizeof(std::uint16_t);
};

}  // namespace memhier
