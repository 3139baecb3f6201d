// Inner products of bit-packed codes with a query of signed bytes, the inner loop of the scan.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace memhier {

// How a code is packed: first the dimensions of 8 bits each, then those of 4, 2 and 1. A group fills whole bytes, in
// chunks of up to 64 of them: field s of byte b in a chunk of c bytes is dimension s * c + b of that chunk, so that a
// chunk unpacks by shifts alone.
//
// Codes lie in blocks of 16 rows. Of each chunk a block has the first four bytes of all its rows, then the next four,
// at last the two and the one that are left, so that one load brings the same bytes of 16 codes, and their inner
// products end in 16 lanes. The rows after the last whole block lie one after the other.
struct CodeFormat {
  static constexpr std::size_t kBlockRows = 16;
  static constexpr std::array<int, 4> kWidths = {8, 4, 2, 1};
  std::array<std::size_t, 4> dimensions;

  std::size_t group_bytes(std::size_t group) const {
    const std::size_t per_byte = 8 / static_cast<std::size_t>(kWidths[group]);
    return (dimensions[group] + per_byte - 1) / per_byte;
  }
  std::size_t bytes() const {
    std::size_t sum = 0;
    for (std::size_t group = 0; group < 4; ++group) sum += group_bytes(group);
    return sum;
  }
  std::size_t coded_dimensions() const { return dimensions[0] + dimensions[1] + dimensions[2] + dimensions[3]; }
};

// Some of the 16 rows of a block.
struct RowGroup {
  std::uint32_t first;   // row, a multiple of 16
  std::uint16_t wanted;  // a bit for each
};

// Instruction sets that a processor may have, the least first.
enum class Instructions { kPlain, kAvx2, kAvx512 };

// The instruction set of this processor, but no more than `most`.
Instructions instructions(Instructions most);

// One query as signed bytes, in the order of the dimensions.
class ByteQuery {
 public:
  ByteQuery(const CodeFormat& format, Instructions most);

  // Takes values[coded_dimensions], of which the largest magnitude is known, and rounds them to steps of `scale`.
  void assign(const float* values, float largest);

  float scale() const { return scale_; }
  // The product of a code of half its range in every dimension: sum over dimensions of (2^width - 1) / 2 * byte.
  float offset() const { return offset_; }

  // sums[16 g + i] = sum over dimensions of field * byte, for row i of group g if it is wanted, of codes of which there
  // are `total` from `base` on. Of rows in whole blocks, one begins `step` bytes after another.
  void dot(const std::uint8_t* base, std::size_t step, std::size_t total, const RowGroup* groups, std::size_t count,
           std::int32_t* sums) const;

 private:
  struct Chunk {
    std::uint32_t at;     // first byte within the code
    std::uint32_t bytes;  // 1 to 64
    std::uint32_t width;
    std::uint32_t query;  // its first dimension; those of the next field follow `bytes` later
  };

  void dot_blocks(const std::uint8_t* const* block, std::size_t blocks, std::int32_t* sums) const;
  std::int32_t dot_row(const std::uint8_t* code) const;
  void dot_plain(const std::uint8_t* block, std::int32_t* sums) const;
  void dot_avx2(const std::uint8_t* block, std::int32_t* sums) const;
  void dot_vnni(const std::uint8_t* const* block, std::size_t blocks, std::int32_t* sums) const;

  CodeFormat format_;
  Instructions use_;
  std::size_t code_bytes_;
  std::vector<Chunk> chunks_;
  std::vector<std::int8_t> bytes_;
  float scale_ = 0, offset_ = 0;
};

}  // namespace memhier
