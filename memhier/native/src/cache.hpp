// The cache that every compiled policy's order drives; memhier/policies/_reference.py is the same in Python.
//
// An Order knows the resident entries by number, in an order from which victims are taken:
//   explicit Order(std::size_t capacity)
//   void resize(std::size_t numbers)              numbers below this may come
//   void enter(std::uint32_t number, std::int64_t key)
//   void touch(std::uint32_t number)
//   void leave(std::uint32_t number)              discarded
//   void prefetch(std::uint32_t number) const     hints that a touch or an entrance follows, 16 and 8 turns ahead;
//   void prefetch_neighbours(std::uint32_t number) const     the number may not have entered yet
//   void evict(std::size_t count, Held held, Emit emit)   emit every victim, none of which is held
//   std::size_t bytes() const
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

#include "buffer.hpp"
#include "key_table.hpp"

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
           (stamps_.capacity() + turns_.capacity()) * sizeof(std::uint32_t);
  }

  // The victims as bytes, or the capacity that would be enough, nothing changed.
  nb::object access(nb::handle keys, nb::handle pinned, nb::handle hit) {
    const Buffer batch(keys, Buffer::Access::read), held(pinned, Buffer::Access::read);
    const Buffer hits(hit, Buffer::Access::write);
    hits.require(hits.bytes() == batch.count<std::int64_t>(), "hit: one byte per key");
    std::vector<std::int64_t> evicted;
    std::size_t enough = 0;
    {
      nb::gil_scoped_release released;
      const std::lock_guard lock(mutex_);
      enough = prepare(batch.as<const std::int64_t>(), batch.count<std::int64_t>(), held.as<const std::int64_t>(),
                       held.count<std::int64_t>());
      if (enough == 0) {
        make_room(evicted);
        take_turns(hits.as<std::uint8_t>());
      }
    }
    if (enough != 0) return nb::int_(enough);
    return nb::bytes(reinterpret_cast<const char*>(evicted.data()), evicted.size() * sizeof(std::int64_t));
  }

  void replay(nb::handle keys, nb::handle hit) {
    const Buffer trace(keys, Buffer::Access::read), hits(hit, Buffer::Access::write);
    hits.require(hits.bytes() == trace.count<std::int64_t>(), "hit: one byte per key");
    nb::gil_scoped_release released;
    const std::lock_guard lock(mutex_);
    grow(capacity_);
    const auto* key = trace.as<const std::int64_t>();
    const std::size_t count = trace.count<std::int64_t>();
    for_each_ahead(table_, key, count, [&](std::size_t i, KeyTable::Token token) {
      const std::uint32_t number = table_.find(token, key[i]);
      const bool resident = number != KeyTable::none;
      hits.as<std::uint8_t>()[i] = resident;
      if (resident) {
        order_.touch(number);
        return;
      }
      if (table_.size() == capacity_)
        order_.evict(1, [](std::uint32_t) { return false; }, [&](std::uint32_t victim) { table_.erase(victim); });
      order_.enter(table_.insert(key[i]), key[i]);
    });
  }

  void discard(nb::handle keys) {
    const Buffer gone(keys, Buffer::Access::read);
    nb::gil_scoped_release released;
    const std::lock_guard lock(mutex_);
    for (std::size_t i = 0; i < gone.count<std::int64_t>(); ++i) {
      const std::uint32_t number = table_.find(gone.as<const std::int64_t>()[i]);
      if (number == KeyTable::none) continue;
      order_.leave(number);
      table_.erase(number);
    }
  }

 private:
  static constexpr std::size_t kFar = 16, kNear = 8;
  static constexpr std::uint32_t kFirst = 0x80000000;  // marks a turn at which its key enters

  // Numbers the batch's keys, new ones too, and marks what may not leave if something has to. Returns 0, or, with the
  // new keys taken back, the capacity that would be enough.
  std::size_t prepare(const std::int64_t* keys, std::size_t count, const std::int64_t* pinned, std::size_t pins) {
    turns_.resize(count);
    for_each_ahead(table_, keys, count, [&](std::size_t i, KeyTable::Token token) {
      turns_[i] = table_.find(token, keys[i]);
      if (turns_[i] == KeyTable::none) turns_[i] = table_.insert(keys[i]) | kFirst;
    });
    grow(table_.numbers());
    if (table_.size() <= capacity_) return 0;
    if (++epoch_ == 0) {  // the stamps' numbers start over
      std::fill(stamps_.begin(), stamps_.end(), 0);
      epoch_ = 1;
    }
    std::size_t held = 0;
    for (const std::uint32_t turn : turns_) held += hold(turn & ~kFirst);
    for (std::size_t i = 0; i < pins; ++i) {
      const std::uint32_t number = table_.find(pinned[i]);
      held += number != KeyTable::none && hold(number);
    }
    if (held <= capacity_) return 0;
    for (const std::uint32_t turn : turns_)
      if (turn & kFirst) table_.erase(turn & ~kFirst);
    return held;
  }

  bool hold(std::uint32_t number) {
    const bool first = stamps_[number] != epoch_;
    stamps_[number] = epoch_;
    return first;
  }

  void make_room(std::vector<std::int64_t>& evicted) {
    if (table_.size() <= capacity_) return;
    const std::size_t excess = table_.size() - capacity_;
    evicted.reserve(excess);
    order_.evict(
        excess, [&](std::uint32_t number) { return stamps_[number] == epoch_; },
        [&](std::uint32_t victim) {
          evicted.push_back(table_.key(victim));
          table_.erase(victim);
        });
  }

  void take_turns(std::uint8_t* hit) {
    const std::size_t count = turns_.size();
    for (std::size_t i = 0; i < count; ++i) {
      if (i + kFar < count) order_.prefetch(turns_[i + kFar] & ~kFirst);
      if (i + kNear < count) order_.prefetch_neighbours(turns_[i + kNear] & ~kFirst);
      const std::uint32_t number = turns_[i] & ~kFirst;
      hit[i] = (turns_[i] & kFirst) == 0;
      if (hit[i]) order_.touch(number);
      else order_.enter(number, table_.key(number));
    }
  }

  void grow(std::size_t numbers) {
    if (numbers > stamps_.size()) stamps_.resize(std::max(numbers, capacity_));
    order_.resize(stamps_.size());
  }

  const std::size_t capacity_;
  mutable std::mutex mutex_;
  KeyTable table_;
  std::vector<std::uint32_t> stamps_;  // by number: the last batch that held it
  std::vector<std::uint32_t> turns_;   // the batch's keys by number
  std::uint32_t epoch_ = 0;
  Order order_;
};

template <class Order>
void bind_cache(nb::module_& m, const char* name) {
  using C = Cache<Order>;
  nb::class_<C>(m, name)
      .def(nb::init<std::size_t>(), nb::arg("capacity"))
      .def("access", &C::access, nb::arg("keys"), nb::arg("pinned"), nb::arg("hit"))
      .def("replay", &C::replay, nb::arg("keys"), nb::arg("hit"))
      .def("discard", &C::discard, nb::arg("keys"))
      .def("__len__", &C::size)
      .def("__contains__", &C::contains, nb::arg("key"))
      .def_prop_ro("memory_bytes", &C::bytes);
}

}  // namespace memhier
