// io_uring by raw system calls. The kernel interface is declared here, so a build does not depend on the age of the
// system's headers, and nothing has to be linked.
#include "io/engine.hpp"

#include <cerrno>

#include "io/system.hpp"

#if defined(__linux__)
#include <sys/syscall.h>

#include <algorithm>
#include <cassert>
#include <span>

namespace memhier {
namespace {

constexpr long kSetupCall = 425;  // the same numbers on every architecture
constexpr long kEnterCall = 426;
constexpr long kRegisterCall = 427;

constexpr std::uint32_t kSetupClamp = 1u << 4;
constexpr std::uint32_t kSetupCoopTaskrun = 1u << 8;  // Linux 5.19: completions do not interrupt a running thread
constexpr std::uint32_t kFeatureSingleMmap = 1u << 0;
constexpr std::uint32_t kEnterGetEvents = 1u << 0;
constexpr std::uint32_t kRegisterBuffers = 0;
constexpr std::uint32_t kRegisterProbe = 8;
constexpr std::uint16_t kProbeSupported = 1u << 0;
constexpr std::uint8_t kOpReadv = 1;
constexpr std::uint8_t kOpReadFixed = 4;
constexpr std::uint8_t kOpRead = 22;
constexpr long long kRingOffset = 0;
constexpr long long kEntriesOffset = 0x10000000;

struct SqOffsets {
  std::uint32_t head, tail, ring_mask, ring_entries, flags, dropped, array, reserved;
  std::uint64_t user_address;
};
struct CqOffsets {
  std::uint32_t head, tail, ring_mask, ring_entries, overflow, cqes, flags, reserved;
  std::uint64_t user_address;
};
struct Params {
  std::uint32_t sq_entries, cq_entries, flags, sq_thread_cpu, sq_thread_idle, features, wq_fd, reserved[3];
  SqOffsets sq;
  CqOffsets cq;
};
struct Submission {
  std::uint8_t opcode, flags;
  std::uint16_t priority;
  std::int32_t fd;
  std::uint64_t offset, address;
  std::uint32_t length, rw_flags;
  std::uint64_t user_data, unused[3];
};
struct Completion {
  std::uint64_t user_data;
  std::int32_t result;
  std::uint32_t flags;
};
struct ProbeOp {
  std::uint8_t op, reserved;
  std::uint16_t flags;
  std::uint32_t reserved2;
};
struct Probe {
  std::uint8_t last_op, ops_len;
  std::uint16_t reserved;
  std::uint32_t reserved2[3];
  ProbeOp ops[kOpRead + 1];
};
static_assert(sizeof(Params) == 120 && sizeof(Submission) == 64 && sizeof(Completion) == 16);

unsigned load_acquire(const unsigned* at) { return __atomic_load_n(at, __ATOMIC_ACQUIRE); }
void store_release(unsigned* at, unsigned value) { __atomic_store_n(at, value, __ATOMIC_RELEASE); }

Descriptor set_up(unsigned depth, Params& params) {
  for (const std::uint32_t flags : {kSetupClamp | kSetupCoopTaskrun, kSetupClamp, 0u}) {
    params = Params{};
    params.flags = flags;
    const long fd = ::syscall(kSetupCall, depth, &params);
    if (fd >= 0) return Descriptor(static_cast<int>(fd));
    if (errno != EINVAL) break;
  }
  fail(errno, "io_uring_setup");
}

class UringEngine final : public Engine {
 public:
  explicit UringEngine(unsigned depth) {
    Params params;
    ring_ = set_up(depth, params);
    require_reads();
    if (!(params.features & kFeatureSingleMmap)) fail(ENOSYS, "io_uring with one mapping (Linux 5.4)");
    const std::size_t sq_bytes = params.sq.array + params.sq_entries * sizeof(unsigned);
    const std::size_t cq_bytes = params.cq.cqes + params.cq_entries * sizeof(Completion);
    queues_ = Mapping::of(ring_.get(), std::max(sq_bytes, cq_bytes), kRingOffset);
    entries_ = Mapping::of(ring_.get(), params.sq_entries * sizeof(Submission), kEntriesOffset);
    sq_tail_ = queues_.at<unsigned>(params.sq.tail);
    cq_head_ = queues_.at<unsigned>(params.cq.head);
    cq_tail_ = queues_.at<unsigned>(params.cq.tail);
    completions_ = queues_.at<Completion>(params.cq.cqes);
    submissions_ = entries_.at<Submission>(0);
    sq_mask_ = params.sq_entries - 1;
    cq_mask_ = params.cq_entries - 1;
    depth_ = std::min(depth, params.sq_entries);
    tail_ = *sq_tail_;
    for (unsigned i = 0; i < params.sq_entries; ++i) queues_.at<unsigned>(params.sq.array)[i] = i;
  }

  const char* name() const override { return "uring"; }
  std::size_t in_flight() const override { return in_flight_; }
  std::size_t memory_bytes() const override { return queues_.bytes() + entries_.bytes(); }

  // Pages that the kernel knows need not be looked up for each read. Where it may not lock them, reads do without.
  void note_arena(std::byte* start, std::size_t bytes) override {
    const iovec arena{start, bytes};
    if (::syscall(kRegisterCall, ring_.get(), kRegisterBuffers, &arena, 1) == 0) arena_ = {start, bytes};
  }

  void queue(Io& io) override {
    assert(queued_ + in_flight_ < depth_);
    Submission& entry = submissions_[tail_ & sq_mask_];
    entry = Submission{};
    entry.fd = io.source->fd;
    entry.offset = io.offset + io.resumed;
    entry.user_data = reinterpret_cast<std::uint64_t>(&io);
    if (io.part_count == 1) {
      entry.opcode = is_known(io.parts[0]) ? kOpReadFixed : kOpRead;  // of buffer 0, as the entry's zeros say
      entry.address = reinterpret_cast<std::uint64_t>(io.parts[0].iov_base);
      entry.length = static_cast<std::uint32_t>(io.parts[0].iov_len);
    } else {
      entry.opcode = kOpReadv;
      entry.address = reinterpret_cast<std::uint64_t>(io.parts);
      entry.length = io.part_count;
    }
    ++tail_;
    ++queued_;
  }

  int submit_and_wait(std::size_t least, std::vector<Io*>& finished) override {
    store_release(sq_tail_, tail_);
    const auto enough = static_cast<unsigned>(std::min<std::size_t>(least, queued_ + in_flight_));
    for (unsigned refusals = 0;;) {
      const long taken = ::syscall(kEnterCall, ring_.get(), queued_, enough, kEnterGetEvents, nullptr, 0);
      const int error = taken < 0 ? errno : 0;
      if (taken > 0) {
        queued_ -= static_cast<unsigned>(taken);
        in_flight_ += static_cast<unsigned>(taken);
      }
      if (ready() >= enough) break;
      if (error == 0 || error == EINTR) continue;
      if (ready() != 0) break;
      if (in_flight_ == 0 && ((error != EAGAIN && error != EBUSY) || ++refusals > kRefusalsMax)) return error;
      // Reads are on their way, so something will finish; completions need no further call to be seen.
      nap();
      if (ready() != 0) break;
    }
    reap(finished);
    return 0;
  }

  void withdraw() override {
    tail_ -= queued_;
    queued_ = 0;
    store_release(sq_tail_, tail_);
  }

 private:
  void require_reads() const {
    Probe probe{};
    if (::syscall(kRegisterCall, ring_.get(), kRegisterProbe, &probe, kOpRead + 1) < 0)
      fail(errno == EINVAL ? ENOSYS : errno, "io_uring_register");
    if (!(probe.ops[kOpRead].flags & kProbeSupported)) fail(ENOSYS, "io_uring read (Linux 5.6)");
  }

  bool is_known(const iovec& part) const {
    const auto* start = static_cast<const std::byte*>(part.iov_base);
    return start >= arena_.data() && start + part.iov_len <= arena_.data() + arena_.size();
  }

  unsigned ready() const { return load_acquire(cq_tail_) - *cq_head_; }

  void reap(std::vector<Io*>& finished) {
    unsigned head = *cq_head_;
    const unsigned tail = load_acquire(cq_tail_);
    for (; head != tail; ++head) {
      const Completion& completion = completions_[head & cq_mask_];
      Io* io = reinterpret_cast<Io*>(completion.user_data);
      io->result = completion.result;
      finished.push_back(io);
      --in_flight_;
    }
    store_release(cq_head_, head);
  }

  Descriptor ring_;
  Mapping queues_, entries_;
  std::span<std::byte> arena_;  // registered
  unsigned *sq_tail_, *cq_head_, *cq_tail_;
  Submission* submissions_;
  Completion* completions_;
  unsigned sq_mask_, cq_mask_, depth_, tail_;
  unsigned queued_ = 0, in_flight_ = 0;
};

}  // namespace

std::unique_ptr<Engine> make_uring_engine(unsigned depth) { return std::make_unique<UringEngine>(depth); }

}  // namespace memhier
#else
namespace memhier {
std::unique_ptr<Engine> make_uring_engine(unsigned) { fail(ENOSYS, "io_uring is part of Linux"); }
}  // namespace memhier
#endif
