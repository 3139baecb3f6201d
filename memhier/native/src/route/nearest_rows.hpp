// The nearest of many thousand half-precision vectors to a query, by comparing all of them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "route/half_rows.hpp"

namespace memhier {

constexpr std::size_t kComparedRows = 256;  // at a time

// Rows that are compared: fp16 [rows, dimension], of which those `among` count, [count], ascending; null for all.
struct ComparedRows {
  const std::uint16_t* rows;
  std::size_t dimension;
  const std::int64_t* among;
  std::size_t count;

  std::int64_t number(std::size_t place) const {
    return among == nullptr ? static_cast<std::int64_t>(place) : among[place];
  }
};

// The rows nearest to one query: by distance, and at equal ones by number. They are put in order as they are asked for.
class NearestRows {
 public:
  NearestRows(std::size_t wanted, std::size_t rows)
      : wanted_(wanted), keys_(std::min(2 * wanted + kComparedRows, rows)) {}

  // Whether it has the room that it would be made with.
  bool fits(std::size_t wanted, std::size_t rows) const {
    return wanted == wanted_ && keys_.size() == std::min(2 * wanted + kComparedRows, rows);
  }

  void clear() {
    kept_ = sorted_ = 0;
    bound_ = UINT32_MAX;
    in_order_ = true;
  }

  // Takes the distances of rows from `first` on, of at most kComparedRows; `least` is room.
  void add(const float* away, std::size_t first, std::size_t count, std::vector<std::uint32_t>& least);

  // The place of the i-th of the nearest, which are `wanted`; after all rows were added.
  std::size_t at(std::size_t i) {
    if (i >= sorted_) sort_to(i + 1);
    return static_cast<std::size_t>(keys_[i] & UINT32_MAX);
  }

  // Fills nearest[wanted] with the places of all.
  void finish(std::int64_t* nearest);

 private:
  void shrink();
  void sort_to(std::size_t count);
  void sort_by_digits();

  std::size_t wanted_;
  std::size_t kept_ = 0, sorted_ = 0;
  bool in_order_ = true;              // of numbers
  std::uint32_t bound_ = UINT32_MAX;  // beyond it none is one of the nearest
  std::vector<std::uint64_t> keys_;   // distance above, number below
};

// Room for distances, which serves many queries.
struct ComparisonRoom {
  std::vector<float> away;
  std::vector<std::uint32_t> least;
};

// Finds the nearest rows of up to kTogether queries [together, dimension], of each in its own of `found`.
void compare_rows(const float* queries, std::size_t together, const ComparedRows& rows, NearestRows* found,
                  ComparisonRoom& room);

}  // namespace memhier
