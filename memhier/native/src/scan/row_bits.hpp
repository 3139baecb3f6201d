// Bitmaps of rows.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>

namespace memhier {

// A bit for each row of a part; null for all rows.
using RowBits = std::span<const std::uint64_t>;

// Sets bit i of found where words have a bit from starts[i] to before starts[i + 1]; starts ascend, and are one or
// more. It goes from a bit to the end of its run, so that few rows, or rows in few runs, cost little.
inline void mark_runs(RowBits words, std::span<const std::int64_t> starts, std::uint64_t* found) {
  const auto count = static_cast<std::int64_t>(words.size());
  std::size_t run = 0;
  std::int64_t low = starts[0];  // the first row not looked at
  for (std::int64_t at = low / 64; at < count;) {
    const std::uint64_t above = ~std::uint64_t{0} << std::max(low - 64 * at, std::int64_t{0});
    const std::uint64_t left = words[static_cast<std::size_t>(at)] & above;
    if (left == 0) {
      ++at;
      continue;
    }
    while (run + 1 < starts.size() && starts[run + 1] <= 64 * at + std::countr_zero(left)) ++run;
    if (run + 1 == starts.size()) return;
    found[run / 64] |= std::uint64_t{1} << (run % 64);
    low = starts[run + 1];
    at = low / 64;
  }
}

}  // namespace memhier
