// The end of a step of a replay buffer: a swap arrives, another is planned. One call, so that Python handles no signal
// between the changes.
#include <algorithm>
#include <cstring>
#include <numeric>
#include <span>
#include <unordered_set>
#include <vector>

#include "bind/array.hpp"
#include "bind/module.hpp"
#include "io/fence.hpp"

namespace nb = nanobind;

namespace memhier {
namespace {

using Numbers = Array<const std::int64_t, 1>;

// Arrays of memhier.recsys.replay.placement: by slot, but `slot_of`, `labels` and `ids`, which are by position. `dirty`
// marks rows of the index of `per_row` slots, `leaving` has the slots of positions that are visible, not planned.
struct PlacementArrays {
  Array<std::int64_t, 1> planned, visible, swapped;
  Array<std::int32_t, 1> slot_of;
  Array<const std::int32_t, 1> labels;
  Numbers ids;
  Array<bool, 1> dirty;
  std::size_t per_row;
  nb::dict leaving;

  bool has(std::int64_t slot, std::int64_t position) const {
    return slot >= 0 && static_cast<std::size_t>(slot) < planned.size() && position >= 0 &&
           static_cast<std::size_t>(position) < std::min({slot_of.size(), labels.size(), ids.size()});
  }
  void mark(std::int64_t slot) const { dirty[static_cast<std::size_t>(slot) / per_row] = true; }
};

// The memory tier: where its one field, labels and ids begin in the rows of the slab.
struct MemoryArrays {
  Array<std::byte> flat;
  Array<std::uint32_t, 1> generations;
  std::size_t values_at, labels_at, ids_at;
};

// Samples that come into slots. `rows`: their values, where they were read.
struct Coming {
  Numbers slots, positions;
  Array<const std::byte> rows;
};

void check(const PlacementArrays& placement, const MemoryArrays& memory, const Coming& coming) {
  const std::size_t count = coming.slots.size(), slots = placement.planned.size();
  require(coming.positions.size() == count, "positions: one for each slot");
  require(placement.visible.size() == slots && placement.swapped.size() == slots && placement.per_row > 0 &&
              placement.dirty.size() >= (slots + placement.per_row - 1) / placement.per_row,
          "placement: arrays of all slots");
  const std::size_t width = count == 0 ? 0 : coming.rows.bytes() / count;
  require(coming.rows.bytes() == width * count, "rows: of one width");
  const std::size_t values_end = memory.values_at + width * slots;
  const std::size_t end = std::max({memory.labels_at, memory.ids_at}) + sizeof(std::int64_t) * slots;
  require(memory.generations.size() == slots && std::max(values_end, end) <= memory.flat.bytes(),
          "memory: columns of all slots");
}

// Whether each slot shows a sample and awaits the one that comes, which no other slot still shows.
bool may_arrive(const PlacementArrays& placement, const Coming& coming) {
  for (std::size_t i = 0; i < coming.slots.size(); ++i) {
    const std::int64_t slot = coming.slots[i], position = coming.positions[i];
    if (!placement.has(slot, position) || placement.planned[slot] != position || placement.visible[slot] < 0 ||
        placement.visible[slot] == position || placement.leaving.contains(nb::int_(position)))
      return false;
  }
  return true;
}

// Whether each slot shows the sample that is planned for it, or will, and no slot awaits the one that comes.
bool may_be_planned(const PlacementArrays& placement, const Coming& next) {
  for (std::size_t i = 0; i < next.slots.size(); ++i) {
    const std::int64_t slot = next.slots[i], position = next.positions[i];
    if (!placement.has(slot, position) || placement.planned[slot] < 0 || placement.visible[slot] < 0 ||
        placement.slot_of[position] >= 0)
      return false;
  }
  return true;
}

void copy(const PlacementArrays& placement, const MemoryArrays& memory, const Coming& coming) {
  const std::size_t count = coming.slots.size();
  if (count == 0) return;
  const std::size_t width = coming.rows.bytes() / count;
  const std::span slots(coming.slots.data(), count);
  // The last write of a slot may have broken off and left it odd already.
  for (const std::int64_t slot : slots) memory.generations[slot] |= 1;
  fence();
  for (std::size_t i = 0; i < count; ++i) {
    const auto put = [&memory, slot = static_cast<std::size_t>(slots[i])](std::size_t at, const void* from,
                                                                          std::size_t bytes) {
      std::memcpy(memory.flat.data() + at + slot * bytes, from, bytes);
    };
    const std::int64_t label = placement.labels[coming.positions[i]], id = placement.ids[coming.positions[i]];
    put(memory.values_at, coming.rows.data() + i * width, width);
    put(memory.labels_at, &label, sizeof(label));
    put(memory.ids_at, &id, sizeof(id));
  }
  fence();
  for (const std::int64_t slot : slots) ++memory.generations[slot];
}

void arrive(const PlacementArrays& placement, const MemoryArrays& memory, const Coming& coming) {
  for (std::size_t i = 0; i < coming.slots.size(); ++i) {
    const std::int64_t slot = coming.slots[i];
    const nb::int_ shown(placement.visible[slot]);
    if (placement.leaving.contains(shown)) nb::del(placement.leaving[shown]);
    placement.visible[slot] = coming.positions[i];
    placement.mark(slot);
  }
  nb::gil_scoped_release released;
  copy(placement, memory, coming);
}

void plan(const PlacementArrays& placement, const Coming& next, std::int64_t step) {
  for (std::size_t i = 0; i < next.slots.size(); ++i) placement.slot_of[placement.planned[next.slots[i]]] = -1;
  for (std::size_t i = 0; i < next.slots.size(); ++i) {
    const std::int64_t slot = next.slots[i], position = next.positions[i];
    placement.planned[slot] = position;
    placement.slot_of[position] = static_cast<std::int32_t>(slot);
    placement.leaving[nb::int_(placement.visible[slot])] = nb::int_(slot);
    placement.swapped[slot] = step;
    placement.mark(slot);
  }
}

// Lets a swap arrive and plans the next one, then sets attributes of its owner; false, and nothing has changed, where
// that is no simple matter. Its attribute `at_odds` is true meanwhile.
bool end_step(const PlacementArrays& placement, const MemoryArrays& memory, const Coming* coming, const Coming& next,
              std::int64_t step, nb::object owner, const nb::dict& after) {
  check(placement, memory, next);
  if (coming != nullptr) check(placement, memory, *coming);
  if (!may_be_planned(placement, next) || (coming != nullptr && !may_arrive(placement, *coming))) return false;
  owner.attr("at_odds") = true;
  if (coming != nullptr) arrive(placement, memory, *coming);
  plan(placement, next, step);
  for (const auto& [name, value] : after) owner.attr(name) = value;
  owner.attr("at_odds") = false;
  return true;
}

// Takes distinct positions of a group that no slot awaits, in the order of the numbers that choose them, until `chosen`
// is full; returns how many.
std::size_t draw_outside(const Numbers& positions, const Array<const std::int32_t, 1>& slot_of,
                         const Array<const double, 1>& uniforms, const Array<std::int64_t, 1>& chosen) {
  std::size_t count = 0;
  for (std::size_t i = 0; i < uniforms.size() && count < chosen.size(); ++i) {
    const auto rank = static_cast<std::size_t>(uniforms[i] * static_cast<double>(positions.size()));
    require(uniforms[i] >= 0 && rank < positions.size(), "uniforms: from 0 to below 1");
    const std::int64_t position = positions[rank];
    require(position >= 0 && static_cast<std::size_t>(position) < slot_of.size(), "positions: of stored samples");
    const std::int64_t* const end = chosen.data() + count;
    if (slot_of[position] < 0 && std::find(static_cast<const std::int64_t*>(chosen.data()), end, position) == end)
      chosen[count++] = position;
  }
  return count;
}

// Fills `chosen` with distinct integers below `count`, one for each uniform number; one that was drawn before is drawn
// anew with the numbers behind, round after round. Returns how many numbers it took; 0 where there are too few.
std::size_t draw_distinct(const Array<const double, 1>& uniforms, std::int64_t count,
                          const Array<std::int64_t, 1>& chosen) {
  require(count > 0, "count: at least 1");
  std::unordered_set<std::int64_t> seen;
  seen.reserve(chosen.size());
  std::vector<std::size_t> again(chosen.size());
  std::iota(again.begin(), again.end(), std::size_t{0});
  std::size_t taken = 0;
  while (!again.empty()) {
    if (again.size() > uniforms.size() - taken) return 0;
    for (const std::size_t index : again) {
      require(uniforms[taken] >= 0 && uniforms[taken] < 1, "uniforms: from 0 to below 1");
      chosen[index] = static_cast<std::int64_t>(uniforms[taken++] * static_cast<double>(count));
    }
    seen.clear();
    again.clear();
    for (std::size_t index = 0; index < chosen.size(); ++index)
      if (!seen.insert(chosen[index]).second) again.push_back(index);
  }
  return taken;
}

}  // namespace
}  // namespace memhier

void register_swap_step(nb::module_& m) {
  using namespace memhier;
  using namespace nb::literals;
  nb::class_<PlacementArrays>(m, "PlacementArrays")
      .def(nb::init<Array<std::int64_t, 1>, Array<std::int64_t, 1>, Array<std::int64_t, 1>, Array<std::int32_t, 1>,
                    Array<const std::int32_t, 1>, Numbers, Array<bool, 1>, std::size_t, nb::dict>(),
           nb::kw_only(), "planned"_a, "visible"_a, "swapped"_a, "slot_of"_a, "labels"_a, "ids"_a, "dirty"_a,
           "per_row"_a, "leaving"_a);
  nb::class_<MemoryArrays>(m, "MemoryArrays")
      .def(nb::init<Array<std::byte>, Array<std::uint32_t, 1>, std::size_t, std::size_t, std::size_t>(), nb::kw_only(),
           "flat"_a, "generations"_a, "values_at"_a, "labels_at"_a, "ids_at"_a);
  nb::class_<Coming>(m, "Coming")
      .def(nb::init<Numbers, Numbers, Array<const std::byte>>(), nb::kw_only(), "slots"_a, "positions"_a, "rows"_a);
  m.def("end_step", &end_step, nb::kw_only(), "placement"_a, "memory"_a, "coming"_a.none(), "next"_a, "step"_a,
        "owner"_a, "after"_a);
  m.def("draw_distinct", &draw_distinct, nb::kw_only(), "uniforms"_a, "count"_a, "chosen"_a);
  m.def("draw_outside", &draw_outside, nb::kw_only(), "positions"_a, "slot_of"_a, "uniforms"_a, "chosen"_a);
}
