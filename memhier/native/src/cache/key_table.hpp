// int64 keys to small dense numbers, and back: the slot map's index, for tables that may have to grow.
#pragma once

#include <algorithm>
#include <cassert>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "cache/slotmap.hpp"

namespace memhier {

class KeyTable {
 public:
  using Token = HashIndex::Token;
  static constexpr std::uint32_t none = 0xffffffff;

  explicit KeyTable(std::size_t room) { make_room(std::max<std::size_t>(room, 1)); }

  std::size_t size() const { return size_; }
  std::size_t bytes() const { return HashIndex::bytes(room_) + keys_.capacity() * sizeof(std::int64_t); }

  // Numbers handed out so far are below this; it only grows.
  std::size_t numbers() const { return keys_.size(); }

  std::int64_t key(std::uint32_t number) const {
    assert(number < keys_.size());
    return keys_[number];
  }

  Token token(std::int64_t key) const { return index_->token(key); }
  void prefetch(Token token) const { index_->prefetch(token); }
  void prefetch_key(Token token) const { index_->prefetch_key(token); }

  void prefetch_number(std::uint32_t number) const { __builtin_prefetch(&keys_[number]); }

  std::uint32_t find(std::int64_t key) const { return find(token(key), key); }
  std::uint32_t find(Token token, std::int64_t key) const {
    return static_cast<std::uint32_t>(index_->find(token, key));  // -1 becomes none
  }

  // The key is not in the table. Grows a full table.
  std::uint32_t insert(std::int64_t key) {
    if (size_ == room_) make_room(room_ + room_ / 16 + 1);
    std::uint32_t number = free_;
    if (number != none) {
      free_ = static_cast<std::uint32_t>(keys_[number]);
    } else {
      number = static_cast<std::uint32_t>(keys_.size());
      keys_.emplace_back();
    }
    index_->find_or_add(token(key), key, static_cast<std::int32_t>(number));
    keys_[number] = key;
    ++size_;
    return number;
  }

  void erase(std::uint32_t number) {
    index_->remove(token(key(number)), key(number));
    keys_[number] = free_;  // a free number's key links to the number freed before it
    free_ = number;
    --size_;
  }

 private:
  // No number is free when this runs: the table was just made, or is full. Where memory runs out nothing has changed.
  void make_room(std::size_t room) {
    std::vector<std::int64_t> keys;
    keys.reserve(room);
    keys.assign(keys_.begin(), keys_.end());
    auto index = std::make_unique<HashIndex>(room, keys.data());
    for (std::size_t number = 0; number < keys.size(); ++number)
      index->find_or_add(index->token(keys[number]), keys[number], static_cast<std::int32_t>(number));
    keys_.swap(keys);
    index_ = std::move(index);
    room_ = room;
  }

  std::size_t room_ = 0;
  std::vector<std::int64_t> keys_;  // by number; never moves while the index points into it
  std::unique_ptr<HashIndex> index_;
  std::size_t size_ = 0;
  std::uint32_t free_ = none;
};

}  // namespace memhier
