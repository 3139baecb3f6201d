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
constexpr std::size_t kPagesTogether = 6;  // of records, which are copied
constexpr std::size_t kPiecesTogether = 128;
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
  std::size_t group;
  bool is_bitmap;

  std::int64_t span() const { return is_bitmap ? 8 * bytes : kSpan; }
};

// A page of records of a block, in which items of a group are looked for.
struct RecordPage {
  const PostingBlock* block;
  std::int64_t start, count;
  std::size_t group;
};

// The items of a group, and the rows found that hold one of them.
struct Group {
  std::size_t first, stop;  // among all items
  std::size_t filter;
  std::span<std::uint64_t> words;
  bool is_there = false, has_pieces = false;
};

template <class Item>
class Marker {
 public:
  Marker(const PostingSearch& search, const ReadBatch& read)
      : search_(search), read_(read), width_(search.words.size() / search.filters.size()),
        scratch_((search.ends.size() - search.filters.size()) * width_) {
    std::uint64_t* beside = scratch_.data();
    for (std::size_t filter = 0; filter < search.filters.size(); ++filter) {
      for (const std::size_t first = groups_.size(); groups_.size() < group_end(filter);) {
        const std::size_t i = groups_.size();
        std::uint64_t* const words = i == first ? search.words.data() + filter * width_ : beside;
        if (i != first) beside += width_;
        const auto item = static_cast<std::size_t>(i == 0 ? 0 : search.ends[i - 1]);
        groups_.push_back({item, static_cast<std::size_t>(search.ends[i]), filter, {words, width_}});
      }
    }
  }

  std::optional<Fault> run() {
    const auto* heads = reinterpret_cast<const std::byte*>(search_.blocks.data() + search_.blocks.size());
    for (const PostingBlock& block : search_.blocks) {
      const std::int64_t pages = (block.count + kPageRecords - 1) / kPageRecords;
      for (std::size_t group = 0; group < groups_.size() && pages > 0 && is_near(block); ++group)
        if (!look_in(block, heads, pages, group)) return fault_;
      heads += pages * static_cast<std::int64_t>(sizeof(Item));
    }
    if (!look_up()) return fault_;
    pass_over();
    if (mark()) meet();
    return fault_;
  }

 private:
  Item item(std::size_t number) const { return load<Item>(search_.items + number * sizeof(Item)); }

  bool is_near(const PostingBlock& block) const {
    const std::int64_t away = block.first - search_.start;
    return away > -kSpan && away < static_cast<std::int64_t>(64 * width_);
  }

  // The groups of a filter: their end, and all of them.
  std::size_t group_end(std::size_t filter) const { return static_cast<std::size_t>(search_.filters[filter]); }
  std::span<const Group> groups_of(std::size_t filter) const {
    const std::size_t first = filter == 0 ? 0 : group_end(filter - 1);
    return std::span(groups_).subspan(first, group_end(filter) - first);
  }

  // Asks for the pages of records of a block that may have items of a group; false where a read fails.
  bool look_in(const PostingBlock& block, const std::byte* heads, std::int64_t pages, std::size_t group) {
    std::int64_t last = -1;
    for (std::size_t i = groups_[group].first; i < groups_[group].stop; ++i) {
      const std::int64_t page = page_of(heads, pages, item(i));
      if (page == last) continue;
      last = page;
      pages_.push_back({&block, block.records + page * kPageRecords * kRecordBytes,
                        std::min(block.count - page * kPageRecords, kPageRecords), group});
      if (pages_.size() == kPagesTogether && !look_up()) return false;
    }
    return true;
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
    Group& group = groups_[page.group];
    std::int64_t low = 0;
    for (std::size_t i = group.first; i < group.stop && low < page.count; ++i) {
      low = record_of(records, low, page.count, item(i));
      if (low == page.count || load<Item>(records + low * kRecordBytes) != item(i)) continue;
      const std::byte* at = records + low * kRecordBytes;
      const std::int64_t count = load<std::uint32_t>(at + 12);
      const std::uint32_t place = load<std::uint32_t>(at + 8);
      group.is_there = group.is_there || count > 0;
      if (count <= kFewRows) {
        for (std::int64_t row = 0; row < count; ++row)
          mark_row(group.words, page.block->first - search_.start + std::int64_t{place >> (16 * row) & 0xffff});
      } else if (!add_pieces(*page.block, page.group, place, count)) {
        return false;
      }
    }
    return true;
  }

  // The first of the records from `low` on whose item is no less than `wanted`; these ascend.
  static std::int64_t record_of(const std::byte* records, std::int64_t low, std::int64_t high, Item wanted) {
    while (low < high) {
      const std::int64_t middle = (low + high) / 2;
      if (load<Item>(records + middle * kRecordBytes) < wanted)
        low = middle + 1;
      else
        high = middle;
    }
    return low;
  }

  // Notes the pages that hold the rows of an item of a block; false where a read fails.
  bool add_pieces(const PostingBlock& block, std::size_t group, std::uint32_t place, std::int64_t count) {
    const std::int64_t start = block.records + block.count * kRecordBytes + 2 * std::int64_t{place};
    const bool is_bitmap = count > kMostRows;
    const std::int64_t stop = start + (is_bitmap ? kBitmapBytes : 2 * count);
    if (stop > search_.end) return broken();
    groups_[group].has_pieces = true;
    for (std::int64_t from = start; from < stop;) {
      const std::int64_t to = std::min(stop, (from / kPage + 1) * kPage);
      const std::int64_t first = block.first - search_.start + (is_bitmap ? 8 * (from - start) : 0);
      pieces_.push_back({from % kPage, to - from, first, group, is_bitmap});
      offsets_.push_back(from / kPage * kPage);
      from = to;
      if (pieces_.size() == kPiecesTogether && !mark()) return false;
    }
    return true;
  }

  // Leaves out the pieces that wait where groups of the filter whose rows are known hold none.
  void pass_over() {
    std::size_t kept = 0;
    for (std::size_t i = 0; i < pieces_.size(); ++i) {
      const std::span<const Group> groups = groups_of(groups_[pieces_[i].group].filter);
      const auto holds = [&](const Group& group) {
        return group.is_there && (group.has_pieces || has_row(group.words, pieces_[i].first, pieces_[i].span()));
      };
      if (groups.size() > 1 && !std::all_of(groups.begin(), groups.end(), holds)) continue;
      pieces_[kept] = pieces_[i];
      offsets_[kept++] = offsets_[i];
    }
    pieces_.resize(kept);
    offsets_.resize(kept);
  }

  // Whether any of `count` rows from `first` on has a bit, or lies in a word that has one.
  static bool has_row(std::span<const std::uint64_t> words, std::int64_t first, std::int64_t count) {
    const auto size = static_cast<std::int64_t>(words.size());
    const std::int64_t low = std::clamp(first >> 6, std::int64_t{0}, size);
    const std::int64_t high = std::clamp(((first + count - 1) >> 6) + 1, low, size);
    return std::any_of(words.begin() + low, words.begin() + high, [](std::uint64_t word) { return word != 0; });
  }

  void mark_row(std::span<std::uint64_t> words, std::int64_t row) {
    const auto at = static_cast<std::size_t>(row);
    if (at < 64 * words.size()) words[at / 64] |= std::uint64_t{1} << (at % 64);
  }

  void mark_numbers(const Piece& piece, const std::byte* at) {
    const std::span<std::uint64_t> words = groups_[piece.group].words;
    for (std::int64_t i = 0; i < piece.bytes; i += 2)
      mark_row(words, piece.first + std::int64_t{load<std::uint16_t>(at + i)});
  }

  void mark_bits(const Piece& piece, const std::byte* at) {
    const std::span<std::uint64_t> words = groups_[piece.group].words;
    const auto stop = static_cast<std::int64_t>(8 * words.size());
    std::int64_t to = piece.first / 8;  // a byte of the words
    for (const std::byte* const end = at + piece.bytes; at < end;) {
      if (to % 8 == 0 && end - at >= 8) {
        if (to >= 0 && to < stop) words[static_cast<std::size_t>(to / 8)] |= load<std::uint64_t>(at);
        at += 8;
        to += 8;
        continue;
      }
      if (to >= 0 && to < stop)
        words[static_cast<std::size_t>(to / 8)] |= std::to_integer<std::uint64_t>(*at) << (8 * (to % 8));
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

  // Leaves the rows that all groups of a filter hold; no right file tells of one behind the last that counts.
  void meet() {
    for (std::size_t filter = 0; filter < search_.filters.size(); ++filter) {
      const std::span<const Group> groups = groups_of(filter);
      for (const Group& group : groups.subspan(1))
        for (std::size_t i = 0; i < width_; ++i) groups[0].words[i] &= group.words[i];
      if (search_.rows % 64 != 0) groups[0].words.back() &= ~(~std::uint64_t{0} << (search_.rows % 64));
    }
  }

  bool broken() {
    fault_ = Fault{Fault::Kind::layout};
    return false;
  }

  const PostingSearch& search_;
  const ReadBatch& read_;
  std::optional<Fault> fault_;
  const std::size_t width_;  // words of a filter
  std::vector<std::uint64_t> scratch_;
  std::vector<Group> groups_;
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
