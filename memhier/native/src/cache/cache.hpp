// The cache that every compiled policy's order drives; memhier/policies/_reference.py is the same in Python.
//
// An Order knows the resident entries by number, in an order from which victims are taken:
//   explicit Order(std::size_t capacity)          numbers are below this
//   void enter(std::uint32_t number, std::int64_t key)
//   void touch(std::uint32_t number)
//   void leave(std::uint32_t number)              discarded
//   void prefetch(std::uint32_t number) const     hints that a touch or an entrance follows, 16 and 8 turns ahead;
//   void prefetch_neighbours(std::uint32_t number) const     the number may not have entered yet
//   void evict(std::size_t count, Held held, Emit emit)   emit every victim, none of which is held
//   std::size_t bytes() const
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <variant>
#include <vector>

#include <nanobind/stl/variant.h>

#include "bind/array.hpp"
#include "cache/key_table.hpp"

namespace memhier {

namespace nb = nanobind;

template <class Order>
class Cache {
 public:
  explicit Cache(std::size_t capacity) : capacity_(capacity), table_(capacity), stamps_(capacity), order_(capacity) {}

  std::size_t size() const {
    const std::lock_guard lock(mutex_);
    return table_.size();
  }

  bool contains(std::int64_t key) const {
    const std::lock_guard lock(mutex_);
    return table_.find(key) != KeyTable::none;
  }

  std::size_t bytes() const {
    const std::lock_guard lock(mutex_);
    return sizeof *this + table_.bytes() + order_.bytes() +
           (stamps_.capacity() + turns_.capacity() + fresh_.capacity() + seen_.capacity()) * sizeof(std::uint32_t);
  }

  // The victims as bytes, or the capacity that would be enough, nothing changed.
  std::variant<nb::bytes, std::size_t> access(const Array<const std::int64_t, 1>& keys,
                                              const Array<const std::int64_t, 1>& pinned, const Array<bool, 1>& hit) {
    require(hit.size() == keys.size(), "hit: one byte per key");
    require(keys.size() < kFresh, "keys: fewer than 2**31");
    std::vector<std::int64_t> evicted;
    std::size_t enough = 0;
    {
      nb::gil_scoped_release released;
      const std::lock_guard lock(mutex_);
      enough = make_room(keys.data(), keys.size(), pinned.data(), pinned.size(), evicted);
      if (enough == 0) {
        insert_fresh(keys.data());
        take_turns(hit.data());
      }
    }
    if (enough != 0) return enough;
    return nb::bytes(evicted.data(), evicted.size() * sizeof(std::int64_t));
  }

  void replay(const Array<const std::int64_t, 1>& keys, const Array<bool, 1>& hit) {
    require(hit.size() == keys.size(), "hit: one byte per key");
    nb::gil_scoped_release released;
    const std::lock_guard lock(mutex_);
    const std::int64_t* key = keys.data();
    for_each_ahead(table_, key, keys.size(), [&](std::size_t i, KeyTable::Token token) {
      const std::uint32_t number = table_.find(token, key[i]);
      const bool resident = number != KeyTable::none;
      hit[i] = resident;
      if (resident) {
        order_.touch(number);
        return;
      }
      if (table_.size() == capacity_)
        order_.evict(1, [](std::uint32_t) { return false; }, [&](std::uint32_t victim) { table_.erase(victim); });
      order_.enter(table_.insert(key[i]), key[i]);
    });
  }

  void discard(const Array<const std::int64_t, 1>& keys) {
    nb::gil_scoped_release released;
    const std::lock_guard lock(mutex_);
    for (std::size_t i = 0; i < keys.size(); ++i) {
      const std::uint32_t number = table_.find(keys[i]);
      if (number == KeyTable::none) continue;
      order_.leave(number);
      table_.erase(number);
    }
  }

 private:
  static constexpr std::size_t kFar = 16, kNear = 8;
  static constexpr std::uint32_t kFresh = 0x80000000;    // marks the turns of a key that was not resident
  static constexpr std::uint32_t kWaiting = 0x80000000;  // marks such a key's number until its first turn

  // Numbers the batch's keys, and lets others go where the new ones among them lack room: these enter only afterwards,
  // so that no table ever holds more than the capacity. Returns 0, or, nothing changed, the capacity that is enough.
  std::size_t make_room(const std::int64_t* keys, std::size_t count, const std::int64_t* pinned, std::size_t pins,
                        std::vector<std::int64_t>& evicted) {
    turns_.reserve(count);
    turns_.resize(count);
    std::size_t misses = 0;
    for_each_ahead(table_, keys, count, [&](std::size_t i, KeyTable::Token token) {
      turns_[i] = table_.find(token, keys[i]);
      misses += turns_[i] == KeyTable::none;
    });
    find_fresh(keys, misses);
    if (table_.size() + fresh_.size() <= capacity_) return 0;
    if (++epoch_ == 0) {  // the stamps' numbers start over
      std::fill(stamps_.begin(), stamps_.end(), 0);
      epoch_ = 1;
    }
    std::size_t held = fresh_.size();
    for (const std::uint32_t turn : turns_) held += (turn & kFresh) == 0 && hold(turn);
    for (std::size_t i = 0; i < pins; ++i) {
      const std::uint32_t number = table_.find(pinned[i]);
      held += number != KeyTable::none && hold(number);
    }
    if (held > capacity_) return held;
    const std::size_t excess = table_.size() + fresh_.size() - capacity_;
    evicted.reserve(excess);
    order_.evict(
        excess, [&](std::uint32_t number) { return stamps_[number] == epoch_; },
        [&](std::uint32_t victim) {
          evicted.push_back(table_.key(victim));
          table_.erase(victim);
        });
    return 0;
  }

  bool hold(std::uint32_t number) {
    const bool first = stamps_[number] != epoch_;
    stamps_[number] = epoch_;
    return first;
  }

  // Numbers the keys that are not resident in the order in which they come, by a hash table of these numbers.
  void find_fresh(const std::int64_t* keys, std::size_t misses) {
    fresh_.clear();
    if (misses == 0) return;
    fresh_.reserve(misses);
    seen_.assign(2 * misses, KeyTable::none);
    for (std::size_t i = 0; i < turns_.size(); ++i) {
      if (turns_[i] != KeyTable::none) continue;
      std::size_t at = hash_home(table_.token(keys[i]), seen_.size());
      while (seen_[at] != KeyTable::none && keys[fresh_[seen_[at]]] != keys[i])
        at = at + 1 == seen_.size() ? 0 : at + 1;
      if (seen_[at] == KeyTable::none) {
        seen_[at] = static_cast<std::uint32_t>(fresh_.size());
        fresh_.push_back(static_cast<std::uint32_t>(i));
      }
      turns_[i] = seen_[at] | kFresh;
    }
  }

  void insert_fresh(const std::int64_t* keys) {
    for (std::size_t i = 0; i < fresh_.size(); ++i) {
      if (i + kFar < fresh_.size()) table_.prefetch(table_.token(keys[fresh_[i + kFar]]));
      fresh_[i] = table_.insert(keys[fresh_[i]]) | kWaiting;
    }
  }

  std::uint32_t number_of(std::uint32_t turn) const { return turn & kFresh ? fresh_[turn ^ kFresh] & ~kWaiting : turn; }

  void take_turns(bool* hit) {
    const std::size_t count = turns_.size();
    for (std::size_t i = 0; i < count; ++i) {
      if (i + kFar < count) order_.prefetch(number_of(turns_[i + kFar]));
      if (i + kNear < count) order_.prefetch_neighbours(number_of(turns_[i + kNear]));
      const std::uint32_t number = number_of(turns_[i]);
      const bool enters = (turns_[i] & kFresh) && (fresh_[turns_[i] ^ kFresh] & kWaiting);
      hit[i] = !enters;
      if (!enters) {
        order_.touch(number);
        continue;
      }
      fresh_[turns_[i] ^ kFresh] = number;
      order_.enter(number, table_.key(number));
    }
  }

  const std::size_t capacity_;
  mutable std::mutex mutex_;
  KeyTable table_;
  std::vector<std::uint32_t> stamps_;  // by number: the last batch that held it
  std::vector<std::uint32_t> turns_;   // the batch's keys: numbers, or places in `fresh_` that are marked so
  std::vector<std::uint32_t> fresh_;   // its keys that were not resident: where they come first, then their numbers
  std::vector<std::uint32_t> seen_;    // hash table of places in `fresh_`
  std::uint32_t epoch_ = 0;
  Order order_;
};

template <class Order>
void bind_cache(nb::module_& m, const char* name) {
  using C = Cache<Order>;
  nb::class_<C>(m, name)
      .def(nb::init<std::size_t>(), nb::arg("capacity"))
      .def("access", &C::access, nb::kw_only(), nb::arg("keys"), nb::arg("pinned"), nb::arg("hit"))
      .def("replay", &C::replay, nb::kw_only(), nb::arg("keys"), nb::arg("hit"))
      .def("discard", &C::discard, nb::arg("keys"))
      .def("__len__", &C::size)
      .def("__contains__", &C::contains, nb::arg("key"))
      .def_prop_ro("memory_bytes", &C::bytes);
}

}  // namespace memhier
