// Checksums and the memory fence as Python calls them.
#include "bind/array.hpp"
#include "bind/module.hpp"
#include "io/crc32c.hpp"
#include "io/engine.hpp"
#include "io/fence.hpp"

namespace nb = nanobind;

namespace memhier {
namespace {

std::uint32_t crc32c_of(const Array<const std::byte>& data, std::uint32_t value) {
  nb::gil_scoped_release released;
  return crc32c(data.data(), data.bytes(), value);
}

std::uint32_t crc32c_by_table_of(const Array<const std::byte>& data, std::uint32_t value) {
  return crc32c_by_table(data.data(), data.bytes(), value);
}

void crc32c_pages(const Array<const std::byte>& data, const Array<std::uint32_t, 1>& out) {
  require(out.size() == data.bytes() / kPageBytes, "out: one uint32 per page");
  nb::gil_scoped_release released;
  for (std::size_t page = 0; page < out.size(); ++page) out[page] = crc32c(data.data() + page * kPageBytes, kPageBytes);
}

}  // namespace
}  // namespace memhier

void register_io_calls(nb::module_& m) {
  using namespace nb::literals;
  m.def("crc32c", &memhier::crc32c_of, nb::kw_only(), "data"_a, "value"_a);
  m.def("crc32c_by_table", &memhier::crc32c_by_table_of, nb::kw_only(), "data"_a, "value"_a,
        "The path of machines without SSE4.2, for tests on machines that have it.");
  m.def("crc32c_pages", &memhier::crc32c_pages, nb::kw_only(), "data"_a, "out"_a);
  m.def("fence", &memhier::fence);
}
