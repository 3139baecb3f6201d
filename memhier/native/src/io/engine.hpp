// The interface of an engine, which does many reads at a time: io_uring, Linux AIO, or a pool of threads.
#pragma once

#include <sys/uio.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace memhier {

constexpr std::size_t kPageBytes = 4096;

using Clock = std::chrono::steady_clock;

// An open file as the core sees it. Python owns the descriptor and the checksums.
struct Source {
  int fd;
  bool direct;
  bool drops_cache;                // buffered, but the page cache should not fill up
  std::uint64_t length;            // committed bytes
  const std::uint32_t* checksums;  // one per page, or null
  std::size_t alignment = 1;       // of memory that its pages may land in
  std::int64_t held_as = -1;       // its number in the pool of pages held in DRAM; -1: they are not
};

// One read of neighbouring pages. Its parts must stay put until it is finished: the kernel may look at them late.
struct Io {
  const Source* source;
  std::uint64_t offset;  // of the first page
  std::uint32_t pages;
  std::uint32_t wanted;   // bytes the file must have; less than the pages only at its end
  std::uint32_t done;     // bytes landed by earlier, short reads
  std::uint32_t resumed;  // where in the run the read now on its way starts
  std::uint32_t retries;
  std::uint32_t first_request;  // the sorted requests that touch these pages
  std::uint32_t stop_request;
  std::uint32_t part_count;
  std::int64_t result;  // bytes read, or minus the error number
  Clock::time_point submitted;
  std::byte** page;  // where each page lands: room for the longest read, which the context holds
  iovec* parts;      // the same, neighbours joined, from `resumed` on

  // Lays out the parts for the bytes still missing.
  void aim();
};

class Engine {
 public:
  virtual ~Engine() = default;

  virtual const char* name() const = 0;
  // Says where most reads will land, before the first.
  virtual void note_arena(std::byte* /*start*/, std::size_t /*bytes*/) {}
  // Takes a read that was aimed. At most the engine's depth may be queued or in flight.
  virtual void queue(Io& io) = 0;
  // Hands over the queued reads, waits until at least `least` reads in flight are finished, and appends all of these;
  // or sooner, when something is refused. Returns 0, or the error that kept queued reads from being handed over, and
  // then nothing is in flight.
  virtual int submit_and_wait(std::size_t least, std::vector<Io*>& finished) = 0;
  // Forgets the queued reads that were not handed over.
  virtual void withdraw() = 0;
  virtual std::size_t in_flight() const = 0;
  virtual std::size_t memory_bytes() const = 0;
};

class ThreadPool;

// Each throws std::system_error where the system does not allow it.
std::unique_ptr<Engine> make_uring_engine(unsigned depth);
std::unique_ptr<Engine> make_aio_engine(unsigned depth);
std::unique_ptr<Engine> make_thread_engine(std::shared_ptr<ThreadPool> pool, unsigned depth);

// Threads start with the first read.
std::shared_ptr<ThreadPool> make_thread_pool(unsigned depth);
std::size_t memory_bytes_of(const ThreadPool& pool);
std::size_t planned_bytes_of(const ThreadPool& pool);  // once all have started

}  // namespace memhier
