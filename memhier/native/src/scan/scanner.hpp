// Scan of bit-packed residual codes in inverted lists, with a bound on every distance (RaBitQ: Gao, Long 2024; several
// bits a dimension: Gao et al. 2025; more bits where the variance is: as in SAQ, 2025).
//
// A vector x in the list of centroid c is kept as fields u and three numbers, in units of the usual |x - c|: r = |x -
// c|, a factor f and an error e, both as ratios to r, so that <x - c, y> is about f * <a (u - half), y> for
// every y, wrong by some e |y|. From these come an estimate of |x - q|^2 and, `eps` errors below and above, its bounds.
// Only rows whose lower bound is at most the k-th smallest upper bound are handed on. For
// inner products the same is done with -2 <q, x> = -2 <q, c> - 2 <q, x - c>: no norm of a vector counts, so that norms
// may vary as they will.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <utility>
#include <vector>

#include "bind/array.hpp"
#include "rank/top_k.hpp"
#include "scan/code_dot.hpp"
#include "scan/code_estimate.hpp"

namespace memhier {

constexpr std::size_t kLine = 64;        // bytes of the processor's caches
constexpr std::int64_t kAhead = 512;     // rows of a list at most that are asked for before it is scanned
constexpr std::size_t kAskedLines = 96;  // in the time that a block of rows is scanned
constexpr std::int64_t kRowsOfGroup = CodeFormat::kBlockRows;
constexpr std::size_t kFewItems = 64;
constexpr int kPartShift = 40;  // a position is the number of its part, then 40 bits of row
constexpr std::int64_t kRowMask = (std::int64_t{1} << kPartShift) - 1;
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
constexpr std::size_t kBorders = 16;  // nearest lists whose borders count

// Of a query, the k-th smallest value seen.
using Smallest = TopK<float>;
inline float kth_of(const Smallest& smallest) { return smallest.is_full() ? smallest.last() : kInfinity; }

// A row and, where it lies beside the codes, its id.
struct Place {
  std::int64_t position, id;
  bool operator<(const Place& other) const { return position < other.position; }
};
using Found = Candidate<Place>;  // key: the lower bound

// The candidates that may still be among the nearest, at most half as many again as `limit`.
class Admitted {
 public:
  Admitted(std::size_t k, std::size_t limit) : upper_(k), limit_(limit), room_(limit + (limit + 1) / 2) {}

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
    if (items_.size() == room_) shrink();
    if (items_.size() == items_.capacity()) items_.reserve(std::min(room_, std::max(kFewItems, 2 * items_.size())));
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
  // Gives its memory back.
  void drop() { std::vector<Found>().swap(items_); }

 private:
  void shrink() {
    const float most = kth_of(upper_);
    std::erase_if(items_, [most](const Found& item) { return item.key > most; });
    if (items_.size() <= limit_) return;
    cut_ = keep_first(items_, limit_, Nearer{});
    truncated_ = true;
  }

  Smallest upper_;
  std::size_t limit_, room_;
  float most_ = kInfinity, cut_ = kInfinity;
  bool truncated_ = false;
  std::vector<Found> items_;
};

// An id of 4 or 8 bytes.
inline std::int64_t id_at(const std::byte* at, std::size_t bytes) {
  const auto load = [at](auto value) {
    std::memcpy(&value, at, sizeof value);
    return static_cast<std::int64_t>(value);
  };
  return bytes == sizeof(std::uint32_t) ? load(std::uint32_t{}) : load(std::int64_t{});
}

// Rows that were written together: the codes of all of them in list order, or those of some of their lists. Codes,
// numbers and ids of 16 rows lie together; of the next 16 they begin 16 steps after them.
struct Part {
  const std::int64_t *starts, *stops;  // [lists]: their rows
  const std::uint8_t* codes;
  const std::uint16_t* radius;  // fp16, in units
  const std::uint16_t* ratios;  // of factor and error to it
  std::size_t code_step, number_step;
  std::int64_t rows;
  const std::uint64_t* allowed;  // a bit for each row written, or null for all
  std::size_t words;             // of these
  const std::int64_t* shifts;    // [lists]: from a row here to the row written, or null for none
  const std::byte* ids;          // of `id_bytes` each, 4 or 8; or null
  std::size_t id_bytes, id_step;
  const std::int64_t* places;  // [lists]: the byte beyond all these where row 0 of a list lies, or null for none

  std::int64_t shift(std::int64_t list) const { return shifts == nullptr ? 0 : shifts[list]; }
  std::int64_t place(std::int64_t list) const { return places == nullptr ? 0 : places[list]; }
  Numbers numbers(std::int64_t list) const {
    const auto at = [this, list](const std::uint16_t* first) {
      return reinterpret_cast<const std::uint16_t*>(reinterpret_cast<const std::byte*>(first) + place(list));
    };
    return {at(radius), at(ratios), number_step, static_cast<std::size_t>(rows)};
  }
  // The id of a row of a list, -1 where it is not known.
  std::int64_t id(std::int64_t list, std::size_t row) const {
    if (ids == nullptr) return -1;
    const std::size_t lane = row % kLanes;
    return id_at(ids + place(list) + (row - lane) * id_step + lane * id_bytes, id_bytes);
  }

  // Which of the 16 rows from `first` on lie in a list and may be found: a bit for each.
  std::uint32_t wanted(std::int64_t first, std::int64_t list) const {
    const std::int64_t low = std::max(starts[list] - first, std::int64_t{0}), high = stops[list] - first;
    const std::uint32_t bits = 0xffffu << low & 0xffffu >> std::max(kRowsOfGroup - high, std::int64_t{0});
    return allowed == nullptr ? bits : bits & bits_from(first + shift(list));
  }

  // The bits of the 16 rows written from `row` on.
  std::uint32_t bits_from(std::int64_t row) const {
    const auto word = static_cast<std::size_t>(row >> 6);
    const auto within = static_cast<unsigned>(row & 63);
    std::uint64_t bits = allowed[word] >> within;
    if (within > 64 - kRowsOfGroup && word + 1 < words) bits |= allowed[word + 1] << (64 - within);
    return static_cast<std::uint32_t>(bits);
  }

  // The first of the groups of 16 rows from `first` on in which any row of a list may be found.
  std::int64_t next_wanted(std::int64_t first, std::int64_t list) const {
    while (allowed != nullptr && first < stops[list] && wanted(first, list) == 0) first += kRowsOfGroup;
    return first;
  }
  std::int64_t first_wanted(std::int64_t list) const {
    if (starts[list] == stops[list]) return starts[list];
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
// looks at all of these. With a `border` above 0, it passes over those that lie so many k-th distances beyond their
// borders. For inner products, where distances have no zero: those up to the first whose best vector, as a rule, lies
// `gap` spreads beyond the k-th.
struct ScanLimits {
  std::size_t k;
  float eps;
  std::int64_t least;
  float gap, clear, border;
};

// The lists nearest to a query, by whose borders the others are judged: centroids and squared distances.
struct NearestLists {
  std::array<const std::uint16_t*, kBorders> centroids;
  std::array<float, kBorders> squared;
  std::size_t count = 0;
  float length;  // of the query, squared
};

// The lists that a query has scanned.
struct Reach {
  std::int64_t probed = 0;
  float first = 0;   // squared distance of the first
  float widest = 0;  // greatest radius
  std::int64_t nearest = -1;
  float away = kInfinity;  // squared distance of the nearest
};

// How far the scan of a query has come.
struct Progress {
  Progress(std::size_t k, std::size_t most_kept) : nearest(k), admitted(k, most_kept) {}

  // Begins anew; nothing beyond `wanted` is wanted.
  void clear(float wanted) {
    nearest.clear();
    admitted.clear(wanted);
    most = wanted;
    reach = {};
    around.count = 0;
    scanned = 0;
    closed = false;
  }
  float kth() const { return std::min(kth_of(nearest), most); }

  Smallest nearest;
  Admitted admitted;
  Reach reach;
  NearestLists around;
  std::int64_t scanned = 0;  // codes
  float most = kInfinity;
  bool closed = false;  // no further list is to be looked at
};

class Scanner {
 public:
  Scanner(const CodeBook& book, std::size_t dimension, std::vector<Part> parts, const ScanLimits& limits,
          Instructions most)
      : book_(book), code_bytes_(book.format.bytes()), dimension_(dimension), alpha_(dimension),
        parts_(std::move(parts)), margin_(2 * limits.eps * book.unit), limits_(limits), use_(instructions(most)),
        query_(book.format, most), residual_(dimension), apart_(dimension), ones_(dimension, 1.0F) {
    std::copy_n(book.alpha.data(), book.alpha.size(),
                alpha_.begin());  // axes without bits count for the distance alone
  }

  // Takes other parts in the place of those before.
  void take(std::vector<Part> parts) { parts_ = std::move(parts); }

  // Goes on with a query; `inner` where inner products are looked for.
  void go_on(const float* query, Progress& progress, const Spread* inner) {
    now_ = &progress;
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

  // Takes the nearest lists of the query, in whose order it scans: at(i) is the centroid of the i-th of `count`, or
  // null.
  template <class CentroidAt>
  void begin_among(std::size_t count, CentroidAt at) {
    if (!(limits_.border > 0)) return;
    NearestLists& around = now_->around;
    around.length = std::inner_product(wanted_, wanted_ + dimension_, wanted_, 0.0F);
    for (std::size_t& i = around.count = 0; i < std::min(count, kBorders) && at(i) != nullptr; ++i) {
      around.centroids[i] = at(i);
      around.squared[i] = squared_from(at(i));
    }
  }

  // Scans a list, unless none of its rows may be found, or it is passed over or ends the search; it has this number
  // among all lists.
  void scan(const std::uint16_t* centroid, std::int64_t list, float radius, std::int64_t number) {
    const auto holds = [list](const Part& part) { return part.first_wanted(list) < part.stops[list]; };
    if (std::none_of(parts_.begin(), parts_.end(), holds)) return;
    Terms terms{};
    if (!(inner_ == nullptr ? near_enough(centroid, terms) : large_enough(centroid, radius, terms))) return;
    Reach& reach = now_->reach;
    ++reach.probed;
    if (inner_ == nullptr && terms.squared < reach.away) {
      reach.nearest = number;
      reach.away = terms.squared;
    }
    terms.scale = query_.scale();
    terms.offset = query_.offset();
    terms.unit = book_.unit;
    terms.factor = book_.factor;
    terms.error = book_.error;
    for (std::size_t p = 0; p < parts_.size(); ++p) {
      const Part& part = parts_[p];
      const auto rows = static_cast<std::size_t>(part.rows);
      for (std::int64_t at = part.first_wanted(list); choose(part, at, list);) {
        query_.dot(part.codes + part.place(list), part.code_step, rows, block_.groups, block_.count, block_.sums);
        estimate_block(block_, part.numbers(list), terms, now_->admitted.threshold(), use_);
        ahead_.ask(kAskedLines);
        offer((static_cast<std::int64_t>(p) << kPartShift) + part.shift(list), part, list);
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
      const std::int64_t stop = std::min(part.stops[list], part.starts[list] + kAhead);
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

  // Whether a list would end the search after those that `reach` tells of, which then tells of this one, too.
  bool would_end(const std::uint16_t* centroid, float radius, Reach& reach) {
    const float kth = now_->kth();
    const bool ends = inner_ == nullptr
                          ? is_far(squared_from(centroid), kth, reach)
                          : is_small(-2 * centroid_product(wanted_, centroid, dimension_, use_), radius, kth, reach);
    ++reach.probed;
    return ends;
  }

  // Whether a list lies so far beyond its borders with the nearest that it is passed over, now and later. What counts
  // is the sum of the squared distances of the query from these borders.
  bool is_beyond(const std::uint16_t* centroid) {
    const float kth = now_->kth();
    if (!(limits_.border > 0 && kth < kInfinity)) return false;
    const NearestLists& around = now_->around;
    const float squared = squared_from(centroid), most = limits_.border * kth;
    const float along = around.length - centroid_product(wanted_, centroid, dimension_, use_);
    float sum = 0;
    for (std::size_t i = 0; i < around.count && around.squared[i] < squared && sum < most; ++i) {
      const float product = along - centroid_product(apart_.data(), around.centroids[i], dimension_, use_);
      const float excess = squared - around.squared[i], between = squared + around.squared[i] - 2 * product;
      if (between > 0) sum += excess * excess / (4 * between);
    }
    return sum >= most;
  }

 private:
  // Returns the squared distance of the query from a centroid, and keeps their difference.
  float squared_from(const std::uint16_t* centroid) {
    return subtract_centroid(wanted_, centroid, ones_.data(), dimension_, apart_.data(), use_).squared;
  }

  // Fills the terms of a list by distances, unless it is passed over or ends the search: then false.
  bool near_enough(const std::uint16_t* centroid, Terms& terms) {
    const Residual residual = subtract_centroid(wanted_, centroid, alpha_.data(), dimension_, residual_.data(), use_);
    now_->closed = is_far(residual.squared, now_->kth(), now_->reach);
    if (now_->closed || is_beyond(centroid)) return false;
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
    now_->closed = is_small(squared, radius, now_->kth(), now_->reach);
    if (now_->closed) return false;
    terms.squared = squared;
    terms.terms = std::fabs(squared);
    terms.lengths = 2;
    terms.distance = std::max(inner_->wrong, kNearest) * margin_;
    return true;
  }

  // Whether a list at this squared distance ends the search.
  bool is_far(float squared, float kth, Reach& reach) const {
    if (reach.probed == 0) reach.first = squared;
    return squared >= limits_.clear * kth && ends_at(squared - reach.first, std::fabs(kth), kth, reach);
  }

  // Whether a list of this radius, whose centroid has -2 times this inner product, ends the search.
  bool is_small(float squared, float radius, float kth, Reach& reach) const {
    reach.widest = std::max(reach.widest, radius);
    const float away = squared - kBest * 2 * inner_->along * radius;
    return ends_at(away - kth, 2 * inner_->along * reach.widest, kth, reach);
  }

  // Whether the scan ends at a list that lies so far beyond the rows wanted.
  bool ends_at(float beyond, float unit, float kth, const Reach& reach) const {
    return reach.probed >= limits_.least && kth < kInfinity && beyond >= limits_.gap * unit;
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
    const std::int64_t start = part.starts[list], stop = part.stops[list];
    for (; at < stop && block_.count < kGroups; at = part.next_wanted(at + kRowsOfGroup, list)) {
      const bool whole = part.allowed == nullptr && at >= start && at + kRowsOfGroup <= stop;
      const std::uint32_t wanted = whole ? 0xffff : part.wanted(at, list);
      block_.groups[block_.count++] = {static_cast<std::uint32_t>(at), static_cast<std::uint16_t>(wanted)};
      now_->scanned += std::popcount(wanted);
    }
    return block_.count > 0;
  }

  // Offers the rows of the block, whose positions lie `base` beyond their numbers.
  void offer(std::int64_t base, const Part& part, std::int64_t list) {
    Admitted& admitted = now_->admitted;
    float threshold = admitted.threshold();
    for (std::size_t group = 0; group < block_.count; ++group) {
      for (std::uint32_t near = block_.near[group]; near != 0; near &= near - 1) {
        const auto lane = static_cast<std::size_t>(std::countr_zero(near)), i = group * kLanes + lane;
        const float estimate = block_.estimate[i], margin = block_.margin[i];
        if (!(estimate - margin <= threshold)) continue;  // which has fallen meanwhile
        now_->nearest.offer(estimate);
        const std::size_t row = block_.groups[group].first + lane;
        const Place place{base + static_cast<std::int64_t>(row), part.id(list, row)};
        admitted.offer({estimate - margin, estimate, place}, estimate + margin);
        threshold = admitted.threshold();
      }
    }
  }

  const CodeBook& book_;
  const std::size_t code_bytes_, dimension_;
  std::vector<float> alpha_;
  std::vector<Part> parts_;
  const float margin_;
  const ScanLimits& limits_;
  const Instructions use_;
  Progress* now_ = nullptr;
  const float* wanted_ = nullptr;
  const Spread* inner_ = nullptr;
  ByteQuery query_;
  std::vector<float> residual_, apart_, ones_;
  Block block_{};
  Ahead ahead_;
};

}  // namespace memhier
