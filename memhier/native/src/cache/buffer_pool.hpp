// Pages of files held in DRAM: a read takes them from here in place of the device. S3-FIFO says which leave, so that
// one pass over many pages does not push out those in use. memhier/io/buffer_pool.py is the same in Python.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <cassert>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <vector>

#include "cache/key_table.hpp"
#include "cache/s3fifo.hpp"
#include "io/engine.hpp"
#include "io/system.hpp"

namespace memhier {

// Neighbouring pages of a file: the key of the first, and their number.
struct PageRun {
  std::int64_t key;
  std::uint32_t pages;
};

// For many threads. The number of a key is that of the frame where its page lies. Nothing but `add_file` takes memory
// once the pool is made.
class BufferPool {
 public:
  static constexpr std::uint32_t none = KeyTable::none;

  // Throws std::system_error, std::bad_alloc.
  explicit BufferPool(std::size_t capacity)
      : capacity_(capacity), room_(capacity), frames_(Mapping::reserved(capacity * kPageBytes)), table_(capacity),
        order_(capacity), pins_(capacity) {}

  // The key of a page of a file that the reader gave this number.
  static std::int64_t key_of(std::int64_t file, std::uint64_t page) {
    return file << kPageBits | static_cast<std::int64_t>(page);
  }

  std::size_t capacity() const { return capacity_; }

  std::size_t room() const {
    const std::lock_guard lock(mutex_);
    return room_;
  }
  std::size_t size() const {
    const std::lock_guard lock(mutex_);
    return table_.size();
  }
  std::int64_t hits() const {
    const std::lock_guard lock(mutex_);
    return hits_;
  }
  // Of all frames that it may fill.
  std::size_t bytes() const {
    const std::lock_guard lock(mutex_);
    return sizeof *this + room_ * kPageBytes + table_.bytes() + order_.bytes() +
           pins_.capacity() * sizeof(std::uint32_t) + files_.capacity() * sizeof(std::int64_t);
  }

  // Holds `pages` pages at most from now on, but those that are pinned.
  void set_room(std::size_t pages) {
    const std::lock_guard lock(mutex_);
    room_ = std::min(pages, capacity_);
    if (table_.size() > room_) evict(table_.size() - room_, true);
  }

  // Pages of a file enter from now on; and none any more, and those there leave.
  void add_file(std::int64_t file) {
    const std::lock_guard lock(mutex_);
    files_.insert(std::lower_bound(files_.begin(), files_.end(), file), file);
  }
  void drop_file(std::int64_t file) {
    const std::lock_guard lock(mutex_);
    const auto place = std::lower_bound(files_.begin(), files_.end(), file);
    if (place == files_.end() || *place != file) return;
    files_.erase(place);
    for (std::uint32_t frame = 0; frame < table_.numbers(); ++frame) {
      // The place of a free frame holds no key, and finds another frame or none.
      const std::int64_t key = table_.key(frame);
      if (key >> kPageBits != file || table_.find(key) != frame) continue;
      if (pins_[frame] > 0) {  // of a call that began before, which lets it go
        ++orphans_;
        continue;
      }
      order_.leave(frame);
      release(frame, true);
    }
  }

  // Pins the pages of each run that are all there: frames [count, span], `none` first where one is not. Runs of a
  // file ascend; a page that several of them have counts as used once.
  void pin(const PageRun* runs, std::size_t count, std::size_t span, std::uint32_t* frames) {
    const std::lock_guard lock(mutex_);
    for (std::size_t i = 0; i < count; ++i) table_.prefetch(table_.token(runs[i].key));
    std::int64_t last = -1;
    for (std::size_t i = 0; i < count; ++i) {
      std::uint32_t* found = frames + i * span;
      std::uint32_t pages = 0;
      while (pages < runs[i].pages && (found[pages] = table_.find(runs[i].key + pages)) != none) ++pages;
      if (pages < runs[i].pages) {
        found[0] = none;
        continue;
      }
      for (std::uint32_t page = 0; page < pages; ++page) {
        pinned_ += pins_[found[page]]++ == 0;
        const std::int64_t key = runs[i].key + page;
        if (key <= last && key >> kPageBits == last >> kPageBits) continue;
        last = key;
        order_.touch(found[page]);
        ++hits_;
      }
    }
  }

  void unpin(const PageRun* runs, std::size_t count, std::size_t span, const std::uint32_t* frames) {
    const std::lock_guard lock(mutex_);
    for (std::size_t i = 0; i < count; ++i) {
      const std::uint32_t* found = frames + i * span;
      for (std::uint32_t page = 0; found[0] != none && page < runs[i].pages; ++page) {
        if (--pins_[found[page]] > 0) continue;
        --pinned_;
        if (orphans_ == 0 || is_open(runs[i].key)) continue;
        order_.leave(found[page]);
        release(found[page], true);
        --orphans_;
      }
    }
  }

  // Of a pinned frame.
  const std::byte* page(std::uint32_t frame) const { return frames_.data() + std::size_t{frame} * kPageBytes; }

  // Takes in a checked page, unless it is there, its file is gone, or all frames are pinned.
  void put(std::int64_t key, const std::byte* page) {
    const std::lock_guard lock(mutex_);
    if (room_ == 0 || !is_open(key)) return;
    if (table_.find(key) != none) return;
    if (table_.size() >= room_) evict(table_.size() + 1 - room_, false);
    if (table_.size() >= room_) return;
    const std::uint32_t frame = table_.insert(key);
    order_.enter(frame, key);
    std::memcpy(frames_.data() + std::size_t{frame} * kPageBytes, page, kPageBytes);
  }

 private:
  static constexpr int kPageBits = 40;

  bool is_open(std::int64_t key) const { return std::binary_search(files_.begin(), files_.end(), key >> kPageBits); }

  // Lets `count` pages go, fewer where the others are pinned.
  void evict(std::size_t count, bool give_back) {
    count = std::min(count, table_.size() - pinned_);
    if (count > 0)
      order_.evict(
          count, [this](std::uint32_t frame) { return pins_[frame] > 0; },
          [&](std::uint32_t frame) { release(frame, give_back); });
  }

  void release(std::uint32_t frame, bool give_back) {
    table_.erase(frame);
    if (give_back) ::madvise(frames_.data() + std::size_t{frame} * kPageBytes, kPageBytes, MADV_DONTNEED);
  }

  const std::size_t capacity_;
  mutable std::mutex mutex_;
  std::size_t room_;
  Mapping frames_;
  KeyTable table_;
  S3FIFOOrder order_;
  std::vector<std::uint32_t> pins_;  // by frame
  std::size_t pinned_ = 0;           // frames with pins
  std::size_t orphans_ = 0;          // those of them whose file was dropped
  std::vector<std::int64_t> files_;  // ascending
  std::int64_t hits_ = 0;            // pages
};

}  // namespace memhier
