// Descriptors and memory maps that close themselves.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>
#if defined(__linux__)
#include <sys/syscall.h>
#endif

#include <array>
#include <bit>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <system_error>
#include <utility>

namespace memhier {

[[noreturn]] inline void fail(int error, const char* call) {
  throw std::system_error(error, std::generic_category(), call);
}

constexpr unsigned kRefusalsMax = 10'000;  // about a second of naps

inline void nap() {
  const timespec pause{0, 100'000};
  ::nanosleep(&pause, nullptr);
}

// To how many bytes memory has to be aligned that a direct read of a file writes to; `otherwise` where the system does
// not say (Linux before 6.1). The call's answer is declared here, so a build does not depend on the age of the headers.
inline std::size_t direct_alignment([[maybe_unused]] int fd, std::size_t otherwise) {
#if defined(__linux__) && defined(SYS_statx) && defined(AT_EMPTY_PATH)
  constexpr std::uint32_t kDirectAlignment = 0x2000;
  constexpr std::size_t kMask = 0, kMemory = 0x98 / sizeof(std::uint32_t);
  std::array<std::uint32_t, 64> answer{};
  if (::syscall(SYS_statx, fd, "", AT_EMPTY_PATH, kDirectAlignment, answer.data()) == 0 &&
      (answer[kMask] & kDirectAlignment) != 0 && std::has_single_bit(answer[kMemory]))
    return answer[kMemory];
#endif
  return otherwise;
}

class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int fd) : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  int get() const { return fd_; }

 private:
  int fd_ = -1;
};

class Mapping {
 public:
  Mapping() = default;

  // Memory for page buffers: present from the start, so that no read pays for its first touch.
  static Mapping anonymous(std::size_t bytes) {
#if defined(__linux__)
    return Mapping(bytes, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
#else
    return Mapping(bytes, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
#endif
  }

  // Memory that is present once it was touched.
  static Mapping reserved(std::size_t bytes) { return Mapping(bytes, MAP_PRIVATE | MAP_ANONYMOUS | kNoReserve, -1, 0); }

#if defined(__linux__)
  // Memory shared with the kernel.
  static Mapping of(int fd, std::size_t bytes, long long offset) {
    return Mapping(bytes, MAP_SHARED | MAP_POPULATE, fd, offset);
  }
#endif

  Mapping(Mapping&& other) noexcept
      : start_(std::exchange(other.start_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  Mapping& operator=(Mapping&& other) noexcept {
    std::swap(start_, other.start_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~Mapping() {
    if (start_ != nullptr) ::munmap(start_, bytes_);
  }

  std::byte* data() const { return start_; }
  std::size_t bytes() const { return bytes_; }

  template <class T>
  T* at(std::size_t offset) const {
    return reinterpret_cast<T*>(start_ + offset);
  }

 private:
#if defined(MAP_NORESERVE)
  static constexpr int kNoReserve = MAP_NORESERVE;
#else
  static constexpr int kNoReserve = 0;
#endif

  Mapping(std::size_t bytes, int flags, int fd, long long offset) : bytes_(bytes) {
    void* start = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, fd, static_cast<off_t>(offset));
    if (start == MAP_FAILED) fail(errno, "mmap");
    start_ = static_cast<std::byte*>(start);
#if defined(__linux__)
    // A child after a fork makes its own; sharing these would let its pages be swapped from under a read on its way.
    ::madvise(start, bytes, MADV_DONTFORK);
#endif
  }

  std::byte* start_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace memhier
