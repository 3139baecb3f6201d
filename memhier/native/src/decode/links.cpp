// The links of a graph of rows: of each row's neighbours those that no nearer one makes superfluous.
#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include <nanobind/nanobind.h>

#include "bind/buffer.hpp"
#include "decode/query.hpp"
#include "decode/walk.hpp"
#include "bind/module.hpp"

namespace nb = nanobind;

namespace memhier {
namespace {

struct Neighbour {
  float product;
  std::uint32_t row;
  bool operator<(const Neighbour& other) const {
    return product > other.product || (product == other.product && row < other.row);
  }
};

// The MRNG rule for rows of one norm, where the larger product is the nearer: a neighbour stays unless one that stayed
// is nearer to it than the row itself is. Places left over go to the nearest of the others.
void choose(const float* rows, std::size_t width, std::vector<Neighbour>& near, std::vector<Neighbour>& kept,
            std::vector<bool>& taken, std::span<std::uint32_t> links) {
  std::sort(near.begin(), near.end());
  near.erase(std::unique(near.begin(), near.end(), [](const auto& a, const auto& b) { return a.row == b.row; }),
             near.end());
  kept.clear();
  taken.assign(near.size(), false);
  for (std::size_t i = 0; i < near.size() && kept.size() < links.size(); ++i) {
    const float* row = rows + std::size_t{near[i].row} * width;
    taken[i] = std::all_of(kept.begin(), kept.end(), [&](const Neighbour& other) {
      return dot_floats(row, rows + std::size_t{other.row} * width, width) <= near[i].product;
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
void prune_links(nb::handle rows, nb::handle numbers, nb::handle candidates, nb::handle links) {
  const Buffer all(rows, Buffer::Access::read), named(numbers, Buffer::Access::read);
  const Buffer near(candidates, Buffer::Access::read), out(links, Buffer::Access::write);
  const std::size_t count = named.count<std::int64_t>();
  all.require(all.axes() == 2 && near.axes() == 2 && out.axes() == 2 && near.shape(0) == count && out.shape(0) == count,
              "prune_links: rows [V, width], numbers [n], candidates [n, c], links [n, degree]");
  const std::size_t words = all.shape(0), width = all.shape(1), some = near.shape(1), degree = out.shape(1);
  all.require(all.count<float>() == words * width && near.count<std::int64_t>() == count * some &&
                  out.count<std::uint32_t>() == count * degree && words < kNoRow,
              "prune_links: float32, int64, int64, uint32");
  const auto* name = named.as<const std::int64_t>();
  const auto* other = near.as<const std::int64_t>();
  const auto limit = static_cast<std::int64_t>(words);
  near.require(std::all_of(other, other + count * some, [=](auto row) { return row >= -1 && row < limit; }) &&
                   std::all_of(name, name + count, [=](auto row) { return row >= 0 && row < limit; }),
               "prune_links: out of range");
  const auto* row = all.as<const float>();
  auto* link = out.as<std::uint32_t>();
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
      found.push_back({product, static_cast<std::uint32_t>(number)});
    }
    choose(row, width, found, kept, taken, {link + i * degree, degree});
  }
}

}  // namespace
}  // namespace memhier

void register_decode_links(nb::module_& m) {
  m.def("prune_links", &memhier::prune_links, nb::arg("rows"), nb::arg("numbers"), nb::arg("candidates"),
        nb::arg("links"));
}
