// Where the records of keys lie in the parts of a log: the places of memhier.log.index.
#include "bind/array.hpp"
#include "bind/module.hpp"

namespace nb = nanobind;

namespace memhier {
namespace {

constexpr int kOffsetBits = 44;  // of a place; the slot of the part lies above them

// Finds the file and the offset of every key's record; false where a key has none. `places`: of every possible key, one
// more than its place, 0 for none. `handles`: the file of each slot.
bool locate(const Array<const std::int64_t, 1>& keys, const Array<const std::int64_t, 1>& places,
            const Array<const std::int32_t, 1>& handles, const Array<std::int32_t, 1>& files,
            const Array<std::int64_t, 1>& offsets) {
  require(files.size() == keys.size() && offsets.size() == keys.size(), "files, offsets: one for each key");
  for (std::size_t i = 0; i < keys.size(); ++i) {
    const auto key = static_cast<std::size_t>(keys[i]);  // a negative key is a large one here
    if (key >= places.size() || places[key] <= 0) return false;
    const std::int64_t place = places[key] - 1;
    const auto slot = static_cast<std::size_t>(place >> kOffsetBits);
    require(slot < handles.size(), "handles: of every slot");
    files[i] = handles[slot];
    offsets[i] = place & ((std::int64_t{1} << kOffsetBits) - 1);
  }
  return true;
}

}  // namespace
}  // namespace memhier

void register_places(nb::module_& m) {
  using namespace nb::literals;
  m.def("locate", &memhier::locate, nb::kw_only(), "keys"_a, "places"_a, "handles"_a, "files"_a, "offsets"_a);
}
