// The decoder's calls: a batch of hidden states in, the largest logits of each out, all in one crossing.
#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <stdexcept>
#include <tuple>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>

#include "bind/buffer.hpp"
#include "decode/sums.hpp"
#include "decode/workspace.hpp"
#include "bind/module.hpp"

namespace nb = nanobind;

namespace memhier {
namespace {

void require(bool holds, const char* what) {
  if (!holds) throw std::invalid_argument(what);
}

// Hidden states beyond it, as weights, overflow single precision; the Python side refuses the same.
constexpr float kLargestState = 1e15F;
constexpr float kLargestCoordinate = std::numeric_limits<float>::max();

// False for NaN, too.
bool are_within(const float* values, std::size_t count, float most) {
  return std::all_of(values, values + count, [most](float value) { return std::abs(value) <= most; });
}

// A scan of the first `width` directions alone, whose `survivors` are estimated again by all; none of it at zero.
struct Coarse {
  std::size_t width, survivors;
};

struct PreviewCall {
  std::size_t k, limit;
  Coarse coarse;
  bool bounds;
  Rounding rounding;
  float inverse, variance;
  // Each may be null where it is not wanted.
  float* values;          // [n, k]
  std::int64_t* indices;  // [n, k]
  std::uint8_t* proven;   // [n]
  double* partition;      // [n, 3]: log of the sum of exp of all logits: estimate, and bounds
  bool interval;          // whether the bounds are wanted; they are infinite otherwise
  std::int64_t* tally;    // [n]: rows whose exact logit was computed
};

class DecoderCore {
 public:
  DecoderCore(nb::tuple projection, nb::object blocks, nb::object codes, nb::object graph, nb::object exact);

  std::int64_t preview(nb::handle hidden, std::size_t k, std::size_t limit, std::size_t coarse, std::size_t survivors,
                       bool bounds, float per_norm, float per_logit, float inverse, float variance, nb::handle values,
                       nb::handle indices, nb::handle proven, nb::handle partition, bool interval, nb::handle tally);
  std::int64_t candidates(nb::handle hidden, bool coordinates, std::size_t limit, std::size_t coarse,
                          std::size_t survivors, bool bounds, nb::handle rows, nb::handle keys, nb::handle left,
                          nb::handle sums, float inverse, float variance);
  using Three = std::tuple<std::size_t, std::size_t, std::size_t>;
  std::int64_t walk(nb::handle hidden, Three near, float radius, Three far, float far_radius, std::size_t k,
                    nb::handle values, nb::handle indices, nb::handle distances, nb::handle tally);
  std::size_t keep(std::size_t count, std::size_t limit);
  std::size_t workspace_bytes() { return spaces_.bytes(); }

 private:
  const Buffer& hold(nb::handle object) { return held_.emplace_back(object, Buffer::Access::read); }
  template <class T>
  const T* array(nb::handle object, std::size_t count, const char* what) {
    const Buffer& buffer = hold(object);
    require(buffer.count<T>() == count, what);
    return buffer.as<const T>();
  }
  Coarse check_coarse(std::size_t width, std::size_t survivors, std::size_t limit, bool all_needed) const;
  void scan(Workspace& space, const float* hidden, std::size_t count, std::size_t limit, const Coarse& coarse,
            const ScanOptions& options, bool coordinates);
  std::vector<Candidate>& candidates_of(Workspace& space, std::size_t slot, std::size_t limit, const Coarse& coarse);
  void answer(Workspace& space, std::size_t slot, const float* hidden, const PreviewCall& call, std::size_t query);
  void report(const std::vector<Scored>& scored, std::size_t k, float* values, std::int64_t* indices) const;
  void take_blocks(nb::tuple fields);
  void take_codes(nb::tuple fields);
  void take_graph(nb::tuple fields);
  void take_exact(nb::tuple fields);

  std::vector<Buffer> held_;
  Projection projection_{};
  std::size_t rows_ = 0;
  std::optional<BlockCodes> blocks_;
  std::optional<RowCodes> codes_;
  std::optional<ExactRows> exact_;
  Graph graph_{};
  Seeds seeds_{};
  Workspaces spaces_;
};

DecoderCore::DecoderCore(nb::tuple projection, nb::object blocks, nb::object codes, nb::object graph, nb::object exact) {
  held_.reserve(32);  // references into it stay good
  require(projection.size() == 4, "projection: (mean, turn, common, rows)");
  const Buffer& turn = hold(projection[1]);
  require(turn.axes() == 2, "turn: [t, d]");
  projection_.dimension = turn.shape(1);
  projection_.turned = turn.shape(0);
  projection_.turn = turn.as<const float>();
  require(turn.count<float>() == projection_.turned * projection_.dimension, "turn: float32");
  projection_.mean = array<float>(projection[0], projection_.dimension, "mean: float32 [d]");
  projection_.common = array<float>(projection[2], projection_.dimension, "common: float32 [d]");
  rows_ = nb::cast<std::size_t>(projection[3]);
  require(rows_ > 0 && rows_ < kNoRow, "rows: 1 to 2**32 - 2");
  if (!blocks.is_none()) take_blocks(nb::cast<nb::tuple>(blocks));
  if (!codes.is_none()) take_codes(nb::cast<nb::tuple>(codes));
  if (!graph.is_none()) take_graph(nb::cast<nb::tuple>(graph));
  if (!exact.is_none()) take_exact(nb::cast<nb::tuple>(exact));
}

void DecoderCore::take_blocks(nb::tuple fields) {
  require(fields.size() == 3, "blocks: (codes, numbers, width)");
  const auto width = nb::cast<std::size_t>(fields[2]);
  const std::size_t padded = (rows_ + kChunkRows - 1) / kChunkRows * kChunkRows;
  require(width % 4 == 0 && width > 0 && width <= projection_.turned, "blocks: width a multiple of 4, within turn");
  const auto* codes = array<std::uint8_t>(fields[0], padded * width, "blocks: codes [padded, width]");
  const auto* numbers = array<float>(fields[1], 5 * padded, "blocks: numbers float32 [5, padded]");
  blocks_ = BlockCodes{codes, padded, width,
                       {numbers, numbers + padded, numbers + 2 * padded, numbers + 3 * padded, numbers + 4 * padded}};
}

void DecoderCore::take_codes(nb::tuple fields) {
  require(fields.size() == 2, "codes: (codes, numbers)");
  const Buffer& codes = hold(fields[0]);
  require(codes.axes() == 2 && codes.shape(0) == rows_ && codes.shape(1) > 0 && codes.shape(1) <= projection_.turned &&
              codes.bytes() == rows_ * codes.shape(1),
          "codes: uint8 [rows, width], within turn");
  const auto* numbers = array<float>(fields[1], 2 * rows_, "codes: numbers float32 [2, rows]");
  codes_ = RowCodes{codes.as<const std::uint8_t>(), rows_, codes.shape(1), numbers, numbers + rows_};
}

void DecoderCore::take_graph(nb::tuple fields) {
  require(fields.size() == 5 && codes_.has_value(), "graph: (links, centres, halves, starts, seeds), with codes");
  const Buffer& links = hold(fields[0]);
  require(links.axes() == 2 && links.shape(0) == rows_, "links: uint32 [rows, degree]");
  graph_ = {links.as<const std::uint32_t>(), links.shape(1)};
  require(links.count<std::uint32_t>() == rows_ * graph_.degree, "links: uint32 [rows, degree]");
  require(std::all_of(graph_.links, graph_.links + rows_ * graph_.degree,
                      [this](std::uint32_t row) { return row < rows_ || row == kNoRow; }),
          "links: out of range");
  const Buffer& halves = hold(fields[2]);
  seeds_.groups = halves.count<float>();
  seeds_.halves = halves.as<const float>();
  seeds_.centres = array<float>(fields[1], seeds_.groups * codes_->width, "centres: float32 [groups, width]");
  seeds_.starts = array<std::int64_t>(fields[3], seeds_.groups + 1, "starts: int64 [groups + 1]");
  const Buffer& rows = hold(fields[4]);
  seeds_.rows = rows.as<const std::uint32_t>();
  const std::size_t count = rows.count<std::uint32_t>();
  require(std::all_of(seeds_.rows, seeds_.rows + count, [this](std::uint32_t row) { return row < rows_; }),
          "seeds: out of range");
  require(seeds_.groups > 0 && seeds_.starts[0] == 0 && seeds_.starts[seeds_.groups] == static_cast<std::int64_t>(count) &&
              std::is_sorted(seeds_.starts, seeds_.starts + seeds_.groups + 1),
          "starts: must ascend within the seeds");
}

void DecoderCore::take_exact(nb::tuple fields) {
  require(fields.size() == 4, "exact: (rows, type, bias, norms)");
  constexpr std::size_t kElementBytes[] = {4, 2, 2};
  const auto type = nb::cast<std::size_t>(fields[1]);
  require(type < 3, "exact: float32, float16 or bfloat16");
  const std::size_t row_bytes = kElementBytes[type] * projection_.dimension;
  const auto* rows = array<std::byte>(fields[0], rows_ * row_bytes, "exact: rows [rows, d]");
  const auto* bias = array<float>(fields[2], rows_, "exact: bias float32 [rows]");
  const auto* norms = array<float>(fields[3], rows_, "exact: norms float32 [rows]");
  exact_ = ExactRows{rows, static_cast<RowType>(type), row_bytes, projection_.dimension, bias, norms};
}

// Keeps at most so many workspaces for the next calls, none larger than what calls with so many candidates need. Returns
// what these take, in bytes.
std::size_t DecoderCore::keep(std::size_t count, std::size_t limit) {
  limit = std::min(limit, rows_);
  std::size_t bytes = sizeof(Workspace) + Survivors::planned_bytes(limit) +
                      2 * limit * (sizeof(Candidate) + sizeof(Scored)) +  // they grow one by one
                      BlockScan::kQueries * (CodedQuery::planned_bytes(projection_) + Largest::planned_bytes(limit));
  if (seeds_.groups > 0) bytes += Walker::planned_bytes(rows_, seeds_, limit);
  spaces_.keep(count, bytes);
  return count * bytes;
}

Coarse DecoderCore::check_coarse(std::size_t width, std::size_t survivors, std::size_t limit, bool all_needed) const {
  if (width == 0) return {0, 0};
  require(!all_needed, "coarse: not with bounds, nor with a partition function");
  require(width % 4 == 0 && width <= blocks_->width && survivors >= limit, "coarse: a multiple of 4, within the width; survivors >= limit");
  require(codes_.has_value() && codes_->width == blocks_->width, "coarse: needs codes of the same width by row");
  return {width, std::min(survivors, rows_)};
}

// Projects and scans up to four hidden states.
void DecoderCore::scan(Workspace& space, const float* hidden, std::size_t count, std::size_t limit,
                       const Coarse& coarse, const ScanOptions& options, bool coordinates) {
  const CodedQuery* queries[BlockScan::kQueries];
  const std::size_t stride = coordinates ? blocks_->width : projection_.dimension;
  for (std::size_t q = 0; q < count; ++q) {
    CodedQuery& query = space.queries[q];
    if (coordinates)
      query.assign_coordinates(hidden + q * stride, blocks_->width);
    else
      query.assign(projection_, hidden + q * stride, blocks_->width, options.bounds || options.partition);
    queries[q] = &query;
    space.largest[q].start(std::max(limit, coarse.survivors));
    space.sums[q] = ExpSums{};
  }
  const std::size_t width = coarse.width > 0 ? coarse.width : blocks_->width;
  space.scan.run(*blocks_, width, {queries, count}, {space.largest, count}, {space.sums, count}, options);
}

// What a scan found for a query; after a coarse one, the best of its survivors by all directions.
std::vector<Candidate>& DecoderCore::candidates_of(Workspace& space, std::size_t slot, std::size_t limit,
                                                   const Coarse& coarse) {
  std::vector<Candidate>& found = space.largest[slot].finish();
  if (coarse.width > 0) space.survivors.refine(*codes_, space.queries[slot], found, limit);
  return found;
}

void DecoderCore::report(const std::vector<Scored>& scored, std::size_t k, float* values, std::int64_t* indices) const {
  for (std::size_t i = 0; i < k; ++i) {
    values[i] = i < scored.size() ? scored[i].logit : -kInfinity;
    indices[i] = i < scored.size() ? static_cast<std::int64_t>(scored[i].row) : -1;
  }
}

void DecoderCore::answer(Workspace& space, std::size_t slot, const float* hidden, const PreviewCall& call,
                         std::size_t query) {
  std::vector<Candidate>& candidates = candidates_of(space, slot, call.limit, call.coarse);
  const float cut = space.largest[slot].threshold();
  const float norm = std::sqrt(dot_floats(hidden, hidden, projection_.dimension));
  const Rounding rounding{call.rounding.per_norm * norm, call.rounding.per_logit};
  const float left = rank_candidates(*exact_, hidden, candidates, call.k, call.bounds, rounding, space.scored);
  if (call.partition != nullptr)
    close_sums({*blocks_, *exact_, rounding, rows_}, space.queries[slot], space.sums[slot], space.scored,
               {false, true, call.interval, call.inverse, call.variance}, call.partition + 3 * query);
  std::sort(space.scored.begin(), space.scored.end());
  report(space.scored, call.k, call.values + query * call.k, call.indices + query * call.k);
  if (call.proven != nullptr)
    call.proven[query] = is_proven(*exact_, rounding, space.scored, call.k, std::max(cut, left)) ? 1 : 0;
  if (call.tally != nullptr) call.tally[query] = static_cast<std::int64_t>(space.scored.size());
}

// Returns the number of the first hidden state that is not finite or too large, before it writes; -1 for none.
std::int64_t DecoderCore::preview(nb::handle hidden, std::size_t k, std::size_t limit, std::size_t coarse,
                                  std::size_t survivors, bool bounds, float per_norm, float per_logit, float inverse,
                                  float variance, nb::handle values, nb::handle indices, nb::handle proven,
                                  nb::handle partition, bool interval, nb::handle tally) {
  require(blocks_.has_value() && exact_.has_value(), "preview: needs blocks and exact rows");
  const Buffer states(hidden, Buffer::Access::read);
  require(states.axes() == 2 && states.shape(1) == projection_.dimension, "hidden: float32 [n, d]");
  const std::size_t count = states.shape(0), dimension = projection_.dimension;
  require(states.count<float>() == count * dimension && k >= 1 && limit >= k, "hidden: float32 [n, d]; 1 <= k <= limit");
  require((!bounds && partition.is_none()) || projection_.turned >= dimension, "bounds need all directions");
  const Buffer value(values, Buffer::Access::write), index(indices, Buffer::Access::write);
  const Buffer proof = Buffer::optional(proven, Buffer::Access::write);
  const Buffer parts = Buffer::optional(partition, Buffer::Access::write);
  const Buffer counts = Buffer::optional(tally, Buffer::Access::write);
  require(value.count<float>() == count * k && index.count<std::int64_t>() == count * k, "values, indices: [n, k]");
  require(proof.empty() || (proof.bytes() == count && bounds), "proven: uint8 [n], with bounds");
  require(parts.empty() || parts.count<double>() == 3 * count, "partition: float64 [n, 3]");
  require(counts.empty() || counts.count<std::int64_t>() == count, "tally: int64 [n]");
  const auto* state = states.as<const float>();
  const PreviewCall call{k, std::min(limit, rows_), check_coarse(coarse, survivors, limit, bounds || !parts.empty()),
                         bounds, {per_norm, per_logit}, inverse, variance, value.as<float>(),
                         index.as<std::int64_t>(), proof.empty() ? nullptr : proof.as<std::uint8_t>(),
                         parts.empty() ? nullptr : parts.as<double>(), interval,
                         counts.empty() ? nullptr : counts.as<std::int64_t>()};
  nb::gil_scoped_release released;
  for (std::size_t q = 0; q < count; ++q)
    if (!are_within(state + q * dimension, dimension, kLargestState)) return static_cast<std::int64_t>(q);
  Workspaces::Lease space(spaces_);
  for (std::size_t first = 0; first < count; first += BlockScan::kQueries) {
    const std::size_t some = std::min(BlockScan::kQueries, count - first);
    scan(*space, state + first * dimension, some, call.limit, call.coarse,
         {bounds, call.partition != nullptr, interval, inverse, variance}, false);
    for (std::size_t q = 0; q < some; ++q) answer(*space, q, state + (first + q) * dimension, call, first + q);
  }
  return -1;
}

// The candidates alone, by descending key, -1 where there are fewer; sums [n, 4]: of exp, and what they are relative to.
std::int64_t DecoderCore::candidates(nb::handle hidden, bool coordinates, std::size_t limit, std::size_t coarse,
                                     std::size_t survivors, bool bounds, nb::handle rows, nb::handle keys,
                                     nb::handle left, nb::handle sums, float inverse, float variance) {
  require(blocks_.has_value(), "candidates: needs blocks");
  const Buffer states(hidden, Buffer::Access::read);
  const std::size_t width = coordinates ? blocks_->width : projection_.dimension;
  require(states.axes() == 2 && states.shape(1) == width, "hidden: float32 [n, d]");
  const std::size_t count = states.shape(0);
  const Buffer row(rows, Buffer::Access::write), key(keys, Buffer::Access::write), cut(left, Buffer::Access::write);
  const Buffer sum = Buffer::optional(sums, Buffer::Access::write);
  require(states.count<float>() == count * width && limit >= 1 && row.count<std::int64_t>() == count * limit &&
              key.count<float>() == 2 * count * limit && cut.count<float>() == count,
          "candidates: array shapes do not fit together");
  require(sum.empty() || sum.count<double>() == 4 * count, "sums: float64 [n, 4]");
  require((!bounds && sum.empty()) || projection_.turned >= projection_.dimension, "bounds need all directions");
  const Coarse leading = check_coarse(coarse, survivors, limit, bounds || !sum.empty());
  const auto* state = states.as<const float>();
  auto* out_rows = row.as<std::int64_t>();
  auto* out_keys = key.as<float>();
  nb::gil_scoped_release released;
  for (std::size_t q = 0; q < count; ++q)
    if (!are_within(state + q * width, width, coordinates ? kLargestCoordinate : kLargestState))
      return static_cast<std::int64_t>(q);
  Workspaces::Lease lease(spaces_);
  Workspace& space = *lease;
  for (std::size_t first = 0; first < count; first += BlockScan::kQueries) {
    const std::size_t some = std::min(BlockScan::kQueries, count - first);
    scan(space, state + first * width, some, std::min(limit, rows_), leading,
         {bounds, !sum.empty(), !sum.empty(), inverse, variance}, coordinates);
    for (std::size_t q = 0; q < some; ++q) {
      std::vector<Candidate>& found = candidates_of(space, q, std::min(limit, rows_), leading);
      std::sort(found.begin(), found.end(), [](const auto& a, const auto& b) { return b < a; });
      const std::size_t at = first + q;
      for (std::size_t i = 0; i < limit; ++i) {
        out_rows[at * limit + i] = i < found.size() ? static_cast<std::int64_t>(found[i].row) : -1;
        out_keys[(at * limit + i) * 2] = i < found.size() ? found[i].key : -kInfinity;
        out_keys[(at * limit + i) * 2 + 1] = i < found.size() ? found[i].estimate : -kInfinity;
      }
      cut.as<float>()[at] = space.largest[q].threshold();
      if (!sum.empty()) {
        std::copy_n(space.sums[q].sums.begin(), 3, sum.as<double>() + 4 * at);
        sum.as<double>()[4 * at + 3] = space.sums[q].reference;
      }
    }
  }
  return -1;
}

// With exact rows fills values and indices of the k largest; without, of the k best by estimate. Hidden states beyond the
// radius are walked for with another effort; beyond its own radius, too, they are left without an answer.
std::int64_t DecoderCore::walk(nb::handle hidden, Three near, float radius, Three far, float far_radius, std::size_t k,
                               nb::handle values, nb::handle indices, nb::handle distances, nb::handle tally) {
  require(codes_.has_value() && seeds_.groups > 0, "walk: needs codes and seeds");
  const Buffer states(hidden, Buffer::Access::read);
  require(states.axes() == 2 && states.shape(1) == projection_.dimension, "hidden: float32 [n, d]");
  const std::size_t count = states.shape(0), dimension = projection_.dimension;
  const Buffer value(values, Buffer::Access::write), index(indices, Buffer::Access::write);
  const Buffer away = Buffer::optional(distances, Buffer::Access::write);
  const Buffer counts = Buffer::optional(tally, Buffer::Access::write);
  const auto effort_of = [](const Three& three) {
    return Effort{std::get<0>(three), std::get<1>(three), std::get<2>(three)};
  };
  const Effort close = effort_of(near), distant = effort_of(far);
  require(states.count<float>() == count * dimension && value.count<float>() == count * k &&
              index.count<std::int64_t>() == count * k,
          "values, indices: [n, k]");
  require(k >= 1 && std::max(close.limit, distant.limit) >= k && close.probes >= 1, "walk: 1 <= k <= limit; probes");
  require(away.empty() || away.count<float>() == count, "distances: float32 [n]");
  require(counts.empty() || counts.count<std::int64_t>() == count, "tally: int64 [n]");
  const auto* state = states.as<const float>();
  nb::gil_scoped_release released;
  for (std::size_t q = 0; q < count; ++q)
    if (!are_within(state + q * dimension, dimension, kLargestState)) return static_cast<std::int64_t>(q);
  Workspaces::Lease lease(spaces_);
  Workspace& space = *lease;
  for (std::size_t q = 0; q < count; ++q) {
    CodedQuery& query = space.queries[0];
    const float* one = state + q * dimension;
    query.assign(projection_, one, codes_->width, false);
    const float apart = space.walker.approach(seeds_, query, codes_->width);
    std::size_t looked = 0;
    space.candidates.clear();
    if (apart <= radius)
      looked = space.walker.run(*codes_, graph_, seeds_, query, close, space.candidates);
    else if (apart <= far_radius)
      looked = space.walker.run(*codes_, graph_, seeds_, query, distant, space.candidates);
    if (exact_.has_value()) {
      rank_candidates(*exact_, one, space.candidates, k, false, {}, space.scored);
    } else {
      space.scored.clear();
      for (const auto& found : space.candidates) space.scored.push_back({found.estimate, found.estimate, found.row});
    }
    std::sort(space.scored.begin(), space.scored.end());
    report(space.scored, k, value.as<float>() + q * k, index.as<std::int64_t>() + q * k);
    if (!away.empty()) away.as<float>()[q] = apart;
    if (!counts.empty()) counts.as<std::int64_t>()[q] = static_cast<std::int64_t>(looked);
  }
  return -1;
}

}  // namespace
}  // namespace memhier

void register_decoder(nb::module_& m) {
  using memhier::DecoderCore;
  nb::class_<DecoderCore>(m, "DecoderCore")
      .def(nb::init<nb::tuple, nb::object, nb::object, nb::object, nb::object>(), nb::arg("projection"),
           nb::arg("blocks").none(), nb::arg("codes").none(), nb::arg("graph").none(), nb::arg("exact").none())
      .def("preview", &DecoderCore::preview, nb::arg("hidden"), nb::arg("k"), nb::arg("limit"), nb::arg("coarse"),
           nb::arg("survivors"), nb::arg("bounds"), nb::arg("per_norm"), nb::arg("per_logit"), nb::arg("inverse"), nb::arg("variance"), nb::arg("values"), nb::arg("indices"),
           nb::arg("proven").none(), nb::arg("partition").none(), nb::arg("interval"),
           nb::arg("tally").none())
      .def("candidates", &DecoderCore::candidates, nb::arg("hidden"), nb::arg("coordinates"), nb::arg("limit"),
           nb::arg("coarse"), nb::arg("survivors"), nb::arg("bounds"), nb::arg("rows"), nb::arg("keys"), nb::arg("left"), nb::arg("sums").none(),
           nb::arg("inverse"), nb::arg("variance"))
      .def("walk", &DecoderCore::walk, nb::arg("hidden"), nb::arg("near"), nb::arg("radius"), nb::arg("far"),
           nb::arg("far_radius"), nb::arg("k"), nb::arg("values"), nb::arg("indices"), nb::arg("distances").none(), nb::arg("tally").none())
      .def("keep", &DecoderCore::keep, nb::arg("calls"), nb::arg("candidates"))
      .def_prop_ro("workspace_bytes", &DecoderCore::workspace_bytes);
}
