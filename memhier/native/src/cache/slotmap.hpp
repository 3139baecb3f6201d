// The batched map from int64 keys to slots 0..capacity-1: every array is allocated once, no key is reserved.
//
// A batch touches memory at random, so each loop runs in step with two prefetches: the place a key hashes to is asked
// for 16 keys ahead, and the key stored behind that place 8 keys ahead. That is worth a factor of 3 over plain probing.
#pragma once

#include <algorithm>
#include <bit>
#include <cassert>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <mutex>
#include <utility>

namespace memhier {

// The high half of an invertible mix of all 64 bits; tests invert it to make keys that collide.
inline std::uint32_t hash_tag(std::int64_t key) {
  std::uint64_t x = static_cast<std::uint64_t>(key);
  x = (x ^ (x >> 32)) * 0xd6e8feb86659fd93u;
  x = (x ^ (x >> 32)) * 0xd6e8feb86659fd93u;
  return static_cast<std::uint32_t>(x >> 32);
}

// Multiplying instead of masking lets a table have any length, so capacity is not rounded up to a power of two.
inline std::size_t hash_home(std::uint32_t tag, std::size_t places) {
  return static_cast<std::size_t>((std::uint64_t{tag} * places) >> 32);
}

// Calls visit(i, token) for every key in order; table.prefetch and table.prefetch_key run ahead of it.
template <class Table, class Visit>
void for_each_ahead(const Table& table, const std::int64_t* keys, std::size_t count, Visit visit) {
  constexpr std::size_t kRing = 32, kFar = 16, kNear = 8;
  typename Table::Token ring[kRing];
  std::size_t far = 0, near = 0;
  for (std::size_t i = 0; i < count; ++i) {
    for (; far < count && far <= i + kFar; ++far) {
      ring[far % kRing] = table.token(keys[far]);
      table.prefetch(ring[far % kRing]);
    }
    for (; near < count && near <= i + kNear; ++near) table.prefetch_key(ring[near % kRing]);
    visit(i, ring[i % kRing]);
  }
}

// Open addressing with linear probing, at most half full. A place holds a slot and 32 bits of the hash, the key itself
// stays in the array key_of[slot]: 16 bytes per slot in place of 32. A place's tag alone gives its home, so deleting
// (by shifting back, which leaves no tombstones) reads no keys.
class HashIndex {
 public:
  using Token = std::uint32_t;
  HashIndex(std::size_t capacity, const std::int64_t* key_of)
      : length_(2 * capacity), places_(std::make_unique<Place[]>(length_)), key_of_(key_of) {}

  static std::size_t bytes(std::size_t capacity) { return 2 * capacity * sizeof(Place); }
  Token token(std::int64_t key) const { return hash_tag(key); }
  void prefetch(Token tag) const { __builtin_prefetch(&places_[hash_home(tag, length_)]); }
  void prefetch_key(Token tag) const {
    const Place place = places_[hash_home(tag, length_)];
    if (place.slot >= 0) __builtin_prefetch(&key_of_[place.slot]);
  }

  std::int32_t find(Token tag, std::int64_t key) const { return places_[locate(tag, key)].slot; }

  // The slot of key; if it has none, `slot`, which becomes its own: the caller then writes key_of[slot] = key.
  std::int32_t find_or_add(Token tag, std::int64_t key, std::int32_t slot) {
    Place& place = places_[locate(tag, key)];
    if (place.slot < 0) place = {tag, slot};
    return place.slot;
  }

  // The same index for more slots, whose keys will lie in `key_of`.
  HashIndex grown(std::size_t capacity, const std::int64_t* key_of) const {
    HashIndex larger(capacity, key_of);
    for (std::size_t from = 0; from < length_; ++from) {
      if (places_[from].slot < 0) continue;
      std::size_t at = hash_home(places_[from].tag, larger.length_);
      while (larger.places_[at].slot >= 0) at = larger.after(at);
      larger.places_[at] = places_[from];
    }
    return larger;
  }

  // The slot that key had, or -1.
  std::int32_t remove(Token tag, std::int64_t key) {
    std::size_t hole = locate(tag, key);
    const std::int32_t slot = places_[hole].slot;
    if (slot < 0) return -1;
    for (std::size_t next = after(hole); places_[next].slot >= 0; next = after(next)) {
      const std::size_t home = hash_home(places_[next].tag, length_);
      // An entry may move back into the hole only when the hole is on its way from home to where it stands.
      if (distance(home, next) >= distance(hole, next)) {
        places_[hole] = places_[next];
        hole = next;
      }
    }
    places_[hole].slot = -1;
    return slot;
  }

 private:
  struct Place {
    std::uint32_t tag = 0;
    std::int32_t slot = -1;
  };
  std::size_t after(std::size_t place) const { return ++place == length_ ? 0 : place; }
  std::size_t distance(std::size_t from, std::size_t to) const { return to >= from ? to - from : to + length_ - from; }

  // Where key is, or the empty place where it would go. Half the places are empty, so the walk ends.
  std::size_t locate(Token tag, std::int64_t key) const {
    std::size_t at = hash_home(tag, length_);
    for (; places_[at].slot >= 0; at = after(at)) {
      if (places_[at].tag == tag && key_of_[places_[at].slot] == key) break;
    }
    return at;
  }

  std::size_t length_;
  std::unique_ptr<Place[]> places_;
  const std::int64_t* key_of_;
};

// For keys known to be 0..key_space-1: the slot of every possible key, four bytes each. No hash beats it.
class DirectIndex {
 public:
  using Token = std::size_t;
  explicit DirectIndex(std::size_t key_space) : length_(key_space), slots_(new std::int32_t[key_space]) {
    std::fill_n(slots_.get(), key_space, -1);
  }

  static std::size_t bytes(std::size_t key_space) { return key_space * sizeof(std::int32_t); }
  Token token(std::int64_t key) const {
    assert(key >= 0 && static_cast<std::size_t>(key) < length_);
    return static_cast<std::size_t>(key);
  }
  void prefetch(Token key) const { __builtin_prefetch(&slots_[key]); }
  void prefetch_key(Token) const {}
  std::int32_t find(Token at, std::int64_t) const { return slots_[at]; }
  std::int32_t find_or_add(Token at, std::int64_t, std::int32_t slot) {
    if (slots_[at] < 0) slots_[at] = slot;
    return slots_[at];
  }
  std::int32_t remove(Token at, std::int64_t) { return std::exchange(slots_[at], -1); }

 private:
  std::size_t length_;
  std::unique_ptr<std::int32_t[]> slots_;
};

// The distinct keys of one batch, numbered in the order they first appear. Entries carry the number of the batch that
// wrote them, so nothing has to be cleared in between; the key lies in the entry, as a batch's table stays in cache.
class BatchIndex {
 public:
  using Token = std::uint32_t;
  static std::size_t bytes(std::size_t batch) { return batch * (2 * sizeof(Entry) + sizeof(std::int64_t)); }

  void reserve(std::size_t batch) {
    if (batch <= reserved_) return;
    // Free first: the old and the new array need not be held together.
    entries_.reset();
    ordered_.reset();
    reserved_ = 0;
    entries_ = std::make_unique<Entry[]>(2 * batch);
    ordered_ = std::make_unique<std::int64_t[]>(batch);
    reserved_ = batch;
    epoch_ = 0;
  }

  // Fills ordered() and, unless null, inverse; returns how many keys are distinct.
  std::size_t run(const std::int64_t* keys, std::size_t count, std::int64_t* inverse) {
    reserve(count);
    length_ = 2 * count;  // a small batch uses, and warms, only the front of the table
    if (++epoch_ == 0) {
      std::fill_n(entries_.get(), 2 * reserved_, Entry{});
      epoch_ = 1;
    }
    std::int32_t distinct = 0;
    for_each_ahead(*this, keys, count, [&](std::size_t i, Token tag) {
      std::size_t at = hash_home(tag, length_);
      while (entries_[at].epoch == epoch_ && entries_[at].key != keys[i]) at = at + 1 == length_ ? 0 : at + 1;
      Entry& entry = entries_[at];
      if (entry.epoch != epoch_) {
        entry = {keys[i], distinct, epoch_};
        ordered_[distinct++] = keys[i];
      }
      if (inverse != nullptr) inverse[i] = entry.index;
    });
    return static_cast<std::size_t>(distinct);
  }

  const std::int64_t* ordered() const { return ordered_.get(); }
  std::size_t reserved() const { return reserved_; }
  Token token(std::int64_t key) const { return hash_tag(key); }
  void prefetch(Token tag) const { __builtin_prefetch(&entries_[hash_home(tag, length_)], 1); }
  void prefetch_key(Token) const {}

 private:
  struct Entry {
    std::int64_t key = 0;
    std::int32_t index = 0;
    std::uint32_t epoch = 0;  // no batch has number 0
  };

  std::size_t reserved_ = 0;
  std::size_t length_ = 0;
  std::uint32_t epoch_ = 0;
  std::unique_ptr<Entry[]> entries_;
  std::unique_ptr<std::int64_t[]> ordered_;
};

// The result of a call of unique: arrays of exactly the right length.
struct Distinct {
  std::size_t count = 0;
  std::unique_ptr<std::int64_t[]> keys, slots;
};

// The map itself. Free slots are a stack: fresh ones come out in rising order, a slot freed last is used first. Every
// call holds the mutex; callers let go of the GIL before, so that waiting for it never stops the interpreter.
template <class Index>
class SlotMap {
 public:
  template <class MakeIndex>
  SlotMap(std::size_t capacity, MakeIndex make_index)
      : capacity_(capacity), key_of_(std::make_unique<std::int64_t[]>(capacity)), free_(new std::int32_t[capacity]),
        held_(std::make_unique<std::uint64_t[]>(words(capacity))), free_count_(capacity),
        index_(make_index(key_of_.get())) {
    assert(capacity >= 1 && capacity <= std::size_t{std::numeric_limits<std::int32_t>::max()});
    for (std::size_t i = 0; i < capacity; ++i) free_[i] = static_cast<std::int32_t>(capacity - 1 - i);
  }

  std::size_t size() {
    std::lock_guard lock(mutex_);
    return capacity_ - free_count_;
  }
  std::size_t reserved() {
    std::lock_guard lock(mutex_);
    return batch_.reserved();
  }
  // Without the index: its key, its place among the free and a bit for a slot, and the working table of the largest
  // batch.
  static std::size_t bytes(std::size_t capacity, std::size_t batch) {
    const std::size_t words_bytes = words(capacity) * sizeof(std::uint64_t);
    return capacity * (sizeof(std::int64_t) + sizeof(std::int32_t)) + words_bytes + BatchIndex::bytes(batch);
  }
  void reserve(std::size_t batch) {
    std::lock_guard lock(mutex_);
    batch_.reserve(batch);
  }

  // Makes room for more keys; slots stay, and come out in the order of a map that had the room before. Where memory
  // runs out nothing has changed.
  void grow(std::size_t capacity) {
    std::lock_guard lock(mutex_);
    assert(capacity >= capacity_ && capacity <= std::size_t{std::numeric_limits<std::int32_t>::max()});
    const std::size_t added = capacity - capacity_;
    auto key_of = std::make_unique<std::int64_t[]>(capacity);
    std::unique_ptr<std::int32_t[]> free(new std::int32_t[capacity]);
    auto held = std::make_unique<std::uint64_t[]>(words(capacity));
    std::copy_n(key_of_.get(), capacity_, key_of.get());
    std::copy_n(held_.get(), words(capacity_), held.get());
    for (std::size_t i = 0; i < added; ++i) free[i] = static_cast<std::int32_t>(capacity - 1 - i);
    std::copy_n(free_.get(), free_count_, free.get() + added);
    index_ = index_.grown(capacity, key_of.get());
    key_of_ = std::move(key_of);
    free_ = std::move(free);
    held_ = std::move(held);
    free_count_ += added;
    capacity_ = capacity;
  }

  void find(const std::int64_t* keys, std::size_t count, std::int64_t* slots) {
    std::lock_guard lock(mutex_);
    lookup(keys, count, slots);
  }

  // Returns 0, or how many slots the batch needs when there are not so many free: then nothing has changed.
  std::size_t insert(const std::int64_t* keys, std::size_t count, std::int64_t* slots) {
    std::lock_guard lock(mutex_);
    if (count > free_count_) {
      const std::size_t needed = count_new(keys, count);
      if (needed > free_count_) return needed;
    }
    for_each_ahead(index_, keys, count, [&](std::size_t i, typename Index::Token token) {
      const std::int32_t next = free_count_ > 0 ? free_[free_count_ - 1] : -1;
      const std::int32_t slot = index_.find_or_add(token, keys[i], next);
      assert(slot >= 0);
      if (slot == next) {
        key_of_[slot] = keys[i];
        held_[word(slot)] |= bit(slot);
        --free_count_;
      }
      slots[i] = slot;
    });
    return 0;
  }

  void erase(const std::int64_t* keys, std::size_t count, std::int64_t* slots) {
    std::lock_guard lock(mutex_);
    for_each_ahead(index_, keys, count, [&](std::size_t i, typename Index::Token token) {
      const std::int32_t slot = index_.remove(token, keys[i]);
      if (slot >= 0) {
        held_[word(slot)] &= ~bit(slot);
        free_[free_count_++] = slot;
      }
      assert(free_count_ <= capacity_);
      slots[i] = slot;
    });
  }

  Distinct unique(const std::int64_t* keys, std::size_t count, std::int64_t* inverse, bool with_slots) {
    std::lock_guard lock(mutex_);
    Distinct found;
    found.count = batch_.run(keys, count, inverse);
    found.keys.reset(new std::int64_t[found.count]);
    std::copy_n(batch_.ordered(), found.count, found.keys.get());
    if (with_slots) {
      found.slots.reset(new std::int64_t[found.count]);
      lookup(found.keys.get(), found.count, found.slots.get());
    }
    return found;
  }

  // The position of the first slot that holds no key, or `count`.
  std::size_t keys_of(const std::int64_t* slots, std::size_t count, std::int64_t* keys) {
    std::lock_guard lock(mutex_);
    for (std::size_t i = 0; i < count; ++i) {
      assert(slots[i] >= 0 && static_cast<std::size_t>(slots[i]) < capacity_);
      keys[i] = key_of_[slots[i]];
      if (!holds(static_cast<std::int32_t>(slots[i]))) return i;
    }
    return count;
  }

  // Every key with its slot, by rising slot.
  Distinct items() {
    std::lock_guard lock(mutex_);
    Distinct found;
    const std::size_t size = capacity_ - free_count_;
    found.keys.reset(new std::int64_t[size]);
    found.slots.reset(new std::int64_t[size]);
    for (std::size_t at = 0; at < words(capacity_); ++at) {
      for (std::uint64_t left = held_[at]; left != 0; left &= left - 1) {
        const std::size_t slot = 64 * at + static_cast<std::size_t>(std::countr_zero(left));
        found.keys[found.count] = key_of_[slot];
        found.slots[found.count++] = static_cast<std::int64_t>(slot);
      }
    }
    assert(found.count == size);
    return found;
  }

 private:
  void lookup(const std::int64_t* keys, std::size_t count, std::int64_t* slots) const {
    for_each_ahead(index_, keys, count,
                   [&](std::size_t i, typename Index::Token token) { slots[i] = index_.find(token, keys[i]); });
  }
  std::size_t count_new(const std::int64_t* keys, std::size_t count) {
    const std::size_t distinct = batch_.run(keys, count, nullptr);
    std::size_t absent = 0;
    for_each_ahead(index_, batch_.ordered(), distinct, [&](std::size_t i, typename Index::Token token) {
      absent += index_.find(token, batch_.ordered()[i]) < 0;
    });
    return absent;
  }
  static std::size_t words(std::size_t capacity) { return (capacity + 63) / 64; }
  static std::size_t word(std::int32_t slot) { return static_cast<std::size_t>(slot) / 64; }
  static std::uint64_t bit(std::int32_t slot) { return std::uint64_t{1} << (slot % 64); }
  // A free slot keeps a stale key.
  bool holds(std::int32_t slot) const { return (held_[word(slot)] & bit(slot)) != 0; }

  std::mutex mutex_;
  std::size_t capacity_;
  std::unique_ptr<std::int64_t[]> key_of_;
  std::unique_ptr<std::int32_t[]> free_;
  std::unique_ptr<std::uint64_t[]> held_;  // a bit for each slot: whether it holds a key
  std::size_t free_count_;
  Index index_;
  BatchIndex batch_;
};

}  // namespace memhier
