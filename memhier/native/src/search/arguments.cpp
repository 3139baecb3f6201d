// The arguments of a search, made in Python.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include "bind/module.hpp"
#include "search/search_arguments.hpp"

namespace nb = nanobind;

void register_search(nb::module_& m) {
  using namespace memhier;
  using namespace nb::literals;
  nb::class_<QuerySpace>(m, "QuerySpace")
      .def(nb::init<int, std::size_t, double, std::optional<Array<const float, 2>>,
                    std::optional<Array<const std::int64_t, 1>>, std::optional<Array<const float, 1>>,
                    std::optional<Array<const float, 1>>, float>(),
           nb::kw_only(), "metric"_a, "dimension"_a, "scale"_a, "matrix"_a.none(), "order"_a.none(), "share"_a.none(),
           "errors"_a.none(), "usual"_a);
  nb::class_<ListRouting>(m, "ListRouting")
      .def(nb::init<std::optional<Array<const std::int32_t, 2>>, std::optional<Array<const std::int32_t, 1>>>(),
           nb::kw_only(), "links"_a.none(), "seeds"_a.none());
  nb::class_<StoredRows>(m, "StoredRows")
      .def(nb::init<int, std::size_t, std::size_t, Array<const std::int64_t, 1>, Array<const std::byte, 2>>(),
           nb::kw_only(), "type"_a, "row_bytes"_a, "per_page"_a, "hot_keys"_a, "hot_pages"_a);
  nb::class_<StoredLists>(m, "StoredLists")
      .def(nb::init<std::int32_t, Array<const std::int64_t, 1>, Array<const std::int64_t, 1>, std::size_t, std::size_t,
                    std::optional<Array<const std::uint64_t, 1>>>(),
           nb::kw_only(), "file"_a, "starts"_a, "offsets"_a, "block_bytes"_a, "id_bytes"_a, "allowed"_a.none());
  nb::class_<IndexState>(m, "IndexState")
      .def(nb::init<const QuerySpace&, const CodeLists&, const CodeBook&, const std::vector<const CodedPart*>&,
                    const std::vector<const StoredLists*>&, std::size_t, const ListRouting&, const StoredRows&,
                    const std::vector<const PageRowArrays*>&>(),
           nb::kw_only(), "space"_a, "lists"_a, "book"_a, "parts"_a, "stored_lists"_a, "wave_pages"_a, "routing"_a,
           "stored"_a, "page_rows"_a, nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(), nb::keep_alive<1, 4>(),
           nb::keep_alive<1, 5>(), nb::keep_alive<1, 6>(), nb::keep_alive<1, 8>(), nb::keep_alive<1, 9>(),
           nb::keep_alive<1, 10>())
      .def(nb::init<const IndexState&, std::vector<Array<const std::uint64_t, 1>>, bool>(), nb::kw_only(), "whole"_a,
           "bitmaps"_a, "narrowed"_a, nb::keep_alive<1, 2>())
      .def_ro("left", &IndexState::left)
      .def_prop_ro("held", &IndexState::held);
  nb::class_<SearchEffort>(m, "SearchEffort")
      .def(nb::init<std::size_t, float, std::int64_t, float, float, float, std::int64_t, std::int64_t, std::int64_t,
                    std::size_t, std::size_t, std::size_t, double, float, bool>(),
           nb::kw_only(), "k"_a, "eps"_a, "least"_a, "gap"_a, "clear"_a, "border"_a, "most"_a, "usual"_a,
           "most_times"_a, "limit"_a, "first_round"_a, "max_reads"_a, "deadline"_a, "loss"_a, "put_off"_a);
  nb::class_<SearchRequest>(m, "SearchRequest")
      .def(nb::init<Array<const float, 2>, Routes, const SearchEffort&, std::optional<Array<const float, 1>>>(),
           nb::kw_only(), "queries"_a, "routes"_a, "effort"_a, "radius"_a.none());
  nb::class_<SearchOutput>(m, "SearchOutput")
      .def(nb::init<Array<std::int64_t, 2>, Array<float, 2>, Array<std::int32_t, 2>, Array<std::int64_t, 2>,
                    Array<ScanTally, 1>, Array<std::int64_t, 1>, Array<RankTally, 1>>(),
           nb::kw_only(), "ids"_a, "distances"_a, "files"_a, "offsets"_a, "scanned"_a, "admitted"_a, "ranked"_a);
}
