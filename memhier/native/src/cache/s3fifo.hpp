// The order of S3-FIFO, equal to the one in memhier/policies/s3fifo.py; cache.hpp says how an Order behaves.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "cache/chain.hpp"
#include "cache/key_table.hpp"

namespace memhier {

class S3FIFOOrder {
 public:
  explicit S3FIFOOrder(std::size_t capacity)
      : small_target_(std::max<std::size_t>(1, capacity / 10)), main_target_(capacity - small_target_),
        links_(capacity), entries_(capacity), ghosts_(main_target_ + 1), ghost_links_(main_target_ + 1) {}

  std::size_t bytes() const {
    return (links_.capacity() + ghost_links_.capacity()) * sizeof(Link) + entries_.capacity() * sizeof(Entry) +
           ghosts_.bytes();
  }

  void prefetch(std::uint32_t number) const { __builtin_prefetch(&entries_[number], 1); }
  void prefetch_neighbours(std::uint32_t) const {}

  void enter(std::uint32_t number, std::int64_t key) {
    entries_[number] = {key, 0, false};
    const std::uint32_t ghost = ghosts_.find(key);
    if (ghost == KeyTable::none) {
      push(small_, number);
      return;
    }
    drop_ghost(ghost);
    entries_[number].in_main = true;
    push(main_, number);
  }

  void touch(std::uint32_t number) { entries_[number].uses = std::min(entries_[number].uses + 1, kUsesMax); }

  void leave(std::uint32_t number) { pull(entries_[number].in_main ? main_ : small_, number); }

  template <class Held, class Emit>
  void evict(std::size_t count, Held held, Emit emit) {
    bool stuck = false;  // the rest of the small queue is held: the paper has no such case, main takes its turns
    std::size_t gone = 0;
    const auto count_and_emit = [&](std::uint32_t victim) {
      ++gone;
      emit(victim);
    };
    while (gone < count) {
      const bool small = small_.size >= small_target_ && !stuck;
      if (small || !evict_main(held, count_and_emit)) stuck = !evict_small(held, count_and_emit);
    }
  }

 private:
  static constexpr int kUsesMax = 3;

  struct Queue {
    Chain chain;
    std::size_t size = 0;
  };
  struct Entry {
    std::int64_t key;
    int uses;
    bool in_main;
  };

  void push(Queue& queue, std::uint32_t number) {
    queue.chain.append(links_, number);
    ++queue.size;
  }

  std::uint32_t pull(Queue& queue, std::uint32_t number) {
    queue.chain.remove(links_, number);
    --queue.size;
    return number;
  }

  template <class Held, class Emit>
  bool evict_small(Held held, Emit emit) {
    for (std::size_t passed = 0; passed < small_.size;) {  // held keys, which go round
      const std::uint32_t number = pull(small_, small_.chain.oldest);
      Entry& entry = entries_[number];
      if (held(number)) {
        push(small_, number);
        ++passed;
      } else if (entry.uses > 1) {
        entry.uses = 0;
        entry.in_main = true;
        push(main_, number);
        if (main_.size > main_target_) evict_main(held, emit);
      } else {
        add_ghost(entry.key);
        emit(number);
        return true;
      }
    }
    return false;
  }

  template <class Held, class Emit>
  bool evict_main(Held held, Emit emit) {
    for (std::size_t passed = 0; passed < main_.size;) {  // held keys in a row
      const std::uint32_t number = pull(main_, main_.chain.oldest);
      Entry& entry = entries_[number];
      if (held(number)) {
        push(main_, number);
        ++passed;
      } else if (entry.uses > 0) {
        --entry.uses;
        push(main_, number);
        passed = 0;
      } else {
        emit(number);
        return true;
      }
    }
    return false;
  }

  void add_ghost(std::int64_t key) {
    if (main_target_ == 0) return;
    if (ghosts_.size() == main_target_) drop_ghost(ghost_chain_.oldest);
    ghost_chain_.append(ghost_links_, ghosts_.insert(key));
  }

  void drop_ghost(std::uint32_t ghost) {
    ghost_chain_.remove(ghost_links_, ghost);
    ghosts_.erase(ghost);
  }

  const std::size_t small_target_;
  const std::size_t main_target_;
  std::vector<Link> links_;  // by key's number: within its queue, from oldest to newest
  std::vector<Entry> entries_;
  Queue small_;
  Queue main_;
  KeyTable ghosts_;
  std::vector<Link> ghost_links_;
  Chain ghost_chain_;
};

}  // namespace memhier
