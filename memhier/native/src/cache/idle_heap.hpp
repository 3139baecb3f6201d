// Entries by score, the smallest first, that can be taken out from anywhere: an indexed binary heap.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace memhier {

struct Score {
  double uses = 0;
  std::uint64_t last = 0;  // number of the last access: equal scores go by it

  bool operator<(const Score& other) const { return uses != other.uses ? uses < other.uses : last < other.last; }
};

class IdleHeap {
 public:
  // `scores` is indexed by entry; an entry's score does not change alone while it is in the heap.
  explicit IdleHeap(const std::vector<Score>& scores) : scores_(scores) {}

  bool empty() const { return heap_.empty(); }
  std::uint32_t top() const { return heap_.front(); }
  const std::vector<std::uint32_t>& entries() const { return heap_; }
  std::size_t bytes() const { return (heap_.capacity() + place_.capacity()) * sizeof(std::uint32_t); }

  // Room for entries below this number: a push takes no memory.
  void resize(std::size_t entries) {
    heap_.reserve(entries);
    place_.resize(entries);
  }

  // Scores have changed, all of them together.
  void rebuild() {
    for (std::size_t at = heap_.size() / 2; at-- > 0;) sink(at, heap_[at]);
  }

  void push(std::uint32_t entry) {
    heap_.push_back(entry);
    rise(heap_.size() - 1, entry);
  }

  void remove(std::uint32_t entry) {
    const std::size_t hole = place_[entry];
    const std::uint32_t moved = heap_.back();
    heap_.pop_back();
    if (hole == heap_.size()) return;
    if (scores_[moved] < scores_[entry])
      rise(hole, moved);
    else
      sink(hole, moved);
  }

 private:
  void rise(std::size_t at, std::uint32_t entry) {
    for (; at > 0 && scores_[entry] < scores_[heap_[(at - 1) / 2]]; at = (at - 1) / 2) put(at, heap_[(at - 1) / 2]);
    put(at, entry);
  }

  void sink(std::size_t at, std::uint32_t entry) {
    for (std::size_t child; (child = 2 * at + 1) < heap_.size(); at = child) {
      if (child + 1 < heap_.size() && scores_[heap_[child + 1]] < scores_[heap_[child]]) ++child;
      if (!(scores_[heap_[child]] < scores_[entry])) break;
      put(at, heap_[child]);
    }
    put(at, entry);
  }

  void put(std::size_t at, std::uint32_t entry) {
    heap_[at] = entry;
    place_[entry] = static_cast<std::uint32_t>(at);
  }

  const std::vector<Score>& scores_;
  std::vector<std::uint32_t> heap_;
  std::vector<std::uint32_t> place_;  // by entry
};

}  // namespace memhier
