"""Belady's rule over a window of announced batches, in plain Python: the definition, and the fallback.

Of the keys that may leave, those with no announced use go first, the least frequently used of them foremost; then the
key whose next use lies farthest ahead. Two keys next used by the same batch are interchangeable (both have to be there
for it), so the one that has waited longest for that batch goes first, only to make the choice repeatable.
"""

import math
import sys
from collections import OrderedDict, deque
from collections.abc import Collection
from heapq import heapify, heappop, heappush

import numpy as np
import numpy.typing as npt

__all__ = ["BeladyReference"]

Keys = npt.NDArray[np.int64]

# What CPython takes for one resident key and for one announced use of a key, measured.
_KEY_BYTES, _USE_BYTES = 660, 850
# Scores are scaled back by this power of two before they could overflow a double.
_RESCALE = 512


class BeladyReference:
    """Belady within the announced window; arguments have been checked."""

    def __init__(self, *, capacity: int, half_life: int) -> None:
        self._capacity = capacity
        self._half_life = half_life
        self._window: deque[dict[int, None]] = deque()
        self._announced = 0  # keys in the window: a number can be asked for while another thread changes it
        self._turn = 0  # number of the batch at the window's front
        self._uses: dict[int, deque[int]] = {}  # announced batches that need a key, soonest first
        self._resident: dict[int, None] = {}
        self._of_turn: dict[int, OrderedDict[int, None]] = {}  # residents by the batch that needs them next
        self._turns: list[int] = []  # heap of the negated keys of _of_turn, and of some that are gone
        self._idle: dict[int, tuple[float, int, int]] = {}  # residents without announced use: score, last access, key
        self._idle_heap: list[tuple[float, int, int]] = []  # the values of _idle, and some that are gone
        self._score: dict[int, tuple[float, int]] = {}  # score and last access of residents and announced keys
        self._accesses = 0
        self._clock = 0  # keys accessed so far, repeats within a batch not counted
        self._base = 0  # halvings already taken out of the scores

    def __len__(self) -> int:
        return len(self._resident)

    def __contains__(self, key: object) -> bool:
        return key in self._resident

    @property
    def pending(self) -> int:
        return len(self._window)

    @property
    def idle(self) -> int:
        return len(self._idle)

    @property
    def memory_bytes(self) -> int:
        return sys.getsizeof(self) + _USE_BYTES * self._announced + _KEY_BYTES * len(self._resident)

    def announce(self, keys: Keys) -> int:
        """Add a batch at the window's far end; or return the capacity that would be enough for it."""
        batch = dict.fromkeys(keys.tolist())
        if len(batch) > self._capacity:
            return len(batch)
        turn = self._turn + len(self._window)
        for key in batch:
            if key in self._idle:
                del self._idle[key]
                self._wait(key, turn)
            self._uses.setdefault(key, deque()).append(turn)
        self._window.append(batch)
        self._announced += len(batch)
        return 0

    def awaited(self, *, after: int) -> bytes:
        """Return, as int64 bytes, the keys of a batch that neither are resident nor come in a batch before it."""
        turn = self._turn + after
        batch = self._window[after] if after < len(self._window) else ()
        keys = [key for key in batch if key not in self._resident and self._uses[key][0] == turn]
        return np.array(keys, np.int64).tobytes()

    def withdraw(self) -> None:
        """Take all announced batches back, the last one first."""
        while self._window:
            turn = self._turn + len(self._window) - 1
            batch = self._window.pop()
            self._announced -= len(batch)
            for key in batch:
                uses = self._uses[key]
                uses.pop()
                if uses:
                    continue
                del self._uses[key]
                if key in self._resident:
                    self._stop_waiting(key, turn)
                    self._idle[key] = (*self._score[key], key)
                    heappush(self._idle_heap, self._idle[key])
                else:
                    self._score.pop(key, None)
        self._drop_stale()

    def access(self, *, keys: Keys, pinned: Keys, hit: npt.NDArray[np.bool_]) -> bytes | int:
        """Fill `hit` and return the victims as int64 bytes; or the capacity that would be enough, nothing changed."""
        batch = dict.fromkeys(keys.tolist())
        if self._window and batch.keys() != self._window[0].keys():
            raise ValueError("keys differ from the batch that was announced for this turn")
        held = batch | {key: None for key in pinned.tolist() if key in self._resident}
        if len(held) > self._capacity:
            return len(held)
        if not self._window:
            self.announce(keys)
        evicted, seen = self._step(held)
        for place, key in enumerate(keys.tolist()):
            hit[place] = seen[key]
            seen[key] = True
        return np.array(evicted, np.int64).tobytes()

    def advance(self) -> tuple[bytes, bytes, bytes]:
        """Access the announced batch whose turn it is: its distinct keys, whether each was a hit, the victims."""
        evicted, hits = self._step(self._window[0])
        return np.array([*hits], np.int64).tobytes(), bytes(hits.values()), np.array(evicted, np.int64).tobytes()

    def replay(self, *, keys: Keys, lookahead: int, hit: npt.NDArray[np.bool_]) -> None:
        """Access keys one at a time, each knowing the `lookahead` that follow it."""
        trace = keys.reshape(-1, 1)
        for key in trace[:lookahead]:
            self.announce(key)
        for place in range(len(trace)):
            if place + lookahead < len(trace):
                self.announce(trace[place + lookahead])
            hit[place] = self._step(self._window[0])[1].popitem()[1]

    def expire(self) -> bytes:
        """Let every resident go that no announced batch needs, in the order of last access."""
        idle = [key for _, _, key in sorted(self._idle.values(), key=lambda entry: entry[1])]
        for key in idle:
            self._leave(key)
        return np.array(idle, np.int64).tobytes()

    def discard(self, keys: Keys) -> None:
        for key in keys.tolist():
            if key in self._resident:
                self._leave(key)

    def _step(self, held: dict[int, None]) -> tuple[list[int], dict[int, bool]]:
        """Access the window's first batch: the victims, and its keys with whether each was a hit."""
        batch = self._window[0]
        missing = sum(key not in self._resident for key in batch)
        evicted = self._evict(len(self._resident) + missing - self._capacity, held.keys())
        self._window.popleft()
        self._announced -= len(batch)
        hits = {}
        for key in batch:
            hits[key] = key in self._resident
            if hits[key]:
                self._stop_waiting(key, self._turn)
            self._resident[key] = None
            uses = self._uses[key]
            uses.popleft()
            self._count(key)
            if uses:
                self._wait(key, uses[0])
            else:
                del self._uses[key]
                self._idle[key] = (*self._score[key], key)
                heappush(self._idle_heap, self._idle[key])
        self._turn += 1
        self._clock += len(batch)
        self._drop_stale()
        return evicted, hits

    def _evict(self, count: int, held: Collection[int]) -> list[int]:
        victims: list[int] = []
        passed = []
        while len(victims) < count and self._idle_heap:
            entry = heappop(self._idle_heap)
            key = entry[2]
            if self._idle.get(key) != entry:
                continue
            if key in held:
                passed.append(entry)
                continue
            victims.append(key)
            self._leave(key)
        for entry in passed:
            heappush(self._idle_heap, entry)
        turns_passed = []
        while len(victims) < count:
            turn = -self._turns[0]
            free = [key for key in self._of_turn.get(turn, ()) if key not in held][: count - len(victims)]
            for key in free:
                victims.append(key)
                self._leave(key)
            if len(victims) < count:
                turns_passed.append(heappop(self._turns))
        for negated in turns_passed:
            if -negated in self._of_turn:
                heappush(self._turns, negated)
        return victims

    def _leave(self, key: int) -> None:
        del self._resident[key]
        if key in self._idle:
            del self._idle[key]
            del self._score[key]
        else:
            self._stop_waiting(key, self._uses[key][0])

    def _wait(self, key: int, turn: int) -> None:
        if turn not in self._of_turn:
            self._of_turn[turn] = OrderedDict()
            heappush(self._turns, -turn)
        self._of_turn[turn][key] = None

    def _stop_waiting(self, key: int, turn: int) -> None:
        keys = self._of_turn[turn]
        del keys[key]
        if not keys:
            del self._of_turn[turn]

    def _count(self, key: int) -> None:
        """Add this access to a key's score: an access counts half as much as one that comes a half-life later.

        The growing weight is 2^(clock / half_life) with straight lines between the powers of two: products and sums
        that every machine rounds alike, where exp2 might differ.
        """
        halvings, rest = divmod(self._clock, self._half_life)
        while halvings - self._base >= _RESCALE:
            self._base += _RESCALE
            self._score = {key: (math.ldexp(score, -_RESCALE), last) for key, (score, last) in self._score.items()}
            self._idle = {key: (*self._score[key], key) for key in self._idle}
            self._rebuild_idle_heap()
        score, _ = self._score.get(key, (0.0, 0))
        weight = math.ldexp(1.0 + rest / self._half_life, halvings - self._base)
        self._accesses += 1
        self._score[key] = (score + weight, self._accesses)

    def _drop_stale(self) -> None:
        if len(self._idle_heap) > 2 * len(self._idle) + 64:
            self._rebuild_idle_heap()
        if len(self._turns) > 2 * len(self._of_turn) + 64:
            self._turns = [-turn for turn in self._of_turn]
            heapify(self._turns)

    def _rebuild_idle_heap(self) -> None:
        self._idle_heap = list(self._idle.values())
        heapify(self._idle_heap)
