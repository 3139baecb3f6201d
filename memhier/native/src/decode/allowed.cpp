// Allowed words as bits, from a mask, bits or ids.
#include "decode/allowed.hpp"

#include <algorithm>
#include <cstring>

#include <nanobind/stl/optional.h>

#include "bind/array.hpp"
#include "bind/module.hpp"

namespace nb = nanobind;

namespace memhier {
namespace {

// The bits of 64 bytes, one where a byte is not zero.
std::uint64_t bits_of_bytes(const std::byte* bytes) {
  std::uint64_t word = 0;
  for (std::size_t i = 0; i < 8; ++i) {
    std::uint64_t eight;
    std::memcpy(&eight, bytes + 8 * i, 8);
    eight |= eight >> 4;
    eight |= eight >> 2;
    eight |= eight >> 1;
    word |= ((eight & 0x0101010101010101) * 0x0102040810204080 >> 56) << (8 * i);
  }
  return word;
}

void take_mask(const std::byte* mask, std::size_t words, std::uint64_t* bits) {
  for (std::size_t first = 0; first < words; first += 64) {
    std::byte last[64] = {};
    const bool whole = first + 64 <= words;
    if (!whole) std::memcpy(last, mask + first, words - first);
    bits[first / 64] = bits_of_bytes(whole ? mask + first : last);
  }
}

void take_bits(const std::byte* given, std::size_t words, std::uint64_t* bits) {
  std::memcpy(bits, given, (words + 31) / 32 * 4);
  if (words % 64 != 0) bits[words / 64] &= (std::uint64_t{1} << words % 64) - 1;
}

constexpr std::int64_t kAllFit = -1;

// allowed: bytes of a mask [rows, words], int32 bits [rows, ceil(words / 32)], or int64 ids from ends[row] to
// ends[row + 1], all of them for one row without ends; the size of an element tells which. Fills bits [rows, padded /
// 64] of zeros, and counts [rows]. Returns kAllFit, the place of the first id out of range, or -2 less the first row
// that holds no word.
std::int64_t allow_words(const Array<const std::byte>& allowed, std::size_t words,
                         const std::optional<Array<const std::int64_t, 1>>& ends, const Array<std::uint64_t, 2>& bits,
                         const Array<std::int64_t, 1>& counts) {
  const std::size_t rows = counts.size(), stride = padded_rows(words) / 64;
  require(bits.has_shape(rows, stride), "bits: uint64 [rows, padded / 64]; counts: int64 [rows]");
  const std::size_t element = allowed.item_bytes();
  const bool by_id = element == sizeof(std::int64_t);
  const auto given = static_cast<std::int64_t>(allowed.bytes() / sizeof(std::int64_t));
  const std::int64_t all[] = {0, given};
  const std::int64_t* const limits = ends ? ends->data() : all;
  if (by_id) {
    require(ends ? ends->size() == rows + 1 : rows == 1, "ends: int64 [rows + 1]");
    require(limits[0] == 0 && limits[rows] == given && std::is_sorted(limits, limits + rows + 1),
            "ends: must ascend within the ids");
  } else {
    require(element == 1 || element == 4, "allowed: a mask of bytes, or int32 bits");
    require(allowed.bytes() == rows * (element == 1 ? words : (words + 31) / 32 * 4), "allowed: does not fit counts");
  }
  const auto* ids = reinterpret_cast<const std::int64_t*>(allowed.data());
  nb::gil_scoped_release released;
  for (std::size_t row = 0; row < rows; ++row) {
    std::uint64_t* own = bits.data() + row * stride;
    if (by_id) {
      for (std::int64_t i = limits[row]; i < limits[row + 1]; ++i) {
        const auto id = static_cast<std::uint64_t>(ids[i]);
        if (id >= words) return i;
        own[id / 64] |= std::uint64_t{1} << (id % 64);
      }
    } else if (element == 1) {
      take_mask(allowed.data() + row * words, words, own);
    } else {
      take_bits(allowed.data() + row * ((words + 31) / 32 * 4), words, own);
    }
    counts[row] = static_cast<std::int64_t>(AllowedRows(own).count(words));
  }
  for (std::size_t row = 0; row < rows; ++row)
    if (counts[row] == 0) return -2 - static_cast<std::int64_t>(row);
  return kAllFit;
}

}  // namespace
}  // namespace memhier

void register_allowed(nb::module_& m) {
  using namespace nb::literals;
  m.def("allow_words", &memhier::allow_words, nb::kw_only(), "allowed"_a, "words"_a, "ends"_a.none(), "bits"_a,
        "counts"_a);
}
