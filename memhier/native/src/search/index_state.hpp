// The state of an index as a search takes it in one call: lists in DRAM, codes there or on SSD, rows on SSD.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "bind/array.hpp"
#include "rank/rank_arguments.hpp"
#include "route/nearest_rows.hpp"
#include "scan/row_bits.hpp"
#include "scan/scan_arguments.hpp"
#include "search/query_space.hpp"
#include "search/stored_lists.hpp"

namespace memhier {

// How queries find their lists: by the graph over the centroids of all, links [lists, degree] and seeds [s], or None.
struct ListRouting {
  std::optional<Array<const std::int32_t, 2>> links;
  std::optional<Array<const std::int32_t, 1>> seeds;
};

// Rows on SSD: their size, how many lie whole in a page (0 where they straddle pages), and pages held in DRAM.
struct StoredRows {
  int type;
  std::size_t row_bytes, per_page;
  Array<const std::int64_t, 1> hot_keys;
  Array<const std::byte, 2> hot_pages;

  HotPages hot() const { return {{hot_keys.data(), hot_keys.size()}, hot_pages.data()}; }
  std::int64_t offset(std::int64_t row) const {
    const auto bytes = static_cast<std::int64_t>(row_bytes), whole = static_cast<std::int64_t>(per_page);
    return whole == 0 ? row * bytes : row / whole * static_cast<std::int64_t>(kPageBytes) + row % whole * bytes;
  }
};

// Its owner keeps the arguments of the constructor. The codes of all parts are in DRAM (`parts`), or all on SSD
// (`stored_lists`), of which a wave reads `wave_pages`, or one list. Ids then lie with the codes, and `page_rows` calls
// rows by their positions.
class IndexState {
 public:
  IndexState(const QuerySpace& space, const CodeLists& lists, const CodeBook& book,
             const std::vector<const CodedPart*>& parts, const std::vector<const StoredLists*>& stored_lists,
             std::size_t wave_pages, const ListRouting& routing, const StoredRows& stored,
             const std::vector<const PageRowArrays*>& page_rows)
      : space(space), lists(lists), book(book), routing(routing), stored(stored), stored_lists(stored_lists),
        wave_pages(wave_pages) {
    const std::size_t count = lists.centroids.shape(0), dimension = lists.centroids.shape(1);
    require(space.padded() == dimension && book.format.coded_dimensions() <= dimension && lists.radii.size() == count,
            "lists, book, space: of one dimension");
    require(stored.row_bytes > 0 && stored.per_page * stored.row_bytes <= kPageBytes && stored.type >= 0 &&
                stored.type < kRowTypes && stored.hot_pages.bytes() == stored.hot_keys.size() * kPageBytes,
            "stored: rows of a known type that fit their pages, and a page for each key");
    require((parts.empty() || stored_lists.empty()) && parts.size() + stored_lists.size() == page_rows.size(),
            "page_rows: of every part");
    for (const CodedPart* part : parts) {
      coded.push_back(part->part(count, book.format.bytes()));
      allowed.emplace_back(coded.back().allowed, coded.back().words);
    }
    for (const StoredLists* part : stored_lists) {
      part->check(count, book.format.bytes());
      allowed.push_back(part->allowed ? RowBits(part->allowed->data(), part->allowed->size()) : RowBits());
    }
    for (const PageRowArrays* arrays : page_rows) rows.push_back(arrays->view());
    for (std::size_t i = 0; i < rows.size(); ++i)
      require((stored_lists.empty() ? coded[i].rows : stored_lists[i]->rows()) == rows[i].rows,
              "page_rows: as many as there are codes");
    compared = {lists.centroids.data(), dimension, nullptr, count};
    require(routing.links.has_value() == routing.seeds.has_value() &&
                (!routing.links || (routing.links->shape(0) == count && routing.links->shape(1) > 0)),
            "links, seeds: of all lists");
  }

  // The same index, where of each part only the rows of a bitmap may be found; in the lists that hold such rows alone
  // if it is `narrowed`.
  IndexState(const IndexState& whole, std::vector<Array<const std::uint64_t, 1>> bitmaps, bool narrowed)
      : space(whole.space), lists(whole.lists), book(whole.book), routing(whole.routing), stored(whole.stored),
        stored_lists(whole.stored_lists), wave_pages(whole.wave_pages), coded(whole.coded), rows(whole.rows),
        allowed(whole.allowed), compared(whole.compared), bitmaps_(std::move(bitmaps)) {
    require(bitmaps_.size() == rows.size(), "bitmaps: of every part");
    for (std::size_t i = 0; i < rows.size(); ++i) {
      const RowBits bits(bitmaps_[i].data(), bitmaps_[i].size());
      require(bits.size() == (static_cast<std::size_t>(rows[i].rows) + 63) / 64, "bitmaps: a bit for each row");
      for (const std::uint64_t word : bits)
        if (word != 0) left += std::popcount(word);
      rows[i].allowed = bits.data();
      allowed[i] = bits;
      if (stored_lists.empty()) {
        coded[i].allowed = bits.data();
        coded[i].words = bits.size();
      }
    }
    if (narrowed) narrow();
  }

  IndexState(const IndexState&) = delete;
  IndexState& operator=(const IndexState&) = delete;

  // The lists that count.
  std::int64_t held() const { return static_cast<std::int64_t>(compared.count); }

  const QuerySpace& space;
  const CodeLists& lists;
  const CodeBook& book;
  const ListRouting& routing;
  const StoredRows& stored;
  const std::vector<const StoredLists*> stored_lists;
  const std::size_t wave_pages;
  std::vector<Part> coded;
  std::vector<PageRows> rows;
  std::vector<RowBits> allowed;  // of each part
  ComparedRows compared;         // the centroids of the lists that count
  std::int64_t left = 0;         // rows of the bitmaps

 private:
  // Lets the lists alone count that hold a row of a bitmap.
  void narrow() {
    std::vector<std::uint64_t> holding((compared.count + 63) / 64);
    for (std::size_t part = 0; part < rows.size(); ++part) {
      const std::int64_t* const starts = stored_lists.empty() ? coded[part].starts : stored_lists[part]->starts.data();
      mark_runs(allowed[part], {starts, compared.count + 1}, holding.data());
    }
    for (std::size_t at = 0; at < holding.size(); ++at)
      for (std::uint64_t lists = holding[at]; lists != 0; lists &= lists - 1)
        among_.push_back(static_cast<std::int64_t>(64 * at) + std::countr_zero(lists));
    compared.among = among_.data();
    compared.count = among_.size();
  }

  std::vector<Array<const std::uint64_t, 1>> bitmaps_;
  std::vector<std::int64_t> among_;
};

}  // namespace memhier
