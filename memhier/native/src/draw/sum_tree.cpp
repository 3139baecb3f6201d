// Sums over priorities: changes of leaves, and draws in proportion to them.
#include "draw/sum_tree.hpp"

#include <algorithm>
#include <cassert>
#include <limits>

#include "bind/array.hpp"
#include "bind/module.hpp"

namespace nb = nanobind;

namespace memhier {
namespace {

constexpr std::size_t kBlock = SumTree::kFan;

std::size_t blocks_of(std::size_t count) { return (count + kBlock - 1) / kBlock; }

// The first child whose running sum is above `target`, else the last that is not zero; `target` becomes a place in it.
template <class Number>
std::size_t child_of(const Number* children, double& target) {
  double below = 0, last_below = 0;
  std::size_t last = 0;
  for (std::size_t i = 0; i < kBlock; ++i) {
    const double up_to = below + static_cast<double>(children[i]);
    if (up_to > target) {
      target -= below;
      return i;
    }
    if (children[i] > 0) {
      last = i;
      last_below = below;
    }
    below = up_to;
  }
  target -= last_below;
  return last;
}

}  // namespace

std::size_t SumTree::nodes_above(std::size_t leaves) {
  std::size_t nodes = 0;
  for (std::size_t count = leaves; count > 1;) {
    count = blocks_of(count);
    nodes += blocks_of(count) * kBlock;
  }
  return nodes;
}

SumTree::SumTree(std::span<float> leaves, std::span<double> sums, std::span<float> least)
    : leaves_(leaves), sums_(sums), least_(least) {
  std::size_t start = 0;
  for (std::size_t count = leaves.size(); count > 1; ++levels_) {
    assert(levels_ < kMostLevels);
    starts_[levels_] = start;
    count = blocks_of(count);
    start += blocks_of(count) * kBlock;
  }
  assert(start == sums.size() && start == least.size());
}

void SumTree::renew(std::size_t level, std::size_t node) {
  double sum = 0;
  float least = std::numeric_limits<float>::infinity();
  if (level == 0) {
    const float* children = leaves_.data() + node * kFan;
    for (std::size_t i = 0; i < kFan; ++i) {
      sum += static_cast<double>(children[i]);
      least = children[i] > 0 ? std::min(least, children[i]) : least;
    }
  } else {
    const std::size_t first = starts_[level - 1] + node * kFan;
    for (std::size_t i = first; i < first + kFan; ++i) {
      sum += sums_[i];
      least = std::min(least, least_[i]);
    }
  }
  sums_[starts_[level] + node] = sum;
  least_[starts_[level] + node] = least;
}

void SumTree::set(std::span<const std::int64_t> places, std::span<const float> values) {
  for (std::size_t i = 0; i < places.size(); ++i) leaves_[static_cast<std::size_t>(places[i])] = values[i];
  std::size_t below = 1;
  for (std::size_t level = 0; level < levels_; ++level) {
    below *= kFan;
    std::size_t before = std::numeric_limits<std::size_t>::max();
    for (const std::int64_t place : places) {
      const std::size_t node = static_cast<std::size_t>(place) / below;
      if (node != before) renew(level, node);
      before = node;
    }
  }
}

std::int64_t SumTree::drawn(double uniform) const {
  const double total = sums_[starts_[levels_ - 1]];
  if (!(total > 0)) return -1;
  double target = uniform * total;
  std::size_t node = 0;
  for (std::size_t level = levels_ - 1; level > 0; --level)
    node = node * kFan + child_of(sums_.data() + starts_[level - 1] + node * kFan, target);
  return static_cast<std::int64_t>(node * kFan + child_of(leaves_.data() + node * kFan, target));
}

void SumTree::draw(std::span<const double> uniforms, std::span<std::int64_t> places) const {
  for (std::size_t i = 0; i < uniforms.size(); ++i) places[i] = drawn(uniforms[i]);
}

void SumTree::take(std::span<const double> uniforms, std::span<std::int64_t> places) {
  constexpr float kZero = 0;
  for (std::size_t i = 0; i < uniforms.size(); ++i) {
    places[i] = drawn(uniforms[i]);
    if (places[i] >= 0) set(places.subspan(i, 1), {&kZero, 1});
  }
}

namespace {

// The tree over arrays of the caller's, which have the lengths of its levels.
SumTree over(const Array<float, 1>& leaves, const Array<double, 1>& sums, const Array<float, 1>& least) {
  require(leaves.size() >= kBlock && leaves.size() % kBlock == 0, "leaves: whole blocks of sixteen");
  const std::size_t nodes = SumTree::nodes_above(leaves.size());
  require(sums.size() == nodes && least.size() == nodes, "sums, least: one for each node");
  return {{leaves.data(), leaves.size()}, {sums.data(), nodes}, {least.data(), nodes}};
}

void set_leaves(const Array<float, 1>& leaves, const Array<double, 1>& sums, const Array<float, 1>& least,
                const Array<const std::int64_t, 1>& places, const Array<const float, 1>& values) {
  SumTree tree = over(leaves, sums, least);
  require(places.size() == values.size(), "values: one for each place");
  for (std::size_t i = 0; i < places.size(); ++i) {
    require(places[i] >= 0 && static_cast<std::size_t>(places[i]) < leaves.size(), "places: those of leaves");
    require(values[i] >= 0 && values[i] < std::numeric_limits<float>::infinity(), "values: finite, at least 0");
  }
  nb::gil_scoped_release released;
  tree.set({places.data(), places.size()}, {values.data(), values.size()});
}

void draw_leaves(const Array<float, 1>& leaves, const Array<double, 1>& sums, const Array<float, 1>& least,
                 const Array<const double, 1>& uniforms, const Array<std::int64_t, 1>& places, bool taking) {
  SumTree tree = over(leaves, sums, least);
  require(places.size() == uniforms.size(), "places: one for each number");
  for (std::size_t i = 0; i < uniforms.size(); ++i)
    require(uniforms[i] >= 0 && uniforms[i] < 1, "uniforms: from 0 to below 1");
  nb::gil_scoped_release released;
  const std::span<const double> numbers{uniforms.data(), uniforms.size()};
  const std::span<std::int64_t> drawn{places.data(), places.size()};
  taking ? tree.take(numbers, drawn) : tree.draw(numbers, drawn);
}

}  // namespace
}  // namespace memhier

void register_sum_tree(nb::module_& m) {
  using namespace nb::literals;
  m.def("sum_tree_set", &memhier::set_leaves, nb::kw_only(), "leaves"_a, "sums"_a, "least"_a, "places"_a, "values"_a);
  m.def("sum_tree_draw", &memhier::draw_leaves, nb::kw_only(), "leaves"_a, "sums"_a, "least"_a, "uniforms"_a,
        "places"_a, "taking"_a);
}
