// Exact distances between float32 queries and rows of any stored element type.
#pragma once

#include <cstddef>
#include <cstdint>

namespace memhier {

// In the order of memhier.io.kernels.ROW_DTYPES and METRICS.
enum class RowType : int { float32, float16, bfloat16, int8, uint8 };
enum class Metric : int { l2, ip, cosine };
constexpr int kRowTypes = 5;
constexpr int kMetrics = 3;

struct DistanceBatch {
  const float* queries;              // [queries, dimension]
  const std::byte* rows;             // row i starts at rows + i * row_stride, at any alignment
  std::ptrdiff_t row_stride;         // bytes
  std::size_t count;                 // rows
  std::size_t dimension;             // elements per row
  const std::int32_t* query_of_row;  // [count], within the queries; null: the first query for every row
  float* out;                        // [count]
};

// Fills batch.out; smaller is nearer.
void distances(const DistanceBatch& batch, RowType type, Metric metric);

}  // namespace memhier
