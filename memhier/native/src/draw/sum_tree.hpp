// A tree of sums over priorities: sixteen children a node, so a leaf's block is one cache line.
//
// Each node is the sum of its children in their order, whatever was set before: the tree is a function of its leaves.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace memhier {

class SumTree {
 public:
  static constexpr std::size_t kFan = 16;
  // Nodes of all levels above so many leaves, each level filled up to blocks; the lowest comes first.
  static std::size_t nodes_above(std::size_t leaves);

  // The memory is the caller's. `sums` are those of the nodes, `least` their smallest positive leaf, infinity for none.
  SumTree(std::span<float> leaves, std::span<double> sums, std::span<float> least);

  // Sets leaves; where a place comes twice, its last value stays.
  void set(std::span<const std::int64_t> places, std::span<const float> values);
  // The leaf that each uniform number in [0, 1) falls on; -1 where all leaves are zero.
  void draw(std::span<const double> uniforms, std::span<std::int64_t> places) const;
  // Draws one after the other, and sets each drawn leaf to zero before the next draw.
  void take(std::span<const double> uniforms, std::span<std::int64_t> places);

 private:
  static constexpr std::size_t kMostLevels = 12;
  std::int64_t drawn(double uniform) const;
  void renew(std::size_t level, std::size_t node);

  std::span<float> leaves_;
  std::span<double> sums_;
  std::span<float> least_;
  std::size_t starts_[kMostLevels];  // where a level's nodes begin
  std::size_t levels_ = 0;
};

}  // namespace memhier
