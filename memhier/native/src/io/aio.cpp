// Linux AIO by raw system calls: as fast as io_uring with direct I/O, and allowed where io_uring is not (Docker's
// default profile). On buffered files its submission blocks, so those go to threads.
#include "io/engine.hpp"

#include <cerrno>

#include "io/system.hpp"

#if defined(__linux__)
#include <linux/aio_abi.h>
#include <sys/syscall.h>

#include <algorithm>
#include <cassert>

namespace memhier {
namespace {

class AioContext {
 public:
  explicit AioContext(unsigned depth) {
    if (::syscall(SYS_io_setup, depth, &context_) < 0) fail(errno, "io_setup");
  }
  AioContext(const AioContext&) = delete;
  AioContext& operator=(const AioContext&) = delete;
  ~AioContext() { ::syscall(SYS_io_destroy, context_); }
  aio_context_t get() const { return context_; }

 private:
  aio_context_t context_ = 0;
};

class AioEngine final : public Engine {
 public:
  explicit AioEngine(unsigned depth) : context_(depth), blocks_(depth), queue_(depth), events_(depth) {
    for (unsigned i = 0; i < depth; ++i) free_.push_back(&blocks_[i]);
  }

  const char* name() const override { return "aio"; }
  std::size_t in_flight() const override { return in_flight_; }
  std::size_t memory_bytes() const override {
    // The kernel keeps an event ring of twice the depth beside the memory held here.
    return blocks_.size() * (sizeof(iocb) + 2 * sizeof(iocb*) + 3 * sizeof(io_event));
  }

  void queue(Io& io) override {
    assert(!free_.empty());
    iocb& block = *free_.back();
    free_.pop_back();
    block = iocb{};
    block.aio_data = reinterpret_cast<std::uint64_t>(&io);
    block.aio_fildes = static_cast<std::uint32_t>(io.source->fd);
    block.aio_offset = static_cast<std::int64_t>(io.offset + io.resumed);
    if (io.part_count == 1) {
      block.aio_lio_opcode = IOCB_CMD_PREAD;
      block.aio_buf = reinterpret_cast<std::uint64_t>(io.parts[0].iov_base);
      block.aio_nbytes = io.parts[0].iov_len;
    } else {
      block.aio_lio_opcode = IOCB_CMD_PREADV;
      block.aio_buf = reinterpret_cast<std::uint64_t>(io.parts);
      block.aio_nbytes = io.part_count;
    }
    queue_[queued_++] = &block;
  }

  int submit_and_wait(std::size_t least, std::vector<Io*>& finished) override {
    const std::size_t before = finished.size();
    if (const int error = submit(finished); error != 0) return error;
    while (finished.size() == before) {
      const auto enough = static_cast<long>(std::min(least, in_flight_));
      const long count = ::syscall(SYS_io_getevents, context_.get(), enough, static_cast<long>(events_.size()),
                                   events_.data(), nullptr);
      if (count < 0 && errno != EINTR) nap();  // not for a valid context; reads on their way must be waited for
      for (long i = 0; i < count; ++i) {
        Io* io = reinterpret_cast<Io*>(events_[i].data);
        io->result = events_[i].res;
        free_.push_back(reinterpret_cast<iocb*>(events_[i].obj));
        finished.push_back(io);
        --in_flight_;
      }
      if (least == 0) break;
    }
    return 0;
  }

  void withdraw() override {
    while (queued_ > 0) free_.push_back(queue_[--queued_]);
  }

 private:
  // Hands over all that is queued, or as much as the kernel takes while reads are on their way.
  int submit(std::vector<Io*>& finished) {
    std::size_t at = 0;
    int error = 0;
    for (unsigned refusals = 0; at < queued_;) {
      const long taken = ::syscall(SYS_io_submit, context_.get(), static_cast<long>(queued_ - at), queue_.data() + at);
      error = taken > 0 ? 0 : taken < 0 ? errno : EAGAIN;
      if (taken > 0) {
        at += static_cast<std::size_t>(taken);
        in_flight_ += static_cast<std::size_t>(taken);
      } else if (error == EAGAIN) {
        if (in_flight_ > 0 || ++refusals > kRefusalsMax) break;
        nap();
      } else if (error != EINTR) {  // the fault of the first read, which the kernel looked at before it took it
        Io* io = reinterpret_cast<Io*>(queue_[at]->aio_data);
        io->result = -error;
        finished.push_back(io);
        free_.push_back(queue_[at++]);
      }
    }
    std::move(queue_.begin() + static_cast<std::ptrdiff_t>(at), queue_.begin() + static_cast<std::ptrdiff_t>(queued_),
              queue_.begin());
    queued_ -= at;
    return error == EAGAIN && in_flight_ == 0 && finished.empty() ? error : 0;
  }

  AioContext context_;
  std::vector<iocb> blocks_;
  std::vector<iocb*> free_;
  std::vector<iocb*> queue_;
  std::vector<io_event> events_;
  std::size_t queued_ = 0, in_flight_ = 0;
};

}  // namespace

std::unique_ptr<Engine> make_aio_engine(unsigned depth) { return std::make_unique<AioEngine>(depth); }

}  // namespace memhier
#else
namespace memhier {
std::unique_ptr<Engine> make_aio_engine(unsigned) { fail(ENOSYS, "Linux AIO is part of Linux"); }
}  // namespace memhier
#endif
