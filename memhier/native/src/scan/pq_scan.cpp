// Scan of product-quantised residuals in inverted lists: asymmetric distance computation
// (Jegou, Douze, Schmid: Product Quantization for Nearest Neighbor Search, 2011), keeping the k nearest per query.
//
// Codes lie in list order without ids, so a code's position is also the row number of its full vector on SSD.
// faiss's own lists would add eight bytes of id to every code, which is more than half of a code here.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "bind/array.hpp"
#include "bind/module.hpp"
#include "bind/simd.hpp"
#include "rank/top_k.hpp"

namespace nb = nanobind;

namespace memhier {
namespace {

constexpr size_t kCodes = 256;  // one byte selects a sub-centroid
constexpr size_t kTile = 32;    // of them at a time
constexpr size_t kGroup = 4;    // lists whose tables are made together

MEMHIER_CLONES
void subtract_centroid(const float* query, const uint16_t* centroid, size_t dim, float* residual) {
#pragma omp simd
  for (size_t t = 0; t < dim; ++t) residual[t] = query[t] - half_to_float(centroid[t]);
}

// tables[g][m][j] = |residual_m of list g - codebook[m][j]|^2 for every sub-vector m and code j, for kGroup lists at a
// time: the codebook is larger than the cache next to the core, so each load of it serves all of them. It comes
// transposed to [m][t][j], so that the inner loop runs over codes.
MEMHIER_CLONES
void fill_tables(const float* residuals, const float* codebook, size_t subvectors, size_t width, float* tables) {
  const size_t dim = subvectors * width, table_size = subvectors * kCodes;
  for (size_t m = 0; m < subvectors; ++m) {
    for (size_t tile = 0; tile < kCodes; tile += kTile) {
      float sums[kGroup][kTile] = {};  // in registers for the whole sub-vector
      for (size_t t = m * width; t < (m + 1) * width; ++t) {
        const float* codes = codebook + t * kCodes + tile;
        for (size_t g = 0; g < kGroup; ++g) {
          const float value = residuals[g * dim + t];
#pragma omp simd
          for (size_t j = 0; j < kTile; ++j) {
            const float difference = value - codes[j];
            sums[g][j] += difference * difference;
          }
        }
      }
      for (size_t g = 0; g < kGroup; ++g) {
        std::memcpy(tables + g * table_size + m * kCodes + tile, sums[g], sizeof sums[g]);
      }
    }
  }
}

// tables[g][m][j] = -2 <query_m, codebook[m][j]> is the same for every list g.
MEMHIER_CLONES
void fill_products(const float* query, const float* codebook, size_t subvectors, size_t width, float* table) {
  std::memset(table, 0, subvectors * kCodes * sizeof *table);
  for (size_t m = 0; m < subvectors; ++m) {
    for (size_t t = m * width; t < (m + 1) * width; ++t) {
      const float* codes = codebook + t * kCodes;
#pragma omp simd
      for (size_t j = 0; j < kCodes; ++j) table[m * kCodes + j] -= 2 * query[t] * codes[j];
    }
  }
}

MEMHIER_CLONES
float centroid_product(const float* query, const uint16_t* centroid, size_t dim) {
  float product = 0;
#pragma omp simd reduction(+ : product)
  for (size_t t = 0; t < dim; ++t) product += query[t] * half_to_float(centroid[t]);
  return product;
}

float code_distance(const uint8_t* code, const float* table, size_t subvectors) {
  float sum[4] = {0, 0, 0, 0};
  size_t m = 0;
  for (; m + 4 <= subvectors; m += 4) {
    for (size_t lane = 0; lane < 4; ++lane) sum[lane] += table[(m + lane) * kCodes + code[m + lane]];
  }
  for (; m < subvectors; ++m) sum[0] += table[m * kCodes + code[m]];
  return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

// Codes in list order, and the sub-centroids that they stand for.
struct ProductLists {
  Array<const std::uint16_t, 2> centroids;  // fp16 [lists, d]
  Array<const std::int64_t, 1> starts;      // [lists + 1]
  Array<const std::uint8_t, 2> codes;       // [n, m]
  Array<const float, 3> codebook;           // [m, width, 256] with m * width == d

  void check() const {
    const std::size_t lists = centroids.shape(0), subvectors = codebook.shape(0);
    const auto total = static_cast<std::int64_t>(codes.shape(0));
    require(starts.shape(0) == lists + 1 && codes.shape(1) == subvectors &&
                subvectors * codebook.shape(1) == centroids.shape(1) && codebook.shape(2) == kCodes,
            "pq_scan: array shapes do not fit together");
    for (std::size_t list = 0; list < lists; ++list)
      require(starts[list] >= 0 && starts[list] <= starts[list + 1] && starts[list + 1] <= total,
              "pq_scan: list starts must ascend within the codes");
  }
};

// queries [q, d]; probes [q, p] list numbers, -1 for none; fills positions and distances [q, k], nearest first, with
// position -1 at infinite distance where there are fewer. For inner products distances are -2 <q, x>. Returns the
// number of codes scanned.
size_t pq_scan(const Array<const float, 2>& queries, const Array<const std::int64_t, 2>& probes, const ProductLists& of,
               bool inner, const Array<std::int64_t, 2>& positions, const Array<float, 2>& distances) {
  const size_t count = queries.shape(0), dim = queries.shape(1), lists = of.centroids.shape(0);
  const size_t subvectors = of.codebook.shape(0), width = of.codebook.shape(1), k = positions.shape(1);
  const auto& centroids = of.centroids;
  const auto& codebook = of.codebook;
  const auto& codes = of.codes;
  of.check();
  require(probes.shape(0) == count && positions.shape(0) == count && distances.has_shape(count, k) &&
              of.centroids.shape(1) == dim,
          "pq_scan: array shapes do not fit together");
  require(k > 0, "pq_scan: k must be at least 1");
  const int64_t* start = of.starts.data();
  const size_t probe_count = probes.shape(1);
  for (size_t i = 0; i < count * probe_count; ++i)
    require(probes[i] >= -1 && probes[i] < static_cast<int64_t>(lists), "pq_scan: list number out of range");

  nb::gil_scoped_release released;
  std::vector<float> residuals(kGroup * dim), tables(kGroup * subvectors * kCodes);
  TopK<Candidate<std::int64_t>, Nearer> nearest(std::min(k, codes.shape(0)));
  size_t scanned = 0;
  for (size_t q = 0; q < count; ++q) {
    nearest.clear();
    const float* query = queries.data() + q * dim;
    if (inner) fill_products(query, codebook.data(), subvectors, width, tables.data());
    const int64_t* lists_of_query = probes.data() + q * probe_count;
    for (size_t p = 0; p < probe_count;) {
      int64_t group[kGroup];
      float base[kGroup] = {};
      size_t filled = 0;
      for (; p < probe_count && filled < kGroup; ++p) {
        const int64_t list = lists_of_query[p];
        if (list < 0 || start[list] == start[list + 1]) continue;
        const uint16_t* centroid = centroids.data() + static_cast<size_t>(list) * dim;
        if (inner)
          base[filled] = -2 * centroid_product(query, centroid, dim);
        else
          subtract_centroid(query, centroid, dim, residuals.data() + filled * dim);
        group[filled++] = list;
      }
      if (filled == 0) continue;
      if (!inner) fill_tables(residuals.data(), codebook.data(), subvectors, width, tables.data());
      for (size_t g = 0; g < filled; ++g) {
        const float* table = tables.data() + (inner ? 0 : g * subvectors * kCodes);
        const uint8_t* code = codes.data() + static_cast<size_t>(start[group[g]]) * subvectors;
        for (int64_t position = start[group[g]]; position < start[group[g] + 1]; ++position, code += subvectors) {
          const float distance = base[g] + code_distance(code, table, subvectors);
          nearest.offer({distance, distance, position});
        }
        scanned += static_cast<size_t>(start[group[g] + 1] - start[group[g]]);
      }
    }
    const auto& found = nearest.sort();
    for (size_t i = 0; i < k; ++i) {
      positions[q * k + i] = i < found.size() ? found[i].row : -1;
      distances[q * k + i] = i < found.size() ? found[i].key : std::numeric_limits<float>::infinity();
    }
  }
  return scanned;
}

}  // namespace
}  // namespace memhier

void register_pq_scan(nb::module_& m) {
  using namespace memhier;
  using namespace nb::literals;
  nb::class_<ProductLists>(m, "ProductLists")
      .def(nb::init<Array<const std::uint16_t, 2>, Array<const std::int64_t, 1>, Array<const std::uint8_t, 2>,
                    Array<const float, 3>>(),
           nb::kw_only(), "centroids"_a, "starts"_a, "codes"_a, "codebook"_a);
  m.def("pq_scan", &pq_scan, nb::kw_only(), "queries"_a, "probes"_a, "lists"_a, "inner"_a, "positions"_a,
        "distances"_a);
}
