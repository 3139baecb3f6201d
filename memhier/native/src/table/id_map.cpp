// Rows for any ids: see id_map.hpp. `PythonIdMap` is the same in Python.
#include "table/id_map.hpp"

#include <algorithm>
#include <array>
#include <cassert>
#include <cstring>
#include <utility>

#include "bind/module.hpp"

namespace nb = nanobind;

namespace memhier {
namespace {

constexpr std::uint32_t kUsesMax = 0xffffffff;
constexpr std::size_t kShare = 64;  // a full map frees one slot of so many at a time
constexpr std::uint64_t kSeeds[] = {0, 0x9e3779b97f4a7c15u, 0xc2b2ae3d27d4eb4fu, 0x165667b19e3779f9u};

}  // namespace

IdMap::IdMap(IdMapArrays arrays, IdMapRules rules)
    : a_(std::move(arrays)), rules_(rules), room_(a_.ids.size()), groups_((room_ + kGroup - 1) / kGroup) {
  check();
  require(rules.capacity < (std::size_t{1} << 31) && rules.admit_after >= 1 && rules.pending >= 1 &&
              (rules.admit_after == 1 || a_.cells.size() != 0),
          "rules");
  index_.emplace(room_, a_.ids.data());
}

void IdMap::check() const {
  require(room_ >= 1 && room_ <= rules_.capacity && a_.last.size() == room_ && a_.uses.size() == room_ &&
              a_.cells.size() % kBlock == 0 && a_.numbers.size() == kNumbers &&
              a_.changed.size() == groups_ + a_.cells.size() / kBlock,
          "arrays: of one map");
}

void IdMap::resize(Array<std::int64_t, 1> ids, Array<std::uint32_t, 1> last, Array<std::uint32_t, 1> uses,
                   Array<std::uint8_t, 1> changed) {
  require(static_cast<std::int64_t>(ids.size()) >= a_.numbers[kFresh], "arrays: with room for the slots in use");
  auto index = [&] {
    nb::gil_scoped_release released;
    return index_->grown(ids.size(), ids.data());  // where memory runs out nothing has changed
  }();
  a_.ids = std::move(ids);
  a_.last = std::move(last);
  a_.uses = std::move(uses);
  a_.changed = std::move(changed);
  room_ = a_.ids.size();
  groups_ = (room_ + kGroup - 1) / kGroup;
  check();
  index_ = std::move(index);
}

bool IdMap::reindex() {
  frames_.clear();
  index_.emplace(room_, a_.ids.data());
  for (std::size_t slot = 0; slot < room_; ++slot) {
    if (a_.uses[slot] == 0) continue;
    const auto number = static_cast<std::int32_t>(slot);
    if (index_->find_or_add(index_->token(a_.ids[slot]), a_.ids[slot], number) != number) return false;
  }
  return true;
}

std::size_t IdMap::bytes() const {
  std::size_t held = HashIndex::bytes(room_);
  for (const Frame& frame : frames_) held += frame.bytes();
  return held;
}

std::size_t IdMap::last_bytes() const { return frames_.empty() ? 0 : frames_.back().bytes(); }

void IdMap::note(std::size_t slot) {
  if (a_.last[slot] == now()) return;  // this frame has it
  frames_.back().entries.push_back({static_cast<std::uint32_t>(slot), a_.last[slot], a_.uses[slot], a_.ids[slot]});
  a_.last[slot] = now();
  a_.changed[slot / kGroup] = 1;
}

void IdMap::note_word(std::size_t at) {
  std::uint64_t cells;
  std::memcpy(&cells, a_.cells.data() + 8 * at, 8);
  frames_.back().words.push_back({static_cast<std::uint32_t>(at), cells});
  a_.changed[groups_ + 8 * at / kBlock] = 1;
}

void IdMap::use(std::size_t slot) {
  note(slot);
  if (a_.uses[slot] != kUsesMax) ++a_.uses[slot];
}

void IdMap::forget(std::size_t slot, std::int64_t next) {
  note(slot);
  index_->remove(index_->token(a_.ids[slot]), a_.ids[slot]);
  a_.ids[slot] = next;
  a_.uses[slot] = 0;
  --a_.numbers[kLive];
}

void IdMap::free_in_order(std::size_t slot, std::int64_t& tail) {
  forget(slot, -1);
  const auto number = static_cast<std::int64_t>(slot);
  (tail < 0 ? a_.numbers[kFree] : a_.ids[static_cast<std::size_t>(tail)]) = number;
  tail = number;
}

std::int64_t IdMap::allocate(std::int64_t id) {
  const auto fresh = static_cast<std::size_t>(a_.numbers[kFresh]);
  if (a_.numbers[kFree] < 0 && fresh == rules_.capacity && !collect()) return -1;
  std::int64_t slot = a_.numbers[kFree];
  if (slot < 0 && fresh == room_) throw NoRoom{};
  if (slot < 0) slot = a_.numbers[kFresh]++;
  const auto at = static_cast<std::size_t>(slot);
  note(at);
  if (slot == a_.numbers[kFree]) a_.numbers[kFree] = a_.ids[at];
  index_->find_or_add(index_->token(id), id, static_cast<std::int32_t>(slot));
  a_.ids[at] = id;
  a_.uses[at] = 1;
  ++a_.numbers[kLive];
  return slot;
}

// Frees the slots of expired ids, and of others until it has its share; false if there are none. No slot is free.
bool IdMap::collect() {
  if (barren_ == now()) return false;
  std::int64_t tail = -1;
  std::size_t freed = expire(tail);
  const std::size_t share = std::max<std::size_t>(1, rules_.capacity / kShare);
  if (freed < share && rules_.evict != 0) freed += evict(share - freed, tail);
  if (freed == 0) barren_ = now();
  return freed != 0;
}

std::size_t IdMap::expire(std::int64_t& tail) {
  if (rules_.expire_after == 0 || now() <= expires_after_) return 0;
  std::size_t freed = 0;
  std::uint32_t oldest = now();
  for (std::size_t slot = 0; slot < room_; ++slot) {
    if (is_expired(slot)) {
      free_in_order(slot, tail);
      ++freed;
    } else {
      oldest = std::min(oldest, a_.last[slot]);
    }
  }
  const std::uint64_t after = std::uint64_t{oldest} + rules_.expire_after;
  expires_after_ = static_cast<std::uint32_t>(std::min<std::uint64_t>(after, kUsesMax));
  return freed;
}

// Finds the worth of the last slot to leave, 16 bits at a time, then frees in the order of slots.
std::size_t IdMap::evict(std::size_t wanted, std::int64_t& tail) {
  std::vector<std::uint32_t> counts(65536);
  std::uint64_t least = 0;
  std::size_t left = wanted;  // of those as worthy as `least`, so many leave
  for (int shift = rules_.evict == 2 ? 48 : 16; shift >= 0; shift -= 16) {
    std::fill(counts.begin(), counts.end(), 0);
    std::size_t there = 0;
    for (std::size_t slot = 0; slot < room_; ++slot) {
      if (!may_leave(slot) || (shift < 48 && worth(slot) >> (shift + 16) != least)) continue;
      ++counts[(worth(slot) >> shift) & 65535];
      ++there;
    }
    if (there == 0) return 0;
    left = std::min(left, there);  // all of them may be too few, at the first digit
    std::size_t digit = 0;
    for (; counts[digit] < left; ++digit) left -= counts[digit];
    least = least << 16 | digit;
  }
  std::size_t freed = 0;
  for (std::size_t slot = 0; slot < room_; ++slot) {
    if (!may_leave(slot) || worth(slot) > least) continue;
    if (worth(slot) == least && left-- == 0) {
      left = 0;
      continue;
    }
    free_in_order(slot, tail);
    ++freed;
  }
  return freed;
}

// Counts a sighting. As it counts, a hand goes over the cells and halves them: one turn takes an eighth of the cells.
bool IdMap::is_admitted(std::int64_t id) {
  if (rules_.admit_after == 1) return true;
  const std::size_t cells = a_.cells.size(), hand = static_cast<std::size_t>(a_.numbers[kHand]);
  std::uint64_t word;
  std::memcpy(&word, a_.cells.data() + 8 * hand, 8);
  if (word != 0) {
    note_word(hand);
    word = (word >> 1) & 0x7f7f7f7f7f7f7f7fu;
    std::memcpy(a_.cells.data() + 8 * hand, &word, 8);
  }
  a_.numbers[kHand] = static_cast<std::int64_t>(hand + 1 == cells / 8 ? 0 : hand + 1);
  std::array<std::size_t, 4> at;
  std::uint8_t least = 255;
  for (std::size_t i = 0; i < 4; ++i) {
    at[i] = hash_home(hash_tag(static_cast<std::int64_t>(static_cast<std::uint64_t>(id) ^ kSeeds[i])), cells);
    least = std::min(least, a_.cells[at[i]]);
  }
  for (std::size_t i = 0; i < 4 && least != 255; ++i) {
    if (a_.cells[at[i]] != least) continue;
    note_word(at[i] / 8);
    ++a_.cells[at[i]];
  }
  return least + 1u >= rules_.admit_after;
}

std::int64_t IdMap::map(const std::int64_t* ids, std::size_t count, std::int64_t* slots, std::int64_t* added,
                        std::int64_t* places) {
  Frame& frame = frames_.emplace_back();
  std::copy_n(a_.numbers.data(), std::size_t{kNumbers}, frame.numbers);
  try {
    ++a_.numbers[kBatches];
    const std::size_t unknown = map_known(ids, count, slots);
    const std::size_t found = unknown == 0 ? 0 : admit(ids, count, slots, added, places);
    frame.entries.shrink_to_fit();
    frame.words.shrink_to_fit();
    return static_cast<std::int64_t>(found);
  } catch (const NoRoom&) {
    undo();
    return -1;
  }
}

std::size_t IdMap::map_known(const std::int64_t* ids, std::size_t count, std::int64_t* slots) {
  std::size_t unknown = 0;
  for_each_ahead(*index_, ids, count, [&](std::size_t i, HashIndex::Token token) {
    const std::int32_t slot = index_->find(token, ids[i]);
    slots[i] = -1;
    if (slot >= 0 && is_expired(static_cast<std::size_t>(slot))) {
      forget(static_cast<std::size_t>(slot), a_.numbers[kFree]);
      a_.numbers[kFree] = slot;
    } else if (slot >= 0) {
      use(static_cast<std::size_t>(slot));
      slots[i] = slot;
    }
    unknown += slots[i] < 0;
  });
  return unknown;
}

// Once for ids in turn; then for those that came before their own admission.
std::size_t IdMap::admit(const std::int64_t* ids, std::size_t count, std::int64_t* slots, std::int64_t* added,
                         std::int64_t* places) {
  std::size_t found = 0;
  for (const bool admits : {true, false}) {
    for (std::size_t i = 0; i < count; ++i) {
      if (slots[i] >= 0) continue;
      const std::int32_t slot = index_->find(index_->token(ids[i]), ids[i]);
      if (slot >= 0) {
        use(static_cast<std::size_t>(slot));
        slots[i] = slot;
      } else if (admits && is_admitted(ids[i]) && (slots[i] = allocate(ids[i])) >= 0) {
        added[found] = slots[i];
        places[found++] = static_cast<std::int64_t>(i);
      }
    }
  }
  return found;
}

void IdMap::find(const std::int64_t* ids, std::size_t count, std::int64_t* slots) const {
  for_each_ahead(*index_, ids, count, [&](std::size_t i, HashIndex::Token token) {
    const std::int32_t slot = index_->find(token, ids[i]);
    slots[i] = slot >= 0 && is_expired(static_cast<std::size_t>(slot)) ? -1 : slot;
  });
}

void IdMap::begin(std::size_t frames) {
  require(frames <= frames_.size(), "frames: more than there are");
  frames_.erase(frames_.begin(), frames_.begin() + static_cast<std::ptrdiff_t>(frames));
}

void IdMap::undo() {
  require(!frames_.empty(), "frames: there is none");
  trade(frames_.back(), true);
  frames_.pop_back();
}

void IdMap::rewind() {
  for (auto frame = frames_.rbegin(); frame != frames_.rend(); ++frame) trade(*frame, true);
}

void IdMap::advance() {
  for (Frame& frame : frames_) trade(frame, false);
}

void IdMap::drop() { frames_.clear(); }

void IdMap::trade(Frame& frame, bool back) {
  expires_after_ = barren_ = 0;
  for (const Entry& entry : frame.entries) {
    if (a_.uses[entry.slot] != 0) index_->remove(index_->token(a_.ids[entry.slot]), a_.ids[entry.slot]);
  }
  for (Entry& entry : frame.entries) {
    std::swap(entry.id, a_.ids[entry.slot]);
    std::swap(entry.last, a_.last[entry.slot]);
    std::swap(entry.uses, a_.uses[entry.slot]);
    a_.changed[entry.slot / kGroup] = 1;
  }
  for (const Entry& entry : frame.entries) {
    const std::int64_t id = a_.ids[entry.slot];
    if (a_.uses[entry.slot] != 0) index_->find_or_add(index_->token(id), id, static_cast<std::int32_t>(entry.slot));
  }
  const auto trade_word = [&](Word& word) {
    std::uint64_t cells;
    std::memcpy(&cells, a_.cells.data() + 8 * std::size_t{word.at}, 8);
    std::memcpy(a_.cells.data() + 8 * std::size_t{word.at}, &word.cells, 8);
    word.cells = cells;
    a_.changed[groups_ + 8 * std::size_t{word.at} / kBlock] = 1;
  };
  if (back)
    std::for_each(frame.words.rbegin(), frame.words.rend(), trade_word);
  else
    std::for_each(frame.words.begin(), frame.words.end(), trade_word);
  for (std::size_t i = 0; i < kNumbers; ++i) std::swap(frame.numbers[i], a_.numbers[i]);
}

}  // namespace memhier

void register_id_map(nb::module_& m) {
  using namespace memhier;
  using namespace nb::literals;
  using Ids = Array<const std::int64_t, 1>;
  using Slots = Array<std::int64_t, 1>;
  using Places = Array<std::uint32_t, 1>;
  using Bytes = Array<std::uint8_t, 1>;
  nb::class_<IdMap>(m, "IdMap")
      .def(
          "__init__",
          [](IdMap* map, Slots& ids, Places& last, Places& uses, Bytes& cells, Bytes& changed, Slots& numbers,
             std::size_t capacity, std::uint32_t admit_after, std::uint32_t expire_after, std::uint32_t evict,
             std::uint32_t pending) {
            new (map) IdMap({std::move(ids), std::move(last), std::move(uses), std::move(cells), std::move(changed),
                             std::move(numbers)},
                            {capacity, admit_after, expire_after, evict, pending});
          },
          nb::kw_only(), "ids"_a, "last"_a, "uses"_a, "cells"_a, "changed"_a, "numbers"_a, "capacity"_a,
          "admit_after"_a, "expire_after"_a, "evict"_a, "pending"_a)
      .def(
          "map",
          [](IdMap& map, const Ids& ids, const Slots& slots, const Slots& added, const Slots& places) {
            require(slots.size() == ids.size() && added.size() == ids.size() && places.size() == ids.size(),
                    "slots, added, places: as long as ids");
            nb::gil_scoped_release released;
            return map.map(ids.data(), ids.size(), slots.data(), added.data(), places.data());
          },
          nb::kw_only(), "ids"_a, "slots"_a, "added"_a, "places"_a)
      .def(
          "find",
          [](const IdMap& map, const Ids& ids, const Slots& slots) {
            require(slots.size() == ids.size(), "slots: as long as ids");
            nb::gil_scoped_release released;
            map.find(ids.data(), ids.size(), slots.data());
          },
          nb::kw_only(), "ids"_a, "slots"_a)
      .def(
          "resize",
          [](IdMap& map, Slots& ids, Places& last, Places& uses, Bytes& changed) {
            map.resize(std::move(ids), std::move(last), std::move(uses), std::move(changed));
          },
          nb::kw_only(), "ids"_a, "last"_a, "uses"_a, "changed"_a)
      .def("begin", &IdMap::begin, "frames"_a)
      .def("undo", &IdMap::undo, nb::call_guard<nb::gil_scoped_release>())
      .def("rewind", &IdMap::rewind, nb::call_guard<nb::gil_scoped_release>())
      .def("advance", &IdMap::advance, nb::call_guard<nb::gil_scoped_release>())
      .def("drop", &IdMap::drop)
      .def("reindex", &IdMap::reindex, nb::call_guard<nb::gil_scoped_release>())
      .def("frames", &IdMap::frames)
      .def("bytes", &IdMap::bytes)
      .def("last_bytes", &IdMap::last_bytes);
}
