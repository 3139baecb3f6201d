// Walks over a graph of centroids for a batch of queries, and the lists in their reach.
#include <cstdint>
#include <vector>

#include "bind/array.hpp"
#include "bind/module.hpp"
#include "route/list_graph.hpp"

namespace nb = nanobind;

namespace memhier {
namespace {

// queries [q, d]; rows fp16 [lists, d]; links int32 [lists, degree]; seeds int32 [s]; fills nearest [q, p] with the
// lists that walks with `sight` lists in sight find, by distance, and -1 where they find fewer.
void walk_lists(const Array<const float, 2>& queries, const Array<const std::uint16_t, 2>& rows,
                const Array<const std::int32_t, 2>& links, const Array<const std::int32_t, 1>& seeds, std::size_t sight,
                const Array<std::int64_t, 2>& nearest) {
  const std::size_t wanted = nearest.shape(1), count = queries.shape(0);
  require(rows.shape(1) == queries.shape(1) && links.shape(0) == rows.shape(0) && links.shape(1) > 0 &&
              nearest.shape(0) == count && sight >= 1 && sight <= UINT32_MAX && rows.shape(0) <= INT32_MAX,
          "walk_lists: array shapes do not fit together");
  const ListGraph graph{rows.data(), rows.shape(0), rows.shape(1), links.data(), links.shape(1)};
  nb::gil_scoped_release released;
  Walk walk(graph, sight);
  for (std::size_t q = 0; q < count; ++q) {
    walk.run(queries.data() + q * graph.dimension, seeds.data(), seeds.size());
    walk.finish(nearest.data() + q * wanted, wanted);
  }
}

// links int32 [lists, degree]; sets reached uint8 [lists] for all lists that a list set before leads to, copies among
// them.
void reach_lists(const Array<const std::int32_t, 2>& links, const Array<std::uint8_t, 1>& reached) {
  const std::size_t lists = links.shape(0), degree = links.shape(1);
  require(reached.size() == lists && degree > 0 && lists <= INT32_MAX, "reach_lists: links [n, degree], reached [n]");
  const ListGraph graph{nullptr, lists, 0, links.data(), degree};
  nb::gil_scoped_release released;
  std::vector<std::int32_t> ahead;
  for (std::size_t list = 0; list < lists; ++list)
    if (reached[list] != 0) ahead.push_back(static_cast<std::int32_t>(list));
  const auto reach = [&](std::int32_t list) {
    std::uint8_t& mark = reached[graph.checked(list)];
    if (mark == 0) ahead.push_back(list);
    mark = 1;
  };
  while (!ahead.empty()) {
    const auto list = static_cast<std::size_t>(ahead.back());
    ahead.pop_back();
    const std::int32_t* link = graph.of(list);
    for (std::size_t i = 0; i < degree && link[i] >= 0; ++i) reach(link[i]);
    if (graph.copy_of(list) != kNone) reach(graph.copy_of(list));
  }
}

}  // namespace
}  // namespace memhier

void register_list_graph(nb::module_& m) {
  m.def("walk_lists", &memhier::walk_lists, nb::kw_only(), nb::arg("queries"), nb::arg("rows"), nb::arg("links"),
        nb::arg("seeds"), nb::arg("sight"), nb::arg("nearest"));
  m.def("reach_lists", &memhier::reach_lists, nb::kw_only(), nb::arg("links"), nb::arg("reached"));
}
