// A set of places on a ring, with a quick answer to "which is the greatest at or before this one".
//
// One bit per place, and above it one bit per 64-bit word that is not zero, and so on: a search climbs and descends a
// few words whatever the size.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace memhier {

class TurnSet {
 public:
  static constexpr std::size_t none = static_cast<std::size_t>(-1);

  explicit TurnSet(std::size_t places) {
    do {
      places = (places + 63) / 64;
      levels_.emplace_back(places);
    } while (places > 1);
  }

  std::size_t bytes() const {
    std::size_t words = 0;
    for (const auto& level : levels_) words += level.capacity();
    return words * sizeof(std::uint64_t);
  }

  bool contains(std::size_t place) const { return (levels_[0][place / 64] >> (place % 64)) & 1; }

  void add(std::size_t place) {
    for (auto& level : levels_) {
      const bool was_empty = level[place / 64] == 0;
      level[place / 64] |= std::uint64_t{1} << (place % 64);
      if (!was_empty) return;
      place /= 64;
    }
  }

  void remove(std::size_t place) {
    for (auto& level : levels_) {
      level[place / 64] &= ~(std::uint64_t{1} << (place % 64));
      if (level[place / 64] != 0) return;
      place /= 64;
    }
  }

  std::size_t at_or_before(std::size_t place) const {
    for (std::size_t height = 0; height < levels_.size(); ++height) {
      const std::uint64_t word = levels_[height][place / 64] & (~std::uint64_t{0} >> (63 - place % 64));
      if (word != 0) return descend(height, place / 64 * 64 + last(word));
      if (place < 64) return none;  // in the first word: nothing lies before it
      place = place / 64 - 1;       // one level up, the words before this one
    }
    return none;
  }

 private:
  static std::size_t last(std::uint64_t word) { return 63 - static_cast<std::size_t>(std::countl_zero(word)); }

  std::size_t descend(std::size_t height, std::size_t place) const {
    while (height-- > 0) place = place * 64 + last(levels_[height][place]);
    return place;
  }

  std::vector<std::vector<std::uint64_t>> levels_;
};

}  // namespace memhier
