// The preview: an estimate of every row's logit from its leading directions, and the largest of them.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <numeric>
#include <span>
#include <vector>

#include "decode/allowed.hpp"
#include "decode/exact.hpp"
#include "decode/query.hpp"
#include "scan/digit_dot.hpp"

namespace memhier {

// The numbers of rows that estimates and bounds at one width of codes need; all padded to a multiple of kChunkRows.
struct RowNumbers {
  const float* offsets;  // far below all others for the rows that pad
  const float* scales;
  // Upper bounds of norms of a row's coordinates: beyond the width; lost to rounding; and as coded.
  const float* outside;
  const float* lost;
  const float* coded;
};

// Codes of 256 rows lie together, four directions of each after the other, [rows / 256, width / 4, 256, 4], so that the
// leading directions of them can be read without the others.
struct BlockCodes {
  const std::uint8_t* codes;
  std::size_t rows, padded_rows, width;  // width: a multiple of 4
  RowNumbers numbers;
};

// The leading directions of the same rows in fewer bytes: digits of two bits, [rows / 256, digits / 16, 256, 4], and
// for each digit its direction and the value of one, as a share of the row's norm as coded. A digit stands for its
// number less one and a half. Values descend, so that the digits worth most have a step of the query for themselves.
struct DigitCodes {
  const std::uint8_t* codes;
  std::size_t count;
  const std::uint32_t* directions;
  const float* values;
};

// A hidden state as digits see it.
class DigitQuery {
 public:
  static constexpr std::size_t kParts = 2, kLeading = 64;  // the leading digits, and all others

  void assign(const DigitCodes& digits, const CodedQuery& query);

  const std::int8_t* bytes(std::size_t part) const { return bytes_.data() + part * kLeading; }
  float step(std::size_t part) const { return steps_[part]; }
  float excess() const { return excess_; }  // of the sum of all products, as digits are not negative
  static std::size_t count(const DigitCodes& digits, std::size_t part) {
    const std::size_t leading = std::min(kLeading, digits.count);
    return part == 0 ? leading : digits.count - leading;
  }
  std::size_t held_bytes() const { return bytes_.capacity(); }

 private:
  std::vector<std::int8_t> bytes_;
  float steps_[kParts] = {}, excess_ = 0;
};

// Sums of exp over all rows: of the estimates, each with half its variance; and of their lower and upper bounds.
struct ExpSums {
  double reference = -1e300;  // all three are relative to exp of it
  std::array<double, 3> sums = {0, 0, 0};
};

struct ScanOptions {
  bool bounds;     // candidates by upper bound, not by estimate
  bool partition;  // sums of exp as well
  bool interval;   // of the bounds, too
  float inverse;   // of the temperature: multiplies every logit in the sums
  float variance;  // of a logit per squared norm that lies outside the width
};

// The margin between the estimate of a row and its bounds.
inline float margin_of(const RowNumbers& rows, std::uint32_t row, const Spread& spread, float shift) {
  // 16 times the share of the terms that single precision loses.
  constexpr float kRounding = 1e-6F;
  const float terms =
      std::abs(rows.offsets[row]) + std::abs(shift) + (rows.coded[row] + rows.lost[row]) * spread.inside;
  return rows.outside[row] * spread.outside + rows.lost[row] * spread.inside + rows.coded[row] * spread.rounded +
         kRounding * terms;
}

using Dots = std::int32_t (*)[kChunkRows];

// Products of the codes of a chunk with up to four queries, by the first `width` directions.
void dot_chunk(const std::uint8_t* codes, std::size_t width, std::span<const CodedQuery* const> queries, Dots dots);

// Up to four queries that one scan answers: each with the rows that it may find, and its results.
struct ScanQueries {
  std::span<const CodedQuery* const> coded;
  std::span<const AllowedRows> allowed;
  std::span<Largest> largest;
  std::span<ExpSums> sums;
};

// Estimates of all allowed rows for up to four queries at once, by the first `width` directions. Bounds and sums need
// all of them.
class BlockScan {
 public:
  static constexpr std::size_t kQueries = 4;

  void run(const BlockCodes& rows, std::size_t width, const ScanQueries& queries, const ScanOptions& options);
  // The same by digits, without bounds and sums.
  void run(const BlockCodes& rows, const DigitCodes& digits, std::span<const DigitQuery> own,
           const ScanQueries& queries);
  // Bytes of the rows of the chunks that a scan by digits begins with, for candidates of so many.
  static std::size_t planned_bytes(std::size_t limit) { return kQueries * limit * sizeof(Logit); }
  std::size_t held_bytes() const {
    return std::accumulate(std::begin(sampled_), std::end(sampled_), std::size_t{0},
                           [](std::size_t sum, const auto& each) { return sum + each.capacity() * sizeof(Logit); });
  }

 private:
  enum class Chunks { sampled, others, all };

  void pass(const BlockCodes& rows, const DigitCodes& digits, std::span<const DigitQuery> own,
            const ScanQueries& queries, Chunks wanted);
  void exclude(const AllowedRows& allowed, std::size_t first);
  void offer(const BlockCodes& rows, std::size_t first, const AllowedRows& allowed, const float* keys,
             Largest& largest);

  alignas(64) std::int32_t dots_[kQueries][kChunkRows], leading_[kQueries][kChunkRows];
  alignas(64) float estimates_[kChunkRows], margins_[kChunkRows];
  std::vector<Logit> sampled_[kQueries];  // by row
};

}  // namespace memhier
