// Products of digits of two bits with queries of signed bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace memhier {

constexpr std::size_t kDigitRows = 256;
constexpr std::size_t kDigits = 16;  // of a row in four bytes

using DigitSums = std::int32_t (*)[kDigitRows];

// Codes of 256 rows lie together, [digits / 16, 256, 4]: byte b of a row's four holds the digits b, b + 4, b + 8 and
// b + 12 of sixteen, from its lowest bits on. Sums of up to four queries over the first `count` digits, a multiple
// of 16.
void dot_digits(const std::uint8_t* codes, std::size_t count, std::span<const std::int8_t* const> queries,
                DigitSums sums);

}  // namespace memhier
