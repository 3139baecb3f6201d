// The memory that one call of the decoder works in; kept for the next.
#pragma once

#include <cstddef>
#include <limits>
#include <memory>
#include <mutex>
#include <vector>

#include "decode/exact.hpp"
#include "decode/query.hpp"
#include "decode/scan.hpp"
#include "decode/survivors.hpp"
#include "decode/walk.hpp"
#include "draw/envelope.hpp"
#include "draw/sampler.hpp"

namespace memhier {

struct Workspace {
  CodedQuery queries[BlockScan::kQueries];
  Largest largest[BlockScan::kQueries];
  ExpSums sums[BlockScan::kQueries];
  BlockScan scan;
  Walker walker;
  std::vector<Logit> candidates, scored;
  std::vector<float> lanes;
  Survivors survivors;
  Envelope envelopes[BlockScan::kQueries];
  Sampler sampler;
  DigitQuery digit_queries[BlockScan::kQueries];

  std::size_t bytes() const {
    std::size_t sum = sizeof(Workspace) + walker.bytes() + (candidates.capacity() + scored.capacity()) * sizeof(Logit) +
                      lanes.capacity() * sizeof(float) + survivors.bytes() + scan.held_bytes() + sampler.held_bytes();
    for (const auto& query : queries) sum += query.held_bytes();
    for (const auto& each : largest) sum += each.bytes();
    for (const auto& each : envelopes) sum += each.held_bytes();
    for (const auto& each : digit_queries) sum += each.held_bytes();
    return sum;
  }
};

// Workspaces that no call works in. Keeps few, and none that an unusual call made large.
class Workspaces {
 public:
  class Lease {
   public:
    explicit Lease(Workspaces& all) : all_(all), space_(all.take()) {}
    ~Lease() { all_.give(std::move(space_)); }
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;
    Workspace& operator*() { return *space_; }

   private:
    Workspaces& all_;
    std::unique_ptr<Workspace> space_;
  };

  void keep(std::size_t count, std::size_t bytes) {
    const std::lock_guard guard(lock_);
    count_ = count;
    bytes_ = bytes;
  }
  std::size_t bytes() {
    const std::lock_guard guard(lock_);
    std::size_t sum = 0;
    for (const auto& space : spaces_) sum += space->bytes();
    return sum;
  }

 private:
  std::unique_ptr<Workspace> take() {
    const std::lock_guard guard(lock_);
    if (spaces_.empty()) return std::make_unique<Workspace>();
    auto space = std::move(spaces_.back());
    spaces_.pop_back();
    return space;
  }
  void give(std::unique_ptr<Workspace> space) {
    const std::lock_guard guard(lock_);
    if (space->bytes() <= bytes_ && spaces_.size() < count_) spaces_.push_back(std::move(space));
  }

  std::mutex lock_;
  std::size_t count_ = 16, bytes_ = std::numeric_limits<std::size_t>::max();
  std::vector<std::unique_ptr<Workspace>> spaces_;
};

}  // namespace memhier
