#include "rank/postings.hpp"

#include <algorithm>
#include <bit>
#include <cstring>

static_assert(std::endian::native == std::endian::little, "numbers on SSD are little-endian");

namespace memhier {
namespace {

constexpr std::int64_t kRecordBytes = 16;
constexpr std::int64_t kSpan = 1 << 16;   // rows of a block at most
constexpr std::int64_t kMostRows = 4096;  // of an item in a block that are numbers; more are a bitmap of kSpan bits
constexpr std::int64_t kBitmapBytes = kSpan / 8;
constexpr std::int64_t kFewRows = 2;       // of an item in a block that lie in its record
constexpr std::size_t kPagesTogether = 4;  // of records, which are copied
constexpr std::size_t kPiecesTogether = 256;
constexpr auto kPage = static_cast<std::int64_t>(kPageBytes);

template <class T>
T load(const std::byte* at) {
  T value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

// Rows of an item that lie in one page of the file.
struct Piece {
  std::int64_t start, bytes;  // in the page
  std::int64_t first;         // row of the block, or of these bits, from the first that counts
  bool is_bitmap;
};

// A page of records of a block.
struct RecordPage {
  const PostingBlock* block;
  std::int64_t start, count;
};

template <class Item>
class Marker {
 public:
  Marker(const PostingSearch& search, const ReadBatch& read) : search_(search), read_(read) {}

  std::optional<Fault> run() {
    const std::byte* heads = search_.heads;
    for (const PostingBlock& block : search_.blocks) {
      const std::int64_t pages = (block.count + kPageRecords - 1) / kPageRecords;
      std::int64_t last = -1;
      for (std::size_t i = 0; i < search_.item_count && pages > 0 && is_near(block); ++i) {
        const std::int64_t page = page_of(heads, pages, item(i));
        if (page == last) continue;
        last = page;
        pages_.push_back({&block, block.records + page * kPageRecords * kRecordBytes,
                          std::min(block.count - page * kPageRecords, kPageRecords)});
        if (pages_.size() == kPagesTogether && !look_up()) return fault_;
      }
      heads += pages * static_cast<std::int64_t>(sizeof(Item));
    }
    if (look_up()) static_cast<void>(mark());
    return fault_;
  }

 private:
  Item item(std::size_t number) const { return load<Item>(search_.items + number * sizeof(Item)); }

  bool is_near(const PostingBlock& block) const {
    const std::int64_t away = block.first - search_.start;
    return away > -kSpan && away < static_cast<std::int64_t>(64 * search_.words.size());
  }

  // The last page whose first item is no more than `wanted`; -1 where there is none.
  static std::int64_t page_of(const std::byte* heads, std::int64_t pages, Item wanted) {
    std::int64_t low = 0, high = pages;
    while (low < high) {
      const std::int64_t middle = (low + high) / 2;
      if (load<Item>(heads + middle * static_cast<std::int64_t>(sizeof(Item))) <= wanted)
        low = middle + 1;
      else
        high = middle;
    }
    return low - 1;
  }

  // Reads the pages of records that wait, and notes the rows of items in them; false where that fails.
  bool look_up() {
    if (pages_.empty()) return true;
    const std::int64_t length = std::min(kPage, search_.end);
    starts_.clear();
    for (const RecordPage& page : pages_) {
      if (page.start < 0 || page.start + page.count * kRecordBytes > search_.end) return broken();
      starts_.push_back(std::min(page.start, search_.end - length));
    }
    copies_.resize(pages_.size() * static_cast<std::size_t>(length));
    const auto bytes = static_cast<std::size_t>(length);
    fault_ = read_({{}, nullptr, search_.file, starts_.data(), starts_.size(), bytes, copies_.data(), nullptr});
    if (fault_) return false;
    for (std::size_t i = 0; i < pages_.size(); ++i)
      if (!note(pages_[i], copies_.data() + i * bytes + (pages_[i].start - starts_[i]))) return false;
    pages_.clear();
    return true;
  }

  // Notes the rows of the items among the records of a page.
  bool note(const RecordPage& page, const std::byte* records) {
    const PostingBlock& block = *page.block;
    for (std::int64_t record = 0; record < page.count; ++record) {
      const std::byte* at = records + record * kRecordBytes;
      if (!is_wanted(load<Item>(at))) continue;
      const std::int64_t count = load<std::uint32_t>(at + 12);
      const std::uint32_t place = load<std::uint32_t>(at + 8);
      if (count <= kFewRows) {
        for (std::int64_t i = 0; i < count; ++i)
          mark_row(block.first - search_.start + std::int64_t{place >> (16 * i) & 0xffff});
        continue;
      }
      const std::int64_t start = block.records + block.count * kRecordBytes + 2 * std::int64_t{place};
      const bool is_bitmap = count > kMostRows;
      const std::int64_t stop = start + (is_bitmap ? kBitmapBytes : 2 * count);
      if (stop > search_.end) return broken();
      for (std::int64_t from = start; from < stop;) {
        const std::int64_t to = std::min(stop, (from / kPage + 1) * kPage);
        const std::int64_t first = block.first - search_.start + (is_bitmap ? 8 * (from - start) : 0);
        pieces_.push_back({from % kPage, to - from, first, is_bitmap});
        offsets_.push_back(from / kPage * kPage);
        from = to;
        if (pieces_.size() == kPiecesTogether && !mark()) return false;
      }
    }
    return true;
  }

  bool is_wanted(Item found) const {
    if (search_.item_count == 1) return found == item(0);
    std::size_t low = 0, high = search_.item_count;
    while (low < high) {
      const std::size_t middle = (low + high) / 2;
      if (item(middle) < found)
        low = middle + 1;
      else
        high = middle;
    }
    return low < search_.item_count && item(low) == found;
  }

  void mark_row(std::int64_t row) {
    const auto at = static_cast<std::size_t>(row);
    if (at < 64 * search_.words.size()) search_.words[at / 64] |= std::uint64_t{1} << (at % 64);
  }

  void mark_numbers(const Piece& piece, const std::byte* at) {
    for (std::int64_t i = 0; i < piece.bytes; i += 2) mark_row(piece.first + std::int64_t{load<std::uint16_t>(at + i)});
  }

  void mark_bits(const Piece& piece, const std::byte* at) {
    const auto stop = static_cast<std::int64_t>(8 * search_.words.size());
    std::int64_t to = piece.first / 8;  // a byte of the words
    for (const std::byte* const end = at + piece.bytes; at < end;) {
      if (to % 8 == 0 && end - at >= 8) {
        if (to >= 0 && to < stop) search_.words[static_cast<std::size_t>(to / 8)] |= load<std::uint64_t>(at);
        at += 8;
        to += 8;
        continue;
      }
      if (to >= 0 && to < stop)
        search_.words[static_cast<std::size_t>(to / 8)] |= std::to_integer<std::uint64_t>(*at) << (8 * (to % 8));
      ++at;
      ++to;
    }
  }

  // Reads the rows that wait, and sets their bits; false where that fails.
  bool mark() {
    if (pieces_.empty()) return true;
    const Landed landed = [this](std::uint32_t number, const std::byte* page) {
      const Piece& piece = pieces_[number];
      piece.is_bitmap ? mark_bits(piece, page + piece.start) : mark_numbers(piece, page + piece.start);
    };
    fault_ =
        read_({{}, nullptr, search_.file, offsets_.data(), offsets_.size(), kPageBytes, nullptr, nullptr, &landed});
    pieces_.clear();
    offsets_.clear();
    return !fault_;
  }

  bool broken() {
    fault_ = Fault{Fault::Kind::layout};
    return false;
  }

  const PostingSearch& search_;
  const ReadBatch& read_;
  std::optional<Fault> fault_;
  std::vector<RecordPage> pages_;
  std::vector<std::int64_t> starts_, offsets_;
  std::vector<std::byte> copies_;
  std::vector<Piece> pieces_;
};

}  // namespace

std::optional<Fault> mark_rows(const PostingSearch& search, const ReadBatch& read) {
  return search.floats ? Marker<double>(search, read).run() : Marker<std::int64_t>(search, read).run();
}

}  // namespace memhier
