// Where the records of keys lie in the parts of a log: the places of memhier.log.index.
#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

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

// Whether each of some pages, counted from 0, is among others, which are few.
void are_among(const Array<const std::int64_t, 1>& pages, const Array<const std::int64_t, 1>& others,
               const Array<bool, 1>& found) {
  require(found.size() == pages.size(), "found: one for each page");
  nb::gil_scoped_release released;
  const auto bits = static_cast<int>(std::bit_width(2 * others.size() + 1));  // less than half of the places are taken
  require(others.size() < std::size_t{1} << 31, "others: fewer");
  std::vector<std::uint32_t> table(std::size_t{1} << bits);  // one more than a place among the others, 0 for none
  const auto place_of = [&](std::int64_t page) {
    std::size_t at = (static_cast<std::uint64_t>(page) * 0x9e3779b97f4a7c15u) >> (64 - bits);
    while (table[at] != 0 && others[table[at] - 1] != page) at = (at + 1) & (table.size() - 1);
    return at;
  };
  for (std::size_t i = 0; i < others.size(); ++i) {
    if (others[i] >= 0) table[place_of(others[i])] = static_cast<std::uint32_t>(i + 1);
  }
  for (std::size_t i = 0; i < pages.size(); ++i) found[i] = pages[i] >= 0 && table[place_of(pages[i])] != 0;
}

}  // namespace
}  // namespace memhier

void register_places(nb::module_& m) {
  using namespace nb::literals;
  m.def("are_among", &memhier::are_among, nb::kw_only(), "pages"_a, "others"_a, "found"_a);
  m.def("locate", &memhier::locate, nb::kw_only(), "keys"_a, "places"_a, "handles"_a, "files"_a, "offsets"_a);
}
