// Scan of bit-packed residual codes in inverted lists, with a bound on every distance (RaBitQ: Gao, Long 2024; several
// bits a dimension: Gao et al. 2025; more bits where the variance is: as in SAQ, 2025).
//
// A vector x in the list of centroid c is kept as fields u and three numbers, in units of the usual |x - c|: r = |x - c|,
// a factor f and an error e, both by what they are of r, so that <x - c, y> is about f * <a (u - half), y> for every y, wrong by some e |y|. From
// these come an estimate of |x - q|^2 and, `eps` errors below and above, its bounds. Only what may be among the k nearest
// by its lower bound is handed on: at most the k-th smallest upper bound. For inner products the same is done with
// -2 <q, x> = -2 <q, c> - 2 <q, x - c>: no norm of a vector counts, so that norms may vary as they will.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <stdexcept>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include "scan/code_dot.hpp"
#include "scan/code_estimate.hpp"
#include "bind/module.hpp"
#include "bind/simd.hpp"

namespace nb = nanobind;

namespace memhier {
namespace {

constexpr std::size_t kLine = 64;    // bytes of the processor's caches
constexpr std::int64_t kAhead = 512;  // rows of a list at most that are asked for before it is scanned
constexpr std::size_t kAskedLines = 96;  // in the time that a block of rows is scanned
constexpr std::int64_t kRowsOfGroup = CodeFormat::kBlockRows;
constexpr int kPartShift = 40;       // a position is the number of its part, then 40 bits of row
// A query nearer to the centroid than this share of a vector's radius has bounds as if it were as far: what half
// precision loses of the radius counts whole, not by the query's distance, at the widest bounds of all (8 errors).
constexpr float kNearest = 0.125F;

// What a query of inner products has in place of its distances to centroids.
struct Spread {
  float wrong;  // a standard error, of those it would have were its axes weighted as those of residuals are
  float along;  // of a residual's length, what lies along the query as a rule
};

// Spreads of a list's residuals beyond its centroid that its best vector is taken to lie: REACH of the plain twin.
constexpr float kBest = 2.0F;

struct Candidate {
  float lower;
  float estimate;
  std::int64_t position;
  bool operator<(const Candidate& other) const {
    return lower < other.lower || (lower == other.lower && position < other.position);
  }
};

// The k-th smallest of the values seen.
class KthSmallest {
 public:
  explicit KthSmallest(std::size_t k) : k_(k) { values_.reserve(k); }
  void clear() { values_.clear(); }
  float value() const { return values_.size() < k_ ? kInfinity : values_.front(); }
  void offer(float value) {
    if (values_.size() < k_) {
      values_.push_back(value);
      std::push_heap(values_.begin(), values_.end());
    } else if (value < values_.front()) {
      std::pop_heap(values_.begin(), values_.end());
      values_.back() = value;
      std::push_heap(values_.begin(), values_.end());
    }
  }

 private:
  std::size_t k_;
  std::vector<float> values_;
};

// Which lists are looked at: those up to the first, after `least` of them, that lies `gap` k-th distances beyond the nearest. So a query to which many lists are
// nearly equally near looks at all of these. For inner products, where distances have no zero: up to the first of which
// the best vector as a rule lies `gap` spreads beyond the k-th.
struct Reach {
  std::int64_t least;
  float gap;
};

// What may still be among the nearest. Holds at most twice `limit` candidates.
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
  float threshold() const { return std::min(upper_.value(), cut_); }
  void offer(const Candidate& candidate, float upper) {
    upper_.offer(upper);
    if (items_.size() == 2 * limit_) shrink();
    items_.push_back(candidate);
  }
  // Leaves the admitted in order, and returns the threshold.
  float finish() {
    shrink();
    std::sort(items_.begin(), items_.end());
    const float most = std::min(upper_.value(), most_);
    truncated_ = truncated_ && cut_ <= most;  // what was dropped and lies beyond would not have been admitted
    return most;
  }
  const std::vector<Candidate>& items() const { return items_; }
  bool truncated() const { return truncated_; }

 private:
  void shrink() {
    const float most = upper_.value();
    std::erase_if(items_, [most](const Candidate& item) { return item.lower > most; });
    if (items_.size() <= limit_) return;
    std::nth_element(items_.begin(), items_.begin() + static_cast<std::ptrdiff_t>(limit_), items_.end());
    cut_ = items_[limit_].lower;
    truncated_ = true;
    items_.resize(limit_);
  }

  KthSmallest upper_;
  std::size_t limit_;
  float most_ = kInfinity, cut_ = kInfinity;
  bool truncated_ = false;
  std::vector<Candidate> items_;
};

// Rows that were written together: their codes in list order.
struct Part {
  const std::int64_t* starts;  // [lists + 1]
  const std::uint8_t* codes;   // [rows, bytes]
  const std::uint16_t* radius;  // fp16 [rows], in units
  const std::uint16_t* ratios;  // [rows]: of factor and error to it
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
  void clear() { ranges_.clear(); next_ = 0; }
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
  struct Range { const char *at, *end; };
  std::vector<Range> ranges_;
  std::size_t next_ = 0;
};

class Scanner {
 public:
  Scanner(const CodeFormat& format, std::size_t dimension, const float* alpha, std::vector<Part> parts, float unit,
          RatioScale factor, RatioScale error, std::size_t k, float eps, std::size_t limit, Instructions most)
      : code_bytes_(format.bytes()), dimension_(dimension), alpha_(dimension), parts_(std::move(parts)),
        unit_(unit), factor_(factor), error_(error), margin_(2 * eps * unit), use_(instructions(most)), query_(format, most),
        residual_(dimension), nearest_(k), admitted_(k, limit) {
    std::copy_n(alpha, format.coded_dimensions(), alpha_.begin());  // axes without bits count for the distance alone
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
  void scan(const std::uint16_t* centroid, std::int64_t list, float radius, const Reach& reach) {
    const auto holds = [list](const Part& part) { return part.first_wanted(list) < part.starts[list + 1]; };
    if (std::none_of(parts_.begin(), parts_.end(), holds)) return;
    Terms terms{};
    if (!(inner_ == nullptr ? near_enough(centroid, reach, terms) : large_enough(centroid, radius, reach, terms))) return;
    ++probed;
    terms.scale = query_.scale();
    terms.offset = query_.offset();
    terms.unit = unit_;
    terms.factor = factor_;
    terms.error = error_;
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

  // Notes what scanning a list will read, to ask for it bit by bit while one before it is scanned: lists are short, and a
  // processor that guesses what is read next has seen too little of each; asked for at once, it is more than the processor
  // can wait for and go on.
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

  // Asks for what of it was not yet asked for.
  void prefetch_rest() { ahead_.ask(SIZE_MAX); }

  // Whether no further list is to be looked at.
  bool closed() const { return closed_; }

  Admitted& admitted() { return admitted_; }

  std::int64_t probed = 0, scanned = 0;

 private:
  // Fills the terms of a list by distances, unless it ends the search: then false.
  bool near_enough(const std::uint16_t* centroid, const Reach& reach, Terms& terms) {
    const Residual residual = subtract_centroid(wanted_, centroid, alpha_.data(), dimension_, residual_.data(), use_);
    const float kth = std::min(nearest_.value(), most_);
    if (probed == 0) first_ = residual.squared;
    if (ends_at(residual.squared - first_, std::fabs(kth), kth, reach)) return false;
    query_.assign(residual_.data(), residual.largest);
    terms.squared = terms.terms = residual.squared;
    terms.squares = 1;
    terms.distance = residual.distance * margin_;
    terms.nearest = kNearest * margin_;
    return true;
  }

  // The same by inner products with a query of length 1.
  bool large_enough(const std::uint16_t* centroid, float radius, const Reach& reach, Terms& terms) {
    const float squared = -2 * centroid_product(wanted_, centroid, dimension_, use_);
    const float kth = std::min(nearest_.value(), most_);
    widest_ = std::max(widest_, radius);
    const float away = squared - kBest * 2 * inner_->along * radius;
    if (ends_at(away - kth, 2 * inner_->along * widest_, kth, reach)) return false;
    terms.squared = squared;
    terms.terms = std::fabs(squared);
    terms.lengths = 2;
    terms.distance = std::max(inner_->wrong, kNearest) * margin_;
    return true;
  }

  // Whether no list is looked at from this on, which lies so far beyond what the query wants.
  bool ends_at(float beyond, float unit, float kth, const Reach& reach) {
    closed_ = probed >= reach.least && kth < kInfinity && beyond >= reach.gap * unit;
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

  const std::size_t code_bytes_, dimension_;
  std::vector<float> alpha_;
  const std::vector<Part> parts_;
  const float unit_;
  const RatioScale factor_, error_;
  const float margin_;
  const Instructions use_;
  float most_ = kInfinity;
  float first_ = 0;   // squared distance of the first list
  float widest_ = 0;  // greatest radius so far
  bool closed_ = false;
  const float* wanted_ = nullptr;
  const Spread* inner_ = nullptr;
  ByteQuery query_;
  std::vector<float> residual_;
  KthSmallest nearest_;
  Admitted admitted_;
  Block block_{};
  Ahead ahead_;
};

template <class T, int axes>
using Array = nb::ndarray<T, nb::ndim<axes>, nb::c_contig, nb::device::cpu>;

void require(bool holds, const char* what) {
  if (!holds) throw std::invalid_argument(what);
}

Part take_part(nb::handle item, std::size_t lists, std::size_t code_bytes) {
  const auto fields = nb::cast<nb::tuple>(item);
  require(fields.size() == 4, "code_scan: a part is (starts, codes, numbers, allowed)");
  const auto starts = nb::cast<Array<const std::int64_t, 1>>(fields[0]);
  const auto codes = nb::cast<Array<const std::uint8_t, 2>>(fields[1]);
  const auto numbers = nb::cast<Array<const std::uint16_t, 2>>(fields[2]);
  const std::size_t rows = codes.shape(0);
  require(starts.shape(0) == lists + 1 && codes.shape(1) == code_bytes && numbers.shape(0) == 2 &&
              numbers.shape(1) == rows && rows <= UINT32_MAX,
          "code_scan: the arrays of a part do not fit together");
  const std::int64_t* start = starts.data();
  for (std::size_t list = 0; list < lists; ++list)
    require(start[list] >= 0 && start[list] <= start[list + 1] && start[list + 1] <= static_cast<std::int64_t>(rows),
            "code_scan: list starts must ascend within the codes");
  Part part{start, codes.data(), numbers.data(), numbers.data() + rows, nullptr, static_cast<std::int64_t>(rows)};
  if (!fields[3].is_none()) {
    const auto allowed = nb::cast<Array<const std::uint64_t, 1>>(fields[3]);
    require(allowed.shape(0) >= (rows + 63) / 64, "code_scan: allowed needs a bit for each row");
    part.allowed = allowed.data();
  }
  return part;
}

// queries [q, d]; probes [q, p] list numbers, nearest first, -1 for none; centroids fp16 [lists, d]; radii [lists];
// dimensions: how many of the first d have 8, 4, 2 and 1 bits; alpha [coded]; parts: tuples of starts [lists + 1],
// codes [n, bytes], numbers uint16 [2, n] and allowed uint64 or None; ratios: least and step of factors, then of errors; most [q]: the largest distance wanted;
// inner: None, or for inner products [q, 2], a Spread of each query. Fills
// positions, lower bounds and estimates [q, limit] in ascending order of the bound, their counts [q], thresholds [q],
// and [q, 4]: lists probed, codes scanned, whether candidates were dropped for lack of room, whether the probes ended before
// one was `gap` k-th distances beyond the first, after at least `least` lists. `instructions` is for tests: 0 uses what any
// processor has, 1 no more than AVX2, 2 all that there is.
void code_scan(Array<const float, 2> queries, Array<const std::int64_t, 2> probes,
               Array<const std::uint16_t, 2> centroids, Array<const float, 1> radii,
               Array<const std::int64_t, 1> dimensions, Array<const float, 1> alpha, nb::list parts, float unit,
               Array<const std::int32_t, 1> ratios,
               std::size_t k, float eps, std::int64_t least, float gap, Array<const float, 1> most,
               nb::object inner, Array<std::int64_t, 2> positions,
               Array<float, 2> lower, Array<float, 2> estimates, Array<std::int64_t, 1> counts, Array<float, 1> thresholds,
               Array<std::int64_t, 2> tally, int instructions) {
  const std::size_t count = queries.shape(0), dimension = queries.shape(1), lists = centroids.shape(0);
  const std::size_t limit = positions.shape(1), probe_count = probes.shape(1);
  require(dimensions.shape(0) == 4 && ratios.shape(0) == 4, "code_scan: four counts of dimensions, two scales");
  const RatioScale factor{ratios.data()[0], ratios.data()[1]}, error{ratios.data()[2], ratios.data()[3]};
  CodeFormat format{};
  for (std::size_t group = 0; group < 4; ++group) {
    require(dimensions.data()[group] >= 0, "code_scan: counts of dimensions are not negative");
    format.dimensions[group] = static_cast<std::size_t>(dimensions.data()[group]);
  }
  require(format.coded_dimensions() <= dimension && format.coded_dimensions() == alpha.shape(0) &&
              centroids.shape(1) == dimension && radii.shape(0) == lists && probes.shape(0) == count &&
              most.shape(0) == count && positions.shape(0) == count && lower.shape(0) == count && lower.shape(1) == limit &&
              estimates.shape(0) == count && estimates.shape(1) == limit && counts.shape(0) == count &&
              thresholds.shape(0) == count && tally.shape(0) == count && tally.shape(1) == 4,
          "code_scan: array shapes do not fit together");
  std::vector<Spread> spreads;
  if (!inner.is_none()) {
    const auto of_queries = nb::cast<Array<const float, 2>>(inner);
    require(of_queries.shape(0) == count && of_queries.shape(1) == 2, "code_scan: inner has two numbers of each query");
    for (std::size_t q = 0; q < count; ++q) spreads.push_back({of_queries(q, 0), of_queries(q, 1)});
  }
  require(instructions >= 0 && instructions <= 2, "code_scan: instructions is 0, 1 or 2");
  require(k >= 1 && limit >= k, "code_scan: k must be at least 1 and at most limit");
  std::vector<Part> taken;
  for (nb::handle item : parts) taken.push_back(take_part(item, lists, format.bytes()));
  for (std::size_t i = 0; i < count * probe_count; ++i)
    require(probes.data()[i] >= -1 && probes.data()[i] < static_cast<std::int64_t>(lists),
            "code_scan: list number out of range");

  nb::gil_scoped_release released;
  Scanner scanner(format, dimension, alpha.data(), std::move(taken), unit, factor, error, k, eps, limit,
                  static_cast<Instructions>(instructions));
  const Reach reach{least, gap};
  for (std::size_t q = 0; q < count; ++q) {
    scanner.start(queries.data() + q * dimension, most.data()[q], spreads.empty() ? nullptr : &spreads[q]);
    for (std::size_t p = 0; p < probe_count && !scanner.closed(); ++p) {
      const std::int64_t list = probes.data()[q * probe_count + p];
      if (list < 0) continue;
      const std::int64_t next = p + 2 < probe_count ? probes.data()[q * probe_count + p + 2] : -1;
      if (next >= 0) scanner.prefetch(centroids.data() + static_cast<std::size_t>(next) * dimension, next);
      scanner.scan(centroids.data() + static_cast<std::size_t>(list) * dimension, list, radii.data()[list], reach);
      scanner.prefetch_rest();
    }
    thresholds.data()[q] = scanner.admitted().finish();
    const std::vector<Candidate>& items = scanner.admitted().items();
    for (std::size_t i = 0; i < items.size(); ++i) {
      positions.data()[q * limit + i] = items[i].position;
      lower.data()[q * limit + i] = items[i].lower;
      estimates.data()[q * limit + i] = items[i].estimate;
    }
    counts.data()[q] = static_cast<std::int64_t>(items.size());
    tally.data()[q * 4] = scanner.probed;
    tally.data()[q * 4 + 1] = scanner.scanned;
    tally.data()[q * 4 + 2] = scanner.admitted().truncated() ? 1 : 0;
    tally.data()[q * 4 + 3] = scanner.closed() ? 0 : 1;
  }
}

}  // namespace
}  // namespace memhier

void register_code_scan(nb::module_& m) {
  m.def("code_scan", &memhier::code_scan, nb::arg("queries"), nb::arg("probes"), nb::arg("centroids"),
        nb::arg("radii"), nb::arg("dimensions"), nb::arg("alpha"), nb::arg("parts"), nb::arg("unit"), nb::arg("ratios"), nb::arg("k"), nb::arg("eps"),
        nb::arg("least"), nb::arg("gap"), nb::arg("most"), nb::arg("inner").none(), nb::arg("positions"), nb::arg("lower"), nb::arg("estimates"), nb::arg("counts"),
        nb::arg("thresholds"), nb::arg("tally"), nb::arg("instructions") = static_cast<int>(memhier::Instructions::kAvx512));
}
