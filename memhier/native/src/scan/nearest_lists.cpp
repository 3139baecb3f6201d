// The nearest of many thousand half-precision vectors to each query, by comparing all of them.
#include <algorithm>
#include <array>
#include <cstdint>
#include <numeric>
#include <optional>
#include <vector>

#include <nanobind/stl/optional.h>

#include "bind/array.hpp"
#include "bind/module.hpp"
#include "bind/simd.hpp"
#include "scan/half_rows.hpp"

namespace nb = nanobind;

namespace memhier {
namespace {

constexpr std::size_t kRows = 4096;  // compared at a time
constexpr std::size_t kGroup = 8;    // rows of which the nearest stands for them
constexpr std::size_t kDigits = 3;   // of a distance, by which many rows are sorted
constexpr int kDigitBits = 11;
constexpr std::size_t kManyRows = 256;

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

// The rows nearest to one query of those seen so far, and some more.
class Nearest {
 public:
  explicit Nearest(std::size_t wanted) : wanted_(wanted), keys_(2 * wanted + kRows) {}

  void clear() {
    kept_ = 0;
    bound_ = UINT32_MAX;
    in_order_ = true;
  }

  // Takes the distances of rows from `first` on, of at most kRows; `least` is room.
  void add(const float* away, std::size_t first, std::size_t count, std::vector<std::uint32_t>& least) {
    if (first == 0) bound_ = bound_of(away, count, wanted_, least);
    for (std::size_t row = 0; row < count; ++row) {
      keys_[kept_] = std::uint64_t{order_of(away[row])} << 32 | (first + row);
      kept_ += order_of(away[row]) <= bound_ ? 1 : 0;
    }
    if (kept_ <= 2 * wanted_) return;
    shrink();
    bound_ = static_cast<std::uint32_t>(keys_[wanted_ - 1] >> 32);
  }

  // Fills nearest[wanted] with their numbers, by distance and at equal ones by number.
  void finish(std::int64_t* nearest) {
    if (kept_ > wanted_) shrink();
    auto first = keys_.begin();
    const auto wanted = static_cast<std::ptrdiff_t>(wanted_);
    if (in_order_ && wanted_ >= kManyRows) {
      sort_by_digits();
      first += wanted;
    } else {
      std::sort(first, first + wanted);
    }
    std::transform(first, first + wanted, nearest,
                   [](std::uint64_t key) { return static_cast<std::int64_t>(key & 0xffffffff); });
  }

 private:
  void shrink() {
    const auto at = [this](std::size_t place) { return keys_.begin() + static_cast<std::ptrdiff_t>(place); };
    std::nth_element(at(0), at(wanted_ - 1), at(kept_));
    kept_ = wanted_;
    in_order_ = false;
  }

  // Sorts the first `wanted` keys, which stand by number, by distance; they then stand after themselves.
  void sort_by_digits() {
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

  const std::size_t wanted_;
  std::size_t kept_ = 0;
  bool in_order_ = true;              // of numbers
  std::uint32_t bound_ = UINT32_MAX;  // beyond it none is one of the nearest
  std::vector<std::uint64_t> keys_;   // distance above, number below
};

// queries [q, d]; rows fp16 [n, d]; fills nearest [q, p] with row numbers, by distance and at equal ones by number; of
// the rows `among`, which ascend, where they are given. Takes no more room for more rows.
void nearest_rows(const Array<const float, 2>& queries, const Array<const std::uint16_t, 2>& rows,
                  const Array<std::int64_t, 2>& nearest, const std::optional<Array<const std::int64_t, 1>>& among) {
  const std::size_t dimension = queries.shape(1), wanted = nearest.shape(1);
  const std::size_t total = among ? among->shape(0) : rows.shape(0);
  require(rows.shape(1) == dimension && nearest.shape(0) == queries.shape(0) && wanted <= total && total <= UINT32_MAX,
          "nearest_rows: array shapes do not fit together");
  const std::int64_t* const chosen = among ? among->data() : nullptr;
  for (std::size_t i = 0; among && i < total; ++i)
    require(chosen[i] >= (i == 0 ? 0 : chosen[i - 1] + 1) && chosen[i] < static_cast<std::int64_t>(rows.shape(0)),
            "nearest_rows: among has row numbers, ascending");
  if (wanted == 0) return;

  nb::gil_scoped_release released;
  std::vector<float> away(std::min(kTogether, queries.shape(0)) * std::min(kRows, total));
  std::vector<std::uint32_t> least;
  least.reserve(kRows / kGroup);
  std::vector<Nearest> found(std::min(kTogether, queries.shape(0)), Nearest(wanted));
  for (std::size_t first = 0; first < queries.shape(0); first += kTogether) {
    const std::size_t together = std::min(kTogether, queries.shape(0) - first);
    for (Nearest& each : found) each.clear();
    for (std::size_t row = 0; row < total; row += kRows) {
      const std::size_t count = std::min(kRows, total - row);
      for (std::size_t at = 0, end = count; at < count; at = end, end = count) {
        std::size_t from = row + at;
        if (chosen != nullptr) {  // those that follow one another are measured together
          from = static_cast<std::size_t>(chosen[row + at]);
          for (end = at + 1; end < count && chosen[row + end] == chosen[row + end - 1] + 1;) ++end;
        }
        measure_rows(queries.data() + first * dimension, together, rows.data() + from * dimension, end - at, dimension,
                     away.data() + at, count);
      }
      for (std::size_t q = 0; q < together; ++q) found[q].add(away.data() + q * count, row, count, least);
    }
    for (std::size_t q = 0; q < together; ++q) {
      std::int64_t* const numbers = nearest.data() + (first + q) * wanted;
      found[q].finish(numbers);
      if (chosen != nullptr) std::transform(numbers, numbers + wanted, numbers, [&](auto i) { return chosen[i]; });
    }
  }
}

}  // namespace
}  // namespace memhier

void register_nearest_lists(nb::module_& m) {
  m.def("nearest_rows", &memhier::nearest_rows, nb::kw_only(), nb::arg("queries"), nb::arg("rows"), nb::arg("nearest"),
        nb::arg("among").none() = nb::none());
}
