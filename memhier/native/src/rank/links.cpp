// The links of a graph of rows: of each row's neighbours those that no nearer one makes superfluous.
#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "bind/array.hpp"
#include "bind/module.hpp"
#include "rank/floats.hpp"
#include "rank/top_k.hpp"

namespace nb = nanobind;

namespace memhier {
namespace {

constexpr std::uint32_t kNone = 0xffffffff;
using Neighbour = Candidate<std::uint32_t>;  // key: how near, the larger the nearer

struct Rows {
  const float* data;
  std::size_t width;
  bool inner;  // by the inner product, of rows of one norm, or else by the distance

  const float* at(std::size_t row) const { return data + row * width; }
  float nearness(const float* a, const float* b) const {
    return inner ? dot_floats(a, b, width) : -squared_floats(a, b, width);
  }
};

// The MRNG rule: a neighbour stays unless one that stayed is nearer to it than the row itself is. Places left over go
// to the nearest of the others.
void choose(const Rows& rows, std::vector<Neighbour>& near, std::vector<Neighbour>& kept, std::vector<bool>& taken,
            std::span<std::uint32_t> links) {
  std::sort(near.begin(), near.end(), Larger{});
  near.erase(std::unique(near.begin(), near.end(), [](const auto& a, const auto& b) { return a.row == b.row; }),
             near.end());
  kept.clear();
  taken.assign(near.size(), false);
  for (std::size_t i = 0; i < near.size() && kept.size() < links.size(); ++i) {
    const float* row = rows.at(near[i].row);
    taken[i] = std::all_of(kept.begin(), kept.end(), [&](const Neighbour& other) {
      return rows.nearness(row, rows.at(other.row)) <= near[i].key;
    });
    if (taken[i]) kept.push_back(near[i]);
  }
  for (std::size_t i = 0; i < near.size() && kept.size() < links.size(); ++i)
    if (!taken[i]) kept.push_back(near[i]);
  std::fill(links.begin(), links.end(), kNone);
  for (std::size_t i = 0; i < kept.size(); ++i) links[i] = kept[i].row;
}

// rows float32 [V, width]; numbers int64 [n]: of the rows whose links are wanted; candidates int64 [n, c], -1 for none;
// fills links uint32 [n, degree].
void prune_links(const Array<const float, 2>& rows, const Array<const std::int64_t, 1>& numbers,
                 const Array<const std::int64_t, 2>& candidates, bool inner, const Array<std::uint32_t, 2>& links) {
  const std::size_t count = numbers.size(), words = rows.shape(0);
  const std::size_t some = candidates.shape(1), degree = links.shape(1);
  require(candidates.shape(0) == count && links.shape(0) == count && words < kNone,
          "prune_links: rows [V, width], numbers [n], candidates [n, c], links [n, degree]");
  const std::int64_t *name = numbers.data(), *other = candidates.data();
  const auto limit = static_cast<std::int64_t>(words);
  require(std::all_of(other, other + count * some, [=](auto row) { return row >= -1 && row < limit; }) &&
              std::all_of(name, name + count, [=](auto row) { return row >= 0 && row < limit; }),
          "prune_links: out of range");
  const Rows every{rows.data(), rows.shape(1), inner};
  std::uint32_t* link = links.data();
  nb::gil_scoped_release released;
  std::vector<Neighbour> found, kept;
  std::vector<bool> taken;
  for (std::size_t i = 0; i < count; ++i) {
    found.clear();
    const float* own = every.at(static_cast<std::size_t>(name[i]));
    for (std::size_t j = 0; j < some; ++j) {
      const std::int64_t number = other[i * some + j];
      if (number < 0 || number == name[i]) continue;
      const float near = every.nearness(own, every.at(static_cast<std::size_t>(number)));
      found.push_back({near, near, static_cast<std::uint32_t>(number)});
    }
    choose(every, found, kept, taken, {link + i * degree, degree});
  }
}

}  // namespace
}  // namespace memhier

void register_links(nb::module_& m) {
  m.def("prune_links", &memhier::prune_links, nb::kw_only(), nb::arg("rows"), nb::arg("numbers"), nb::arg("candidates"),
        nb::arg("inner"), nb::arg("links"));
}
