// The rows that an answer may hold, one bit each.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>

namespace memhier {

constexpr std::size_t kChunkRows = 256;

inline std::size_t padded_rows(std::size_t rows) { return (rows + kChunkRows - 1) / kChunkRows * kChunkRows; }

// Bits of rows, lowest first, up to a multiple of kChunkRows; without bits, all rows.
class AllowedRows {
 public:
  AllowedRows() = default;
  explicit AllowedRows(const std::uint64_t* words) : words_(words) {}

  bool all() const { return words_ == nullptr; }
  bool has(std::size_t row) const { return all() || ((words_[row / 64] >> (row % 64)) & 1) != 0; }
  // Of the 16 rows from a multiple of 16 on.
  std::uint32_t sixteen(std::size_t first) const {
    return all() ? 0xffff : static_cast<std::uint32_t>(words_[first / 64] >> (first % 64)) & 0xffff;
  }
  // Whether any row of a chunk is allowed.
  bool reaches(std::size_t first) const {
    const std::uint64_t* words = words_ + first / 64;
    return all() || std::any_of(words, words + kChunkRows / 64, [](std::uint64_t word) { return word != 0; });
  }
  // Calls with each allowed row, in order.
  template <class Call>
  void each(std::size_t rows, const Call& call) const {
    for (std::size_t i = 0; i < (rows + 63) / 64; ++i)
      for (std::uint64_t word = words_[i]; word != 0; word &= word - 1)
        call(64 * i + static_cast<std::size_t>(std::countr_zero(word)));
  }
  std::size_t count(std::size_t rows) const {
    if (all()) return rows;
    std::size_t sum = 0;
    for (std::size_t i = 0; i < (rows + 63) / 64; ++i) sum += static_cast<std::size_t>(std::popcount(words_[i]));
    return sum;
  }

 private:
  const std::uint64_t* words_ = nullptr;
};

}  // namespace memhier
