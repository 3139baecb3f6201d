// The scan of codes that arrive in waves: each brings the next lists of some queries, and the scan of a query goes on
// where it was. A query scans the lists that it would scan if all codes were there at once.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include "bind/array.hpp"
#include "bind/module.hpp"
#include "scan/scan_arguments.hpp"
#include "scan/scanner.hpp"

namespace nb = nanobind;

namespace memhier {
namespace {

class CodeWaves {
 public:
  // The arguments live as long as this; `limit` candidates are kept of a query.
  CodeWaves(const ScanQueries& of, const CodeLists& lists, const CodeBook& book, const ScanLimits& limits,
            std::size_t limit)
      : of_(of), lists_(lists), book_(book), limits_(limits), dimension_(of.queries.shape(1)),
        probe_count_(of.probes.shape(1)), limit_(limit), done_(of.queries.shape(0)) {
    of.check();
    const auto every = static_cast<std::int64_t>(lists.centroids.shape(0));
    require(book.format.coded_dimensions() <= dimension_ && lists.centroids.shape(1) == dimension_ &&
                lists.radii.shape(0) == lists.centroids.shape(0),
            "code_waves: array shapes do not fit together");
    require(limits.k >= 1 && limit >= limits.k, "code_waves: k must be at least 1 and at most limit");
    for (std::size_t i = 0; i < of.probes.size(); ++i)
      require(of.probes[i] >= -1 && of.probes[i] < every, "code_waves: list number out of range");
    for (std::size_t q = 0; q < done_.size(); ++q) {
      progress_.emplace_back(limits.k, limit);
      progress_[q].clear(of.most[q]);
    }
  }

  // Fills counts [q]: how many of its next lists each query scans if nothing nearer is found in these; none at its
  // end. At most `first` lists, or as many as it scanned so far, or `window`; none of the queries after `total` lists.
  void ahead(std::size_t first, std::size_t window, std::size_t total, const Array<std::int64_t, 1>& counts) {
    require(counts.shape(0) == done_.size() && first > 0 && window > 0, "code_waves: counts [q], lists of a wave");
    nb::gil_scoped_release released;
    Scanner scanner(book_, dimension_, {}, limits_, Instructions::kAvx512);
    std::fill_n(counts.data(), counts.size(), std::int64_t{0});
    for (std::size_t q = 0, found = 0; q < done_.size() && found < total; ++q) {
      const std::int64_t* probes = probes_of(q);
      std::size_t open = 0;
      while (done_[q] + open < probe_count_ && probes[open] >= 0) ++open;
      const auto least = static_cast<std::size_t>(std::max(limits_.least, std::int64_t{0}));
      const std::size_t most = progress_[q].closed ? 0 : std::min({std::max({first, least, done_[q]}), window, open});
      if (most == 0) continue;
      const std::size_t near = near_lists(scanner, q, most);
      progress_[q].closed = near == 0;
      counts[q] = static_cast<std::int64_t>(near);
      found += near;
    }
  }

  // Scans the next `counts` [q] lists of each query, which are among `lists` [n], ascending, as the parts have them.
  void scan(const std::vector<const WavePart*>& parts, const Array<const std::int64_t, 1>& lists,
            const Array<const std::int64_t, 1>& counts) {
    std::vector<Part> taken;
    for (const WavePart* part : parts) taken.push_back(part->part(lists.shape(0), book_.format.bytes()));
    require(counts.shape(0) == done_.size(), "code_waves: counts [q]");
    const std::int64_t *low = lists.data(), *high = low + lists.shape(0);
    for (std::size_t q = 0; q < done_.size(); ++q) {
      require(counts[q] >= 0 && done_[q] + static_cast<std::size_t>(counts[q]) <= probe_count_,
              "code_waves: a query has not so many lists");
      require(std::all_of(probes_of(q), probes_of(q) + counts[q],
                          [=](std::int64_t list) { return std::binary_search(low, high, list); }),
              "code_waves: a list was not read");
    }
    nb::gil_scoped_release released;
    Scanner scanner(book_, dimension_, std::move(taken), limits_, Instructions::kAvx512);
    for (std::size_t q = 0; q < done_.size(); ++q) {
      if (counts[q] == 0) continue;
      const std::int64_t* probes = probes_of(q);
      const std::optional<Spread> spread = spread_of(q);
      scanner.go_on(query(q), progress_[q], spread ? &*spread : nullptr);
      if (done_[q] == 0)
        scanner.begin_among(probe_count_,
                            [=, this](std::size_t i) { return probes[i] < 0 ? nullptr : centroid(probes[i]); });
      for (std::int64_t i = 0; i < counts[q] && !progress_[q].closed; ++i)
        scanner.scan(centroid(probes[i]), std::lower_bound(low, high, probes[i]) - low, radius(probes[i]), probes[i]);
      done_[q] += static_cast<std::size_t>(counts[q]);
    }
  }

  // Fills the result, and gives the memory of each query back.
  void finish(const ScanResult& result) {
    result.check(done_.size());
    require(result.positions.shape(1) == limit_, "code_waves: positions [q, limit]");
    nb::gil_scoped_release released;
    for (std::size_t q = 0; q < done_.size(); ++q) {
      result.fill(q, progress_[q]);
      progress_[q].admitted.drop();
    }
  }

 private:
  const std::int64_t* probes_of(std::size_t q) const { return of_.probes.data() + q * probe_count_ + done_[q]; }
  const float* query(std::size_t q) const { return of_.queries.data() + q * dimension_; }
  const std::uint16_t* centroid(std::int64_t list) const {
    return lists_.centroids.data() + static_cast<std::size_t>(list) * dimension_;
  }
  float radius(std::int64_t list) const { return lists_.radii[static_cast<std::size_t>(list)]; }
  std::optional<Spread> spread_of(std::size_t q) const {
    if (!of_.inner) return std::nullopt;
    return Spread{(*of_.inner)[2 * q], (*of_.inner)[2 * q + 1]};
  }

  // Returns how many of the next `most` lists a query scans before one ends it.
  std::size_t near_lists(Scanner& scanner, std::size_t q, std::size_t most) {
    const std::optional<Spread> spread = spread_of(q);
    scanner.go_on(query(q), progress_[q], spread ? &*spread : nullptr);
    Reach reach = progress_[q].reach;
    const std::int64_t* probes = probes_of(q);
    for (std::size_t i = 0; i < most; ++i)
      if (scanner.would_end(centroid(probes[i]), radius(probes[i]), reach)) return i;
    return most;
  }

  const ScanQueries& of_;
  const CodeLists& lists_;
  const CodeBook& book_;
  const ScanLimits limits_;
  const std::size_t dimension_, probe_count_, limit_;
  std::vector<std::size_t> done_;  // lists of each query
  std::vector<Progress> progress_;
};

}  // namespace
}  // namespace memhier

void register_code_waves(nb::module_& m) {
  using namespace memhier;
  using namespace nb::literals;
  nb::class_<WavePart>(m, "WavePart")
      .def(nb::init<Array<const std::int64_t, 1>, Array<const std::int64_t, 1>, Array<const std::int64_t, 1>,
                    Array<const std::uint8_t, 2>, Array<const std::uint16_t, 2>, Array<const std::int64_t, 1>,
                    std::int64_t, std::optional<Array<const std::uint64_t, 1>>>(),
           nb::kw_only(), "starts"_a, "stops"_a, "shifts"_a, "codes"_a, "numbers"_a, "ids"_a, "written"_a,
           "allowed"_a.none());
  nb::class_<CodeWaves>(m, "CodeWaves")
      .def(nb::init<const ScanQueries&, const CodeLists&, const CodeBook&, const ScanLimits&, std::size_t>(),
           nb::kw_only(), "queries"_a, "lists"_a, "book"_a, "limits"_a, "limit"_a, nb::keep_alive<1, 2>(),
           nb::keep_alive<1, 3>(), nb::keep_alive<1, 4>(), nb::keep_alive<1, 5>())
      .def("ahead", &CodeWaves::ahead, nb::kw_only(), "first"_a, "window"_a, "total"_a, "counts"_a)
      .def("scan", &CodeWaves::scan, nb::kw_only(), "parts"_a, "lists"_a, "counts"_a)
      .def("finish", &CodeWaves::finish, nb::kw_only(), "result"_a);
}
