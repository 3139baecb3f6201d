// The scan of codes in DRAM: all lists of a query, one query after the other.
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
  Scanner scanner(book, dimension, std::move(taken), limits, static_cast<Instructions>(instructions));
  Progress progress(limits.k, limit);
  for (std::size_t q = 0; q < count; ++q) {
    const Spread spread = of.inner ? Spread{(*of.inner)[2 * q], (*of.inner)[2 * q + 1]} : Spread{};
    progress.clear(of.most[q]);
    scanner.go_on(of.queries.data() + q * dimension, progress, of.inner ? &spread : nullptr);
    const std::int64_t* probes = of.probes.data() + q * probe_count;
    scan_lists(scanner, progress, lists, probe_count, [probes](std::size_t i) { return probes[i]; });
    result.fill(q, progress);
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
      .def(nb::init<std::size_t, float, std::int64_t, float, float, float>(), nb::kw_only(), "k"_a, "eps"_a, "least"_a,
           "gap"_a, "clear"_a, "border"_a);
  nb::class_<ScanResult>(m, "ScanResult")
      .def(nb::init<Array<std::int64_t, 2>, Array<float, 2>, Array<float, 2>, Array<std::int64_t, 1>, Array<float, 1>,
                    Array<ScanTally, 1>, std::optional<Array<std::int64_t, 2>>>(),
           nb::kw_only(), "positions"_a, "lower"_a, "estimates"_a, "counts"_a, "thresholds"_a, "tally"_a,
           "ids"_a.none());
  m.def("code_scan", &code_scan, nb::kw_only(), "queries"_a, "lists"_a, "book"_a, "parts"_a, "limits"_a, "result"_a,
        "instructions"_a = static_cast<int>(Instructions::kAvx512));
}
