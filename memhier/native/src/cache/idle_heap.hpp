// Entries by score, the smallest first. Scores only grow, so a heap may hold an old one: it is renewed once it comes to
// the top, and a use of an entry costs nothing here.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace memhier {

struct Score {
  double uses = 0;
  std::uint64_t last = 0;  // number of the last access: equal scores go by it

  bool operator<(const Score& other) const { return uses != other.uses ? uses < other.uses : last < other.last; }
};

class IdleHeap {
 public:
  static constexpr std::uint32_t none = 0xffffffff;

  std::size_t bytes() const { return nodes_.capacity() * sizeof(Node); }

  // Room for entries below this number: a push takes no memory.
  void reserve(std::size_t entries) { nodes_.reserve(entries); }

  // The entry is not in the heap.
  void push(std::uint32_t entry, const Score& score) {
    nodes_.push_back({score, entry});
    std::push_heap(nodes_.begin(), nodes_.end(), later);
  }

  // Takes out the entry with the smallest score; none if the heap is empty. It may have grown since.
  std::uint32_t pop(Score& score) {
    if (nodes_.empty()) return none;
    std::pop_heap(nodes_.begin(), nodes_.end(), later);
    const Node node = nodes_.back();
    nodes_.pop_back();
    score = node.score;
    return node.entry;
  }

  // Calls keeps(entry, score), which may renew the score, and drops the entry if it says no.
  template <class Keeps>
  void renew(Keeps keeps) {
    std::erase_if(nodes_, [&](Node& node) { return !keeps(node.entry, node.score); });
    std::make_heap(nodes_.begin(), nodes_.end(), later);
  }

 private:
  struct Node {
    Score score;
    std::uint32_t entry;
  };
  static bool later(const Node& a, const Node& b) { return b.score < a.score; }

  std::vector<Node> nodes_;
};

}  // namespace memhier
