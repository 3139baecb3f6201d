// Elements by freely running counters: the low bits of a counter are its place.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace memhier {

// The size is a power of two, so that counters may wrap around at 32 bits. Growing keeps those from `first` to `last`.
template <class T>
class Ring {
 public:
  explicit Ring(std::size_t size) : items_(size) {}

  T& operator[](std::uint32_t counter) { return items_[place(counter)]; }
  std::size_t place(std::uint32_t counter) const { return counter & (items_.size() - 1); }
  std::size_t size() const { return items_.size(); }
  std::size_t bytes() const { return items_.capacity() * sizeof(T); }

  void grow(std::uint32_t first, std::uint32_t last) {
    Ring larger(2 * items_.size());
    for (std::uint32_t counter = first; counter != last; ++counter) larger[counter] = (*this)[counter];
    items_.swap(larger.items_);
  }

 private:
  std::vector<T> items_;
};

}  // namespace memhier
