"""Sets of rows as bitmaps: bit ``i % 64`` of word ``i // 64`` is set if row ``i`` is in the set."""

import os
import threading
from collections import OrderedDict
from collections.abc import Hashable
from contextlib import suppress
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier import backend
from memhier.budget import parse_bytes

__all__ = ["BitmapCache", "Words", "bitmap_bytes", "pack", "popcount", "runs_with", "unpack", "word_count"]

Words: TypeAlias = npt.NDArray[np.uint64]

_RUNS = 1024  # looked at together
_ASKED_MOST = 1024  # keys that are remembered
_ENTRY_BYTES = 256  # the key, the array's head and the place in the order, beside the words
_SPARSE_BYTES, _ARRAY_BYTES = 12, 256  # of a word that is not zero, with its place; of two arrays' heads and a tuple


def word_count(count: int) -> int:
    """Return how many words a bitmap of `count` rows has."""
    return -(-count // 64)


def bitmap_bytes(*counts: int) -> int:
    """Return the DRAM of bitmaps with these counts of rows."""
    return 8 * sum([-(-count // 64) for count in counts])


def pack(rows: npt.NDArray[np.bool_]) -> Words:
    """Return the bitmap of bool ``[n]``, uint64 ``[ceil(n / 64)]``.

    Examples
    --------
    >>> import numpy as np
    >>> from memhier.ann.zoom.filters.bitmaps import pack
    >>> pack(np.array([True, False, True])).tolist()
    [5]
    """
    words = np.zeros(word_count(len(rows)), "<u8")
    packed = np.packbits(np.asarray(rows, np.bool_), bitorder="little")
    words.view(np.uint8)[: len(packed)] = packed
    return words.astype(np.uint64, copy=False)


def unpack(words: Words, count: int) -> npt.NDArray[np.bool_]:
    """Return bool ``[count]``, the inverse of :func:`pack`."""
    if len(words) != word_count(count):
        raise ValueError(f"words has {len(words)} entries: expected {word_count(count)} for {count} rows")
    raw = np.ascontiguousarray(words, "<u8").view(np.uint8)
    return np.unpackbits(raw, count=count, bitorder="little").view(np.bool_)


def popcount(words: Words) -> int:
    """Return how many rows are in."""
    return int(np.bitwise_count(words).sum())


def runs_with(words: Words, starts: npt.NDArray[np.int64]) -> tuple[Words, int]:
    """Return which runs of rows hold a row of a bitmap, a bit for each run, and how many rows are in the bitmap.

    Run ``i`` has the rows ``starts[i]`` to ``starts[i + 1]``. Work is linear in words and runs.

    Examples
    --------
    >>> import numpy as np
    >>> from memhier.ann.zoom.filters.bitmaps import pack, runs_with, unpack
    >>> rows = pack(np.array([False, False, True, False]))
    >>> runs, count = runs_with(rows, np.array([0, 2, 2, 3, 4]))
    >>> unpack(runs, 4).tolist(), count
    ([False, False, True, False], 1)
    """
    runs = len(starts) - 1
    found = np.zeros(word_count(runs), np.uint64)
    if (core := backend.core) is not None:
        return found, core.runs_with(words=words, starts=starts, found=found)
    for first in range(0, runs, _RUNS):
        bounds = starts[first : first + _RUNS + 1]
        base = int(bounds[0]) // 64
        some = np.append(words[base : int(bounds[-1]) // 64 + 1], np.uint64(0))  # for a bound after the last word
        before = np.concatenate([[0], np.cumsum(np.bitwise_count(some), dtype=np.int64)])
        place, below = bounds // 64 - base, (np.uint64(1) << (bounds % 64).astype(np.uint64)) - np.uint64(1)
        ranks = before[place] + np.bitwise_count(some[place] & below)
        held = pack(ranks[1:] > ranks[:-1])
        found[first // 64 : first // 64 + len(held)] = held
    return found, popcount(words)


class BitmapCache:
    """The bitmaps most recently used, up to a limit in bytes. For many threads.

    Parameters
    ----------
    limit
        Bytes, or text such as ``"1MiB"``: the most that :attr:`memory_bytes` becomes. A larger bitmap is not kept.

    Examples
    --------
    >>> import numpy as np
    >>> from memhier.ann.zoom.filters.bitmaps import BitmapCache, pack
    >>> cache = BitmapCache("64KiB")
    >>> cache.put("price < 10", pack(np.array([True])))
    >>> cache.get("price < 10").tolist(), cache.get("price < 20")
    ([1], None)
    """

    def __init__(self, limit: int | str) -> None:
        self._limit = parse_bytes(limit, "limit")
        self._bitmaps: OrderedDict[Hashable, tuple[Words | _Sparse, int]] = OrderedDict()  # each with its bytes
        self._asked: set[int] = set()  # hashes of keys that were looked for of late
        self._most = 0  # bytes held, or more where an interrupt came between an entry and its count
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def __len__(self) -> int:
        """Bitmaps held."""
        return len(self._bitmaps)

    @property
    def limit(self) -> int:
        """The most bytes that are held."""
        return self._limit

    @property
    def memory_bytes(self) -> int:
        """DRAM held by bitmaps and their keys, in bytes."""
        # A dictionary lists its entries at once; an ordered one hashes each key, and get() may move some meanwhile.
        return sum([size for _, size in list(dict.values(self._bitmaps))])

    def get(self, key: Hashable) -> Words | None:
        """Return a bitmap, or None; a writable one is the caller's."""
        self._guard()
        found = self._bitmaps.get(key)  # without the lock: an interrupt could leave it locked
        if found is None:
            return None
        with suppress(KeyError):  # which another thread has just removed
            self._bitmaps.move_to_end(key)
        words = found[0]
        return words.whole() if isinstance(words, _Sparse) else words

    def put(self, key: Hashable, words: Words) -> None:
        """Keep a bitmap in place of those least recently used; few of its rows are kept as their words alone.

        A bitmap that is kept whole becomes read-only. One that takes more than the limit is not kept. An interrupt
        leaves fewer bitmaps.
        """
        few = _Sparse.of(words)
        size = _size(key, words.nbytes if few is None else few.nbytes)
        with self._guard():
            if (before := self._bitmaps.pop(key, None)) is not None:
                self._most -= before[1]
            if size > self._limit:
                return
            if few is None:
                words.flags.writeable = False
            while self._bitmaps and self._most + size > self._limit:
                self._most -= self._bitmaps.popitem(last=False)[1][1]
            if not self._bitmaps:
                self._most = 0
            self._most += size
            self._bitmaps[key] = words if few is None else few, size

    def asked_again(self, key: Hashable) -> bool:
        """Return whether a key was asked for of late, and remember it: a bitmap made fast is kept only if it was."""
        number = hash(key)
        if number in self._asked:
            return True
        if len(self._asked) >= _ASKED_MOST:
            self._asked = set()
        self._asked.add(number)
        return False

    def drop(self, owner: object) -> None:
        """Forget all bitmaps whose key is a tuple that begins with `owner`."""
        with self._guard():
            for key in list(dict.keys(self._bitmaps)):  # at once, as in memory_bytes
                if isinstance(key, tuple) and key[:1] == (owner,):
                    self._bitmaps.pop(key, None)
            self._most = self.memory_bytes

    def _guard(self) -> threading.Lock:
        if self._pid != os.getpid():  # A thread that did not survive the fork may have held the lock: begin anew.
            self._bitmaps, self._most = OrderedDict(), 0
            self._lock, self._pid = threading.Lock(), os.getpid()
        return self._lock


class _Sparse(NamedTuple):
    """A bitmap most of whose words are zero: its number of words, the places of the others, int32, and these."""

    length: int
    places: npt.NDArray[np.int32]
    words: Words

    @classmethod
    def of(cls, words: Words) -> "_Sparse | None":
        """Return the bitmap in this form; None where that takes more than half of the room."""
        if 2 * _SPARSE_BYTES * np.count_nonzero(words) > words.nbytes:
            return None
        places = (words != 0).nonzero()[0]  # many times as fast as that of numbers
        return cls(len(words), places.astype(np.int32), words[places])

    @property
    def nbytes(self) -> int:
        return _SPARSE_BYTES * len(self.places) + _ARRAY_BYTES

    def whole(self) -> Words:
        """Return the bitmap."""
        words = np.zeros(self.length, np.uint64)
        words[self.places] = self.words
        return words


def _size(key: Hashable, nbytes: int) -> int:
    parts = key if isinstance(key, tuple) else (key,)
    text = sum([4 * len(str(part)) for part in parts])
    return nbytes + text + _ENTRY_BYTES
