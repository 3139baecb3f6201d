// Scan of bit-packed residual codes in inverted lists, with a bound on every distance (RaBitQ: Gao, Long 2024; several
// bits a dimension: Gao et al. 2025; more bits where the variance is: as in SAQ, 2025).
//
// A vector x in the list of centroid c is kept as fields u and three numbers, in units of the usual |x - c|: r = |x -
// c|, a factor f and an error e, both as ratios to r, so that <x - c, y> is about f * <a (u - half), y> for
// every y, wrong by some e |y|. From these come an estimate of |x - q|^2 and, `eps` errors below and above, its bounds.
// Only rows whose lower bound is at most the k-th smallest upper bound are handed on. For
// inner products the same is done with -2 <q, x> = -2 <q, c> - 2 <q, x - c>: no norm of a vector counts, so that norms
// may vary as they will.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include "bind/array.hpp"
#include "bind/module.hpp"
#include "rank/top_k.hpp"
#include "scan/code_dot.hpp"
#include "scan/code_estimate.hpp"

namespace nb = nanobind;

namespace memhier {
namespace {

constexpr std::size_t kLine = 64;        // bytes of the processor's caches
constexpr std::int64_t kAhead = 512;     // rows of a list at most that are asked for before it is scanned
constexpr std::size_t kAskedLines = 96;  // in the time that a block of rows is scanned
constexpr std::int64_t kRowsOfGroup = CodeFormat::kBlockRows;
constexpr int kPartShift = 40;  // a position is the number of its part, then 40 bits of row
// A query nearer to the centroid than this share of a vector's radius has bounds as if it were as far: what half
// precision loses of the radius counts whole, not by the query's distance, at the widest bounds of all (8 errors).
constexpr float kNearest = 0.125F;

// The numbers of a query of inner products that stand for its distances to centroids.
struct Spread {
  float wrong;  // a standard error, of those it would have were its axes weighted as those of residuals are
  float along;  // the usual share of a residual's length along the query
};

// Spreads of a list's residuals beyond its centroid that its best vector is taken to lie: REACH of the plain twin.
constexpr float kBest = 2.0F;

// Of a query, the k-th smallest value seen.
using Smallest = TopK<float>;
float kth_of(const Smallest& smallest) { return smallest.is_full() ? smallest.last() : kInfinity; }

using Found = Candidate<std::int64_t>;  // key: the lower bound; row: the position

// The candidates that may still be among the nearest, at most twice `limit` of them.
class Admitted {
 public:
  Admitted(std::size_t k, std::size_t limit) : upper_(k), limit_(limit) { items_.reserve(2 * limit); }

  // Nothing beyond `most` is wanted.
  void clear(float most) {
    upper_.clear();
    items_.clear();
    most_ = cut_ = most;
    truncated_ = false;
  }
  float threshold() const { return std::min(kth_of(upper_), cut_); }
  void offer(const Found& candidate, float upper) {
    upper_.offer(upper);
    if (items_.size() == 2 * limit_) shrink();
    items_.push_back(candidate);
  }
  // Leaves the admitted in order, and returns the threshold.
  float finish() {
    shrink();
    std::sort(items_.begin(), items_.end(), Nearer{});
    const float most = std::min(kth_of(upper_), most_);
    truncated_ = truncated_ && cut_ <= most;  // those dropped beyond it would not have been admitted
    return most;
  }
  const std::vector<Found>& items() const { return items_; }
  bool truncated() const { return truncated_; }

 private:
  void shrink() {
    const float most = kth_of(upper_);
    std::erase_if(items_, [most](const Found& item) { return item.key > most; });
    if (items_.size() <= limit_) return;
    cut_ = keep_first(items_, limit_, Nearer{});
    truncated_ = true;
  }

  Smallest upper_;
  std::size_t limit_;
  float most_ = kInfinity, cut_ = kInfinity;
  bool truncated_ = false;
  std::vector<Found> items_;
};

// Rows that were written together: their codes in list order.
struct Part {
  const std::int64_t* starts;    // [lists + 1]
  const std::uint8_t* codes;     // [rows, bytes]
  const std::uint16_t* radius;   // fp16 [rows], in units
  const std::uint16_t* ratios;   // [rows]: of factor and error to it
  const std::uint64_t* allowed;  // a bit for each row, or null for all
  std::int64_t rows;

  // Which of the 16 rows from `first` on lie in a list and may be found: a bit for each.
  std::uint32_t wanted(std::int64_t first, std::int64_t list) const {
    const std::int64_t low = std::max(starts[list] - first, std::int64_t{0}), high = starts[list + 1] - first;
    std::uint32_t bits = 0xffffu << low & 0xffffu >> std::max(kRowsOfGroup - high, std::int64_t{0});
    if (allowed != nullptr) bits &= static_cast<std::uint32_t>(allowed[first >> 6] >> (first & 63));
    return bits;
  }

  // The first of the groups of 16 rows from `first` on in which any row of a list may be found.
  std::int64_t next_wanted(std::int64_t first, std::int64_t list) const {
    while (allowed != nullptr && first < starts[list + 1] && wanted(first, list) == 0) first += kRowsOfGroup;
    return first;
  }
  std::int64_t first_wanted(std::int64_t list) const {
    if (starts[list] == starts[list + 1]) return starts[list];
    return next_wanted(starts[list] / kRowsOfGroup * kRowsOfGroup, list);
  }
};

// Memory that will be read soon.
class Ahead {
 public:
  void clear() {
    ranges_.clear();
    next_ = 0;
  }
  void add(const void* start, std::size_t bytes) {
    const auto* first = static_cast<const char*>(start);
    if (bytes > 0) ranges_.push_back({first, first + bytes});
  }
  // Asks for the next so many lines.
  void ask(std::size_t lines) {
    for (; next_ < ranges_.size(); ++next_) {
      const char *at = ranges_[next_].at, *end = ranges_[next_].end;
      for (; at < end && lines > 0; at += kLine, --lines) __builtin_prefetch(at);
      ranges_[next_].at = at;
      if (at < end) return;
    }
  }

 private:
  struct Range {
    const char *at, *end;
  };
  std::vector<Range> ranges_;
  std::size_t next_ = 0;
};

// How the codes of all parts were made.
struct CodeBook {
  CodeFormat format{};
  Array<const float, 1> alpha;  // [coded dimensions]
  float unit;
  RatioScale factor, error;

  // dimensions: how many of the first axes have 8, 4, 2 and 1 bits; ratios: least and step of factors, then of errors.
  CodeBook(const Array<const std::int64_t, 1>& dimensions, Array<const float, 1> alpha_, float unit_,
           const Array<const std::int32_t, 1>& ratios)
      : alpha(std::move(alpha_)), unit(unit_) {
    require(dimensions.shape(0) == 4 && ratios.shape(0) == 4, "code_scan: four counts of dimensions, two scales");
    for (std::size_t group = 0; group < 4; ++group) {
      require(dimensions[group] >= 0, "code_scan: counts of dimensions are not negative");
      format.dimensions[group] = static_cast<std::size_t>(dimensions[group]);
    }
    require(format.coded_dimensions() == alpha.shape(0), "code_scan: alpha has a number for each coded dimension");
    factor = {ratios[0], ratios[1]};
    error = {ratios[2], ratios[3]};
  }
};

// The limits of one call: neighbours, and errors between an estimate and its bounds.
//
// The lists that a query looks at: after the first `least`, those up to the first that lies `gap` k-th distances beyond
// the nearest and is `clear` times as far as the k-th row, so that a query to which many lists are nearly equally near
// looks at all of these. For inner products,
// where distances have no zero: those up to the first whose best vector, as a rule, lies `gap` spreads beyond the k-th.
struct ScanLimits {
  std::size_t k;
  float eps;
  std::int64_t least;
  float gap, clear;
};

class Scanner {
 public:
  Scanner(const CodeBook& book, std::size_t dimension, std::vector<Part> parts, const ScanLimits& limits,
          std::size_t most_kept, Instructions most)
      : book_(book), code_bytes_(book.format.bytes()), dimension_(dimension), alpha_(dimension),
        parts_(std::move(parts)), margin_(2 * limits.eps * book.unit), limits_(limits), use_(instructions(most)),
        query_(book.format, most), residual_(dimension), nearest_(limits.k), admitted_(limits.k, most_kept) {
    std::copy_n(book.alpha.data(), book.alpha.size(),
                alpha_.begin());  // axes without bits count for the distance alone
  }

  // Begins with a query; `inner` where inner products are looked for.
  void start(const float* query, float most, const Spread* inner) {
    nearest_.clear();
    admitted_.clear(most);
    most_ = most;
    probed = scanned = 0;
    closed_ = false;
    widest_ = 0;
    wanted_ = query;
    inner_ = inner;
    if (inner == nullptr) return;
    float largest = 0;  // no centroid is taken off: the query's bytes serve all lists
    for (std::size_t t = 0; t < dimension_; ++t) {
      residual_[t] = query[t] * alpha_[t];
      largest = std::max(largest, std::fabs(residual_[t]));
    }
    query_.assign(residual_.data(), largest);
  }

  // Scans a list, unless none of its rows may be found, or it ends the search.
  void scan(const std::uint16_t* centroid, std::int64_t list, float radius) {
    const auto holds = [list](const Part& part) { return part.first_wanted(list) < part.starts[list + 1]; };
    if (std::none_of(parts_.begin(), parts_.end(), holds)) return;
    Terms terms{};
    if (!(inner_ == nullptr ? near_enough(centroid, terms) : large_enough(centroid, radius, terms))) return;
    ++probed;
    terms.scale = query_.scale();
    terms.offset = query_.offset();
    terms.unit = book_.unit;
    terms.factor = book_.factor;
    terms.error = book_.error;
    for (std::size_t p = 0; p < parts_.size(); ++p) {
      const Part& part = parts_[p];
      const auto rows = static_cast<std::size_t>(part.rows);
      for (std::int64_t at = part.first_wanted(list); choose(part, at, list);) {
        query_.dot(part.codes, rows, block_.groups, block_.count, block_.sums);
        estimate_block(block_, {part.radius, part.ratios, rows}, terms, admitted_.threshold(), use_);
        ahead_.ask(kAskedLines);
        offer(static_cast<std::int64_t>(p) << kPartShift);
      }
    }
  }

  // Notes what scanning a list will read, to ask for it bit by bit while one before it is scanned: lists are short, and
  // a processor that guesses what is read next has seen too little of each; asked for at once, it is more than the
  // processor can wait for and go on.
  void prefetch(const std::uint16_t* centroid, std::int64_t list) {
    ahead_.clear();
    ahead_.add(centroid, dimension_ * sizeof(std::uint16_t));
    for (const Part& part : parts_) {
      const std::int64_t stop = std::min(part.starts[list + 1], part.starts[list] + kAhead);
      std::int64_t at = part.first_wanted(list);
      while (at < stop) {
        const std::int64_t first = at;
        do at += kRowsOfGroup;
        while (at < stop && (part.allowed == nullptr || part.wanted(at, list) != 0));
        ask_for(part, first, std::min(at, stop));
        at = part.next_wanted(at, list);
      }
    }
  }

  // Asks for the rest of it.
  void prefetch_rest() { ahead_.ask(SIZE_MAX); }

  // Whether no further list is to be looked at.
  bool closed() const { return closed_; }

  Admitted& admitted() { return admitted_; }

  std::int64_t probed = 0, scanned = 0;

 private:
  // Fills the terms of a list by distances, unless it ends the search: then false.
  bool near_enough(const std::uint16_t* centroid, Terms& terms) {
    const Residual residual = subtract_centroid(wanted_, centroid, alpha_.data(), dimension_, residual_.data(), use_);
    const float kth = std::min(kth_of(nearest_), most_);
    if (probed == 0) first_ = residual.squared;
    if (residual.squared >= limits_.clear * kth && ends_at(residual.squared - first_, std::fabs(kth), kth))
      return false;
    query_.assign(residual_.data(), residual.largest);
    terms.squared = terms.terms = residual.squared;
    terms.squares = 1;
    terms.distance = residual.distance * margin_;
    terms.nearest = kNearest * margin_;
    return true;
  }

  // The same by inner products with a query of length 1.
  bool large_enough(const std::uint16_t* centroid, float radius, Terms& terms) {
    const float squared = -2 * centroid_product(wanted_, centroid, dimension_, use_);
    const float kth = std::min(kth_of(nearest_), most_);
    widest_ = std::max(widest_, radius);
    const float away = squared - kBest * 2 * inner_->along * radius;
    if (ends_at(away - kth, 2 * inner_->along * widest_, kth)) return false;
    terms.squared = squared;
    terms.terms = std::fabs(squared);
    terms.lengths = 2;
    terms.distance = std::max(inner_->wrong, kNearest) * margin_;
    return true;
  }

  // Whether the scan ends at a list that lies so far beyond the rows wanted.
  bool ends_at(float beyond, float unit, float kth) {
    closed_ = probed >= limits_.least && kth < kInfinity && beyond >= limits_.gap * unit;
    return closed_;
  }

  void ask_for(const Part& part, std::int64_t first, std::int64_t stop) {
    const auto rows = static_cast<std::size_t>(stop - first);
    for (const std::uint16_t* numbers : {part.radius, part.ratios})
      ahead_.add(numbers + first, rows * sizeof(std::uint16_t));
    ahead_.add(part.codes + static_cast<std::size_t>(first) * code_bytes_, rows * code_bytes_);
  }

  // Fills the block with the groups of a list from row `at` on, and moves it past them; false where there are none.
  bool choose(const Part& part, std::int64_t& at, std::int64_t list) {
    block_.count = 0;
    const std::int64_t start = part.starts[list], stop = part.starts[list + 1];
    for (; at < stop && block_.count < kGroups; at = part.next_wanted(at + kRowsOfGroup, list)) {
      const bool whole = part.allowed == nullptr && at >= start && at + kRowsOfGroup <= stop;
      const std::uint32_t wanted = whole ? 0xffff : part.wanted(at, list);
      block_.groups[block_.count++] = {static_cast<std::uint32_t>(at), static_cast<std::uint16_t>(wanted)};
      scanned += std::popcount(wanted);
    }
    return block_.count > 0;
  }

  void offer(std::int64_t base) {
    float threshold = admitted_.threshold();
    for (std::size_t group = 0; group < block_.count; ++group) {
      for (std::uint32_t near = block_.near[group]; near != 0; near &= near - 1) {
        const auto lane = static_cast<std::size_t>(std::countr_zero(near)), i = group * kLanes + lane;
        const float estimate = block_.estimate[i], margin = block_.margin[i];
        if (!(estimate - margin <= threshold)) continue;  // which has fallen meanwhile
        nearest_.offer(estimate);
        const std::int64_t row = static_cast<std::int64_t>(block_.groups[group].first + lane);
        admitted_.offer({estimate - margin, estimate, base | row}, estimate + margin);
        threshold = admitted_.threshold();
      }
    }
  }

  const CodeBook& book_;
  const std::size_t code_bytes_, dimension_;
  std::vector<float> alpha_;
  const std::vector<Part> parts_;
  const float margin_;
  const ScanLimits& limits_;
  const Instructions use_;
  float most_ = kInfinity;
  float first_ = 0;   // squared distance of the first list
  float widest_ = 0;  // greatest radius so far
  bool closed_ = false;
  const float* wanted_ = nullptr;
  const Spread* inner_ = nullptr;
  ByteQuery query_;
  std::vector<float> residual_;
  Smallest nearest_;
  Admitted admitted_;
  Block block_{};
  Ahead ahead_;
};

// Queries and the lists to look at: [q, d]; [q, p] list numbers, nearest first, -1 for none; [q], the largest distance
// wanted; and for inner products a Spread of each query, [q, 2].
struct ScanQueries {
  Array<const float, 2> queries;
  Array<const std::int64_t, 2> probes;
  Array<const float, 1> most;
  std::optional<Array<const float, 2>> inner;

  void check() const {
    const std::size_t count = queries.shape(0);
    require(probes.shape(0) == count && most.shape(0) == count, "code_scan: array shapes do not fit together");
    require(!inner || inner->has_shape(count, 2), "code_scan: inner has two numbers of each query");
  }
};

// Centroids fp16 [lists, d] and radii [lists].
struct CodeLists {
  Array<const std::uint16_t, 2> centroids;
  Array<const float, 1> radii;
};

// Rows that were written together: starts [lists + 1], codes [n, bytes], numbers [2, n], allowed: a bit for each row.
struct CodedPart {
  Array<const std::int64_t, 1> starts;
  Array<const std::uint8_t, 2> codes;
  Array<const std::uint16_t, 2> numbers;
  std::optional<Array<const std::uint64_t, 1>> allowed;

  Part part(std::size_t lists, std::size_t code_bytes) const {
    const std::size_t rows = codes.shape(0);
    require(starts.shape(0) == lists + 1 && codes.shape(1) == code_bytes && numbers.has_shape(2, rows) &&
                rows <= UINT32_MAX,
            "code_scan: the arrays of a part do not fit together");
    for (std::size_t list = 0; list < lists; ++list)
      require(
          starts[list] >= 0 && starts[list] <= starts[list + 1] && starts[list + 1] <= static_cast<std::int64_t>(rows),
          "code_scan: list starts must ascend within the codes");
    require(!allowed || allowed->shape(0) >= (rows + 63) / 64, "code_scan: allowed needs a bit for each row");
    return {starts.data(),
            codes.data(),
            numbers.data(),
            numbers.data() + rows,
            allowed ? allowed->data() : nullptr,
            static_cast<std::int64_t>(rows)};
  }
};

// SCAN_TALLY of memhier.ann.zoom.preview.code_scan, for each query.
struct ScanTally {
  std::int64_t probed, scanned, cut_short, open;
};
static_assert(sizeof(ScanTally) == 32 && offsetof(ScanTally, scanned) == 8 && offsetof(ScanTally, cut_short) == 16 &&
              offsetof(ScanTally, open) == 24);

// The candidates of each query, [q, limit] in ascending order of the lower bound; and [q]: how many they are, the
// threshold they passed, and the work done.
struct ScanResult {
  Array<std::int64_t, 2> positions;
  Array<float, 2> lower, estimates;
  Array<std::int64_t, 1> counts;
  Array<float, 1> thresholds;
  Array<ScanTally, 1> tally;

  void check(std::size_t count) const {
    const std::size_t limit = positions.shape(1);
    require(positions.shape(0) == count && lower.has_shape(count, limit) && estimates.has_shape(count, limit) &&
                counts.shape(0) == count && thresholds.shape(0) == count && tally.shape(0) == count,
            "code_scan: the arrays of a result do not fit together");
  }

  void fill(std::size_t q, Scanner& scanner) const {
    const std::size_t limit = positions.shape(1);
    thresholds[q] = scanner.admitted().finish();
    const std::vector<Found>& items = scanner.admitted().items();
    for (std::size_t i = 0; i < items.size(); ++i) {
      positions[q * limit + i] = items[i].row;
      lower[q * limit + i] = items[i].key;
      estimates[q * limit + i] = items[i].estimate;
    }
    counts[q] = static_cast<std::int64_t>(items.size());
    tally[q] = {scanner.probed, scanner.scanned, scanner.admitted().truncated() ? 1 : 0, scanner.closed() ? 0 : 1};
  }
};

// `instructions` is for tests: 0 uses the instructions of any processor, 1 no more than AVX2, 2 all that there are.
void code_scan(const ScanQueries& of, const CodeLists& lists, const CodeBook& book,
               const std::vector<const CodedPart*>& parts, const ScanLimits& limits, const ScanResult& result,
               int instructions) {
  const std::size_t count = of.queries.shape(0), dimension = of.queries.shape(1), probe_count = of.probes.shape(1);
  const std::size_t list_count = lists.centroids.shape(0), limit = result.positions.shape(1);
  of.check();
  result.check(count);
  require(book.format.coded_dimensions() <= dimension && lists.centroids.shape(1) == dimension &&
              lists.radii.shape(0) == list_count,
          "code_scan: array shapes do not fit together");
  require(instructions >= 0 && instructions <= 2, "code_scan: instructions is 0, 1 or 2");
  require(limits.k >= 1 && limit >= limits.k, "code_scan: k must be at least 1 and at most limit");
  std::vector<Part> taken;
  for (const CodedPart* part : parts) taken.push_back(part->part(list_count, book.format.bytes()));
  for (std::size_t i = 0; i < count * probe_count; ++i)
    require(of.probes[i] >= -1 && of.probes[i] < static_cast<std::int64_t>(list_count),
            "code_scan: list number out of range");

  nb::gil_scoped_release released;
  Scanner scanner(book, dimension, std::move(taken), limits, limit, static_cast<Instructions>(instructions));
  const auto centroid_of = [&](std::int64_t list) {
    return lists.centroids.data() + static_cast<std::size_t>(list) * dimension;
  };
  for (std::size_t q = 0; q < count; ++q) {
    const Spread spread = of.inner ? Spread{(*of.inner)[2 * q], (*of.inner)[2 * q + 1]} : Spread{};
    scanner.start(of.queries.data() + q * dimension, of.most[q], of.inner ? &spread : nullptr);
    const std::int64_t* probes = of.probes.data() + q * probe_count;
    for (std::size_t p = 0; p < probe_count && !scanner.closed(); ++p) {
      if (probes[p] < 0) continue;
      const std::int64_t next = p + 2 < probe_count ? probes[p + 2] : -1;
      if (next >= 0) scanner.prefetch(centroid_of(next), next);
      scanner.scan(centroid_of(probes[p]), probes[p], lists.radii[static_cast<std::size_t>(probes[p])]);
      scanner.prefetch_rest();
    }
    result.fill(q, scanner);
  }
}

}  // namespace
}  // namespace memhier

void register_code_scan(nb::module_& m) {
  using namespace memhier;
  using namespace nb::literals;
  nb::class_<ScanQueries>(m, "ScanQueries")
      .def(nb::init<Array<const float, 2>, Array<const std::int64_t, 2>, Array<const float, 1>,
                    std::optional<Array<const float, 2>>>(),
           nb::kw_only(), "queries"_a, "probes"_a, "most"_a, "inner"_a.none());
  nb::class_<CodeLists>(m, "CodeLists")
      .def(nb::init<Array<const std::uint16_t, 2>, Array<const float, 1>>(), nb::kw_only(), "centroids"_a, "radii"_a);
  nb::class_<CodeBook>(m, "CodeBook")
      .def(nb::init<const Array<const std::int64_t, 1>&, Array<const float, 1>, float,
                    const Array<const std::int32_t, 1>&>(),
           nb::kw_only(), "dimensions"_a, "alpha"_a, "unit"_a, "ratios"_a);
  nb::class_<CodedPart>(m, "CodedPart")
      .def(nb::init<Array<const std::int64_t, 1>, Array<const std::uint8_t, 2>, Array<const std::uint16_t, 2>,
                    std::optional<Array<const std::uint64_t, 1>>>(),
           nb::kw_only(), "starts"_a, "codes"_a, "numbers"_a, "allowed"_a.none());
  nb::class_<ScanLimits>(m, "ScanLimits")
      .def(nb::init<std::size_t, float, std::int64_t, float, float>(), nb::kw_only(), "k"_a, "eps"_a, "least"_a,
           "gap"_a, "clear"_a);
  nb::class_<ScanResult>(m, "ScanResult")
      .def(nb::init<Array<std::int64_t, 2>, Array<float, 2>, Array<float, 2>, Array<std::int64_t, 1>, Array<float, 1>,
                    Array<ScanTally, 1>>(),
           nb::kw_only(), "positions"_a, "lower"_a, "estimates"_a, "counts"_a, "thresholds"_a, "tally"_a);
  m.def("code_scan", &code_scan, nb::kw_only(), "queries"_a, "lists"_a, "book"_a, "parts"_a, "limits"_a, "result"_a,
        "instructions"_a = static_cast<int>(Instructions::kAvx512));
}
