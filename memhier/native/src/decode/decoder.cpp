// The decoder's calls: a batch of hidden states in, the largest logits of each out, all in one crossing.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>

#include "bind/array.hpp"
#include "bind/module.hpp"
#include "bind/simd.hpp"
#include "decode/sums.hpp"
#include "decode/workspace.hpp"
#include "draw/envelope.hpp"

namespace nb = nanobind;

namespace memhier {
namespace {

// Hidden states beyond it, as weights, overflow single precision; the Python side refuses the same.
constexpr float kLargestState = 1e15F;
constexpr std::int64_t kTooFew = -2;
constexpr float kLargestCoordinate = std::numeric_limits<float>::max();

// The number of the first of `count` states with a value beyond `most`, or NaN; -1 for none.
MEMHIER_CLONES
std::int64_t first_beyond(const float* states, std::size_t count, std::size_t width, float most) {
  int beyond = 0;
  for (std::size_t i = 0; i < count * width; ++i) beyond |= std::abs(states[i]) <= most ? 0 : 1;
  if (beyond == 0) return -1;
  const float* end = states + count * width;
  const float* found = std::find_if_not(states, end, [most](float value) { return std::abs(value) <= most; });
  return (found - states) / static_cast<std::ptrdiff_t>(width);
}

// A scan of the first `width` directions alone, whose `survivors` are estimated again by all; none of it at zero. With
// survivors but no width, a scan of the digits, whose survivors may be all candidates.
struct Coarse {
  std::size_t width, survivors;
};

// The rows that each hidden state of a call may find: bits [n, words], or [1, words] for all; none for all rows.
struct AllowedBits {
  const std::uint64_t* bits = nullptr;
  std::size_t stride = 0;

  AllowedRows of(std::size_t query) const {
    return bits == nullptr ? AllowedRows() : AllowedRows(bits + query * stride);
  }
};

// The hidden states of a call that one scan answers, and their rows.
struct Part {
  std::size_t first, count;
  AllowedBits allowed;
};

struct PreviewCall {
  std::size_t k, limit;
  Coarse coarse;
  AllowedBits allowed;
  Rounding rounding;
  float inverse, variance;
  bool interval;          // whether the bounds of the partition are wanted; they are infinite otherwise
  float* values;          // [n, k]
  std::int64_t* indices;  // [n, k]
  // Each may be null where it is not wanted.
  std::uint8_t* proven;  // [n]: candidates are then chosen by their bounds
  double* partition;     // [n, 3]: log of the sum of exp of all logits: estimate, and bounds
};

// The arrays that a core is made of; it holds on to them.
using ProjectionArrays =  // mean [d], turn [t, d], common [d], and the number of rows
    std::tuple<Array<const float, 1>, Array<const float, 2>, Array<const float, 1>, std::size_t>;
using BlockArrays =  // codes [padded / 256, width / 4, 256, 4], numbers [5, padded], width
    std::tuple<Array<const std::uint8_t>, Array<const float, 2>, std::size_t>;
using DigitArrays =  // codes [padded / 256, digits / 16, 256, 4], directions [digits], values [digits]
    std::tuple<Array<const std::uint8_t>, Array<const std::uint32_t, 1>, Array<const float, 1>>;
using CodeArrays =
    std::tuple<Array<const std::uint8_t, 2>, Array<const float, 2>>;  // codes [rows, width], numbers [2, rows]
using GraphArrays =  // links [rows, degree], centres [groups, width], halves [groups], starts [groups + 1], seeds
    std::tuple<Array<const std::uint32_t, 2>, Array<const float, 2>, Array<const float, 1>,
               Array<const std::int64_t, 1>, Array<const std::uint32_t, 1>>;
using ExactArrays =  // rows [rows, d], their type, bias [rows], norms [rows]
    std::tuple<Array<const std::byte>, std::size_t, Array<const float, 1>, Array<const float, 1>>;

using States = Array<const float, 2>;
using Bits = std::optional<Array<const std::uint64_t, 2>>;
using Rows = std::optional<Array<const std::int64_t, 2>>;

class DecoderCore {
 public:
  DecoderCore(ProjectionArrays projection, std::optional<BlockArrays> blocks, std::optional<CodeArrays> codes,
              std::optional<GraphArrays> graph, std::optional<ExactArrays> exact, std::optional<DigitArrays> digits);

  using Two = std::tuple<std::size_t, std::size_t>;
  using Three = std::tuple<std::size_t, std::size_t, std::size_t>;
  std::int64_t preview(const States& hidden, std::size_t limit, Two coarse, const Array<float, 2>& values,
                       const Array<std::int64_t, 2>& indices, std::tuple<float, float> rounding,
                       const std::optional<Array<std::uint8_t, 1>>& proven,
                       const std::optional<Array<double, 2>>& partition, bool interval, float inverse, float variance,
                       const Bits& allowed);
  std::int64_t candidates(const States& hidden, Two coarse, const Array<std::int64_t, 2>& rows,
                          const Array<float, 3>& keys, const Array<float, 1>& left, bool coordinates, bool bounds,
                          const std::optional<Array<double, 2>>& sums, float inverse, float variance,
                          const Bits& allowed);
  std::int64_t walk(const States& hidden, Three near, float radius, Three far, float far_radius,
                    const Array<float, 2>& values, const Array<std::int64_t, 2>& indices,
                    const std::optional<Array<float, 1>>& distances, const std::optional<Array<std::int64_t, 1>>& tally,
                    const Bits& allowed);
  std::int64_t listed(const States& hidden, const Bits& allowed, const Array<float, 2>& values,
                      const Array<std::int64_t, 2>& indices, std::tuple<float, float> rounding,
                      const std::optional<Array<std::uint8_t, 1>>& proven);
  std::int64_t prove(const States& hidden, const Array<const float, 2>& logits, std::tuple<float, float> rounding,
                     const Array<float, 2>& values, const Array<std::int64_t, 2>& indices,
                     const Array<std::uint8_t, 1>& proven);
  std::int64_t envelope(const States& hidden, std::tuple<float, float> shape, const Rows& out,
                        const Array<std::int64_t, 2>& rows, const Array<float, 2>& logits,
                        const Array<double, 2>& ends);
  using Five = std::tuple<double, double, double, double, double>;
  using Exchange = std::tuple<Array<std::int64_t, 1>, Array<float, 1>, Array<double, 1>, nb::callable>;
  std::int64_t draw(const States& hidden, std::tuple<float, float> shape, const Five& rule, double temperature,
                    double rounding, const Array<const std::int64_t, 2>& stages,
                    const Array<const std::uint64_t, 1>& seeds, const Rows& out,
                    const std::optional<Array<const double, 2>>& scores, const std::optional<Exchange>& exchange,
                    const Array<std::int64_t, 1>& drawn, const Array<std::uint8_t, 1>& stays);
  std::size_t keep(std::size_t count, std::size_t limit, std::size_t draws);
  std::size_t workspace_bytes() { return spaces_.bytes(); }

 private:
  Coarse check_coarse(const Two& coarse, std::size_t limit, bool all_needed) const;
  AllowedBits check_allowed(const Bits& allowed, std::size_t count) const;
  void check_bounded(const States& hidden, const Rows& out) const;
  void bound(Workspace& space, const float* states, std::size_t count);
  void score(Workspace& space, const float* state, std::vector<Logit>& candidates) const;
  void scan(Workspace& space, const float* hidden, const Part& part, std::size_t limit, const Coarse& coarse,
            const ScanOptions& options, bool coordinates);
  std::vector<Logit>& candidates_of(Workspace& space, std::size_t slot, std::size_t limit, const Coarse& coarse);
  void answer(Workspace& space, std::size_t slot, const float* hidden, const PreviewCall& call, std::size_t query);
  void report(const std::vector<Logit>& scored, std::size_t k, float* values, std::int64_t* indices) const;
  void look_at(const BlockArrays& arrays);
  void look_at(const CodeArrays& arrays);
  void look_at(const GraphArrays& arrays);
  void look_at(const ExactArrays& arrays);
  void look_at(const DigitArrays& arrays);

  const ProjectionArrays projection_arrays_;
  const std::optional<BlockArrays> block_arrays_;
  const std::optional<CodeArrays> code_arrays_;
  const std::optional<GraphArrays> graph_arrays_;
  const std::optional<ExactArrays> exact_arrays_;
  const std::optional<DigitArrays> digit_arrays_;
  // The same as the kernels see them.
  Projection projection_{};
  std::size_t rows_ = 0;
  std::optional<BlockCodes> blocks_;
  std::optional<RowCodes> codes_;
  std::optional<ExactRows> exact_;
  std::optional<DigitCodes> digits_;
  Graph graph_{};
  Seeds seeds_{};
  Workspaces spaces_;
};

DecoderCore::DecoderCore(ProjectionArrays projection, std::optional<BlockArrays> blocks,
                         std::optional<CodeArrays> codes, std::optional<GraphArrays> graph,
                         std::optional<ExactArrays> exact, std::optional<DigitArrays> digits)
    : projection_arrays_(std::move(projection)), block_arrays_(std::move(blocks)), code_arrays_(std::move(codes)),
      graph_arrays_(std::move(graph)), exact_arrays_(std::move(exact)), digit_arrays_(std::move(digits)) {
  const auto& [mean, turn, common, rows] = projection_arrays_;
  projection_ = {mean.data(), turn.data(), common.data(), turn.shape(1), turn.shape(0)};
  require(mean.size() == turn.shape(1) && common.size() == turn.shape(1), "mean, common: float32 [d]");
  require(turn.shape(0) % 4 == 0, "turn: a multiple of 4");
  rows_ = rows;
  require(rows_ > 0 && rows_ < kNoRow, "rows: 1 to 2**32 - 2");
  if (block_arrays_) look_at(*block_arrays_);
  if (code_arrays_) look_at(*code_arrays_);
  if (graph_arrays_) look_at(*graph_arrays_);
  if (exact_arrays_) look_at(*exact_arrays_);
  if (digit_arrays_) look_at(*digit_arrays_);
}

void DecoderCore::look_at(const BlockArrays& arrays) {
  const auto& [codes, numbers, width] = arrays;
  const std::size_t padded = padded_rows(rows_);
  require(width % 4 == 0 && width > 0 && width <= projection_.turned, "blocks: width a multiple of 4, within turn");
  require(codes.size() == padded * width, "blocks: codes [padded, width]");
  require(numbers.has_shape(5, padded), "blocks: numbers float32 [5, padded]");
  const float* number = numbers.data();
  blocks_ = BlockCodes{codes.data(),
                       rows_,
                       padded,
                       width,
                       {number, number + padded, number + 2 * padded, number + 3 * padded, number + 4 * padded}};
}

void DecoderCore::look_at(const CodeArrays& arrays) {
  const auto& [codes, numbers] = arrays;
  require(
      codes.shape(0) == rows_ && codes.shape(1) > 0 && codes.shape(1) % 4 == 0 && codes.shape(1) <= projection_.turned,
      "codes: uint8 [rows, width], a multiple of 4, within turn");
  require(numbers.has_shape(2, rows_), "codes: numbers float32 [2, rows]");
  codes_ = RowCodes{codes.data(), rows_, codes.shape(1), numbers.data(), numbers.data() + rows_};
}

void DecoderCore::look_at(const GraphArrays& arrays) {
  const auto& [links, centres, halves, starts, seeds] = arrays;
  require(codes_.has_value(), "graph: needs codes");
  require(links.shape(0) == rows_, "links: uint32 [rows, degree]");
  graph_ = {links.data(), links.shape(1)};
  require(std::all_of(graph_.links, graph_.links + links.size(),
                      [this](std::uint32_t row) { return row < rows_ || row == kNoRow; }),
          "links: out of range");
  seeds_ = {centres.data(), halves.data(), starts.data(), seeds.data(), halves.size()};
  require(centres.has_shape(seeds_.groups, codes_->width), "centres: float32 [groups, width]");
  require(starts.size() == seeds_.groups + 1, "starts: int64 [groups + 1]");
  require(std::all_of(seeds_.rows, seeds_.rows + seeds.size(), [this](std::uint32_t row) { return row < rows_; }),
          "seeds: out of range");
  require(seeds_.groups > 0 && starts[0] == 0 && starts[seeds_.groups] == static_cast<std::int64_t>(seeds.size()) &&
              std::is_sorted(starts.data(), starts.data() + starts.size()),
          "starts: must ascend within the seeds");
}

void DecoderCore::look_at(const ExactArrays& arrays) {
  const auto& [rows, type, bias, norms] = arrays;
  constexpr std::size_t kElementBytes[] = {4, 2, 2};
  require(type < 3, "exact: float32, float16 or bfloat16");
  const std::size_t row_bytes = kElementBytes[type] * projection_.dimension;
  require(rows.bytes() == rows_ * row_bytes, "exact: rows [rows, d]");
  require(bias.size() == rows_ && norms.size() == rows_, "exact: bias, norms float32 [rows]");
  const float largest = std::accumulate(norms.data(), norms.data() + rows_, 0.0F,
                                        [](float one, float other) { return std::max(one, other); });
  const auto kind = static_cast<RowType>(type);
  const float least = kind == RowType::float16
                          ? 0x1p-25F
                          : static_cast<float>(projection_.dimension) * std::numeric_limits<float>::min();
  exact_ = ExactRows{rows.data(), kind, row_bytes, projection_.dimension, bias.data(), norms.data(), largest, least};
}

void DecoderCore::look_at(const DigitArrays& arrays) {
  const auto& [codes, directions, values] = arrays;
  const std::size_t count = directions.size();
  require(blocks_.has_value() && count > 0 && count % kDigits == 0 && values.size() == count,
          "digits: needs blocks; a multiple of 16");
  require(codes.size() == padded_rows(rows_) * (count / 4), "digits: codes [padded, digits / 4]");
  require(std::all_of(directions.data(), directions.data() + count,
                      [this](std::uint32_t direction) { return direction < blocks_->width; }),
          "digits: directions within the width");
  digits_ = DigitCodes{codes.data(), count, directions.data(), values.data()};
}

// Keeps at most so many workspaces for the next calls, none larger than calls with so many candidates, and envelopes of
// so many rows, drawn ones too, need. Returns their size in bytes.
std::size_t DecoderCore::keep(std::size_t count, std::size_t limit, std::size_t draws) {
  limit = std::min(limit, rows_);
  // Candidates of a scan grow one by one; an envelope has room for one state's at a time.
  std::size_t bytes = sizeof(Workspace) + Survivors::planned_bytes(limit) +
                      2 * std::max(2 * limit, draws) * sizeof(Logit) + Sampler::planned_bytes(draws) +
                      Largest::planned_bytes(std::max(limit, draws)) - Largest::planned_bytes(limit) +
                      BlockScan::kQueries * (CodedQuery::planned_bytes(projection_) + Largest::planned_bytes(limit));
  // Without all directions there are no bounds.
  if (blocks_.has_value() && projection_.turned >= projection_.dimension)
    bytes += BlockScan::kQueries * Envelope::planned_bytes(rows_);
  if (digits_.has_value()) bytes += BlockScan::kQueries * digits_->count + BlockScan::planned_bytes(limit);
  if (seeds_.groups > 0) bytes += Walker::planned_bytes(rows_, seeds_, limit);
  spaces_.keep(count, bytes);
  return count * bytes;
}

Coarse DecoderCore::check_coarse(const Two& coarse, std::size_t limit, bool all_needed) const {
  const auto [width, survivors] = coarse;
  if (width == 0 && survivors == 0) return {0, 0};
  require(!all_needed, "coarse: not with bounds, nor with a partition function");
  require(width > 0 || digits_.has_value(), "coarse: no width needs digits");
  require(width % 4 == 0 && width <= blocks_->width && survivors >= limit,
          "coarse: a multiple of 4, within the width; survivors >= limit");
  require((width == 0 && survivors == limit) || (codes_.has_value() && codes_->width == blocks_->width),
          "coarse: needs codes of the same width by row");
  return {width, std::min(survivors, rows_)};
}

AllowedBits DecoderCore::check_allowed(const Bits& allowed, std::size_t count) const {
  if (!allowed) return {};
  const std::size_t words = padded_rows(rows_) / 64;
  require(allowed->has_shape(count, words) || allowed->has_shape(1, words), "allowed: uint64 [n or 1, padded / 64]");
  const std::size_t last = rows_ / 64;
  for (std::size_t i = 0; i < allowed->shape(0); ++i) {
    const std::uint64_t* bits = allowed->data() + i * words;
    require(last == words || ((bits[last] >> (rows_ % 64)) == 0 &&
                              std::all_of(bits + last + 1, bits + words, [](std::uint64_t word) { return word == 0; })),
            "allowed: bits beyond the rows");
  }
  return {allowed->data(), allowed->shape(0) == 1 ? 0 : words};
}

void DecoderCore::check_bounded(const States& hidden, const Rows& out) const {
  require(blocks_.has_value() && projection_.turned >= projection_.dimension, "bounds need blocks and all directions");
  require(hidden.shape(1) == projection_.dimension && (!out || out->shape(0) == hidden.shape(0)),
          "hidden, out: float32 [n, d], int64 [n, c]");
  require(!out || std::all_of(out->data(), out->data() + out->size(),
                              [this](std::int64_t row) { return row < static_cast<std::int64_t>(rows_); }),
          "out: beyond the rows");
}

// Projects and scans up to four hidden states.
void DecoderCore::scan(Workspace& space, const float* hidden, const Part& part, std::size_t limit, const Coarse& coarse,
                       const ScanOptions& options, bool coordinates) {
  const std::size_t count = part.count;
  const CodedQuery* queries[BlockScan::kQueries];
  AllowedRows allowed[BlockScan::kQueries];
  const std::size_t stride = coordinates ? blocks_->width : projection_.dimension;
  for (std::size_t q = 0; q < count; ++q) {
    CodedQuery& query = space.queries[q];
    const float* state = hidden + (part.first + q) * stride;
    if (coordinates)
      query.assign_coordinates(state, blocks_->width);
    else
      query.assign(projection_, state, blocks_->width, options.bounds || options.partition);
    queries[q] = &query;
    allowed[q] = part.allowed.of(part.first + q);
    space.largest[q].start(std::max(limit, coarse.survivors));
    space.sums[q] = ExpSums{};
  }
  const ScanQueries all{{queries, count}, {allowed, count}, {space.largest, count}, {space.sums, count}};
  if (coarse.width == 0 && coarse.survivors > 0) {
    for (std::size_t q = 0; q < count; ++q) space.digit_queries[q].assign(*digits_, space.queries[q]);
    return space.scan.run(*blocks_, *digits_, {space.digit_queries, count}, all);
  }
  space.scan.run(*blocks_, coarse.width > 0 ? coarse.width : blocks_->width, all, options);
}

// The candidates that a scan found for a query; after a coarse one, the best of its survivors by all directions.
std::vector<Logit>& DecoderCore::candidates_of(Workspace& space, std::size_t slot, std::size_t limit,
                                               const Coarse& coarse) {
  std::vector<Logit>& found = space.largest[slot].finish();
  if (coarse.width > 0 || coarse.survivors > limit) space.survivors.refine(*codes_, space.queries[slot], found, limit);
  return found;
}

void DecoderCore::report(const std::vector<Logit>& scored, std::size_t k, float* values, std::int64_t* indices) const {
  for (std::size_t i = 0; i < k; ++i) {
    values[i] = i < scored.size() ? scored[i].key : -kInfinity;
    indices[i] = i < scored.size() ? static_cast<std::int64_t>(scored[i].row) : -1;
  }
}

void DecoderCore::answer(Workspace& space, std::size_t slot, const float* hidden, const PreviewCall& call,
                         std::size_t query) {
  std::vector<Logit>& candidates = candidates_of(space, slot, call.limit, call.coarse);
  const float cut = space.largest[slot].threshold();
  const float norm = norm_above(hidden, projection_.dimension);
  const Rounding rounding{call.rounding.per_norm * norm, call.rounding.per_logit};
  const float left =
      rank_candidates(*exact_, hidden, candidates, call.k, call.proven != nullptr, rounding, space.scored);
  if (call.partition != nullptr)
    close_sums({*blocks_, *exact_, rounding, call.allowed.of(query).count(rows_)}, space.queries[slot],
               space.sums[slot], space.scored, {false, true, call.interval, call.inverse, call.variance},
               call.partition + 3 * query);
  const auto last = space.scored.begin() + static_cast<std::ptrdiff_t>(std::min(call.k, space.scored.size()));
  std::partial_sort(space.scored.begin(), last, space.scored.end(), Larger{});
  report(space.scored, call.k, call.values + query * call.k, call.indices + query * call.k);
  if (call.proven != nullptr)
    call.proven[query] = is_proven(*exact_, rounding, space.scored, call.k, std::max(cut, left)) ? 1 : 0;
}

// Returns the number of the first hidden state that is not finite or too large, before it writes; -1 for none.
std::int64_t DecoderCore::preview(const States& hidden, std::size_t limit, Two coarse, const Array<float, 2>& values,
                                  const Array<std::int64_t, 2>& indices, std::tuple<float, float> rounding,
                                  const std::optional<Array<std::uint8_t, 1>>& proven,
                                  const std::optional<Array<double, 2>>& partition, bool interval, float inverse,
                                  float variance, const Bits& allowed) {
  require(blocks_.has_value() && exact_.has_value(), "preview: needs blocks and exact rows");
  const std::size_t count = hidden.shape(0), dimension = projection_.dimension, k = values.shape(1);
  require(hidden.shape(1) == dimension && k >= 1 && limit >= k, "hidden: float32 [n, d]; 1 <= k <= limit");
  require((!proven && !partition) || projection_.turned >= dimension, "bounds need all directions");
  require(values.shape(0) == count && indices.has_shape(count, k), "values, indices: [n, k]");
  require(!proven || proven->size() == count, "proven: uint8 [n]");
  require(!partition || partition->has_shape(count, 3), "partition: float64 [n, 3]");
  const float* state = hidden.data();
  const PreviewCall call{k,
                         std::min(limit, rows_),
                         check_coarse(coarse, limit, proven || partition),
                         check_allowed(allowed, count),
                         {std::get<0>(rounding), std::get<1>(rounding)},
                         inverse,
                         variance,
                         interval,
                         values.data(),
                         indices.data(),
                         proven ? proven->data() : nullptr,
                         partition ? partition->data() : nullptr};
  nb::gil_scoped_release released;
  if (const std::int64_t bad = first_beyond(state, count, dimension, kLargestState); bad >= 0) return bad;
  Workspaces::Lease space(spaces_);
  for (std::size_t first = 0; first < count; first += BlockScan::kQueries) {
    const std::size_t some = std::min(BlockScan::kQueries, count - first);
    scan(*space, state, {first, some, call.allowed}, call.limit, call.coarse,
         {call.proven != nullptr, call.partition != nullptr, interval, inverse, variance}, false);
    for (std::size_t q = 0; q < some; ++q) answer(*space, q, state + (first + q) * dimension, call, first + q);
  }
  return -1;
}

// The candidates alone, by descending key, -1 where there are fewer; sums [n, 4]: of exp, and their
// reference.
std::int64_t DecoderCore::candidates(const States& hidden, Two coarse, const Array<std::int64_t, 2>& rows,
                                     const Array<float, 3>& keys, const Array<float, 1>& left, bool coordinates,
                                     bool bounds, const std::optional<Array<double, 2>>& sums, float inverse,
                                     float variance, const Bits& allowed) {
  require(blocks_.has_value(), "candidates: needs blocks");
  const std::size_t width = coordinates ? blocks_->width : projection_.dimension;
  const std::size_t count = hidden.shape(0), limit = rows.shape(1);
  require(hidden.shape(1) == width && limit >= 1 && rows.shape(0) == count && keys.has_shape(count, limit, 2) &&
              left.size() == count,
          "candidates: array shapes do not fit together");
  require(!sums || sums->has_shape(count, 4), "sums: float64 [n, 4]");
  require((!bounds && !sums) || projection_.turned >= projection_.dimension, "bounds need all directions");
  const Coarse leading = check_coarse(coarse, limit, bounds || sums);
  const AllowedBits bits = check_allowed(allowed, count);
  const float* state = hidden.data();
  nb::gil_scoped_release released;
  if (const std::int64_t bad = first_beyond(state, count, width, coordinates ? kLargestCoordinate : kLargestState);
      bad >= 0)
    return bad;
  Workspaces::Lease lease(spaces_);
  Workspace& space = *lease;
  for (std::size_t first = 0; first < count; first += BlockScan::kQueries) {
    const std::size_t some = std::min(BlockScan::kQueries, count - first);
    scan(space, state, {first, some, bits}, std::min(limit, rows_), leading,
         {bounds, sums.has_value(), sums.has_value(), inverse, variance}, coordinates);
    for (std::size_t q = 0; q < some; ++q) {
      std::vector<Logit>& found = candidates_of(space, q, std::min(limit, rows_), leading);
      std::sort(found.begin(), found.end(), Larger{});
      const std::size_t at = first + q;
      for (std::size_t i = 0; i < limit; ++i) {
        rows[at * limit + i] = i < found.size() ? static_cast<std::int64_t>(found[i].row) : -1;
        keys[(at * limit + i) * 2] = i < found.size() ? found[i].key : -kInfinity;
        keys[(at * limit + i) * 2 + 1] = i < found.size() ? found[i].estimate : -kInfinity;
      }
      left[at] = space.largest[q].threshold();
      if (sums) {
        std::copy_n(space.sums[q].sums.begin(), 3, sums->data() + 4 * at);
        (*sums)[4 * at + 3] = space.sums[q].reference;
      }
    }
  }
  return -1;
}

// Bounds of all rows for up to four hidden states.
void DecoderCore::bound(Workspace& space, const float* states, std::size_t count) {
  const CodedQuery* queries[BlockScan::kQueries];
  for (std::size_t q = 0; q < count; ++q) {
    space.queries[q].assign(projection_, states + q * projection_.dimension, blocks_->width, true);
    queries[q] = &space.queries[q];
  }
  Envelope::bound(*blocks_, rows_, {queries, count}, {space.envelopes, count});
}

// Exact logits of candidates in their order, in scored; minus infinity without exact rows.
void DecoderCore::score(Workspace& space, const float* state, std::vector<Logit>& candidates) const {
  space.scored.clear();
  if (exact_.has_value())
    rank_candidates(*exact_, state, candidates, 1, false, {}, space.scored);
  else
    space.scored.resize(candidates.size(), {-kInfinity, -kInfinity, kNoRow});
}

// The rows of the largest upper bounds, with exact logits if there are exact rows; of the others the largest bound and
// log of the sum of exp, in ends [n, 2].
std::int64_t DecoderCore::envelope(const States& hidden, std::tuple<float, float> shape, const Rows& out,
                                   const Array<std::int64_t, 2>& rows, const Array<float, 2>& logits,
                                   const Array<double, 2>& ends) {
  const std::size_t dimension = projection_.dimension, count = hidden.shape(0), limit = rows.shape(1);
  check_bounded(hidden, out);
  require(limit >= 1 && rows.shape(0) == count && logits.has_shape(count, limit) && ends.has_shape(count, 2),
          "envelope: array shapes do not fit together");
  const std::size_t outs = out ? out->shape(1) : 0;
  const Shape change{std::get<0>(shape), std::get<1>(shape)};
  const float* state = hidden.data();
  nb::gil_scoped_release released;
  if (const std::int64_t bad = first_beyond(state, count, dimension, kLargestState); bad >= 0) return bad;
  Workspaces::Lease lease(spaces_);
  Workspace& space = *lease;
  for (std::size_t at = 0; at < count; ++at) {
    const std::size_t q = at % BlockScan::kQueries;
    if (q == 0) bound(space, state + at * dimension, std::min(BlockScan::kQueries, count - at));
    Envelope& envelope = space.envelopes[q];
    std::vector<Logit>& head = space.candidates;
    envelope.open({out ? out->data() + at * outs : nullptr, outs}, change);
    envelope.take(limit, space.largest[0], head);
    score(space, state + at * dimension, head);
    for (std::size_t i = 0; i < limit; ++i) {
      rows[at * limit + i] = i < head.size() ? static_cast<std::int64_t>(head[i].row) : -1;
      logits[at * limit + i] = i < head.size() ? space.scored[i].key : -kInfinity;
    }
    ends[2 * at] = envelope.largest();
    ends[2 * at + 1] = envelope.log_sum();
  }
  return -1;
}

struct Unanswered {};  // ends the draw of a state

// A word of each hidden state, and whether it stays; see draw/sampler. `exchange` is asked for the model's logits: it
// takes rows and exact logits of the state of a number, and writes logits to the third array. If it returns false, the
// state's draw ends there, open and without a word.
std::int64_t DecoderCore::draw(const States& hidden, std::tuple<float, float> shape, const Five& rule,
                               double temperature, double rounding, const Array<const std::int64_t, 2>& stages,
                               const Array<const std::uint64_t, 1>& seeds, const Rows& out,
                               const std::optional<Array<const double, 2>>& scores,
                               const std::optional<Exchange>& exchange, const Array<std::int64_t, 1>& drawn,
                               const Array<std::uint8_t, 1>& stays) {
  const std::size_t dimension = projection_.dimension, count = hidden.shape(0), outs = out ? out->shape(1) : 0;
  check_bounded(hidden, out);
  require(seeds.size() == count && drawn.size() == count && stays.size() == count && stages.shape(1) == 2 &&
              stages.shape(0) >= 1 && out.has_value() == scores.has_value() &&
              (!scores || scores->has_shape(count, outs)) && (exchange || exact_),
          "draw: array shapes do not fit together");
  std::vector<Stage> each(stages.shape(0));
  for (std::size_t i = 0; i < each.size(); ++i) {
    const std::int64_t limit = stages[2 * i], evidence = stages[2 * i + 1];
    require(limit >= 1 && evidence >= 1 && (i == 0 || limit > stages[2 * i - 2]), "stages: limits ascend");
    each[i] = {static_cast<std::size_t>(limit), static_cast<std::size_t>(evidence)};
    require(!exchange || std::min({std::get<0>(*exchange).size(), std::get<1>(*exchange).size(),
                                   std::get<2>(*exchange).size()}) >= std::max(each[i].limit, each[i].evidence),
            "exchange: room for the rows of a stage");
  }
  const float* states = hidden.data();
  nb::gil_scoped_release released;
  if (const std::int64_t bad = first_beyond(states, count, dimension, kLargestState); bad >= 0) return bad;
  Workspaces::Lease lease(spaces_);
  Workspace& space = *lease;
  std::size_t at = 0;
  const auto logits = [&](std::vector<Logit>& rows, std::vector<double>& found) {
    score(space, states + at * dimension, rows);
    found.reserve(rows.size());
    found.resize(rows.size());
    std::transform(space.scored.begin(), space.scored.end(), found.begin(), [](const Logit& one) { return one.key; });
    if (!exchange || rows.empty()) return;
    const auto& [asked, exact, answer, ask] = *exchange;
    for (std::size_t i = 0; i < rows.size(); ++i) {
      asked[i] = static_cast<std::int64_t>(rows[i].row);
      exact[i] = space.scored[i].key;
    }
    nb::gil_scoped_acquire held;
    if (!nb::cast<bool>(ask(at, rows.size()))) throw Unanswered{};
    std::copy_n(answer.data(), rows.size(), found.begin());
  };
  const auto& [top_p, min_p, typical_p, epsilon, eta] = rule;
  const DrawCall call{{top_p, min_p, typical_p, epsilon, eta},
                      {std::get<0>(shape), std::get<1>(shape)},
                      temperature,
                      rounding,
                      rows_,
                      each,
                      logits};
  for (; at < count; ++at) {
    const std::size_t q = at % BlockScan::kQueries;
    if (q == 0) bound(space, states + at * dimension, std::min(BlockScan::kQueries, count - at));
    const ChangedWords changed{{out ? out->data() + at * outs : nullptr, outs},
                               {scores ? scores->data() + at * outs : nullptr, outs}};
    space.envelopes[q].open(changed.rows, call.shape);
    Uniforms uniforms(seeds[at]);
    Sampler::Drawn found{-1, 0};
    try {
      found = space.sampler.draw(call, space.envelopes[q], space.largest[0], changed, uniforms);
    } catch (const Unanswered&) {  // it stays open
    }
    drawn[at] = found.row;
    stays[at] = static_cast<std::uint8_t>(found.stays);
  }
  return -1;
}

// With exact rows fills values and indices of the k largest; without, of the k best by estimate. Hidden states beyond
// the radius are walked for with another effort; beyond its own radius, too, they are left without an answer. Returns
// the number of the first hidden state that is not finite or too large; else -1, or -2 if one has fewer than k rows.
std::int64_t DecoderCore::walk(const States& hidden, Three near, float radius, Three far, float far_radius,
                               const Array<float, 2>& values, const Array<std::int64_t, 2>& indices,
                               const std::optional<Array<float, 1>>& distances,
                               const std::optional<Array<std::int64_t, 1>>& tally, const Bits& allowed) {
  require(codes_.has_value() && seeds_.groups > 0, "walk: needs codes and seeds");
  const std::size_t count = hidden.shape(0), dimension = projection_.dimension, k = values.shape(1);
  require(hidden.shape(1) == dimension, "hidden: float32 [n, d]");
  const auto effort_of = [](const Three& three) {
    return Effort{std::get<0>(three), std::get<1>(three), std::get<2>(three)};
  };
  const Effort close = effort_of(near), distant = effort_of(far);
  require(values.shape(0) == count && indices.has_shape(count, k), "values, indices: [n, k]");
  require(k >= 1 && std::max(close.limit, distant.limit) >= k && close.probes >= 1, "walk: 1 <= k <= limit; probes");
  require(!distances || distances->size() == count, "distances: float32 [n]");
  require(!tally || tally->size() == count, "tally: int64 [n]");
  const AllowedBits bits = check_allowed(allowed, count);
  const float* state = hidden.data();
  nb::gil_scoped_release released;
  if (const std::int64_t bad = first_beyond(state, count, dimension, kLargestState); bad >= 0) return bad;
  Workspaces::Lease lease(spaces_);
  Workspace& space = *lease;
  bool all_found = true;
  for (std::size_t q = 0; q < count; ++q) {
    CodedQuery& query = space.queries[0];
    const float* one = state + q * dimension;
    query.assign(projection_, one, codes_->width, false);
    const float apart = space.walker.approach(seeds_, query, codes_->width);
    std::size_t looked = 0;
    space.candidates.clear();
    if (apart <= radius)
      looked = space.walker.run(*codes_, graph_, seeds_, query, close, bits.of(q), space.candidates);
    else if (apart <= far_radius)
      looked = space.walker.run(*codes_, graph_, seeds_, query, distant, bits.of(q), space.candidates);
    if (exact_.has_value()) {
      rank_candidates(*exact_, one, space.candidates, k, false, {}, space.scored);
    } else {
      space.scored.clear();
      for (const auto& found : space.candidates) space.scored.push_back({found.estimate, found.estimate, found.row});
    }
    std::sort(space.scored.begin(), space.scored.end(), Larger{});
    all_found = all_found && space.scored.size() >= k;
    report(space.scored, k, values.data() + q * k, indices.data() + q * k);
    if (distances) (*distances)[q] = apart;
    if (tally) (*tally)[q] = static_cast<std::int64_t>(looked);
  }
  return all_found ? -1 : kTooFew;
}

// The k largest of the allowed rows, of which all logits are computed. Proven is an answer that rounding cannot change.
std::int64_t DecoderCore::listed(const States& hidden, const Bits& allowed, const Array<float, 2>& values,
                                 const Array<std::int64_t, 2>& indices, std::tuple<float, float> rounding,
                                 const std::optional<Array<std::uint8_t, 1>>& proven) {
  require(exact_.has_value(), "listed: needs exact rows");
  const std::size_t count = hidden.shape(0), dimension = projection_.dimension, k = values.shape(1);
  require(hidden.shape(1) == dimension && k >= 1, "hidden: float32 [n, d]; k >= 1");
  require(values.shape(0) == count && indices.has_shape(count, k), "values, indices: [n, k]");
  require(!proven || proven->size() == count, "proven: uint8 [n]");
  require(allowed.has_value(), "allowed: needed");
  const AllowedBits bits = check_allowed(allowed, count);
  const float* states = hidden.data();
  nb::gil_scoped_release released;
  if (const std::int64_t bad = first_beyond(states, count, dimension, kLargestState); bad >= 0) return bad;
  Workspaces::Lease lease(spaces_);
  Workspace& space = *lease;
  for (std::size_t q = 0; q < count; ++q) {
    const float* state = states + q * dimension;
    space.candidates.clear();
    bits.of(q).each(rows_,
                    [&](std::size_t row) { space.candidates.push_back({0, 0, static_cast<std::uint32_t>(row)}); });
    rank_candidates(*exact_, state, space.candidates, k, false, {}, space.scored);
    const auto last = space.scored.begin() + static_cast<std::ptrdiff_t>(std::min(k, space.scored.size()));
    std::partial_sort(space.scored.begin(), last, space.scored.end(), Larger{});
    report(space.scored, k, values.data() + q * k, indices.data() + q * k);
    if (!proven) continue;
    const float norm = norm_above(state, dimension);
    const Rounding error{std::get<0>(rounding) * norm, std::get<1>(rounding)};
    (*proven)[q] = is_proven(*exact_, error, space.scored, k, -kInfinity) ? 1 : 0;
  }
  return -1;
}

// The k largest of all logits [n, rows], which come as the layer computed them: rounded to its type, so of another than
// single precision the answer is multiplied again. Proven is an answer that rounding cannot change.
std::int64_t DecoderCore::prove(const States& hidden, const Array<const float, 2>& logits,
                                std::tuple<float, float> rounding, const Array<float, 2>& values,
                                const Array<std::int64_t, 2>& indices, const Array<std::uint8_t, 1>& proven) {
  require(exact_.has_value(), "prove: needs exact rows");
  const std::size_t count = hidden.shape(0), dimension = projection_.dimension, k = values.shape(1);
  require(hidden.shape(1) == dimension && logits.has_shape(count, rows_), "hidden: [n, d]; logits: [n, rows]");
  require(k >= 1 && k <= rows_ && values.shape(0) == count && indices.has_shape(count, k), "values, indices: [n, k]");
  require(proven.size() == count, "proven: uint8 [n]");
  const float* states = hidden.data();
  nb::gil_scoped_release released;
  if (const std::int64_t bad = first_beyond(states, count, dimension, kLargestState); bad >= 0) return bad;
  Workspaces::Lease lease(spaces_);
  Workspace& space = *lease;
  for (std::size_t q = 0; q < count; ++q) {
    const float* state = states + q * dimension;
    const std::span<const float> own(logits.data() + q * rows_, rows_);
    std::vector<Logit>& best = largest_of(own, k + 1, space.largest[0], space.lanes);
    std::sort(best.begin(), best.end(), Larger{});
    const float per_norm = 2 * std::get<0>(rounding) * norm_above(state, dimension);
    proven[q] = best.size() == k || best[k - 1].key - best[k].key >
                                        per_norm * exact_->largest_norm + 2 * exact_->least_error +
                                            std::get<1>(rounding) * (std::abs(best[k - 1].key) + std::abs(best[k].key));
    if (exact_->type != RowType::float32) {
      best.resize(k);
      for (Logit& each : best) each.key = exact_->logit(state, each.row);
      std::sort(best.begin(), best.end(), Larger{});
    }
    report(best, k, values.data() + q * k, indices.data() + q * k);
  }
  return -1;
}

}  // namespace
}  // namespace memhier

void register_decoder(nb::module_& m) {
  using namespace memhier;
  using namespace nb::literals;
  constexpr float kNoBound = std::numeric_limits<float>::infinity();
  nb::class_<DecoderCore>(m, "DecoderCore")
      .def(nb::init<ProjectionArrays, std::optional<BlockArrays>, std::optional<CodeArrays>, std::optional<GraphArrays>,
                    std::optional<ExactArrays>, std::optional<DigitArrays>>(),
           nb::kw_only(), "projection"_a, "blocks"_a.none(), "codes"_a.none(), "graph"_a.none(), "exact"_a.none(),
           "digits"_a.none())
      .def("preview", &DecoderCore::preview, nb::kw_only(), "hidden"_a, "limit"_a, "coarse"_a, "values"_a, "indices"_a,
           "rounding"_a = std::tuple<float, float>(0.0F, 0.0F), "proven"_a.none() = nb::none(),
           "partition"_a.none() = nb::none(), "interval"_a = false, "inverse"_a = 1.0F, "variance"_a = 0.0F,
           "allowed"_a.none() = nb::none())
      .def("candidates", &DecoderCore::candidates, nb::kw_only(), "hidden"_a, "coarse"_a, "rows"_a, "keys"_a, "left"_a,
           "coordinates"_a = false, "bounds"_a = false, "sums"_a.none() = nb::none(), "inverse"_a = 1.0F,
           "variance"_a = 0.0F, "allowed"_a.none() = nb::none())
      .def("walk", &DecoderCore::walk, nb::kw_only(), "hidden"_a, "near"_a, "radius"_a = kNoBound,
           "far"_a = DecoderCore::Three(0, 0, 0), "far_radius"_a = 0.0F, "values"_a, "indices"_a,
           "distances"_a.none() = nb::none(), "tally"_a.none() = nb::none(), "allowed"_a.none() = nb::none())
      .def("listed", &DecoderCore::listed, nb::kw_only(), "hidden"_a, "allowed"_a, "values"_a, "indices"_a,
           "rounding"_a = std::tuple<float, float>(0.0F, 0.0F), "proven"_a.none() = nb::none())
      .def("prove", &DecoderCore::prove, nb::kw_only(), "hidden"_a, "logits"_a, "rounding"_a, "values"_a, "indices"_a,
           "proven"_a)
      .def("envelope", &DecoderCore::envelope, nb::kw_only(), "hidden"_a, "shape"_a, "out"_a.none(), "rows"_a,
           "logits"_a, "ends"_a)
      .def("draw", &DecoderCore::draw, nb::kw_only(), "hidden"_a, "shape"_a, "rule"_a, "temperature"_a, "rounding"_a,
           "stages"_a, "seeds"_a, "out"_a.none(), "scores"_a.none(), "exchange"_a.none(), "drawn"_a, "stays"_a)
      .def("keep", &DecoderCore::keep, nb::kw_only(), "calls"_a, "candidates"_a, "draws"_a)
      .def_prop_ro("workspace_bytes", &DecoderCore::workspace_bytes);
}
