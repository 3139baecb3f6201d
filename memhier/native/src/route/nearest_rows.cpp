// The comparison with all rows, and the order of the nearest.
#include "route/nearest_rows.hpp"

#include <array>
#include <numeric>

#include "bind/simd.hpp"

namespace memhier {
namespace {

constexpr std::size_t kGroup = 8;   // rows of which the nearest stands for them
constexpr std::size_t kDigits = 3;  // of a distance, by which many rows are sorted
constexpr int kDigitBits = 11;
constexpr std::size_t kManyRows = 256;
constexpr std::size_t kFirstSorted = 24;  // of the nearest: more are put in order where they are asked for

// least[groups] = the least of every kGroup, which stand `groups` apart.
MEMHIER_CLONES
void least_of_groups(const float* away, std::size_t groups, std::uint32_t* least) {
  for (std::size_t group = 0; group < groups; ++group) least[group] = order_of(away[group]);
  for (std::size_t each = 1; each < kGroup; ++each)
#pragma omp simd
    for (std::size_t group = 0; group < groups; ++group)
      least[group] = std::min(least[group], order_of(away[each * groups + group]));
}

// A distance that at least `wanted` rows do not exceed, and few more: the wanted-th of the groups' least.
std::uint32_t bound_of(const float* away, std::size_t count, std::size_t wanted, std::vector<std::uint32_t>& least) {
  const std::size_t groups = count / kGroup;
  if (wanted > groups) return UINT32_MAX;
  least.resize(groups);
  least_of_groups(away, groups, least.data());
  const auto last = least.begin() + static_cast<std::ptrdiff_t>(wanted - 1);
  std::nth_element(least.begin(), last, least.end());
  return *last;
}

}  // namespace

void NearestRows::add(const float* away, std::size_t first, std::size_t count, std::vector<std::uint32_t>& least) {
  if (first == 0) bound_ = bound_of(away, count, wanted_, least);
  for (std::size_t row = 0; row < count; ++row) {
    keys_[kept_] = std::uint64_t{order_of(away[row])} << 32 | (first + row);
    kept_ += order_of(away[row]) <= bound_ ? 1 : 0;
  }
  if (kept_ <= 2 * wanted_) return;
  shrink();
  bound_ = static_cast<std::uint32_t>(keys_[wanted_ - 1] >> 32);
}

void NearestRows::finish(std::int64_t* nearest) {
  if (kept_ > wanted_) shrink();
  auto first = keys_.begin();
  const auto wanted = static_cast<std::ptrdiff_t>(wanted_);
  if (in_order_ && wanted_ >= kManyRows) {
    keys_.resize(std::max(keys_.size(), 2 * wanted_));
    first = keys_.begin();
    sort_by_digits();
    first += wanted;
  } else {
    std::sort(first, first + wanted);
  }
  std::transform(first, first + wanted, nearest,
                 [](std::uint64_t key) { return static_cast<std::int64_t>(key & UINT32_MAX); });
}

// Puts at least the first `count` of the nearest in order, and as many again as were asked for before.
void NearestRows::sort_to(std::size_t count) {
  const auto place = [this](std::size_t at) { return keys_.begin() + static_cast<std::ptrdiff_t>(at); };
  const std::size_t stop = std::min(wanted_, std::max({count, 2 * sorted_, kFirstSorted}));
  if (stop < kept_) std::nth_element(place(sorted_), place(stop), place(kept_));
  std::sort(place(sorted_), place(stop));
  sorted_ = stop;
}

void NearestRows::shrink() {
  const auto at = [this](std::size_t place) { return keys_.begin() + static_cast<std::ptrdiff_t>(place); };
  std::nth_element(at(0), at(wanted_ - 1), at(kept_));
  kept_ = wanted_;
  in_order_ = false;
}

// Sorts the first `wanted` keys, which stand by number, by distance; they then stand after themselves.
void NearestRows::sort_by_digits() {
  static_assert(kDigits % 2 == 1);
  std::array<std::array<std::uint32_t, std::size_t{1} << kDigitBits>, kDigits> places{};
  constexpr std::uint64_t kMask = (std::uint64_t{1} << kDigitBits) - 1;
  const auto digit_of = [](std::uint64_t key, std::size_t digit) {
    return static_cast<std::size_t>(key >> (32 + kDigitBits * digit) & kMask);
  };
  for (std::size_t i = 0; i < wanted_; ++i)
    for (std::size_t digit = 0; digit < kDigits; ++digit) ++places[digit][digit_of(keys_[i], digit)];
  std::uint64_t *from = keys_.data(), *to = from + wanted_;
  for (std::size_t digit = 0; digit < kDigits; ++digit) {
    std::exclusive_scan(places[digit].begin(), places[digit].end(), places[digit].begin(), std::uint32_t{0});
    for (std::size_t i = 0; i < wanted_; ++i) to[places[digit][digit_of(from[i], digit)]++] = from[i];
    std::swap(from, to);
  }
}

void compare_rows(const float* queries, std::size_t together, const ComparedRows& rows, NearestRows* found,
                  ComparisonRoom& room) {
  room.away.resize(together * std::min(kComparedRows, rows.count));
  for (std::size_t q = 0; q < together; ++q) found[q].clear();
  for (std::size_t row = 0; row < rows.count; row += kComparedRows) {
    const std::size_t count = std::min(kComparedRows, rows.count - row);
    for (std::size_t at = 0, end = count; at < count; at = end, end = count) {
      std::size_t from = row + at;
      if (rows.among != nullptr) {  // those that follow one another are measured together
        const std::int64_t* const chosen = rows.among + row;
        from = static_cast<std::size_t>(chosen[at]);
        for (end = at + 1; end < count && chosen[end] == chosen[end - 1] + 1;) ++end;
      }
      measure_rows(queries, together, rows.rows + from * rows.dimension, end - at, rows.dimension,
                   room.away.data() + at, count);
    }
    for (std::size_t q = 0; q < together; ++q) found[q].add(room.away.data() + q * count, row, count, room.least);
  }
}

}  // namespace memhier
