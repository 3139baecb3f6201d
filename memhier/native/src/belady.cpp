// Belady's rule over a window of announced batches; memhier/policies/_belady_reference.py is the same in Python.
//
// An announced use lies on a ring in the order of announcement and points to its key's next use. A resident key waits
// in the queue of the batch (the turn) that needs it next; the turns with waiting keys are a TurnSet, which knows the
// farthest. Residents that no announced batch needs are in a heap by score. Counters of uses and turns run freely and
// wrap around at 32 bits; the rings' sizes are powers of two, so a counter's low bits are its place.
#include <nanobind/nanobind.h>

#include <algorithm>
#include <bit>
#include <cassert>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

#include "buffer.hpp"
#include "chain.hpp"
#include "idle_heap.hpp"
#include "key_table.hpp"
#include "module.hpp"
#include "turn_set.hpp"

namespace nb = nanobind;

namespace memhier {
namespace {

// Elements by freely running counters; growing keeps those from `first` to `last`.
template <class T>
class Ring {
 public:
  explicit Ring(std::size_t size) : items_(size) {}

  T& operator[](std::uint32_t counter) { return items_[place(counter)]; }
  std::size_t place(std::uint32_t counter) const { return counter & (items_.size() - 1); }
  std::size_t size() const { return items_.size(); }
  std::size_t bytes() const { return items_.capacity() * sizeof(T); }

  void grow(std::uint32_t first, std::uint32_t last) {
    Ring larger(2 * items_.size());
    for (std::uint32_t counter = first; counter != last; ++counter) larger[counter] = (*this)[counter];
    items_.swap(larger.items_);
  }

 private:
  std::vector<T> items_;
};

class Belady {
 public:
  Belady(std::size_t capacity, std::uint64_t half_life)
      : capacity_(capacity),
        half_life_(half_life),
        table_(capacity),
        idle_(scores_),
        uses_(64),
        turns_(64),
        waiting_(turns_.size()) {
    grow_entries(capacity);
  }

  std::size_t size() const {
    const std::lock_guard lock(mutex_);
    return resident_;
  }

  std::size_t pending() const {
    const std::lock_guard lock(mutex_);
    return end_ - turn_;
  }

  bool contains(std::int64_t key) const {
    const std::lock_guard lock(mutex_);
    const std::uint32_t number = table_.find(key);
    return number != KeyTable::none && entries_[number].resident;
  }

  std::size_t bytes() const {
    const std::lock_guard lock(mutex_);
    const std::size_t entry_bytes = sizeof(Entry) + sizeof(Link) + sizeof(Score);
    const std::size_t scratch = numbers_.capacity() + passed_.capacity() + 2 * evicted_.capacity();
    return sizeof *this + table_.bytes() + entries_.capacity() * entry_bytes + idle_.bytes() + uses_.bytes() +
           turns_.bytes() + waiting_.bytes() + scratch * sizeof(std::uint32_t);
  }

  // 0, or the capacity that would be enough, nothing changed.
  std::size_t announce(nb::handle keys) {
    const Buffer batch(keys, Buffer::Access::read);
    nb::gil_scoped_release released;
    const std::lock_guard lock(mutex_);
    append(batch.as<const std::int64_t>(), batch.count<std::int64_t>());
    const std::size_t distinct = turns_[end_ - 1].count;
    if (distinct <= capacity_) return 0;
    take_back();
    return distinct;
  }

  nb::object access(nb::handle keys, nb::handle pinned, nb::handle hit) {
    const Buffer batch(keys, Buffer::Access::read), held(pinned, Buffer::Access::read);
    const Buffer hits(hit, Buffer::Access::write);
    hits.require(hits.bytes() == batch.count<std::int64_t>(), "hit: one byte per key");
    std::vector<std::int64_t> evicted;
    std::size_t enough = 0;
    bool as_announced = true;
    {
      nb::gil_scoped_release released;
      const std::lock_guard lock(mutex_);
      const auto* key = batch.as<const std::int64_t>();
      const std::size_t count = batch.count<std::int64_t>();
      const bool unannounced = end_ == turn_;
      if (unannounced) append(key, count);
      else as_announced = is_next(key, count);
      if (as_announced) {
        enough = hold(held.as<const std::int64_t>(), held.count<std::int64_t>());
        if (enough > capacity_) {
          if (unannounced) take_back();
        } else {
          enough = 0;
          access_as_given(key, count, hits.as<std::uint8_t>());
        }
      }
      evicted.swap(evicted_);
    }
    if (!as_announced) throw nb::value_error("keys differ from the batch that was announced for this turn");
    if (enough != 0) return nb::int_(enough);
    return as_bytes(evicted);
  }

  nb::tuple advance() {
    std::vector<std::int64_t> keys, evicted;
    std::vector<std::uint8_t> hits;
    {
      nb::gil_scoped_release released;
      const std::lock_guard lock(mutex_);
      if (end_ == turn_) throw nb::value_error("no batch is announced");
      const std::uint32_t first = turns_[turn_].first, last = first + turns_[turn_].count;
      keys.reserve(last - first);
      for (std::uint32_t use = first; use != last; ++use) keys.push_back(table_.key(uses_[use].entry));
      hits.resize(keys.size());
      hold(nullptr, 0);
      step(hits.data());
      evicted.swap(evicted_);
    }
    return nb::make_tuple(as_bytes(keys), as_bytes(hits), as_bytes(evicted));
  }

  void replay(nb::handle keys, std::size_t lookahead, nb::handle hit) {
    const Buffer trace(keys, Buffer::Access::read), hits(hit, Buffer::Access::write);
    hits.require(hits.bytes() == trace.count<std::int64_t>(), "hit: one byte per key");
    nb::gil_scoped_release released;
    const std::lock_guard lock(mutex_);
    const auto* key = trace.as<const std::int64_t>();
    const std::size_t count = trace.count<std::int64_t>();
    std::size_t announced = 0;
    for (std::size_t i = 0; i < count; ++i) {
      for (; announced < count && announced <= i + lookahead; ++announced) {
        if (announced + kAhead < count) table_.prefetch(table_.token(key[announced + kAhead]));
        append(key + announced, 1);
      }
      hold(nullptr, 0);
      step(hits.as<std::uint8_t>() + i);
      evicted_.clear();
    }
  }

  nb::object expire() {
    std::vector<std::int64_t> evicted;
    {
      nb::gil_scoped_release released;
      const std::lock_guard lock(mutex_);
      std::vector<std::uint32_t> idle = idle_.entries();
      std::sort(idle.begin(), idle.end(), [&](auto a, auto b) { return scores_[a].last < scores_[b].last; });
      for (const std::uint32_t entry : idle) evict(entry);
      evicted.swap(evicted_);
    }
    return as_bytes(evicted);
  }

  void discard(nb::handle keys) {
    const Buffer gone(keys, Buffer::Access::read);
    nb::gil_scoped_release released;
    const std::lock_guard lock(mutex_);
    for (std::size_t i = 0; i < gone.count<std::int64_t>(); ++i) {
      const std::uint32_t entry = table_.find(gone.as<const std::int64_t>()[i]);
      if (entry != KeyTable::none && entries_[entry].resident) evict(entry);
    }
    evicted_.clear();
  }

 private:
  static constexpr std::size_t kAhead = 16;
  static constexpr int kRescale = 512;

  struct Entry {           // a key that is resident or announced
    std::uint32_t next;    // its soonest announced use, if any
    std::uint32_t latest;  // the one announced last
    std::uint32_t uses = 0;
    std::uint32_t held = 0;  // the last step that held it
    bool resident = false;
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

  template <class T>
  static nb::object as_bytes(const std::vector<T>& items) {
    return nb::bytes(reinterpret_cast<const char*>(items.data()), items.size() * sizeof(T));
  }

  void grow_entries(std::size_t count) {
    if (count <= entries_.size()) return;
    count = std::max(count, entries_.size() + entries_.size() / 2);
    entries_.resize(count);
    links_.resize(count);
    scores_.resize(count);
    idle_.resize(count);
  }

  // Adds a batch at the window's far end.
  void append(const std::int64_t* keys, std::size_t count) {
    if (end_ - turn_ == turns_.size()) grow_turns();
    turns_[end_] = {written_, 0, {}};
    for_each_ahead(table_, keys, count, [&](std::size_t i, KeyTable::Token token) {
      std::uint32_t number = table_.find(token, keys[i]);
      if (number == KeyTable::none) {
        number = table_.insert(keys[i]);
        grow_entries(table_.numbers());
        entries_[number] = {};
        scores_[number] = {};
      } else if (entries_[number].uses > 0 && uses_[entries_[number].latest].turn == end_) {
        return;  // a repeat
      }
      announce_use(number);
    });
    turns_[end_].count = written_ - turns_[end_].first;
    ++end_;
  }

  void announce_use(std::uint32_t number) {
    if (written_ - turns_[turn_].first == uses_.size()) uses_.grow(turns_[turn_].first, written_);
    uses_[written_] = {number, end_, 0};
    Entry& entry = entries_[number];
    if (entry.uses == 0) {
      entry.next = written_;
      if (entry.resident) {
        idle_.remove(number);
        wait(number, end_);
      }
    } else {
      uses_[entry.latest].next = written_;
    }
    entry.latest = written_;
    ++entry.uses;
    ++written_;
  }

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
          idle_.push(number);
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

  void grow_turns() {
    turns_.grow(turn_, end_);
    waiting_ = TurnSet(turns_.size());
    for (std::uint32_t turn = turn_; turn != end_; ++turn)
      if (!turns_[turn].keys.empty()) waiting_.add(turns_.place(turn));
  }

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

  // Marks the next batch and the pinned residents; returns how many they are.
  std::size_t hold(const std::int64_t* pinned, std::size_t pins) {
    const std::uint32_t mark = next_mark();
    const Turn& batch = turns_[turn_];
    missing_ = 0;
    for (std::uint32_t use = batch.first; use != batch.first + batch.count; ++use) {
      Entry& entry = entries_[uses_[use].entry];
      entry.held = mark;
      missing_ += !entry.resident;
    }
    std::size_t held = batch.count;
    for (std::size_t i = 0; i < pins; ++i) {
      const std::uint32_t number = table_.find(pinned[i]);
      if (number == KeyTable::none || !entries_[number].resident) continue;
      held += entries_[number].held != mark;
      entries_[number].held = mark;
    }
    return held;
  }

  std::uint32_t next_mark() {
    if (++mark_ == 0) {  // the marks' numbers start over
      for (Entry& entry : entries_) entry.held = 0;
      mark_ = 1;
    }
    return mark_;
  }

  void access_as_given(const std::int64_t* keys, std::size_t count, std::uint8_t* hit) {
    numbers_.resize(count);
    for (std::size_t i = 0; i < count; ++i) {
      numbers_[i] = table_.find(keys[i]);
      hit[i] = entries_[numbers_[i]].resident;
    }
    step(nullptr);
    // A key's first turn in the batch keeps what it was; the later ones find it there.
    const std::uint32_t mark = next_mark();
    for (std::size_t i = 0; i < count; ++i) {
      Entry& entry = entries_[numbers_[i]];
      hit[i] = hit[i] != 0 || entry.held == mark;
      entry.held = mark;
    }
  }

  // Accesses the window's first batch, whose keys are marked; `hit` for its distinct keys.
  void step(std::uint8_t* hit) {
    if (resident_ + missing_ > capacity_) make_room(resident_ + missing_ - capacity_);
    const Turn batch = turns_[turn_];
    rescale();
    const double weight = std::ldexp(1.0 + static_cast<double>(clock_ % half_life_) / static_cast<double>(half_life_),
                                     static_cast<int>(clock_ / half_life_ - base_));
    for (std::uint32_t use = batch.first; use != batch.first + batch.count; ++use) {
      if (use + kAhead - turns_[turn_].first < written_ - turns_[turn_].first) prefetch(uses_[use + kAhead].entry);
      const std::uint32_t number = uses_[use].entry;
      Entry& entry = entries_[number];
      if (hit != nullptr) *hit++ = entry.resident;
      if (entry.resident) stop_waiting(number, turn_);
      else ++resident_;
      entry.resident = true;
      scores_[number].uses += weight;
      scores_[number].last = ++accesses_;
      if (--entry.uses > 0) {
        entry.next = uses_[use].next;
        wait(number, uses_[entry.next].turn);
      } else {
        idle_.push(number);
      }
    }
    ++turn_;
    clock_ += batch.count;
  }

  void prefetch(std::uint32_t number) const {
    __builtin_prefetch(&entries_[number], 1);
    __builtin_prefetch(&scores_[number], 1);
    __builtin_prefetch(&links_[number], 1);
  }

  // Weights double every half-life: before one could overflow, all scores are scaled back.
  void rescale() {
    for (; clock_ / half_life_ - base_ >= kRescale; base_ += kRescale)
      for (Score& score : scores_) score.uses = std::ldexp(score.uses, -kRescale);
  }

  void make_room(std::size_t count) {
    passed_.clear();
    while (count > 0 && !idle_.empty()) {
      const std::uint32_t number = idle_.top();
      if (entries_[number].held == mark_) {
        idle_.remove(number);
        passed_.push_back(number);
        continue;
      }
      evict(number);
      --count;
    }
    for (const std::uint32_t number : passed_) idle_.push(number);
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
      idle_.remove(number);
      table_.erase(number);
    }
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

  const std::size_t capacity_;
  const std::uint64_t half_life_;
  mutable std::mutex mutex_;
  KeyTable table_;
  std::vector<Entry> entries_;
  std::vector<Link> links_;
  std::vector<Score> scores_;
  IdleHeap idle_;
  Ring<Use> uses_;
  Ring<Turn> turns_;
  TurnSet waiting_;
  std::vector<std::uint32_t> numbers_;
  std::vector<std::uint32_t> passed_;
  std::vector<std::int64_t> evicted_;
  std::size_t resident_ = 0;
  std::size_t missing_ = 0;
  std::uint32_t turn_ = 0;     // the window's first batch
  std::uint32_t end_ = 0;      // the batch announced next
  std::uint32_t written_ = 0;  // uses announced so far
  std::uint32_t mark_ = 0;
  std::uint64_t clock_ = 0;     // keys accessed, repeats within a batch not counted
  std::uint64_t accesses_ = 0;
  std::uint64_t base_ = 0;  // halvings already taken out of the scores
};

}  // namespace
}  // namespace memhier

void register_belady(nb::module_& m) {
  using memhier::Belady;
  nb::class_<Belady>(m, "BeladyPolicy")
      .def(nb::init<std::size_t, std::uint64_t>(), nb::arg("capacity"), nb::arg("half_life"))
      .def("announce", &Belady::announce, nb::arg("keys"))
      .def("access", &Belady::access, nb::arg("keys"), nb::arg("pinned"), nb::arg("hit"))
      .def("advance", &Belady::advance)
      .def("expire", &Belady::expire)
      .def("replay", &Belady::replay, nb::arg("keys"), nb::arg("lookahead"), nb::arg("hit"))
      .def("discard", &Belady::discard, nb::arg("keys"))
      .def("__len__", &Belady::size)
      .def("__contains__", &Belady::contains, nb::arg("key"))
      .def_prop_ro("pending", &Belady::pending)
      .def_prop_ro("memory_bytes", &Belady::bytes);
}
