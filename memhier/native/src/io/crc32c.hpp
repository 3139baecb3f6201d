// CRC32C (Castagnoli), the checksum of every stored page.
#pragma once

#include <cstddef>
#include <cstdint>

namespace memhier {

// The checksum of `size` bytes that follow bytes with the checksum `value` (0 for none).
std::uint32_t crc32c(const void* data, std::size_t size, std::uint32_t value = 0);

// The same on processors without SSE4.2; for tests on those that have it.
std::uint32_t crc32c_by_table(const void* data, std::size_t size, std::uint32_t value = 0);

}  // namespace memhier
