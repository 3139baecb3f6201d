// The nearest of some thousand half-precision vectors to each query, by comparing all of them.
#include <algorithm>
#include <bit>
#include <cstdint>
#include <stdexcept>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include "distance.hpp"
#include "module.hpp"

namespace nb = nanobind;

namespace memhier {
namespace {

template <class T, int axes>
using Array = nb::ndarray<T, nb::ndim<axes>, nb::c_contig, nb::device::cpu>;

// queries [q, d]; rows fp16 [n, d]; fills nearest [q, p] with row numbers, by distance and at equal ones by number.
void nearest_rows(Array<const float, 2> queries, Array<const std::uint16_t, 2> rows, Array<std::int64_t, 2> nearest) {
  const std::size_t dimension = queries.shape(1), count = rows.shape(0), wanted = nearest.shape(1);
  if (rows.shape(1) != dimension || nearest.shape(0) != queries.shape(0) || wanted > count || count > UINT32_MAX)
    throw std::invalid_argument("nearest_rows: array shapes do not fit together");

  nb::gil_scoped_release released;
  std::vector<float> away(count);
  // Distance above, number below: floats that are not negative order as their bits do.
  std::vector<std::uint64_t> keys(count);
  for (std::size_t q = 0; q < queries.shape(0); ++q) {
    distances({queries.data() + q * dimension, reinterpret_cast<const std::byte*>(rows.data()),
               static_cast<std::ptrdiff_t>(dimension * sizeof(std::uint16_t)), count, dimension, nullptr, away.data()},
              RowType::float16, Metric::l2);
    for (std::size_t row = 0; row < count; ++row)
      keys[row] = std::uint64_t{std::bit_cast<std::uint32_t>(away[row])} << 32 | row;
    const auto last = keys.begin() + static_cast<std::ptrdiff_t>(wanted);
    if (wanted < count) std::nth_element(keys.begin(), last, keys.end());
    std::sort(keys.begin(), last);
    std::transform(keys.begin(), last, nearest.data() + q * wanted,
                   [](std::uint64_t key) { return static_cast<std::int64_t>(key & 0xffffffff); });
  }
}

}  // namespace
}  // namespace memhier

void register_nearest_lists(nb::module_& m) {
  m.def("nearest_rows", &memhier::nearest_rows, nb::arg("queries"), nb::arg("rows"), nb::arg("nearest"));
}
