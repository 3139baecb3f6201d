// Bitmaps of rows.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

namespace memhier {

// A bit for each row of a part; null for all rows.
using RowBits = std::span<const std::uint64_t>;

// Whether any row from `start` to before `stop` has its bit.
inline bool has_bit(RowBits words, std::size_t start, std::size_t stop) {
  if (start == stop) return false;
  const std::size_t first = start / 64, last = (stop - 1) / 64;
  const std::uint64_t from = ~std::uint64_t{0} << (start % 64), to = ~std::uint64_t{0} >> (63 - (stop - 1) % 64);
  if (first == last) return (words[first] & from & to) != 0;
  if ((words[first] & from) != 0 || (words[last] & to) != 0) return true;
  return std::any_of(words.begin() + static_cast<std::ptrdiff_t>(first) + 1,
                     words.begin() + static_cast<std::ptrdiff_t>(last), [](std::uint64_t word) { return word != 0; });
}

}  // namespace memhier
