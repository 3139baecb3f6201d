// The rows that hold items of lists, read from SSD into a bitmap; memhier.ann.zoom.filters.postings tells the layout.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "io/context.hpp"

namespace memhier {

constexpr std::int64_t kPageRecords = 256;

// A block of neighbouring rows: the first of them, where its records begin in the file, and their number.
struct PostingBlock {
  std::int64_t first, records, count;
};
static_assert(sizeof(PostingBlock) == 24);

// What is looked for, and where: for each filter, rows that hold one of the items of every group. Items are f64 or i64.
struct PostingSearch {
  std::int32_t file;
  std::int64_t end;                       // of the records and rows in the file
  std::span<const PostingBlock> blocks;   // behind them the item of every 256th record, block by block
  const std::byte* items;                 // of each group different ones, ascending
  std::span<const std::int64_t> ends;     // of each group, the number of items up to its last
  std::span<const std::int64_t> filters;  // of each filter, the number of groups up to its last
  bool floats;
  std::int64_t start, rows;        // the first row that counts, and how many do
  std::span<std::uint64_t> words;  // of each filter, a bit for each of these
};

// Sets the bits of the rows that hold one of the items of every group, in words that are zero; each group of a filter
// but the first takes as many words beside these. A fault without a source tells of places that cannot be.
std::optional<Fault> mark_rows(const PostingSearch& search, const ReadBatch& read);

}  // namespace memhier
