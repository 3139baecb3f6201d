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
#include <stdexcept>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include "bind/module.hpp"
#include "bind/simd.hpp"

namespace nb = nanobind;

namespace memhier {
namespace {

constexpr size_t kCodes = 256;  // one byte selects a sub-centroid
constexpr size_t kTile = 32;   // of them at a time
constexpr size_t kGroup = 4;   // lists whose tables are made together

struct Candidate {
  float distance;
  int64_t position;
  // Ties break by position so that the result does not depend on the order of the scan.
  bool operator<(const Candidate& other) const {
    return distance < other.distance || (distance == other.distance && position < other.position);
  }
};

// The k nearest candidates seen so far, as a max-heap whose root is the one to beat.
class NearestHeap {
 public:
  explicit NearestHeap(size_t capacity) : capacity_(capacity) { items_.reserve(capacity); }

  void clear() { items_.clear(); }

  float threshold() const {
    return items_.size() < capacity_ ? std::numeric_limits<float>::infinity() : items_.front().distance;
  }

  void offer(Candidate candidate) {
    if (items_.size() < capacity_) {
      items_.push_back(candidate);
      std::push_heap(items_.begin(), items_.end());
    } else if (candidate < items_.front()) {
      std::pop_heap(items_.begin(), items_.end());
      items_.back() = candidate;
      std::push_heap(items_.begin(), items_.end());
    }
  }

  // Writes the nearest first; the tail is filled with position -1 at infinite distance.
  void drain(int64_t* positions, float* distances) {
    std::sort_heap(items_.begin(), items_.end());
    for (size_t i = 0; i < capacity_; ++i) {
      const bool found = i < items_.size();
      positions[i] = found ? items_[i].position : -1;
      distances[i] = found ? items_[i].distance : std::numeric_limits<float>::infinity();
    }
  }

 private:
  size_t capacity_;
  std::vector<Candidate> items_;
};

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

using FloatMatrix = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using FloatCube = nb::ndarray<const float, nb::ndim<3>, nb::c_contig, nb::device::cpu>;
using ListMatrix = nb::ndarray<const int64_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using HalfMatrix = nb::ndarray<const uint16_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Starts = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Codes = nb::ndarray<const uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Positions = nb::ndarray<int64_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Distances = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

// queries [q, d] float32; probes [q, p] list numbers, -1 for none; centroids [lists, d] fp16; starts [lists + 1];
// codes [n, m]; codebook [m, width, 256] with m * width == d; fills positions and distances [q, k].
// For inner products distances are -2 <q, x>. Returns the number of codes scanned.
size_t pq_scan(FloatMatrix queries, ListMatrix probes, HalfMatrix centroids, Starts starts, Codes codes,
               FloatCube codebook, bool inner, Positions positions, Distances distances) {
  const size_t count = queries.shape(0), dim = queries.shape(1), lists = centroids.shape(0);
  const size_t subvectors = codebook.shape(0), width = codebook.shape(1), k = positions.shape(1);
  if (probes.shape(0) != count || positions.shape(0) != count || distances.shape(0) != count ||
      distances.shape(1) != k || centroids.shape(1) != dim || starts.shape(0) != lists + 1 ||
      codes.shape(1) != subvectors || subvectors * width != dim || codebook.shape(2) != kCodes) {
    throw std::invalid_argument("pq_scan: array shapes do not fit together");
  }
  const int64_t total = static_cast<int64_t>(codes.shape(0));
  const int64_t* start = starts.data();
  for (size_t list = 0; list < lists; ++list) {
    if (start[list] < 0 || start[list] > start[list + 1] || start[list + 1] > total) {
      throw std::invalid_argument("pq_scan: list starts must ascend within the codes");
    }
  }
  if (k == 0) throw std::invalid_argument("pq_scan: k must be at least 1");
  const size_t probe_count = probes.shape(1);
  for (size_t i = 0; i < count * probe_count; ++i) {
    if (probes.data()[i] < -1 || probes.data()[i] >= static_cast<int64_t>(lists)) {
      throw std::invalid_argument("pq_scan: list number out of range");
    }
  }

  nb::gil_scoped_release released;
  std::vector<float> residuals(kGroup * dim), tables(kGroup * subvectors * kCodes);
  NearestHeap nearest(std::min(k, static_cast<size_t>(total)));
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
          if (distance <= nearest.threshold()) nearest.offer({distance, position});
        }
        scanned += static_cast<size_t>(start[group[g] + 1] - start[group[g]]);
      }
    }
    int64_t* out_positions = positions.data() + q * k;
    float* out_distances = distances.data() + q * k;
    nearest.drain(out_positions, out_distances);
    for (size_t i = std::min(k, static_cast<size_t>(total)); i < k; ++i) {
      out_positions[i] = -1;
      out_distances[i] = std::numeric_limits<float>::infinity();
    }
  }
  return scanned;
}

}  // namespace
}  // namespace memhier

void register_pq_scan(nb::module_& m) {
  m.def("pq_scan", &memhier::pq_scan, nb::arg("queries"), nb::arg("probes"), nb::arg("centroids"), nb::arg("starts"),
        nb::arg("codes"), nb::arg("codebook"), nb::arg("inner"), nb::arg("positions"), nb::arg("distances"));
}
