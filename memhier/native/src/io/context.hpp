// Everything one batch needs while it runs: an engine, page buffers, and the requests being planned.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "cache/buffer_pool.hpp"
#include "io/engine.hpp"
#include "io/plan.hpp"
#include "io/system.hpp"

namespace memhier {

// Why a batch could not be read; memhier.io.faults turns it into an exception.
struct Fault {
  enum class Kind { error, cut_short, checksum, range, closed, layout };
  Kind kind;
  const Source* source = nullptr;  // none: the engine itself
  std::int64_t first = 0, second = 0, third = 0;
};

// Told of a range that lies within one page as soon as this is read: its number, and its bytes, which stay until it
// returns.
using Landed = std::function<void(std::uint32_t, const std::byte*)>;

// One call. The caller keeps all of it alive, and the files open, until read() returns.
struct Batch {
  std::span<const Source* const> sources;  // by handle; null where there is none
  const std::int32_t* files;               // [count], or null: `file` for all
  std::int32_t file;
  const std::int64_t* offsets;  // [count]
  std::size_t count;
  std::size_t length;  // bytes of each range
  std::byte* out;      // [count, length], or null where `landed` takes them
  float* latency;      // [count] or null
  const Landed* landed = nullptr;
  BufferPool* pool = nullptr;  // of pages that need not be read, and that takes in those read; or null
};

// Runs a batch, whose sources and pool it knows.
using ReadBatch = std::function<std::optional<Fault>(Batch)>;

// READ_TALLY of memhier.io.read_arguments: I/Os, and the pages and bytes that they read.
struct ReadTally {
  std::int64_t reads = 0, pages = 0, bytes = 0;

  ReadTally& operator+=(const ReadTally& more) {
    reads += more.reads;
    pages += more.pages;
    bytes += more.bytes;
    return *this;
  }
};
static_assert(sizeof(ReadTally) == 24 && offsetof(ReadTally, pages) == 8 && offsetof(ReadTally, bytes) == 16);

class Context {
 public:
  // A read has so many pages at most. `buffered` serves the files that `direct` would block on; null if there are none.
  Context(unsigned depth, unsigned run_pages, std::unique_ptr<Engine> direct, std::unique_ptr<Engine> buffered);

  // Reads requests [start, start + window()) of a batch. When it returns nothing is in flight.
  std::optional<Fault> read_window(const Batch& batch, std::size_t start, ReadTally& tally);

  // Hands over the reads of a batch and waits for none; false, with nothing begun, if they are too many for that. The
  // batch stays where it is until land_all() has returned.
  bool begin(const Batch& batch);
  // Lands the reads that have finished; whether those were the last.
  bool land_finished() { return free_ios_.size() == ios_.size() || advance(0); }
  // Waits for the rest of a batch that was begun.
  std::optional<Fault> land_all(ReadTally& tally);

  std::size_t window() const { return std::min(kWindowRequests, kWindowPerRead * ios_.size()); }

  // May be asked while a batch runs in another thread.
  std::size_t memory_bytes() const { return fixed_bytes_ + plan_bytes_.load(std::memory_order_relaxed); }
  // The same once a window is full.
  std::size_t planned_bytes() const { return fixed_bytes_ + window() * sizeof(Request); }

 private:
  std::optional<Fault> plan_window(const Batch& batch, std::size_t start);
  void set_out(const Batch& batch, std::size_t start);
  bool advance(std::size_t least);
  void reset();
  void take_held();
  void ask_for(const Request& request, std::uint32_t frame) const;
  void issue();
  std::size_t worth_waiting_for() const;
  bool prepare(const Run& run);
  void claim_rows(Io& io);
  void land(Io& io);
  bool verify(const Io& io);
  void deliver(const Io& io);
  void deliver(const Request& request, const std::uint32_t* frames);
  void hold(const Io& io);
  void release(Io& io);
  void blame(Fault fault);

  std::byte* row(std::uint32_t index) const { return batch_->out + std::size_t{index} * batch_->length; }
  bool in_arena(const std::byte* page) const { return page >= arena_.data() && page < arena_.data() + arena_.bytes(); }

  std::unique_ptr<Engine> direct_, buffered_;
  const std::size_t run_pages_;
  Mapping arena_;
  std::vector<std::byte*> free_pages_;
  std::vector<Io> ios_;
  std::vector<std::byte*> io_pages_;  // of each of them, `run_pages_`
  std::vector<iovec> io_parts_;
  std::vector<Io*> free_ios_;
  std::vector<Io*> finished_;
  std::vector<Request> requests_;
  std::size_t fixed_bytes_ = 0;
  std::atomic<std::size_t> plan_bytes_ = 0;

  // The batch being read.
  const Batch* batch_ = nullptr;
  bool lands_in_rows_ = false;
  Plan plan_{1, 1};
  std::optional<Run> waiting_;  // a run that found no page buffers
  Engine* engine_ = nullptr;
  Clock::time_point now_;
  ReadTally tally_;
  std::optional<Fault> fault_;
};

}  // namespace memhier
