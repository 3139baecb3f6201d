// The slot map as Python calls it.
#include "cache/slotmap.hpp"

#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>

#include "bind/array.hpp"
#include "bind/module.hpp"

namespace nb = nanobind;

namespace memhier {
namespace {

using Keys = Array<const std::int64_t, 1>;
using Slots = Array<std::int64_t, 1>;
using Owned = nb::ndarray<nb::numpy, std::int64_t>;

// memhier.cache.slots has checked every argument before; this check guards memory, so it is made here again.
void require_equal_length(const Keys& keys, const Slots& slots) {
  require(keys.size() == slots.size(), "keys and slots differ in length");
}

Owned hand_over(std::unique_ptr<std::int64_t[]> values, std::size_t count) {
  std::int64_t* data = values.get();
  nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<std::int64_t*>(p); });
  values.release();
  return Owned(data, {count}, owner);
}

template <class Index>
std::size_t insert(SlotMap<Index>& map, const Keys& keys, const Slots& slots) {
  require_equal_length(keys, slots);
  return map.insert(keys.data(), keys.size(), slots.data());
}

template <class Index>
Owned unique(SlotMap<Index>& map, const Keys& keys, const Slots& inverse) {
  require_equal_length(keys, inverse);
  Distinct found;
  {
    nb::gil_scoped_release release;
    found = map.unique(keys.data(), keys.size(), inverse.data(), false);
  }
  return hand_over(std::move(found.keys), found.count);
}

template <class Index>
std::pair<Owned, Owned> unique_find(SlotMap<Index>& map, const Keys& keys, const Slots& inverse) {
  require_equal_length(keys, inverse);
  Distinct found;
  {
    nb::gil_scoped_release release;
    found = map.unique(keys.data(), keys.size(), inverse.data(), true);
  }
  return {hand_over(std::move(found.keys), found.count), hand_over(std::move(found.slots), found.count)};
}

template <class Index>
std::pair<Owned, Owned> items(SlotMap<Index>& map) {
  Distinct found;
  {
    nb::gil_scoped_release release;
    found = map.items();
  }
  return {hand_over(std::move(found.keys), found.count), hand_over(std::move(found.slots), found.count)};
}

template <class Index>
auto bind(nb::module_& m, const char* name) {
  using Map = SlotMap<Index>;
  using Unlocked = nb::call_guard<nb::gil_scoped_release>;
  return nb::class_<Map>(m, name)
      .def("size", &Map::size, Unlocked())
      .def("reserved", &Map::reserved, Unlocked())
      .def("reserve", &Map::reserve, Unlocked(), nb::arg("batch"))
      .def(
          "find",
          [](Map& map, const Keys& keys, const Slots& slots) {
            require_equal_length(keys, slots);
            map.find(keys.data(), keys.size(), slots.data());
          },
          Unlocked(), nb::kw_only(), nb::arg("keys"), nb::arg("slots"))
      .def("insert", &insert<Index>, Unlocked(), nb::kw_only(), nb::arg("keys"), nb::arg("slots"))
      .def(
          "erase",
          [](Map& map, const Keys& keys, const Slots& slots) {
            require_equal_length(keys, slots);
            map.erase(keys.data(), keys.size(), slots.data());
          },
          Unlocked(), nb::kw_only(), nb::arg("keys"), nb::arg("slots"))
      .def("unique", &unique<Index>, nb::kw_only(), nb::arg("keys"), nb::arg("inverse"))
      .def("unique_find", &unique_find<Index>, nb::kw_only(), nb::arg("keys"), nb::arg("inverse"))
      .def(
          "keys_of",
          [](Map& map, const Keys& slots, const Slots& keys) {
            require_equal_length(slots, keys);
            return map.keys_of(slots.data(), slots.size(), keys.data());
          },
          Unlocked(), nb::kw_only(), nb::arg("slots"), nb::arg("keys"))
      .def("items", &items<Index>);
}

}  // namespace
}  // namespace memhier

void register_slotmap(nb::module_& m) {
  using namespace memhier;
  bind<HashIndex>(m, "HashSlots")
      .def(
          "__init__",
          [](SlotMap<HashIndex>* self, std::size_t capacity) {
            const auto make = [&](const std::int64_t* key_of) { return HashIndex(capacity, key_of); };
            new (self) SlotMap<HashIndex>(capacity, make);
          },
          nb::arg("capacity"))
      .def("grow", &SlotMap<HashIndex>::grow, nb::call_guard<nb::gil_scoped_release>(), nb::arg("capacity"))
      .def_static(
          "bytes_for",
          [](std::size_t capacity, std::size_t batch) {
            return HashIndex::bytes(capacity) + SlotMap<HashIndex>::bytes(capacity, batch);
          },
          nb::arg("capacity"), nb::arg("batch"));
  bind<DirectIndex>(m, "DirectSlots")
      .def(
          "__init__",
          [](SlotMap<DirectIndex>* self, std::size_t capacity, std::size_t key_space) {
            const auto make = [&](const std::int64_t*) { return DirectIndex(key_space); };
            new (self) SlotMap<DirectIndex>(capacity, make);
          },
          nb::arg("capacity"), nb::arg("key_space"))
      .def_static(
          "bytes_for",
          [](std::size_t capacity, std::size_t key_space, std::size_t batch) {
            return DirectIndex::bytes(key_space) + SlotMap<DirectIndex>::bytes(capacity, batch);
          },
          nb::arg("capacity"), nb::arg("key_space"), nb::arg("batch"));
}
