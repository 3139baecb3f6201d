// Exact MaxSim of items, from tokens of any stored element type.
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "bind/array.hpp"
#include "bind/module.hpp"
#include "bind/simd.hpp"

namespace nb = nanobind;

namespace memhier {
namespace {

constexpr std::size_t kTogether = 4;  // tokens for which a value of the query is loaded once
constexpr std::size_t kLanes = 16;    // vectors of the query in one register
constexpr std::size_t kRegisters = 2;
constexpr std::size_t kColumns = kLanes * kRegisters;  // vectors of a query that are looked at together
constexpr std::size_t kTypes = 4;

typedef float Lanes __attribute__((vector_size(kLanes * sizeof(float)), aligned(4), may_alias));

// Vectors of a query, turned: [dimension, kLanes * registers], zeros beyond the last of them.
struct Columns {
  const float* turned;
  std::size_t count, registers, dimension;
};

// Turns `count` numbers into float32.
MEMHIER_CLONES void from_float32(const void* from, std::size_t count, float* to) {
  std::copy_n(static_cast<const float*>(from), count, to);
}
MEMHIER_CLONES void from_float16(const void* from, std::size_t count, float* to) {
#pragma omp simd
  for (std::size_t i = 0; i < count; ++i) to[i] = half_to_float(static_cast<const std::uint16_t*>(from)[i]);
}
MEMHIER_CLONES void from_int8(const void* from, std::size_t count, float* to) {
#pragma omp simd
  for (std::size_t i = 0; i < count; ++i) to[i] = static_cast<float>(static_cast<const std::int8_t*>(from)[i]);
}
MEMHIER_CLONES void from_uint8(const void* from, std::size_t count, float* to) {
#pragma omp simd
  for (std::size_t i = 0; i < count; ++i) to[i] = static_cast<float>(static_cast<const std::uint8_t*>(from)[i]);
}

struct Element {
  std::size_t bytes;
  void (*floats)(const void*, std::size_t, float*);
};
// In the order of memhier.ann.multivector.coding.scores.TOKEN_DTYPES.
constexpr std::array<Element, kTypes> kElements = {
    {{4, from_float32}, {2, from_float16}, {1, from_int8}, {1, from_uint8}}};

// Raises best [kLanes * registers] to the products with kTogether tokens [kTogether, dimension], of which the first
// `taken` count. Each product is summed along the axes, whatever tokens stand beside.
template <std::size_t registers>
MEMHIER_INLINE void raise(const Columns& by, const float* tokens, std::size_t taken, float* best) {
  Lanes sums[kTogether][registers] = {};
  const float* row = by.turned;
  for (std::size_t axis = 0; axis < by.dimension; ++axis, row += kLanes * registers) {
    Lanes column[registers];
#pragma GCC unroll 2
    for (std::size_t r = 0; r < registers; ++r) column[r] = *reinterpret_cast<const Lanes*>(row + r * kLanes);
#pragma GCC unroll 4
    for (std::size_t t = 0; t < kTogether; ++t) {
#pragma GCC unroll 2
      for (std::size_t r = 0; r < registers; ++r) sums[t][r] += tokens[t * by.dimension + axis] * column[r];
    }
  }
  for (std::size_t t = 0; t < taken; ++t) {
    const float* products = reinterpret_cast<const float*>(sums[t]);
    for (std::size_t v = 0; v < kLanes * registers; ++v) best[v] = std::max(best[v], products[v]);
  }
}

MEMHIER_CLONES void raise_one(const Columns& by, const float* tokens, std::size_t taken, float* best) {
  raise<1>(by, tokens, taken, best);
}
MEMHIER_CLONES void raise_two(const Columns& by, const float* tokens, std::size_t taken, float* best) {
  raise<2>(by, tokens, taken, best);
}

// Vectors `first` and on of a query [v, dimension].
Columns columns_of(const Array<const float, 2>& query, std::size_t first, std::vector<float>& room) {
  const std::size_t count = std::min(kColumns, query.shape(0) - first), dimension = query.shape(1);
  const std::size_t registers = (count + kLanes - 1) / kLanes, width = kLanes * registers;
  room.assign(width * dimension, 0);
  for (std::size_t v = 0; v < count; ++v)
    for (std::size_t axis = 0; axis < dimension; ++axis)
      room[axis * width + v] = query.data()[(first + v) * dimension + axis];
  return {room.data(), count, registers, dimension};
}

// query [v, d]; tokens [t, d] of a type; lows, highs [n]; out [n] = MaxSim of each item, the tokens from low to high.
void exact_max_sims(const Array<const float, 2>& query, const Array<const std::byte, 2>& tokens, int dtype,
                    const Array<const std::int64_t, 1>& lows, const Array<const std::int64_t, 1>& highs,
                    const Array<float, 1>& out) {
  const std::size_t dimension = query.shape(1), items = out.shape(0), count = tokens.shape(0);
  require(dtype >= 0 && dtype < static_cast<int>(kTypes), "exact_max_sims: dtype out of range");
  const Element element = kElements[static_cast<std::size_t>(dtype)];
  require(tokens.shape(1) == dimension && tokens.item_bytes() == element.bytes && lows.has_shape(items) &&
              highs.has_shape(items),
          "exact_max_sims: array shapes do not fit together");
  nb::gil_scoped_release released;
  for (std::size_t item = 0; item < items; ++item)
    require(lows[item] >= 0 && lows[item] <= highs[item] && highs[item] <= static_cast<std::int64_t>(count),
            "exact_max_sims: items outside the tokens");
  std::vector<double> sums(items, 0);
  std::vector<float> turned, floats(kTogether * dimension);
  for (std::size_t first = 0; first < query.shape(0); first += kColumns) {
    const Columns by = columns_of(query, first, turned);
    for (std::size_t item = 0; item < items; ++item) {
      std::array<float, kColumns> best;
      best.fill(-std::numeric_limits<float>::infinity());
      const auto stop = static_cast<std::size_t>(highs[item]);
      for (auto token = static_cast<std::size_t>(lows[item]); token < stop; token += kTogether) {
        const std::size_t taken = std::min(kTogether, stop - token);
        element.floats(tokens.data() + token * dimension * element.bytes, taken * dimension, floats.data());
        (by.registers == 1 ? raise_one : raise_two)(by, floats.data(), taken, best.data());
      }
      for (std::size_t v = 0; v < by.count; ++v) sums[item] += best[v];
    }
  }
  std::transform(sums.begin(), sums.end(), out.data(), [](double sum) { return static_cast<float>(sum); });
}

}  // namespace
}  // namespace memhier

void register_exact_max_sim(nb::module_& m) {
  m.def("exact_max_sims", &memhier::exact_max_sims, nb::kw_only(), nb::arg("query"), nb::arg("tokens"),
        nb::arg("dtype"), nb::arg("lows"), nb::arg("highs"), nb::arg("out"));
}
