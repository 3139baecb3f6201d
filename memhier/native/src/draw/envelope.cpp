// Upper bounds of logits, their sums by chunk, and draws: a chunk by its sum, then a row of it.
#include "draw/envelope.hpp"

#include <algorithm>
#include <bit>
#include <cassert>
#include <cmath>

#include "decode/exp.hpp"

namespace memhier {
namespace {

// 16 times the loss of a cap in single precision, as a share of the cap.
constexpr float kCapRounding = 2e-6F;

struct Line {  // the numbers of a query
  Spread spread;
  float shift, step;
  std::int32_t excess;
};

MEMHIER_CLONES
void bound_chunk(const std::int32_t* dots, const RowNumbers& rows, std::size_t first, const Line& query,
                 float* bounds) {
  // Of this chunk: a row's number that might wrap around would keep the loop from vectors.
  const RowNumbers these{rows.offsets + first, rows.scales + first, rows.outside + first, rows.lost + first,
                         rows.coded + first};
  const Line line = query;
#pragma omp simd
  for (std::uint32_t i = 0; i < kChunkRows; ++i) {
    const float estimate =
        (these.offsets[i] + line.shift) + these.scales[i] * (line.step * static_cast<float>(dots[i] - line.excess));
    bounds[i] = estimate + margin_of(these, i, line.spread, line.shift);
  }
}

// cap * tanh(bound / cap), rounded up; rows that are out stay out.
MEMHIER_CLONES
void cap_chunk(float* bounds, float cap) {
#pragma omp simd
  for (std::size_t i = 0; i < kChunkRows; ++i) {
    const float twice = std::min(std::max(2 / cap * bounds[i], -40.F), 40.F);
    const float capped = cap * (1 - 2 / (exp_of(twice) + 1)) + kCapRounding * cap;
    bounds[i] = bounds[i] == -kInfinity ? -kInfinity : capped;
  }
}

// In lanes, as a compiler must not reorder comparisons of floats.
MEMHIER_CLONES
float largest_of(const float* bounds) {
  constexpr std::size_t kLanes = 16;
  float lanes[kLanes];
  std::copy_n(bounds, kLanes, lanes);
  for (std::size_t i = kLanes; i < kChunkRows; i += kLanes)
    for (std::size_t j = 0; j < kLanes; ++j) lanes[j] = bounds[i + j] > lanes[j] ? bounds[i + j] : lanes[j];
  return *std::max_element(lanes, lanes + kLanes);
}

// Places of numbers in [0, 1), in ascending order of the numbers: by as many equal parts of the range, then by
// insertion.
void sort_places(const double* numbers, std::size_t count, std::vector<std::uint32_t>& order) {
  order.assign(2 * count + 1, 0);
  std::uint32_t* starts = order.data() + count;
  const auto part = [&](std::size_t i) {
    return std::min(static_cast<std::size_t>(std::max(0.0, numbers[i]) * static_cast<double>(count)), count - 1);
  };
  for (std::size_t i = 0; i < count; ++i) ++starts[part(i) + 1];
  for (std::size_t i = 0; i < count; ++i) starts[i + 1] += starts[i];
  for (std::size_t i = 0; i < count; ++i) order[starts[part(i)]++] = static_cast<std::uint32_t>(i);
  for (std::size_t i = 1; i < count; ++i) {
    const std::uint32_t place = order[i];
    std::size_t at = i;
    for (; at > 0 && numbers[order[at - 1]] > numbers[place]; --at) order[at] = order[at - 1];
    order[at] = place;
  }
}

MEMHIER_CLONES
void exps(const float* bounds, float inverse, float reference, float* out) {
#pragma omp simd
  for (std::size_t i = 0; i < kChunkRows; ++i) out[i] = exp_of(inverse * (bounds[i] - reference));
}

MEMHIER_CLONES
float sum_of_exps(const float* bounds, float inverse, float reference) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (std::size_t i = 0; i < kChunkRows; ++i) sum += exp_of(inverse * (bounds[i] - reference));
  return sum;
}

constexpr std::size_t kLane = 16;

MEMHIER_CLONES
void add_lanes(const float* values, float* sums) {
  for (std::size_t lane = 0; lane < kChunkRows / kLane; ++lane) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (std::size_t i = 0; i < kLane; ++i) sum += values[lane * kLane + i];
    sums[lane] = sum;
  }
}

struct Chunk {  // exp of the bounds of a chunk, and their sums by lane
  alignas(64) float each[kChunkRows];
  float lanes[kChunkRows / kLane];

  void fill(const float* bounds, float inverse, float reference) {
    exps(bounds, inverse, reference, each);
    add_lanes(each, lanes);
  }
  // The row up to which the sums pass a number.
  std::size_t row_at(double left) const {
    std::size_t lane = 0;
    for (; lane + 1 < kChunkRows / kLane && left >= static_cast<double>(lanes[lane]); ++lane)
      left -= static_cast<double>(lanes[lane]);
    std::size_t last = kChunkRows;  // rounding may leave a little after the last row
    for (std::size_t i = lane * kLane; i < kChunkRows; ++i) {
      if (each[i] <= 0) continue;
      last = i;
      left -= static_cast<double>(each[i]);
      if (left < 0) break;
    }
    for (std::size_t i = kChunkRows; last == kChunkRows && i-- > 0;)
      if (each[i] > 0) last = i;
    assert(last < kChunkRows);
    return last;
  }
};

}  // namespace

void Envelope::bound(const BlockCodes& blocks, std::size_t rows, std::span<const CodedQuery* const> queries,
                     std::span<Envelope> envelopes) {
  alignas(64) std::int32_t dots[BlockScan::kQueries][kChunkRows];
  Line lines[BlockScan::kQueries];
  for (std::size_t q = 0; q < queries.size(); ++q) {
    const CodedQuery& query = *queries[q];
    lines[q] = {query.spread(blocks.width), query.shift(), query.step(), query.excess(blocks.width)};
    envelopes[q].bounds_.resize(blocks.padded_rows);
  }
  for (std::size_t first = 0; first < blocks.padded_rows; first += kChunkRows) {
    dot_chunk(blocks.codes + first * blocks.width, blocks.width, queries, dots);
    for (std::size_t q = 0; q < queries.size(); ++q)
      bound_chunk(dots[q], blocks.numbers, first, lines[q], envelopes[q].bounds_.data() + first);
  }
  for (std::size_t q = 0; q < queries.size(); ++q)
    std::fill(envelopes[q].bounds_.begin() + static_cast<std::ptrdiff_t>(rows), envelopes[q].bounds_.end(), -kInfinity);
}

void Envelope::open(std::span<const std::int64_t> out, const Shape& shape) {
  inverse_ = shape.inverse;
  for (const std::int64_t row : out)
    if (row >= 0) bounds_[static_cast<std::size_t>(row)] = -kInfinity;
  if (shape.cap > 0)
    for (std::size_t first = 0; first < bounds_.size(); first += kChunkRows)
      cap_chunk(bounds_.data() + first, shape.cap);
}

void Envelope::take(std::size_t limit, Largest& largest, std::vector<Logit>& head) {
  largest.start(limit);
  for (std::size_t first = 0; first < bounds_.size(); first += kChunkRows) {
    const float* bounds = bounds_.data() + first;
    if (!(largest_of(bounds) > largest.threshold())) continue;
    for (std::size_t i = 0; i < kChunkRows; ++i)
      if (bounds[i] > largest.threshold()) largest.offer({bounds[i], bounds[i], static_cast<std::uint32_t>(first + i)});
  }
  taken_.assign(bounds_.size() / 64, 0);
  for (const Logit& found : largest.finish()) {
    bounds_[found.row] = -kInfinity;
    taken_[found.row / 64] |= std::uint64_t{1} << (found.row % 64);
  }
  head.clear();
  head.reserve(limit);
  for (std::size_t word = 0; word < taken_.size(); ++word)
    for (std::uint64_t bits = taken_[word]; bits != 0; bits &= bits - 1)
      head.push_back({0, 0, static_cast<std::uint32_t>(64 * word + static_cast<std::size_t>(std::countr_zero(bits)))});
  largest_ = -kInfinity;
  for (std::size_t first = 0; first < bounds_.size(); first += kChunkRows)
    largest_ = std::max(largest_, largest_of(bounds_.data() + first));
  ends_.assign(bounds_.size() / kChunkRows, 0);
  if (largest_ == -kInfinity) return;
  double sum = 0;
  for (std::size_t chunk = 0; chunk < ends_.size(); ++chunk) {
    sum += sum_of_exps(bounds_.data() + chunk * kChunkRows, inverse_, largest_);
    ends_[chunk] = sum;
  }
}

double Envelope::log_sum() const {
  if (largest_ == -kInfinity) return -static_cast<double>(kInfinity);
  return static_cast<double>(inverse_) * static_cast<double>(largest_) + std::log(ends_.back());
}

void Envelope::draw(const double* uniforms, std::size_t count, std::vector<std::uint32_t>& order,
                    std::vector<Logit>& drawn) const {
  assert(largest_ > -kInfinity);
  sort_places(uniforms, count, order);
  drawn.clear();
  drawn.reserve(count);
  Chunk chunk;
  auto end = ends_.begin();
  for (const std::uint32_t place : std::span(order).first(count)) {
    const double target = uniforms[place] * ends_.back();
    if (drawn.empty() || !(target < *end)) {
      end = std::upper_bound(end, ends_.end(), target);
      if (end == ends_.end()) --end;
      chunk.fill(bounds_.data() + (end - ends_.begin()) * static_cast<std::ptrdiff_t>(kChunkRows), inverse_, largest_);
    }
    const std::size_t before = static_cast<std::size_t>(end - ends_.begin());
    const std::size_t first = before * kChunkRows;
    const std::size_t row = first + chunk.row_at(target - (before > 0 ? ends_[before - 1] : 0));
    drawn.push_back({bounds_[row], bounds_[row], static_cast<std::uint32_t>(row)});
  }
}

}  // namespace memhier
