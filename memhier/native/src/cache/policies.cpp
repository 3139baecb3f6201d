// The orders of LRU, LFU and S3-FIFO, each equal to the one in its Python file.
#include "bind/module.hpp"
#include "cache/cache.hpp"
#include "cache/chain.hpp"

#include <algorithm>
#include <cassert>

namespace memhier {
namespace {

class LRUOrder {
 public:
  explicit LRUOrder(std::size_t capacity) : links_(capacity) {}

  std::size_t bytes() const { return links_.capacity() * sizeof(Link); }

  void prefetch(std::uint32_t number) const { __builtin_prefetch(&links_[number], 1); }
  void prefetch_neighbours(std::uint32_t number) const { memhier::prefetch_neighbours(links_, number); }

  void enter(std::uint32_t number, std::int64_t) { chain_.append(links_, number); }
  void leave(std::uint32_t number) { chain_.remove(links_, number); }

  void touch(std::uint32_t number) {
    if (chain_.newest == number) return;
    chain_.remove(links_, number);
    chain_.append(links_, number);
  }

  template <class Held, class Emit>
  void evict(std::size_t count, Held held, Emit emit) {
    for (std::uint32_t number = chain_.oldest; count > 0;) {
      assert(number != Chain::none);
      const std::uint32_t victim = number;
      number = links_[victim].newer;
      if (held(victim)) continue;
      chain_.remove(links_, victim);
      emit(victim);
      --count;
    }
  }

 private:
  std::vector<Link> links_;
  Chain chain_;
};

// Buckets of keys with equal counts, in a queue from the smallest count to the greatest.
class LFUOrder {
 public:
  explicit LFUOrder(std::size_t capacity) : links_(capacity), bucket_of_(capacity) {}

  std::size_t bytes() const {
    return links_.capacity() * sizeof(Link) + bucket_of_.capacity() * sizeof(std::uint32_t) +
           buckets_.capacity() * sizeof(Bucket) + order_.capacity() * sizeof(Link);
  }

  void prefetch(std::uint32_t number) const {
    __builtin_prefetch(&links_[number], 1);
    __builtin_prefetch(&bucket_of_[number], 1);
  }
  void prefetch_neighbours(std::uint32_t number) const { memhier::prefetch_neighbours(links_, number); }

  void enter(std::uint32_t number, std::int64_t) {
    const bool fresh = by_count_.empty() || buckets_[by_count_.oldest].uses != 1;
    put(number, fresh ? make_after(Chain::none, 1) : by_count_.oldest);
  }

  void touch(std::uint32_t number) {
    const std::uint32_t from = bucket_of_[number];
    const std::uint64_t uses = buckets_[from].uses + 1;
    std::uint32_t to = order_[from].newer;
    if (to == Chain::none || buckets_[to].uses != uses) {
      Chain& keys = buckets_[from].keys;
      if (keys.oldest == number && keys.newest == number) {  // alone: its bucket counts on, and stays in its place
        buckets_[from].uses = uses;
        return;
      }
      to = make_after(from, uses);
    }
    leave(number);
    put(number, to);
  }

  void leave(std::uint32_t number) {
    const std::uint32_t bucket = bucket_of_[number];
    buckets_[bucket].keys.remove(links_, number);
    if (!buckets_[bucket].keys.empty()) return;
    by_count_.remove(order_, bucket);
    order_[bucket].newer = free_;
    free_ = bucket;
  }

  template <class Held, class Emit>
  void evict(std::size_t count, Held held, Emit emit) {
    std::uint32_t bucket = by_count_.oldest;
    while (count > 0) {
      assert(bucket != Chain::none);
      const std::uint32_t next_bucket = order_[bucket].newer;
      for (std::uint32_t number = buckets_[bucket].keys.oldest; number != Chain::none && count > 0;) {
        const std::uint32_t victim = number;
        number = links_[victim].newer;
        if (held(victim)) continue;
        leave(victim);
        emit(victim);
        --count;
      }
      bucket = next_bucket;
    }
  }

 private:
  struct Bucket {
    std::uint64_t uses;
    Chain keys;
  };

  void put(std::uint32_t number, std::uint32_t bucket) {
    bucket_of_[number] = bucket;
    buckets_[bucket].keys.append(links_, number);
  }

  // An empty bucket behind `before` in the queue of buckets, or at its front.
  std::uint32_t make_after(std::uint32_t before, std::uint64_t uses) {
    std::uint32_t bucket = free_;
    if (bucket != Chain::none) {
      free_ = order_[bucket].newer;
      buckets_[bucket] = {uses, {}};
    } else {
      bucket = static_cast<std::uint32_t>(buckets_.size());
      buckets_.push_back({uses, {}});
      order_.emplace_back();
    }
    const std::uint32_t after = before == Chain::none ? by_count_.oldest : order_[before].newer;
    order_[bucket] = {before, after};
    (before == Chain::none ? by_count_.oldest : order_[before].newer) = bucket;
    (after == Chain::none ? by_count_.newest : order_[after].older) = bucket;
    return bucket;
  }

  std::vector<Link> links_;               // by key's number: within its bucket, from least recently used
  std::vector<std::uint32_t> bucket_of_;  // by key's number
  std::vector<Bucket> buckets_;
  std::vector<Link> order_;  // by bucket
  Chain by_count_;
  std::uint32_t free_ = Chain::none;  // buckets not in use, linked by `newer`
};

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

}  // namespace
}  // namespace memhier

void register_policies(nanobind::module_& m) {
  memhier::bind_cache<memhier::LRUOrder>(m, "LRUPolicy");
  memhier::bind_cache<memhier::LFUOrder>(m, "LFUPolicy");
  memhier::bind_cache<memhier::S3FIFOOrder>(m, "S3FIFOPolicy");
}
