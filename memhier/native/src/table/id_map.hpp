// Rows of a table for any int64 ids, each id with a row of its own: given out as ids come, taken back by age or use.
//
// The state lies in arrays that Python owns and makes durable, with room for slots that grows up to the capacity; this
// class adds an index, and a frame for every batch that was mapped but not begun. A frame holds the values before the
// batch, and trades them for those after it: so the state goes back and forth between the batch in training and the
// last one read ahead.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <vector>

#include "bind/array.hpp"
#include "cache/slotmap.hpp"

namespace memhier {

// The arrays of an IdMap, by slot but for the last three.
struct IdMapArrays {
  Array<std::int64_t, 1> ids;      // of a free slot: the next free one, -1 for none
  Array<std::uint32_t, 1> last;    // the number of the last batch that used it
  Array<std::uint32_t, 1> uses;    // 0: free
  Array<std::uint8_t, 1> cells;    // the sketch: counts of ids without a slot
  Array<std::uint8_t, 1> changed;  // by 16 slots, then by 256 cells: whether they changed
  Array<std::int64_t, 1> numbers;  // batches, first free slot, slots ever used, slots in use, the sketch's hand
};

struct IdMapRules {
  std::size_t capacity;        // the most slots
  std::uint32_t admit_after;   // sightings before an id has a slot
  std::uint32_t expire_after;  // batches without use until an id is forgotten; 0: never
  std::uint32_t evict;         // when all slots are in use: 0 nothing, 1 the least recently, 2 the least often used
  std::uint32_t pending;       // batches whose ids stay
};

class IdMap {
 public:
  static constexpr std::size_t kGroup = 16, kBlock = 256;

  IdMap(IdMapArrays arrays, IdMapRules rules);

  // Gives each id its slot, or -1; returns how many slots were given out: which (added), and to the ids at which
  // places. Returns -1 if the arrays have no room for them; nothing has changed then.
  std::int64_t map(const std::int64_t* ids, std::size_t count, std::int64_t* slots, std::int64_t* added,
                   std::int64_t* places);
  // Takes larger or smaller arrays with the same values.
  void resize(Array<std::int64_t, 1> ids, Array<std::uint32_t, 1> last, Array<std::uint32_t, 1> uses,
              Array<std::uint8_t, 1> changed);
  // The slot of each id, or -1; changes nothing.
  void find(const std::int64_t* ids, std::size_t count, std::int64_t* slots) const;
  // The first frames are final.
  void begin(std::size_t frames);
  // Goes back over the newest frame, and forgets it.
  void undo();
  // Go back over all frames, and forth again; forget the frames that were gone back over.
  void rewind();
  void advance();
  void drop();
  // The arrays were filled anew; false if an id has two slots.
  bool reindex();
  std::size_t frames() const { return frames_.size(); }
  std::size_t bytes() const;
  std::size_t last_bytes() const;  // of the newest frame

 private:
  enum Number : std::size_t { kBatches, kFree, kFresh, kLive, kHand, kNumbers };
  struct NoRoom {};
  struct Entry {
    std::uint32_t slot, last, uses;
    std::int64_t id;
  };
  struct Word {
    std::uint32_t at;
    std::uint64_t cells;
  };
  struct Frame {
    std::vector<Entry> entries;
    std::vector<Word> words;
    std::int64_t numbers[kNumbers];

    std::size_t bytes() const {
      return sizeof(Frame) + entries.capacity() * sizeof(Entry) + words.capacity() * sizeof(Word);
    }
  };

  void check() const;
  std::uint32_t now() const { return static_cast<std::uint32_t>(a_.numbers[kBatches]); }
  bool is_expired(std::size_t slot) const {
    return rules_.expire_after != 0 && now() - a_.last[slot] > rules_.expire_after;
  }
  std::uint64_t worth(std::size_t slot) const {
    return rules_.evict == 2 ? std::uint64_t{a_.uses[slot]} << 32 | a_.last[slot] : a_.last[slot];
  }
  bool may_leave(std::size_t slot) const { return a_.uses[slot] != 0 && now() - a_.last[slot] >= rules_.pending; }
  std::size_t map_known(const std::int64_t* ids, std::size_t count, std::int64_t* slots);
  std::size_t admit(const std::int64_t* ids, std::size_t count, std::int64_t* slots, std::int64_t* added,
                    std::int64_t* places);
  void note(std::size_t slot);
  void note_word(std::size_t at);
  void use(std::size_t slot);
  void forget(std::size_t slot, std::int64_t next);
  void free_in_order(std::size_t slot, std::int64_t& tail);
  std::int64_t allocate(std::int64_t id);
  bool collect();
  std::size_t expire(std::int64_t& tail);
  std::size_t evict(std::size_t wanted, std::int64_t& tail);
  bool is_admitted(std::int64_t id);
  void trade(Frame& frame, bool back);

  IdMapArrays a_;
  IdMapRules rules_;
  std::size_t room_, groups_;  // slots, and groups of them, that the arrays have
  std::optional<HashIndex> index_;
  std::deque<Frame> frames_;
  // These spare work and change no result.
  std::uint32_t expires_after_ = 0;  // no id expires before this batch is over
  std::uint32_t barren_ = 0;         // in this batch there is no slot to be had
};

}  // namespace memhier
