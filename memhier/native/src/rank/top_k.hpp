// Candidates, the two orders they are taken in, and the k best of those offered.
#pragma once

#include <algorithm>
#include <cstddef>
#include <functional>
#include <vector>

namespace memhier {

// A row that may be in the answer. Its key orders it: a distance, a logit, or a bound on either.
template <class Row>
struct Candidate {
  float key, estimate;
  Row row;
};

// Distances: the smaller key goes first. Equal keys go by row in both orders, so that a result does not depend on the
// order of the scan.
struct Nearer {
  template <class Row>
  bool operator()(const Candidate<Row>& a, const Candidate<Row>& b) const {
    return a.key < b.key || (a.key == b.key && a.row < b.row);
  }
};

// Logits: the larger key goes first.
struct Larger {
  template <class Row>
  bool operator()(const Candidate<Row>& a, const Candidate<Row>& b) const {
    return a.key > b.key || (a.key == b.key && a.row < b.row);
  }
};

// The k items offered that go first. Its heap has the last of them at the root.
template <class Item, class Before = std::less<>>
class TopK {
 public:
  TopK() = default;
  explicit TopK(std::size_t k) : k_(k) { items_.reserve(k); }

  void clear() { items_.clear(); }
  std::size_t size() const { return items_.size(); }
  bool is_full() const { return items_.size() == k_; }
  const Item& last() const { return items_.front(); }

  void offer(const Item& item) {
    if (items_.size() < k_) {
      items_.push_back(item);
    } else {
      if (!Before{}(item, items_.front())) return;
      std::pop_heap(items_.begin(), items_.end(), Before{});
      items_.back() = item;
    }
    std::push_heap(items_.begin(), items_.end(), Before{});
  }

  // The items in order; offer nothing more before clear().
  const std::vector<Item>& sort() {
    std::sort_heap(items_.begin(), items_.end(), Before{});
    return items_;
  }

 private:
  std::size_t k_ = 0;
  std::vector<Item> items_;
};

// Leaves the `count` items that go first, in any order, and returns the key of the first one dropped. There must be
// more.
template <class Item, class Before>
float keep_first(std::vector<Item>& items, std::size_t count, Before before) {
  const auto end = items.begin() + static_cast<std::ptrdiff_t>(count);
  std::nth_element(items.begin(), end, items.end(), before);
  const float key = end->key;
  items.erase(end, items.end());
  return key;
}

}  // namespace memhier
