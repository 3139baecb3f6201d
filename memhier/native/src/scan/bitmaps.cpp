// Bitmaps of rows: which runs of rows hold one, as runs_with of memhier.ann.zoom.filters.bitmaps finds in NumPy.
#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "bind/array.hpp"
#include "bind/module.hpp"
#include "scan/row_bits.hpp"

namespace nb = nanobind;

namespace memhier {
namespace {

// Sets bit i of found where words have a bit from starts[i] to before starts[i + 1], and returns the bits of all words.
std::int64_t runs_with(const Array<const std::uint64_t, 1>& words, const Array<const std::int64_t, 1>& starts,
                       const Array<std::uint64_t, 1>& found) {
  require(starts.size() > 0 && found.size() == (starts.size() - 1 + 63) / 64 && starts[0] >= 0 &&
              std::is_sorted(starts.data(), starts.data() + starts.size()) &&
              starts[starts.size() - 1] <= static_cast<std::int64_t>(64 * words.size()),
          "runs_with: ascending starts within the words, a bit for each run");
  std::fill_n(found.data(), found.size(), 0);
  mark_runs({words.data(), words.size()}, {starts.data(), starts.size()}, found.data());
  std::int64_t count = 0;
  for (std::size_t i = 0; i < words.size(); ++i)
    if (words[i] != 0) count += std::popcount(words[i]);
  return count;
}

}  // namespace
}  // namespace memhier

void register_bitmaps(nb::module_& m) {
  using namespace nb::literals;
  m.def("runs_with", &memhier::runs_with, nb::kw_only(), "words"_a, "starts"_a, "found"_a);
}
