// The nearest of many thousand half-precision vectors to each query of a batch.
#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include <nanobind/stl/optional.h>

#include "bind/array.hpp"
#include "bind/module.hpp"
#include "route/nearest_rows.hpp"

namespace nb = nanobind;

namespace memhier {
namespace {

// queries [q, d]; rows fp16 [n, d]; fills nearest [q, p] with row numbers, by distance and at equal ones by number; of
// the rows `among`, which ascend, where they are given. Takes no more room for more rows.
void nearest_rows(const Array<const float, 2>& queries, const Array<const std::uint16_t, 2>& rows,
                  const Array<std::int64_t, 2>& nearest, const std::optional<Array<const std::int64_t, 1>>& among) {
  const std::size_t dimension = queries.shape(1), wanted = nearest.shape(1);
  const std::size_t total = among ? among->shape(0) : rows.shape(0);
  require(rows.shape(1) == dimension && nearest.shape(0) == queries.shape(0) && wanted <= total && total <= UINT32_MAX,
          "nearest_rows: array shapes do not fit together");
  const std::int64_t* const chosen = among ? among->data() : nullptr;
  for (std::size_t i = 0; among && i < total; ++i)
    require(chosen[i] >= (i == 0 ? 0 : chosen[i - 1] + 1) && chosen[i] < static_cast<std::int64_t>(rows.shape(0)),
            "nearest_rows: among has row numbers, ascending");
  if (wanted == 0) return;

  nb::gil_scoped_release released;
  const ComparedRows compared{rows.data(), dimension, chosen, total};
  ComparisonRoom room;
  std::vector<NearestRows> found(std::min(kTogether, queries.shape(0)), NearestRows(wanted, total));
  for (std::size_t first = 0; first < queries.shape(0); first += kTogether) {
    const std::size_t together = std::min(kTogether, queries.shape(0) - first);
    compare_rows(queries.data() + first * dimension, together, compared, found.data(), room);
    for (std::size_t q = 0; q < together; ++q) {
      std::int64_t* const numbers = nearest.data() + (first + q) * wanted;
      found[q].finish(numbers);
      if (chosen != nullptr) std::transform(numbers, numbers + wanted, numbers, [&](auto i) { return chosen[i]; });
    }
  }
}

}  // namespace
}  // namespace memhier

void register_nearest_lists(nb::module_& m) {
  m.def("nearest_rows", &memhier::nearest_rows, nb::kw_only(), nb::arg("queries"), nb::arg("rows"), nb::arg("nearest"),
        nb::arg("among").none() = nb::none());
}
