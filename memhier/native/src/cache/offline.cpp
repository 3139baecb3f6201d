// Facts about a whole trace: each access's next one, Belady's hits, LRU stack distances.
//
// memhier/planning/offline.py is the same in Python.
#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <numeric>
#include <vector>

#include "bind/array.hpp"
#include "bind/module.hpp"
#include "cache/key_table.hpp"
#include "cache/turn_set.hpp"

namespace nb = nanobind;

namespace memhier {
namespace {

constexpr std::uint32_t kNever = 0xffffffff;

// For every access, the place of the next one to its key, or kNever.
void next_uses(const Array<const std::int64_t, 1>& keys, const Array<std::uint32_t, 1>& next) {
  const std::size_t count = keys.size();
  require(next.size() == count && count < kNever, "next: one uint32 per key");
  nb::gil_scoped_release released;
  KeyTable table(std::size_t{1} << 16);
  std::vector<std::uint32_t> latest;
  for_each_ahead(table, keys.data(), count, [&](std::size_t i, KeyTable::Token token) {
    const std::int64_t key = keys[i];
    std::uint32_t number = table.find(token, key);
    if (number == KeyTable::none) {
      number = table.insert(key);
      latest.push_back(0);
    } else {
      next[latest[number]] = static_cast<std::uint32_t>(i);
    }
    latest[number] = static_cast<std::uint32_t>(i);
    next[i] = kNever;
  });
}

// A resident key is known by the place of its next access: an access hits when its own place is in the set. Keys that
// never come again are victims before all others, and only their number matters.
void belady_hits(const Array<const std::uint32_t, 1>& next, std::size_t capacity, const Array<bool, 1>& hit) {
  const std::size_t count = next.size();
  require(hit.size() == count, "hit: one byte per access");
  nb::gil_scoped_release released;
  TurnSet awaited(std::max<std::size_t>(count, 1));
  std::size_t resident = 0, spent = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const bool is_hit = awaited.contains(i);
    hit[i] = is_hit;
    if (is_hit) {
      awaited.remove(i);
    } else if (resident < capacity) {
      ++resident;
    } else if (spent > 0) {
      --spent;
    } else {
      awaited.remove(awaited.at_or_before(count - 1));
    }
    if (next[i] == kNever)
      ++spent;
    else
      awaited.add(next[i]);
  }
}

// How many distinct keys were accessed since a key's last access, itself included: the smallest LRU cache that hits.
//
// A bit marks each time that is some key's last access. Counting bits behind a time takes one word's population and a
// Fenwick tree over the words, which is small enough to stay in cache. When the times run out, the keys in use are
// numbered anew, so memory follows the number of keys and not the length of the trace.
class StackDistances {
 public:
  StackDistances() : table_(kTimes), bits_(kTimes / 64), sums_(kTimes / 64 + 1) {}

  // 0 for a key's first access.
  void access(const Array<const std::int64_t, 1>& keys, const Array<std::int64_t, 1>& distance) {
    const std::size_t count = keys.size();
    require(distance.size() == count, "distance: one int64 per key");
    nb::gil_scoped_release released;
    const std::lock_guard lock(mutex_);
    const std::int64_t* key = keys.data();
    for_each_ahead(table_, key, count, [&](std::size_t i, KeyTable::Token token) {
      if (now_ == 64 * bits_.size()) renumber();
      std::uint32_t number = table_.find(token, key[i]);
      std::int64_t& result = distance[i];
      if (number == KeyTable::none) {
        number = table_.insert(key[i]);
        last_.resize(table_.numbers());
        result = 0;
      } else {
        result = static_cast<std::int64_t>(marked_since(last_[number]));
        unmark(last_[number]);
      }
      last_[number] = now_;
      mark(now_++);
    });
  }

  std::size_t bytes() const {
    const std::lock_guard lock(mutex_);
    return sizeof *this + table_.bytes() + bits_.capacity() * sizeof(std::uint64_t) +
           (last_.capacity() + sums_.capacity()) * sizeof(std::uint32_t);
  }

 private:
  static constexpr std::size_t kTimes = std::size_t{1} << 16;

  void mark(std::uint32_t time) {
    bits_[time / 64] |= std::uint64_t{1} << (time % 64);
    for (std::size_t at = time / 64 + 1; at < sums_.size(); at += at & -at) ++sums_[at];
  }

  void unmark(std::uint32_t time) {
    bits_[time / 64] &= ~(std::uint64_t{1} << (time % 64));
    for (std::size_t at = time / 64 + 1; at < sums_.size(); at += at & -at) --sums_[at];
  }

  std::size_t marked_since(std::uint32_t time) const {
    std::size_t before = std::popcount(bits_[time / 64] & ((std::uint64_t{1} << (time % 64)) - 1));
    for (std::size_t at = time / 64; at > 0; at -= at & -at) before += sums_[at];
    return table_.size() - before;
  }

  void renumber() {
    std::vector<std::uint32_t> order(last_.size());
    std::iota(order.begin(), order.end(), 0);
    std::sort(order.begin(), order.end(), [&](auto a, auto b) { return last_[a] < last_[b]; });
    for (now_ = 0; now_ < order.size(); ++now_) last_[order[now_]] = now_;
    if (order.size() > 32 * bits_.size()) bits_.resize(2 * bits_.size());
    std::fill(bits_.begin(), bits_.end(), 0);
    sums_.assign(bits_.size() + 1, 0);
    for (std::uint32_t time = 0; time < now_; ++time) {
      bits_[time / 64] |= std::uint64_t{1} << (time % 64);
      ++sums_[time / 64 + 1];
    }
    for (std::size_t at = 1; at < sums_.size(); ++at)
      if (const std::size_t parent = at + (at & -at); parent < sums_.size()) sums_[parent] += sums_[at];
  }

  mutable std::mutex mutex_;
  KeyTable table_;
  std::vector<std::uint32_t> last_;  // by key's number
  std::vector<std::uint64_t> bits_;  // by time
  std::vector<std::uint32_t> sums_;  // Fenwick tree over the words of bits_
  std::uint32_t now_ = 0;
};

}  // namespace
}  // namespace memhier

void register_offline(nb::module_& m) {
  using namespace nb::literals;
  using memhier::StackDistances;
  m.def("next_uses", &memhier::next_uses, nb::kw_only(), "keys"_a, "next"_a);
  m.def("belady_hits", &memhier::belady_hits, nb::kw_only(), "next"_a, "capacity"_a, "hit"_a);
  nb::class_<StackDistances>(m, "StackDistances")
      .def(nb::init<>())
      .def("access", &StackDistances::access, nb::kw_only(), "keys"_a, "distance"_a)
      .def_prop_ro("memory_bytes", &StackDistances::bytes);
}
