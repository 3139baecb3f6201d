// Belady's rule over a window of announced batches; memhier/policies/_belady_reference.py is the same in Python.
//
// An announced use lies on a ring in the order of announcement and points to its key's next use. A resident key waits
// in the queue of the batch (the turn) that needs it next; the turns with waiting keys are a TurnSet, which knows the
// farthest. Residents that no announced batch needs (idle ones) are in a heap by score. Counters of uses and turns run
// freely and wrap around at 32 bits.
#pragma once

#include <algorithm>
#include <cassert>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "cache/chain.hpp"
#include "cache/idle_heap.hpp"
#include "cache/key_table.hpp"
#include "cache/turn_set.hpp"
#include "io/ring.hpp"

namespace memhier {

class BeladyWindow {
 public:
  static constexpr std::size_t kAhead = 16;

  BeladyWindow(std::size_t capacity, std::uint64_t half_life)
      : capacity_(capacity), half_life_(half_life), table_(capacity), uses_(64), turns_(64), waiting_(turns_.size()) {
    grow_entries(capacity);
  }

  std::size_t resident() const { return resident_; }
  std::size_t pending() const { return end_ - turn_; }
  std::size_t idle() const { return idle_; }

  bool contains(std::int64_t key) const {
    const std::uint32_t number = table_.find(key);
    return number != KeyTable::none && entries_[number].resident;
  }

  std::size_t bytes() const {
    const std::size_t entry_bytes = sizeof(Entry) + sizeof(Link);
    const std::size_t scratch =
        numbers_.capacity() + leaving_.capacity() + passed_.capacity() + 2 * evicted_.capacity();
    return sizeof *this + table_.bytes() + entries_.capacity() * entry_bytes + by_score_.bytes() + uses_.bytes() +
           turns_.bytes() + waiting_.bytes() + scratch * sizeof(std::uint32_t);
  }

  void prefetch(std::int64_t key) const { table_.prefetch(table_.token(key)); }

  std::vector<std::int64_t> take_evicted() { return std::exchange(evicted_, {}); }
  void forget_evicted() { evicted_.clear(); }

  // Adds a batch at the window's far end. Where memory runs out nothing has changed.
  void append(const std::int64_t* keys, std::size_t count) {
    if (end_ - turn_ == turns_.size()) grow_turns();
    turns_[end_] = {written_, 0, {}};
    try {
      announce_uses(keys, count);
    } catch (...) {
      close_batch();
      take_back();
      throw;
    }
    close_batch();
  }

  std::size_t last_announced() { return turns_[end_ - 1].count; }

  // Undoes the last append. A key's earlier uses are found from its first, which makes this slow; errors may be.
  void take_back() {
    --end_;
    const Turn batch = turns_[end_];
    for (std::uint32_t use = batch.first; use != batch.first + batch.count; ++use) {
      const std::uint32_t number = uses_[use].entry;
      Entry& entry = entries_[number];
      --entry.uses;
      if (entry.uses == 0) {
        if (entry.resident) {
          stop_waiting(number, end_);
          make_idle(number);
        } else {
          table_.erase(number);
        }
        continue;
      }
      entry.latest = entry.next;
      for (std::uint32_t left = entry.uses; left > 1; --left) entry.latest = uses_[entry.latest].next;
    }
    written_ = batch.first;
  }

  // Whether these are the keys of the window's first batch, each once and in the order in which they were announced.
  bool is_next_in_order(const std::int64_t* keys, std::size_t count) {
    const Turn& batch = turns_[turn_];
    if (count != batch.count) return false;
    for (std::size_t i = 0; i < count; ++i) {
      const auto use = static_cast<std::uint32_t>(batch.first + i);
      if (i + kAhead < count) table_.prefetch_number(uses_[use + kAhead].entry);
      if (table_.key(uses_[use].entry) != keys[i]) return false;
    }
    return true;
  }

  // Whether these are the keys of the window's first batch.
  bool is_next(const std::int64_t* keys, std::size_t count) {
    const std::uint32_t mark = next_mark();
    std::size_t distinct = 0;
    for (std::size_t i = 0; i < count; ++i) {
      const std::uint32_t number = table_.find(keys[i]);
      if (number == KeyTable::none) return false;
      Entry& entry = entries_[number];
      if (entry.uses == 0 || uses_[entry.next].turn != turn_) return false;
      distinct += entry.held != mark;
      entry.held = mark;
    }
    return distinct == turns_[turn_].count;
  }

  std::vector<std::int64_t> next_keys() {
    const Turn& batch = turns_[turn_];
    std::vector<std::int64_t> keys;
    keys.reserve(batch.count);
    for (std::uint32_t use = batch.first; use != batch.first + batch.count; ++use)
      keys.push_back(table_.key(uses_[use].entry));
    return keys;
  }

  // The keys of the batch after so many others that are not resident, and that none of those others needs.
  std::vector<std::int64_t> awaited(std::size_t after) {
    std::vector<std::int64_t> keys;
    if (after >= pending()) return keys;
    const Turn& batch = turns_[turn_ + static_cast<std::uint32_t>(after)];
    for (std::uint32_t use = batch.first; use != batch.first + batch.count; ++use) {
      if (use + kAhead - batch.first < batch.count) __builtin_prefetch(&entries_[uses_[use + kAhead].entry]);
      const std::uint32_t number = uses_[use].entry;
      if (entries_[number].resident == 0 && entries_[number].next == use) keys.push_back(table_.key(number));
    }
    return keys;
  }

  // Marks the next batch and the pinned residents; returns how many they are.
  std::size_t hold(const std::int64_t* pinned, std::size_t pins) {
    const std::uint32_t mark = next_mark();
    const Turn& batch = turns_[turn_];
    missing_ = 0;
    for (std::uint32_t use = batch.first; use != batch.first + batch.count; ++use) {
      if (use + kAhead - batch.first < batch.count) __builtin_prefetch(&entries_[uses_[use + kAhead].entry], 1);
      Entry& entry = entries_[uses_[use].entry];
      entry.held = mark;
      missing_ += !entry.resident;
    }
    std::size_t held = batch.count;
    for_each_ahead(table_, pinned, pins, [&](std::size_t i, KeyTable::Token token) {
      const std::uint32_t number = table_.find(token, pinned[i]);
      if (number == KeyTable::none || !entries_[number].resident) return;
      held += entries_[number].held != mark;
      entries_[number].held = mark;
    });
    return held;
  }

  // Accesses the window's first batch, whose keys are held, in the order in which they are given here.
  void access_as_given(const std::int64_t* keys, std::size_t count, bool* hit) {
    numbers_.resize(count);
    for (std::size_t i = 0; i < count; ++i) {
      numbers_[i] = table_.find(keys[i]);
      hit[i] = entries_[numbers_[i]].resident;
    }
    step(nullptr);
    // A key's first turn in the batch keeps its outcome; the later ones find the key there.
    const std::uint32_t mark = next_mark();
    for (std::size_t i = 0; i < count; ++i) {
      Entry& entry = entries_[numbers_[i]];
      hit[i] = hit[i] != 0 || entry.held == mark;
      entry.held = mark;
    }
  }

  // Accesses the window's first batch, whose keys are held; fills `hit`, unless null, for its distinct keys.
  void step(bool* hit) {
    if (resident_ + missing_ > capacity_) make_room(resident_ + missing_ - capacity_);
    const Turn batch = turns_[turn_];
    rescale();
    const double weight = std::ldexp(1.0 + static_cast<double>(clock_ % half_life_) / static_cast<double>(half_life_),
                                     static_cast<int>(clock_ / half_life_ - base_));
    stop_all_waiting(turn_);
    for (std::uint32_t use = batch.first; use != batch.first + batch.count; ++use) {
      if (use + kAhead - batch.first < written_ - batch.first) prefetch_entry(uses_[use + kAhead].entry);
      const std::uint32_t number = uses_[use].entry;
      Entry& entry = entries_[number];
      if (hit != nullptr) *hit++ = entry.resident;
      resident_ += !entry.resident;
      entry.resident = true;
      entry.score.uses += weight;
      entry.score.last = ++accesses_;
      if (--entry.uses > 0) {
        entry.next = uses_[use].next;
        wait(number, uses_[entry.next].turn);
      } else {
        make_idle(number);
      }
    }
    ++turn_;
    clock_ += batch.count;
  }

  void expire() {
    std::vector<std::uint32_t> idle;
    idle.reserve(idle_);
    for (std::uint32_t number = 0; number < table_.numbers(); ++number)
      if (is_idle(number)) idle.push_back(number);
    std::sort(idle.begin(), idle.end(),
              [&](auto a, auto b) { return entries_[a].score.last < entries_[b].score.last; });
    for (const std::uint32_t number : idle) evict(number);
  }

  void discard(std::int64_t key) {
    if (contains(key)) evict(table_.find(key));
    evicted_.clear();
  }

 private:
  static constexpr int kRescale = 512;
  static constexpr std::uint32_t kMarks = 1u << 30;
  static constexpr std::size_t kBlock = 256;  // keys announced at a time

  struct Entry {           // a key that is resident or announced
    std::uint32_t next;    // its soonest announced use, if any
    std::uint32_t latest;  // the one announced last
    std::uint32_t uses = 0;
    std::uint32_t held : 30 = 0;  // the last step that held it
    std::uint32_t resident : 1 = 0;
    std::uint32_t by_score : 1 = 0;  // whether `by_score_` has it; it may have entries that are not idle any more
    Score score;
  };
  struct Use {
    std::uint32_t entry;
    std::uint32_t turn;
    std::uint32_t next;  // the key's next use, if it has one
  };
  struct Turn {
    std::uint32_t first;  // of its uses
    std::uint32_t count;
    Chain keys;  // residents that wait for it
  };

  void grow_entries(std::size_t count) {
    if (count <= entries_.size()) return;
    count = std::max(count, entries_.size() + entries_.size() / 16);
    links_.reserve(count);  // a resize alone would double it
    entries_.reserve(count);
    by_score_.reserve(count);
    links_.resize(count);
    entries_.resize(count);  // last, as its size says that all have grown
  }

  // Finds the entries of many keys, and has them on their way to the processor, before it looks at the first.
  void announce_uses(const std::int64_t* keys, std::size_t count) {
    std::uint32_t numbers[kBlock];
    for (std::size_t start = 0; start < count; start += kBlock) {
      const std::size_t some = std::min(kBlock, count - start);
      for_each_ahead(table_, keys + start, some, [&](std::size_t i, KeyTable::Token token) {
        numbers[i] = table_.find(token, keys[start + i]);
        if (numbers[i] != KeyTable::none) __builtin_prefetch(&entries_[numbers[i]], 1);
      });
      for (std::size_t i = 0; i < some; ++i) announce_key(keys[start + i], numbers[i]);
    }
  }

  // `number` is that of the key before the keys of its block were announced; none if it had none.
  void announce_key(std::int64_t key, std::uint32_t number) {
    const std::uint32_t first = turns_[end_].first;
    if (written_ - turns_[turn_].first == uses_.size()) uses_.grow(turns_[turn_].first, written_);
    if (number == KeyTable::none) number = table_.find(key);  // it may have come in the block before
    if (number == KeyTable::none) {
      grow_entries(table_.size() + 1);  // numbers are handed out again before new ones are
      number = table_.insert(key);
      if (entries_[number].by_score != 0) forget_absent();
      entries_[number] = {};
    } else if (entries_[number].uses > 0 && entries_[number].latest - first < written_ - first) {
      return;  // a repeat
    }
    announce_use(number);
  }

  void close_batch() {
    turns_[end_].count = written_ - turns_[end_].first;
    ++end_;
  }

  void announce_use(std::uint32_t number) {
    uses_[written_] = {number, end_, 0};
    Entry& entry = entries_[number];
    if (entry.uses == 0) {
      entry.next = written_;
      if (entry.resident) {
        --idle_;
        wait(number, end_);
      }
    } else {
      uses_[entry.latest].next = written_;
    }
    entry.latest = written_;
    ++entry.uses;
    ++written_;
  }

  void grow_turns() {
    TurnSet waiting(2 * turns_.size());
    turns_.grow(turn_, end_);
    waiting_ = std::move(waiting);
    for (std::uint32_t turn = turn_; turn != end_; ++turn)
      if (!turns_[turn].keys.empty()) waiting_.add(turns_.place(turn));
  }

  std::uint32_t next_mark() {
    if (++mark_ == kMarks) {  // the marks' numbers start over
      for (Entry& entry : entries_) entry.held = 0;
      mark_ = 1;
    }
    return mark_;
  }

  void prefetch_entry(std::uint32_t number) const {
    __builtin_prefetch(&entries_[number], 1);
    __builtin_prefetch(&links_[number], 1);
  }

  // Weights double every half-life: before one could overflow, all scores are scaled back. Old ones become equal,
  // namely zero, and then go by their last access.
  void rescale() {
    for (; clock_ / half_life_ - base_ >= kRescale; base_ += kRescale) {
      for (Entry& entry : entries_) entry.score.uses = std::ldexp(entry.score.uses, -kRescale);
      by_score_.renew([&](std::uint32_t number, Score& score) {
        score = entries_[number].score;
        return true;
      });
    }
  }

  void make_room(std::size_t count) {
    leaving_.clear();
    passed_.clear();
    leaving_.reserve(count);
    evicted_.reserve(count);
    for (std::uint32_t number; count > 0 && (number = pop_idle()) != IdleHeap::none;) {
      const bool held = entries_[number].held == mark_;
      (held ? passed_ : leaving_).push_back(number);
      count -= !held;
    }
    for (std::size_t i = 0; i < leaving_.size(); ++i) {
      if (i + kAhead < leaving_.size()) table_.prefetch_number(leaving_[i + kAhead]);
      if (i + kAhead / 2 < leaving_.size()) table_.prefetch(table_.token(table_.key(leaving_[i + kAhead / 2])));
      evict(leaving_[i]);
    }
    for (const std::uint32_t number : passed_) rank(number);
    for (std::uint32_t turn = end_; count > 0;) {
      turn = last_waited_for(turn - 1);
      for (std::uint32_t number = turns_[turn].keys.oldest; number != Chain::none && count > 0;) {
        const std::uint32_t victim = number;
        number = links_[victim].newer;
        if (entries_[victim].held == mark_) continue;
        evict(victim);
        --count;
      }
    }
  }

  // The farthest turn, not beyond `turn`, that a resident waits for; there is one.
  std::uint32_t last_waited_for(std::uint32_t turn) const {
    const std::size_t from = turns_.place(turn);
    std::size_t place = waiting_.at_or_before(from);
    if (place == TurnSet::none) place = waiting_.at_or_before(turns_.size() - 1);
    assert(place != TurnSet::none);
    return turn - static_cast<std::uint32_t>((from - place) & (turns_.size() - 1));
  }

  void evict(std::uint32_t number) {
    Entry& entry = entries_[number];
    evicted_.push_back(table_.key(number));
    entry.resident = false;
    --resident_;
    if (entry.uses > 0) {
      stop_waiting(number, uses_[entry.next].turn);
    } else {
      --idle_;
      table_.erase(number);
    }
  }

  bool is_idle(std::uint32_t number) const { return entries_[number].resident != 0 && entries_[number].uses == 0; }

  void make_idle(std::uint32_t number) {
    ++idle_;
    if (entries_[number].by_score == 0) rank(number);
  }

  void rank(std::uint32_t number) {
    entries_[number].by_score = 1;
    by_score_.push(number, entries_[number].score);
  }

  // Takes the idle entry with the smallest score out of `by_score_`.
  std::uint32_t pop_idle() {
    for (Score score;;) {
      const std::uint32_t number = by_score_.pop(score, [&](std::uint32_t entry, Score& renewed) {
        renewed = entries_[entry].score;
        entries_[entry].by_score = is_idle(entry);
        return is_idle(entry);
      });
      if (number == IdleHeap::none) return number;
      if (const std::uint32_t soon = by_score_.upcoming(kAhead); soon != IdleHeap::none)
        __builtin_prefetch(&entries_[soon], 1);
      entries_[number].by_score = 0;
      if (!is_idle(number)) continue;
      if (!(score < entries_[number].score)) return number;
      rank(number);
    }
  }

  // Takes those entries out of `by_score_` that belong to no key, so that their numbers may serve others.
  void forget_absent() {
    by_score_.renew([&](std::uint32_t number, Score&) {
      Entry& entry = entries_[number];
      entry.by_score = entry.resident != 0 || entry.uses != 0;
      return entry.by_score != 0;
    });
  }

  void wait(std::uint32_t number, std::uint32_t turn) {
    Chain& keys = turns_[turn].keys;
    if (keys.empty()) waiting_.add(turns_.place(turn));
    keys.append(links_, number);
  }

  void stop_waiting(std::uint32_t number, std::uint32_t turn) {
    Chain& keys = turns_[turn].keys;
    keys.remove(links_, number);
    if (keys.empty()) waiting_.remove(turns_.place(turn));
  }

  void stop_all_waiting(std::uint32_t turn) {
    Chain& keys = turns_[turn].keys;
    if (!keys.empty()) waiting_.remove(turns_.place(turn));
    keys = {};
  }

  const std::size_t capacity_;
  const std::uint64_t half_life_;
  KeyTable table_;
  std::vector<Entry> entries_;
  std::vector<Link> links_;
  IdleHeap by_score_;
  Ring<Use> uses_;
  Ring<Turn> turns_;
  TurnSet waiting_;
  std::vector<std::uint32_t> numbers_;
  std::vector<std::uint32_t> leaving_;
  std::vector<std::uint32_t> passed_;
  std::vector<std::int64_t> evicted_;
  std::size_t resident_ = 0;
  std::size_t missing_ = 0;
  std::size_t idle_ = 0;       // residents that no announced batch needs
  std::uint32_t turn_ = 0;     // the window's first batch
  std::uint32_t end_ = 0;      // the batch announced next
  std::uint32_t written_ = 0;  // uses announced so far
  std::uint32_t mark_ = 0;
  std::uint64_t clock_ = 0;  // keys accessed, repeats within a batch not counted
  std::uint64_t accesses_ = 0;
  std::uint64_t base_ = 0;  // halvings already taken out of the scores
};

}  // namespace memhier
