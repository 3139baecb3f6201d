// The loop around every read: plan, issue, wait, verify, deliver.
#include "io/context.hpp"

#include <fcntl.h>

#include <array>
#include <cassert>
#include <cerrno>
#include <cstring>

#include "io/crc32c.hpp"

namespace memhier {
namespace {

// Direct reads must start on a block; no device memhier can meet has larger ones than a short read may end at.
constexpr std::uint32_t kBlockBytes = 512;
constexpr std::uint32_t kRetriesMax = 1000;
constexpr std::size_t kPagesPerWait = 256;
constexpr std::size_t kPinned = 64;  // pages of the pool at a time
constexpr std::size_t kLine = 64;    // bytes of the processor's caches

// Errors that say nothing of the file. io_uring cancels a read when a signal meets the start of a kernel worker for it.
bool is_passing(std::int64_t result) { return result == -EAGAIN || result == -EINTR || result == -ECANCELED; }

}  // namespace

void Io::aim() {
  resumed = source->direct ? done / kBlockBytes * kBlockBytes : done;
  part_count = 0;
  std::byte* end = nullptr;
  for (std::uint32_t at = resumed; at < pages * kPageBytes;) {
    const std::uint32_t within = at % kPageBytes;
    std::byte* start = page[at / kPageBytes] + within;
    const std::size_t size = kPageBytes - within;
    if (start == end)
      parts[part_count - 1].iov_len += size;
    else
      parts[part_count++] = {start, size};
    end = start + size;
    at += static_cast<std::uint32_t>(size);
  }
}

Context::Context(unsigned depth, unsigned run_pages, std::unique_ptr<Engine> direct, std::unique_ptr<Engine> buffered)
    : direct_(std::move(direct)), buffered_(std::move(buffered)), run_pages_(run_pages),
      arena_(Mapping::anonymous(std::size_t{std::max(depth, run_pages)} * kPageBytes)), ios_(depth),
      io_pages_(depth * run_pages_), io_parts_(depth * run_pages_) {
  for (std::size_t i = 0; i < ios_.size(); ++i) {
    ios_[i].page = io_pages_.data() + i * run_pages_;
    ios_[i].parts = io_parts_.data() + i * run_pages_;
  }
  free_pages_.reserve(arena_.bytes() / kPageBytes);
  free_ios_.reserve(depth);
  finished_.reserve(depth);
  reset();
  direct_->note_arena(arena_.data(), arena_.bytes());
  fixed_bytes_ = arena_.bytes() + free_pages_.capacity() * sizeof(std::byte*) +
                 ios_.capacity() * (sizeof(Io) + run_pages_ * (sizeof(std::byte*) + sizeof(iovec))) +
                 (free_ios_.capacity() + finished_.capacity()) * sizeof(Io*) + direct_->memory_bytes() +
                 (buffered_ ? buffered_->memory_bytes() : 0);
}

// Takes back every buffer; only while nothing is in flight.
void Context::reset() {
  free_pages_.clear();
  free_ios_.clear();
  for (std::size_t at = arena_.bytes(); at > 0; at -= kPageBytes)
    free_pages_.push_back(arena_.data() + at - kPageBytes);
  for (Io& io : ios_) free_ios_.push_back(&io);
}

std::optional<Fault> Context::read_window(const Batch& batch, std::size_t start, ReadTally& tally) {
  set_out(batch, start);
  return land_all(tally);
}

// Plans a window and queues the first reads.
void Context::set_out(const Batch& batch, std::size_t start) {
  assert(free_ios_.size() == ios_.size());
  reset();  // in order, so that neighbouring pages land side by side: a read of one part need not look up its pages
  batch_ = &batch;
  lands_in_rows_ = batch.out != nullptr && batch.length >= kPageBytes;
  tally_ = {};
  engine_ = direct_.get();
  fault_ = plan_window(batch, start);
  if (!fault_) issue();
}

bool Context::begin(const Batch& batch) {
  if (batch.count > window()) return false;
  set_out(batch, 0);
  if (!fault_ && (waiting_ || !plan_.finished())) {
    engine_->withdraw();
    reset();
    return false;
  }
  if (free_ios_.size() < ios_.size()) advance(0);
  return true;
}

std::optional<Fault> Context::land_all(ReadTally& tally) {
  while (free_ios_.size() < ios_.size()) advance(worth_waiting_for());
  tally += tally_;
  return fault_;
}

// Hands over the queued reads, waits for at least so many reads, lands the finished ones and queues others; whether
// nothing is left.
bool Context::advance(std::size_t least) {
  finished_.clear();
  if (const int error = engine_->submit_and_wait(least, finished_); error != 0) {
    assert(engine_->in_flight() == 0);
    engine_->withdraw();
    reset();
    blame({Fault::Kind::error, nullptr, error});
    return true;
  }
  if (batch_->latency != nullptr) now_ = Clock::now();
  for (Io* io : finished_) land(*io);
  if (!fault_) issue();
  return free_ios_.size() == ios_.size();
}

// How many reads to wait for. Every wait may cost a switch of threads, so several are fetched at a time: an eighth of
// the queue while there is more to queue, which keeps the device busy; at the end all but an eighth, so that most rows
// are delivered while the last reads are on their way. No more than a mebibyte though: checking and copying it takes as
// long as many switches, and the device should be busy meanwhile.
std::size_t Context::worth_waiting_for() const {
  if (batch_->latency != nullptr) return 1;  // each read's time is asked for
  const std::size_t waited_for = ios_.size() - free_ios_.size();
  const bool more = !fault_ && (waiting_ || !plan_.finished());
  const std::size_t most = kPagesPerWait / std::min(batch_->length / kPageBytes + 1, run_pages_);
  return std::clamp<std::size_t>(more ? waited_for / 8 : waited_for - waited_for / 8, 1, most);
}

// Checks every request again, although Python has: the arrays are the caller's and may have changed since.
std::optional<Fault> Context::plan_window(const Batch& batch, std::size_t start) {
  const std::size_t stop = std::min(batch.count, start + window());
  requests_.clear();
  requests_.reserve(stop - start);
  plan_bytes_.store(requests_.capacity() * sizeof(Request), std::memory_order_relaxed);
  for (std::size_t row = start; row < stop; ++row) {
    const std::int64_t file = batch.files == nullptr ? batch.file : batch.files[row];
    const std::int64_t offset = batch.offsets[row];
    const Source* source =
        file >= 0 && static_cast<std::size_t>(file) < batch.sources.size() ? batch.sources[file] : nullptr;
    if (source == nullptr || offset < 0 || batch.length > source->length ||
        static_cast<std::uint64_t>(offset) > source->length - batch.length)
      return Fault{Fault::Kind::range, nullptr, static_cast<std::int64_t>(row)};
    requests_.push_back(
        {static_cast<std::uint64_t>(offset), static_cast<std::uint32_t>(file), static_cast<std::uint32_t>(row)});
    if (batch.out == nullptr && static_cast<std::uint64_t>(offset) % kPageBytes + batch.length > kPageBytes)
      return Fault{Fault::Kind::range, nullptr, static_cast<std::int64_t>(row)};
    if (batch.latency != nullptr) batch.latency[row] = 0;
  }
  Plan::sort(requests_);
  if (batch.pool != nullptr) take_held();
  plan_ = Plan(batch.length, run_pages_);
  plan_.start(requests_);
  waiting_.reset();
  return std::nullopt;
}

// Delivers the requests whose pages are all in the pool, and leaves the others in their order. Some at a time, so that
// few pages are pinned; not those that want more pages than that.
void Context::take_held() {
  const std::size_t span = (batch_->length + 2 * kPageBytes - 2) / kPageBytes;  // pages of a request, at most
  if (span > kPinned) return;
  const std::size_t step = kPinned / span, total = requests_.size();
  std::size_t kept = 0;
  for (std::size_t at = 0; at < total; at += step) {
    const auto some = std::span(requests_).subspan(at, std::min(step, total - at));
    std::array<PageRun, kPinned> runs;
    std::array<std::uint32_t, kPinned> frames;
    for (std::size_t i = 0; i < some.size(); ++i) {
      const std::int64_t file = batch_->sources[some[i].file]->held_as;
      const std::uint64_t first = some[i].first_page();
      const auto pages = static_cast<std::uint32_t>(some[i].last_page(batch_->length) + 1 - first);
      runs[i] = {file < 0 ? -1 : BufferPool::key_of(file, first), pages};
    }
    batch_->pool->pin(runs.data(), some.size(), span, frames.data());
    for (std::size_t i = 0; i < some.size(); ++i) {
      const Request request = some[i];
      if (i == 0) ask_for(some[0], frames[0]);
      if (i + 1 < some.size()) ask_for(some[i + 1], frames[(i + 1) * span]);  // while this one is looked at
      if (frames[i * span] == BufferPool::none)
        requests_[kept++] = request;
      else
        deliver(request, &frames[i * span]);
    }
    batch_->pool->unpin(runs.data(), some.size(), span, frames.data());
  }
  requests_.resize(kept);
}

// Asks for what a request wants of its first page, if the pool holds it.
void Context::ask_for(const Request& request, std::uint32_t frame) const {
  if (frame == BufferPool::none) return;
  const std::byte* const page = batch_->pool->page(frame);
  const std::size_t first = request.offset % kPageBytes, stop = std::min(kPageBytes, first + batch_->length);
  for (std::size_t at = first; at < stop; at += kLine) __builtin_prefetch(page + at);
}

// Delivers a request from frames of the pool.
void Context::deliver(const Request& request, const std::uint32_t* frames) {
  std::size_t within = request.offset % kPageBytes;
  if (batch_->out == nullptr) {
    (*batch_->landed)(request.row, batch_->pool->page(*frames) + within);
    return;
  }
  for (std::size_t done = 0; done < batch_->length; ++frames, within = 0) {
    const std::size_t size = std::min(kPageBytes - within, batch_->length - done);
    std::memcpy(row(request.row) + done, batch_->pool->page(*frames) + within, size);
    done += size;
  }
}

// Queues runs until the depth or the page buffers are used up.
void Context::issue() {
  while (!free_ios_.empty() && (waiting_ || !plan_.finished())) {
    if (!waiting_) waiting_ = plan_.next();
    const Source& source = *batch_->sources[waiting_->file];
    Engine* engine = buffered_ && !source.direct ? buffered_.get() : direct_.get();
    const bool idle = free_ios_.size() == ios_.size();
    if (engine != engine_ && !idle) return;  // one engine is waited for at a time
    engine_ = engine;
    if (!prepare(*waiting_)) return;
    waiting_.reset();
  }
}

// Makes a read of a run and queues it; false if there are not enough page buffers now.
bool Context::prepare(const Run& run) {
  Io& io = *free_ios_.back();
  io.source = batch_->sources[run.file];
  io.offset = run.page * kPageBytes;
  io.pages = run.pages;
  io.wanted =
      static_cast<std::uint32_t>(std::min<std::uint64_t>(run.pages * kPageBytes, io.source->length - io.offset));
  io.done = 0;
  io.retries = 0;
  io.first_request = run.first_request;
  io.stop_request = run.stop_request;
  std::fill_n(io.page, run.pages, nullptr);
  if (lands_in_rows_) claim_rows(io);
  const auto missing = static_cast<std::size_t>(std::count(io.page, io.page + run.pages, nullptr));
  if (missing > free_pages_.size()) return false;
  for (std::uint32_t i = 0; i < run.pages; ++i) {
    if (io.page[i] != nullptr) continue;
    io.page[i] = free_pages_.back();
    free_pages_.pop_back();
  }
  free_ios_.pop_back();
  io.aim();
  if (batch_->latency != nullptr) io.submitted = Clock::now();
  engine_->queue(io);
  ++tally_.reads;
  return true;
}

// Lets pages that a row wants whole land in that row, where it is aligned as its file needs. The first such row has the
// page; others copy from it.
void Context::claim_rows(Io& io) {
  const std::uint64_t io_end = io.offset + io.pages * kPageBytes;
  for (std::uint32_t i = io.first_request; i < io.stop_request; ++i) {
    const Request& request = requests_[i];
    const std::uint64_t whole = (request.offset + kPageBytes - 1) / kPageBytes * kPageBytes;
    const std::uint64_t whole_end = (request.offset + batch_->length) / kPageBytes * kPageBytes;
    std::byte* const start = row(request.row);
    if (reinterpret_cast<std::uintptr_t>(start + (whole - request.offset)) % io.source->alignment != 0) continue;
    for (std::uint64_t at = std::max(whole, io.offset); at < std::min(whole_end, io_end); at += kPageBytes) {
      std::byte*& page = io.page[(at - io.offset) / kPageBytes];
      if (page == nullptr) page = start + (at - request.offset);
    }
  }
}

void Context::land(Io& io) {
  if (is_passing(io.result) && io.retries++ < kRetriesMax && !fault_) {
    engine_->queue(io);
    return;
  }
  if (io.result < 0) {
    blame({Fault::Kind::error, io.source, -io.result});
    return release(io);
  }
  const std::uint32_t end = io.resumed + static_cast<std::uint32_t>(io.result);
  if (end < io.wanted) {
    const bool progress = end > io.done;
    io.done = std::max(io.done, end);
    if (progress && !fault_) {
      io.aim();
      engine_->queue(io);
      return;
    }
    if (!progress)
      blame({Fault::Kind::cut_short, io.source, static_cast<std::int64_t>(io.offset + io.done),
             static_cast<std::int64_t>(io.source->length)});
    return release(io);
  }
  tally_.pages += io.pages;
  tally_.bytes += io.wanted;
  if (!fault_ && verify(io)) {
    deliver(io);
    hold(io);
  }
#if defined(POSIX_FADV_DONTNEED)
  if (io.source->drops_cache)
    ::posix_fadvise(io.source->fd, static_cast<off_t>(io.offset), static_cast<off_t>(io.pages * kPageBytes),
                    POSIX_FADV_DONTNEED);
#endif
  release(io);
}

bool Context::verify(const Io& io) {
  if (io.source->checksums == nullptr) return true;
  for (std::uint32_t i = 0; i < io.pages; ++i) {
    const std::uint64_t page = io.offset / kPageBytes + i;
    const auto size = static_cast<std::uint32_t>(std::min<std::size_t>(kPageBytes, io.wanted - i * kPageBytes));
    // Bytes past the committed length may be a writer's; the checksum has zeros there.
    if (size < kPageBytes) std::memset(io.page[i] + size, 0, kPageBytes - size);
    const std::uint32_t found = crc32c(io.page[i], kPageBytes);
    const std::uint32_t committed = io.source->checksums[page];
    if (found != committed) {
      blame({Fault::Kind::checksum, io.source, static_cast<std::int64_t>(page), committed, found});
      return false;
    }
  }
  return true;
}

void Context::deliver(const Io& io) {
  const std::uint64_t io_end = io.offset + io.pages * kPageBytes;
  for (std::uint32_t i = io.first_request; i < io.stop_request; ++i) {
    const Request& request = requests_[i];
    if (batch_->out == nullptr) {
      const std::uint64_t within = request.offset - io.offset;
      (*batch_->landed)(request.row, io.page[within / kPageBytes] + within % kPageBytes);
      continue;
    }
    const std::uint64_t high = std::min(request.offset + batch_->length, io_end);
    std::uint64_t at = std::max(request.offset, io.offset);
    while (at < high) {
      const std::uint64_t within = at % kPageBytes;
      const std::size_t size = std::min(kPageBytes - within, high - at);
      const std::byte* from = io.page[(at - io.offset) / kPageBytes] + within;
      std::byte* to = row(request.row) + (at - request.offset);
      if (to != from) std::memcpy(to, from, size);
      at += size;
    }
    if (batch_->latency != nullptr) {
      const float seconds = std::chrono::duration<float>(now_ - io.submitted).count();
      batch_->latency[request.row] = std::max(batch_->latency[request.row], seconds);
    }
  }
}

// Takes the pages of a read into the pool.
void Context::hold(const Io& io) {
  if (batch_->pool == nullptr || io.source->held_as < 0) return;
  for (std::uint32_t i = 0; i < io.pages; ++i)
    batch_->pool->put(BufferPool::key_of(io.source->held_as, io.offset / kPageBytes + i), io.page[i]);
}

void Context::release(Io& io) {
  for (std::uint32_t i = 0; i < io.pages; ++i)
    if (in_arena(io.page[i])) free_pages_.push_back(io.page[i]);
  free_ios_.push_back(&io);
}

// Keeps the first fault. Queued reads are given up; reads in flight are waited for, as the kernel writes to their
// pages.
void Context::blame(Fault fault) {
  if (!fault_) fault_ = fault;
}

}  // namespace memhier
