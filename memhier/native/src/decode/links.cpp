// The links of a graph of rows: of each row's neighbours those that no nearer one makes superfluous.
#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "bind/array.hpp"
#include "bind/module.hpp"
#include "decode/query.hpp"
#include "decode/walk.hpp"

namespace nb = nanobind;

namespace memhier {
namespace {

using Neighbour = Candidate<std::uint32_t>;  // key: the product

// The MRNG rule for rows of one norm, where the larger product is the nearer: a neighbour stays unless one that stayed
// is nearer to it than the row itself is. Places left over go to the nearest of the others.
void choose(const float* rows, std::size_t width, std::vector<Neighbour>& near, std::vector<Neighbour>& kept,
            std::vector<bool>& taken, std::span<std::uint32_t> links) {
  std::sort(near.begin(), near.end(), Larger{});
  near.erase(std::unique(near.begin(), near.end(), [](const auto& a, const auto& b) { return a.row == b.row; }),
             near.end());
  kept.clear();
  taken.assign(near.size(), false);
  for (std::size_t i = 0; i < near.size() && kept.size() < links.size(); ++i) {
    const float* row = rows + std::size_t{near[i].row} * width;
    taken[i] = std::all_of(kept.begin(), kept.end(), [&](const Neighbour& other) {
      return dot_floats(row, rows + std::size_t{other.row} * width, width) <= near[i].key;
    });
    if (taken[i]) kept.push_back(near[i]);
  }
  for (std::size_t i = 0; i < near.size() && kept.size() < links.size(); ++i)
    if (!taken[i]) kept.push_back(near[i]);
  std::fill(links.begin(), links.end(), kNoRow);
  for (std::size_t i = 0; i < kept.size(); ++i) links[i] = kept[i].row;
}

// rows float32 [V, width], of one norm; numbers int64 [n]: of the rows whose links are wanted; candidates int64 [n, c],
// -1 for none; fills links uint32 [n, degree].
void prune_links(const Array<const float, 2>& rows, const Array<const std::int64_t, 1>& numbers,
                 const Array<const std::int64_t, 2>& candidates, const Array<std::uint32_t, 2>& links) {
  const std::size_t count = numbers.size(), words = rows.shape(0), width = rows.shape(1);
  const std::size_t some = candidates.shape(1), degree = links.shape(1);
  require(candidates.shape(0) == count && links.shape(0) == count && words < kNoRow,
          "prune_links: rows [V, width], numbers [n], candidates [n, c], links [n, degree]");
  const std::int64_t *name = numbers.data(), *other = candidates.data();
  const auto limit = static_cast<std::int64_t>(words);
  require(std::all_of(other, other + count * some, [=](auto row) { return row >= -1 && row < limit; }) &&
              std::all_of(name, name + count, [=](auto row) { return row >= 0 && row < limit; }),
          "prune_links: out of range");
  const float* row = rows.data();
  std::uint32_t* link = links.data();
  nb::gil_scoped_release released;
  std::vector<Neighbour> found, kept;
  std::vector<bool> taken;
  for (std::size_t i = 0; i < count; ++i) {
    found.clear();
    const float* own = row + static_cast<std::size_t>(name[i]) * width;
    for (std::size_t j = 0; j < some; ++j) {
      const std::int64_t number = other[i * some + j];
      if (number < 0 || number == name[i]) continue;
      const float product = dot_floats(own, row + static_cast<std::size_t>(number) * width, width);
      found.push_back({product, product, static_cast<std::uint32_t>(number)});
    }
    choose(row, width, found, kept, taken, {link + i * degree, degree});
  }
}

}  // namespace
}  // namespace memhier

void register_decode_links(nb::module_& m) {
  m.def("prune_links", &memhier::prune_links, nb::kw_only(), nb::arg("rows"), nb::arg("numbers"), nb::arg("candidates"),
        nb::arg("links"));
}
