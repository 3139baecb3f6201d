// Entries by score, the smallest first. Scores only grow, so an old one may be held: it is renewed once its turn comes,
// and a use of an entry costs nothing here.
//
// An eighth of the entries, the smallest, are sorted at a time, which takes less than a heap of all: they leave in
// order. Entries that come later with a score below theirs are in a small heap beside them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
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

  std::size_t bytes() const { return (nodes_.capacity() + late_.capacity()) * sizeof(Node); }

  // Room for entries below this number: a push takes no memory.
  void reserve(std::size_t entries) {
    nodes_.reserve(entries + share(entries));
    late_.reserve(share(entries));
  }

  // The entry is not there.
  void push(std::uint32_t entry, const Score& score) {
    if (!(score < limit_)) {
      nodes_.push_back({score, entry});
      return;
    }
    if (late_.size() == late_.capacity()) unsort();
    if (score < limit_) {
      late_.push_back({score, entry});
      std::push_heap(late_.begin(), late_.end(), later);
    } else {
      nodes_.push_back({score, entry});
    }
  }

  // Takes out the entry with the smallest score; none if there is none. Its score may have grown since. As in `renew`.
  template <class Keeps>
  std::uint32_t pop(Score& score, Keeps keeps) {
    if (next_ == sorted_ && late_.empty() && !sort_some(keeps)) return none;
    const bool is_late = next_ == sorted_ || (!late_.empty() && late_.front().score < nodes_[next_].score);
    const Node node = is_late ? late_.front() : nodes_[next_++];
    if (is_late) {
      std::pop_heap(late_.begin(), late_.end(), later);
      late_.pop_back();
    }
    score = node.score;
    return node.entry;
  }

  // An entry that leaves soon, or none: the `ahead`-th of those that are sorted.
  std::uint32_t upcoming(std::size_t ahead) const {
    return next_ + ahead < sorted_ ? nodes_[next_ + ahead].entry : none;
  }

  // Calls keeps(entry, score), which may renew the score, and drops the entry if it says no.
  template <class Keeps>
  void renew(Keeps keeps) {
    unsort();
    std::erase_if(nodes_, [&](Node& node) { return !keeps(node.entry, node.score); });
  }

 private:
  struct Node {
    Score score;
    std::uint32_t entry;
  };
  static bool later(const Node& a, const Node& b) { return b.score < a.score; }
  static bool earlier(const Node& a, const Node& b) { return a.score < b.score; }
  static std::size_t share(std::size_t entries) { return entries / 8 + 64; }

  // Lets no entry be sorted.
  void unsort() {
    nodes_.erase(nodes_.begin(), nodes_.begin() + static_cast<std::ptrdiff_t>(next_));
    nodes_.insert(nodes_.end(), late_.begin(), late_.end());
    late_.clear();
    next_ = sorted_ = 0;
    limit_ = {};
  }

  // Sorts the smallest entries; false if there are none.
  template <class Keeps>
  bool sort_some(Keeps keeps) {
    renew(keeps);
    sorted_ = std::min(share(nodes_.size()), nodes_.size());
    const auto end = nodes_.begin() + static_cast<std::ptrdiff_t>(sorted_);
    limit_ = {std::numeric_limits<double>::infinity(), 0};
    if (end != nodes_.end()) {
      std::nth_element(nodes_.begin(), end, nodes_.end(), earlier);
      limit_ = end->score;
    }
    std::sort(nodes_.begin(), end, earlier);
    return sorted_ != 0;
  }

  std::vector<Node> nodes_;            // taken out, sorted, then all others in no order, which are not below `limit_`
  std::size_t next_ = 0, sorted_ = 0;  // where the sorted ones begin and end
  std::vector<Node> late_;             // a heap of entries below `limit_` that came since
  Score limit_;
};

}  // namespace memhier
