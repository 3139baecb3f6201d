// Squared distances of float32 queries to rows in half precision.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

#include "bind/simd.hpp"

namespace memhier {

constexpr std::size_t kTogether = 4;  // queries for which a row is loaded and converted once

// Bits of floats that are not negative order as these do, and those of NaN after all.
MEMHIER_INLINE std::uint32_t order_of(float away) { return std::bit_cast<std::uint32_t>(away); }

// Distances of up to kTogether queries to all rows, each the same however many go together; those of a query start
// `stride` after those of the one before.
void measure_rows(const float* queries, std::size_t together, const std::uint16_t* rows, std::size_t count,
                  std::size_t dimension, float* away, std::size_t stride);

// The same distances of one query to the rows of some numbers.
void measure_some(const float* query, const std::uint16_t* rows, std::size_t dimension, const std::int32_t* numbers,
                  std::size_t count, float* away);

}  // namespace memhier
