// MaxSim of items of many vectors (tokens), from the lists of their tokens, and from their codes as well.
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

constexpr std::size_t kColumns = 32;  // vectors of a query that are looked at together
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Tokens of a part: the list of each, and the byte of its error, of which 255 says that nothing is known of the token.
struct Tokens {
  const std::uint16_t* lists;
  const std::uint8_t* errors;
};

constexpr std::uint8_t kUnknown = 255;

// The products of centroids [lists, columns] with vectors of a query.
struct Products {
  const float* values;
  std::size_t columns;
};

// Some axes of a code with one width of fields; see `chunks` in ann/zoom/preview/codes.py.
struct Chunk {
  std::int64_t byte, axis, width, axes;
};

// Codes of tokens [t, bytes], and how they are read: a field u of an axis stands for alpha (u - half), times the level
// of the token's scale. heads [axes, columns] are the vectors of the query along the coded axes.
struct Codes {
  const std::uint8_t *codes, *scales;
  std::size_t bytes, axes;
  const float *alpha, *levels, *heads;
  const Chunk* chunks;
  std::size_t chunk_count;
};

MEMHIER_INLINE void take_larger(const float* row, std::size_t columns, float* best) {
#pragma omp simd
  for (std::size_t v = 0; v < columns; ++v) best[v] = row[v] > best[v] ? row[v] : best[v];
}

// Adds the sum of the largest products to a score, in the order of the columns.
MEMHIER_INLINE void add(const float* best, std::size_t columns, float& score) {
  float sum = score;
  for (std::size_t v = 0; v < columns; ++v) sum += best[v];
  score = sum;
}

MEMHIER_CLONES
void score_lists(const Products& products, const Tokens& tokens, std::int64_t low, std::int64_t high, float& score) {
  std::array<float, kColumns> best;
  best.fill(-kInfinity);
  for (std::int64_t token = low; token < high; ++token) {
    if (tokens.errors[token] == kUnknown) best.fill(kInfinity);
    take_larger(products.values + tokens.lists[token] * products.columns, products.columns, best.data());
  }
  add(best.data(), products.columns, score);
}

// Fills values [axes] with those of a code, at its scale.
MEMHIER_INLINE void decode(const Codes& of, const std::uint8_t* code, float scale, float* values) {
  for (std::size_t c = 0; c < of.chunk_count; ++c) {
    const auto [byte, axis, width, axes] = of.chunks[c];
    const std::int64_t columns = (axes * width + 7) / 8;
    const float half = static_cast<float>((1 << width) - 1) / 2;
    const int mask = (1 << width) - 1;
    for (std::int64_t field = 0; field < 8 / width; ++field) {
      const std::int64_t first = field * columns, taken = std::max<std::int64_t>(0, std::min(columns, axes - first));
      const float* alpha = of.alpha + axis + first;
      float* out = values + axis + first;
#pragma omp simd
      for (std::int64_t b = 0; b < taken; ++b)
        out[b] = (static_cast<float>(code[byte + b] >> (field * width) & mask) - half) * alpha[b] * scale;
    }
  }
}

MEMHIER_CLONES
void score_codes(const Products& products, const Tokens& tokens, const Codes& of, std::int64_t low, std::int64_t high,
                 float* values, float& score) {
  std::array<float, kColumns> best, sums;
  best.fill(-kInfinity);
  const std::size_t columns = products.columns;
  for (std::int64_t token = low; token < high; ++token) {
    if (tokens.errors[token] == kUnknown) best.fill(kInfinity);
    decode(of, of.codes + static_cast<std::size_t>(token) * of.bytes, of.levels[of.scales[token]], values);
    const float* row = products.values + tokens.lists[token] * columns;
    std::copy_n(row, columns, sums.data());
    for (std::size_t a = 0; a < of.axes; ++a) {
      const float value = values[a];
      const float* head = of.heads + a * columns;
#pragma omp simd
      for (std::size_t v = 0; v < columns; ++v) sums[v] += value * head[v];
    }
    take_larger(sums.data(), columns, best.data());
  }
  add(best.data(), columns, score);
}

void check(const Array<const float, 2>& products, const Array<const std::uint16_t, 1>& lists,
           const Array<const std::uint8_t, 1>& errors, const Array<const std::int64_t, 1>& lows,
           const Array<const std::int64_t, 1>& highs, const Array<float, 1>& out) {
  const std::size_t items = out.shape(0), tokens = lists.shape(0);
  require(products.shape(1) <= kColumns && errors.has_shape(tokens) && lows.has_shape(items) && highs.has_shape(items),
          "max_sims: array shapes do not fit together");
  for (std::size_t i = 0; i < items; ++i) {
    require(lows[i] >= 0 && lows[i] <= highs[i] && highs[i] <= static_cast<std::int64_t>(tokens),
            "max_sims: items outside the tokens");
    for (std::int64_t token = lows[i]; token < highs[i]; ++token)
      require(lists[static_cast<std::size_t>(token)] < products.shape(0), "max_sims: lists outside the products");
  }
}

// products [lists, columns]; lists, errors [t]; lows, highs [m]: adds to out [m] MaxSim of the tokens' centroids.
void list_max_sims(const Array<const float, 2>& products, const Array<const std::uint16_t, 1>& lists,
                   const Array<const std::uint8_t, 1>& errors, const Array<const std::int64_t, 1>& lows,
                   const Array<const std::int64_t, 1>& highs, const Array<float, 1>& out) {
  nb::gil_scoped_release released;
  check(products, lists, errors, lows, highs, out);
  const Products by{products.data(), products.shape(1)};
  const Tokens tokens{lists.data(), errors.data()};
  for (std::size_t i = 0; i < out.shape(0); ++i) score_lists(by, tokens, lows[i], highs[i], out[i]);
}

// As list_max_sims, with codes [t, bytes], scales [t], chunks [c, 4], alpha [axes], levels [256], heads [axes,
// columns].
void code_max_sims(const Array<const float, 2>& products, const Array<const std::uint16_t, 1>& lists,
                   const Array<const std::uint8_t, 1>& errors, const Array<const std::int64_t, 1>& lows,
                   const Array<const std::int64_t, 1>& highs, const Array<const std::uint8_t, 2>& codes,
                   const Array<const std::uint8_t, 1>& scales, const Array<const std::int64_t, 2>& chunks,
                   const Array<const float, 1>& alpha, const Array<const float, 1>& levels,
                   const Array<const float, 2>& heads, const Array<float, 1>& out) {
  const std::size_t tokens = lists.shape(0), axes = alpha.shape(0), bytes = codes.shape(1);
  require(codes.has_shape(tokens, bytes) && scales.has_shape(tokens) && chunks.shape(1) == 4 && levels.has_shape(256) &&
              heads.has_shape(axes, products.shape(1)),
          "code_max_sims: array shapes do not fit together");
  std::vector<Chunk> parts;
  for (std::size_t c = 0; c < chunks.shape(0); ++c) {
    const std::int64_t* row = chunks.data() + 4 * c;
    const Chunk part{row[0], row[1], row[2], row[3]};
    require((part.width == 1 || part.width == 2 || part.width == 4 || part.width == 8) && part.byte >= 0 &&
                part.axis >= 0 && part.axes >= 0 && part.axis + part.axes <= static_cast<std::int64_t>(axes) &&
                part.byte + (part.axes * part.width + 7) / 8 <= static_cast<std::int64_t>(bytes),
            "code_max_sims: chunks outside the codes");
    parts.push_back(part);
  }

  nb::gil_scoped_release released;
  check(products, lists, errors, lows, highs, out);
  const Products by{products.data(), products.shape(1)};
  const Tokens of{lists.data(), errors.data()};
  const Codes coded{codes.data(),  scales.data(), bytes,        axes,        alpha.data(),
                    levels.data(), heads.data(),  parts.data(), parts.size()};
  std::vector<float> values(axes);
  for (std::size_t i = 0; i < out.shape(0); ++i) score_codes(by, of, coded, lows[i], highs[i], values.data(), out[i]);
}

}  // namespace
}  // namespace memhier

void register_max_sim(nb::module_& m) {
  m.def("list_max_sims", &memhier::list_max_sims, nb::kw_only(), nb::arg("products"), nb::arg("lists"),
        nb::arg("errors"), nb::arg("lows"), nb::arg("highs"), nb::arg("out"));
  m.def("code_max_sims", &memhier::code_max_sims, nb::kw_only(), nb::arg("products"), nb::arg("lists"),
        nb::arg("errors"), nb::arg("lows"), nb::arg("highs"), nb::arg("codes"), nb::arg("scales"), nb::arg("chunks"),
        nb::arg("alpha"), nb::arg("levels"), nb::arg("heads"), nb::arg("out"));
}
