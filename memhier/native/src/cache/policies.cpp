// The orders of LRU, LFU and S3-FIFO, each equal to the one in its Python file.
#include "bind/module.hpp"
#include "cache/cache.hpp"
#include "cache/chain.hpp"
#include "cache/s3fifo.hpp"

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

}  // namespace
}  // namespace memhier

void register_policies(nanobind::module_& m) {
  memhier::bind_cache<memhier::LRUOrder>(m, "LRUPolicy");
  memhier::bind_cache<memhier::LFUOrder>(m, "LFUPolicy");
  memhier::bind_cache<memhier::S3FIFOOrder>(m, "S3FIFOPolicy");
}
