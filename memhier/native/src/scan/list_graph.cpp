// The best-first walk over a graph of centroids in half precision, for a batch of queries.
#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <vector>

#include "bind/array.hpp"
#include "bind/module.hpp"
#include "scan/half_rows.hpp"

namespace nb = nanobind;

namespace memhier {
namespace {

constexpr std::int32_t kNone = -1;
constexpr std::size_t kSteps = 4;  // at a time, so that rows arrive while others are measured
constexpr std::size_t kLine = 64;  // bytes that a prefetch brings

template <class T>
MEMHIER_INLINE void fetch(const T* values, std::size_t count) {
  const auto* first = reinterpret_cast<const char*>(values);
  for (std::size_t byte = 0; byte < count * sizeof(T); byte += kLine) __builtin_prefetch(first + byte);
}

// Links int32 [lists, degree]: lists near each, then kNone. The last may be kNone - 1 - c: list c has the same
// centroid; no list links to c by other means.
struct ListGraph {
  const std::uint16_t* rows;  // [lists, dimension]
  std::size_t lists, dimension;
  const std::int32_t* links;
  std::size_t degree;

  const std::int32_t* of(std::size_t list) const { return links + list * degree; }
  std::size_t checked(std::int32_t list) const {
    require(list >= 0 && static_cast<std::size_t>(list) < lists, "walk_lists: a link leads beyond the lists");
    return static_cast<std::size_t>(list);
  }
  // The next list of the same centroid, or kNone.
  std::int32_t copy_of(std::size_t list) const {
    const std::int32_t last = of(list)[degree - 1];
    return last < kNone ? kNone - 1 - last : kNone;
  }
};

// The walk of one query at a time: it goes on from the nearest list that it has not gone on from, and ends after as
// many steps as the sight beyond the nearest list of all.
class Walk {
 public:
  Walk(const ListGraph& graph, std::size_t sight) : graph_(graph), sight_(sight), seen_((graph.lists + 63) / 64) {}

  void run(const float* query, const std::int32_t* seeds, std::size_t count) {
    std::fill(seen_.begin(), seen_.end(), std::uint64_t{0});
    near_.clear();
    ahead_.clear();
    gather(seeds, count);
    std::uint64_t nearest = UINT64_MAX;
    for (std::size_t left = sight_; !fresh_.empty() || (left > 0 && !ahead_.empty());) {
      // Rows arrive while those before are measured.
      std::swap(fresh_, arrived_);
      fresh_.clear();
      std::array<std::size_t, kSteps> lists;
      std::size_t steps = 0;
      for (; steps < kSteps && left > 0 && !ahead_.empty(); ++steps, --left) {
        const std::uint64_t key = ahead_.front();
        std::pop_heap(ahead_.begin(), ahead_.end(), std::greater<>{});
        ahead_.pop_back();
        lists[steps] = key & UINT32_MAX;
        fetch(graph_.of(lists[steps]), graph_.degree);
        if (key < nearest) nearest = key, left = sight_;
      }
      for (std::size_t i = 0; i < steps; ++i) gather(graph_.of(lists[i]), graph_.degree);
      look(query);
    }
  }

  // Fills nearest[wanted] with the lists found, by distance and at equal ones by number, each followed by those of the
  // same centroid; -1 where there are fewer.
  void finish(std::int64_t* nearest, std::size_t wanted) {
    const std::size_t some = std::min(wanted, near_.size());
    const auto last = near_.begin() + static_cast<std::ptrdiff_t>(some);
    if (last != near_.end()) std::nth_element(near_.begin(), last, near_.end());
    std::sort(near_.begin(), last);
    std::size_t at = 0;
    for (std::size_t i = 0; i < some && at < wanted; ++i)
      for (std::int32_t list = static_cast<std::int32_t>(near_[i] & UINT32_MAX); list != kNone && at < wanted;
           list = graph_.copy_of(graph_.checked(list)))
        nearest[at++] = list;
    std::fill(nearest + at, nearest + wanted, kNone);
  }

 private:
  // Takes down the lists that were not yet seen.
  void gather(const std::int32_t* lists, std::size_t count) {
    for (std::size_t i = 0; i < count && lists[i] >= 0; ++i) {
      const std::size_t list = graph_.checked(lists[i]);
      const std::uint64_t bit = std::uint64_t{1} << (list % 64);
      if ((seen_[list / 64] & bit) != 0) continue;
      seen_[list / 64] |= bit;
      fresh_.push_back(lists[i]);
      fetch(graph_.rows + list * graph_.dimension, graph_.dimension);
    }
  }

  // Measures the lists whose rows have arrived.
  void look(const float* query) {
    away_.resize(arrived_.size());
    measure_some(query, graph_.rows, graph_.dimension, arrived_.data(), arrived_.size(), away_.data());
    for (std::size_t i = 0; i < arrived_.size(); ++i) {
      const std::uint64_t key = std::uint64_t{order_of(away_[i])} << 32 | static_cast<std::uint32_t>(arrived_[i]);
      near_.push_back(key);
      ahead_.push_back(key);
      std::push_heap(ahead_.begin(), ahead_.end(), std::greater<>{});
    }
  }

  const ListGraph& graph_;
  const std::size_t sight_;
  std::vector<std::uint64_t> seen_;    // a bit for each list
  std::vector<std::uint64_t> near_;    // distance above, list below, of all seen
  std::vector<std::uint64_t> ahead_;   // a heap of those to go on from, the nearest first
  std::vector<std::int32_t> fresh_;    // lists to measure
  std::vector<std::int32_t> arrived_;  // and those of the steps before
  std::vector<float> away_;            // their distances
};

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
