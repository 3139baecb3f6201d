// Three interleaved hardware streams where SSE4.2 is, eight table look-ups a word elsewhere.
//
// The crc32 instruction takes three cycles but one can start each cycle, so three independent stretches of the data are
// summed at a time and joined afterwards: a CRC moves past n bytes of zeros by a linear map, here four look-ups.
#include "io/crc32c.hpp"

#include <array>
#include <bit>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace memhier {
namespace {

constexpr std::uint32_t kPolynomial = 0x82F63B78;
// A page is three stretches of 1,360 bytes and 16 more.
constexpr std::size_t kStretchBytes = 1360;

using Table = std::array<std::uint32_t, 256>;

constexpr std::array<Table, 8> make_word_tables() {
  std::array<Table, 8> tables{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    std::uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ (crc & 1 ? kPolynomial : 0);
    tables[0][byte] = crc;
  }
  for (std::size_t place = 1; place < 8; ++place)
    for (std::size_t byte = 0; byte < 256; ++byte) {
      const std::uint32_t crc = tables[place - 1][byte];
      tables[place][byte] = (crc >> 8) ^ tables[0][crc & 0xff];
    }
  return tables;
}

constexpr auto kWordTables = make_word_tables();

inline std::uint64_t load_word(const std::byte* at) {
  std::uint64_t word;
  std::memcpy(&word, at, sizeof word);
  if constexpr (std::endian::native == std::endian::big) word = __builtin_bswap64(word);
  return word;
}

std::uint32_t update_by_table(std::uint32_t crc, const std::byte* data, std::size_t size) {
  for (; size >= 8; data += 8, size -= 8) {
    const std::uint64_t word = load_word(data) ^ crc;
    crc = 0;
    for (std::size_t place = 0; place < 8; ++place) crc ^= kWordTables[7 - place][(word >> (8 * place)) & 0xff];
  }
  for (; size > 0; ++data, --size) crc = (crc >> 8) ^ kWordTables[0][(crc ^ static_cast<std::uint8_t>(*data)) & 0xff];
  return crc;
}

#if defined(__x86_64__)
// Takes a CRC past kStretchBytes zeros: one table per byte of it.
const std::array<Table, 4>& stretch_tables() {
  static const std::array<Table, 4> tables = [] {
    std::array<Table, 4> made{};
    const std::array<std::byte, kStretchBytes> zeros{};
    for (std::size_t place = 0; place < 4; ++place)
      for (std::uint32_t byte = 0; byte < 256; ++byte)
        made[place][byte] = update_by_table(byte << (8 * place), zeros.data(), zeros.size());
    return made;
  }();
  return tables;
}

inline std::uint32_t past_stretch(const std::array<Table, 4>& tables, std::uint32_t crc) {
  return tables[0][crc & 0xff] ^ tables[1][(crc >> 8) & 0xff] ^ tables[2][(crc >> 16) & 0xff] ^ tables[3][crc >> 24];
}

__attribute__((target("sse4.2"))) std::uint32_t update_by_sse42(std::uint32_t crc, const std::byte* data,
                                                                std::size_t size) {
  const auto& tables = stretch_tables();
  std::uint64_t first = crc;
  for (; size >= 3 * kStretchBytes; data += 3 * kStretchBytes, size -= 3 * kStretchBytes) {
    std::uint64_t second = 0;
    std::uint64_t third = 0;
    for (std::size_t at = 0; at < kStretchBytes; at += 8) {
      first = _mm_crc32_u64(first, load_word(data + at));
      second = _mm_crc32_u64(second, load_word(data + kStretchBytes + at));
      third = _mm_crc32_u64(third, load_word(data + 2 * kStretchBytes + at));
    }
    const auto joined = past_stretch(tables, static_cast<std::uint32_t>(first)) ^ static_cast<std::uint32_t>(second);
    first = past_stretch(tables, joined) ^ static_cast<std::uint32_t>(third);
  }
  for (; size >= 8; data += 8, size -= 8) first = _mm_crc32_u64(first, load_word(data));
  auto rest = static_cast<std::uint32_t>(first);
  for (; size > 0; ++data, --size) rest = _mm_crc32_u8(rest, static_cast<std::uint8_t>(*data));
  return rest;
}
#endif

std::uint32_t update(std::uint32_t crc, const std::byte* data, std::size_t size) {
#if defined(__x86_64__)
  static const bool has_sse42 = __builtin_cpu_supports("sse4.2") != 0;
  if (has_sse42) return update_by_sse42(crc, data, size);
#endif
  return update_by_table(crc, data, size);
}

}  // namespace

std::uint32_t crc32c(const void* data, std::size_t size, std::uint32_t value) {
  return ~update(~value, static_cast<const std::byte*>(data), size);
}

std::uint32_t crc32c_by_table(const void* data, std::size_t size, std::uint32_t value) {
  return ~update_by_table(~value, static_cast<const std::byte*>(data), size);
}

}  // namespace memhier
