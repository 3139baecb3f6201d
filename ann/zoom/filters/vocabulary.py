"""The sorted distinct words of a text column in a segment: found by bisection on SSD, never held in DRAM.

Layout: the words, UTF-8, end to end; zeros up to a multiple of 8; u64 [w + 1], where each word begins and the last one
ends; u64 w.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.errors import CorruptionError
from memhier.fields import stored_segment
from memhier.io.ranges import CountedReads, Ranges, Reading, read_together
from memhier.io.reader import Reader
from memhier.store.store import Staging, Store, Transaction

__all__ = ["Vocabulary", "write_vocabulary"]

Ints: TypeAlias = npt.NDArray[np.int64]

_BATCH_BYTES = 1 << 16
_STREAM_WORDS = 1 << 12
_WORD_BYTES = 256  # that a word of a run takes with its bounds and its object, beside its letters
WORDS_MAX = 2**31 - 1


def write_vocabulary(tx: Transaction | Staging, name: str, words: Iterable[bytes]) -> None:
    """Write ascending words into a new segment."""
    segment = tx.segment(name)
    starts = array("Q", [0])
    remaining = iter(words)
    while batch := list(islice(remaining, _STREAM_WORDS)):
        starts.extend((segment.length + np.cumsum([len(word) for word in batch])).tolist())
        segment.append(b"".join(batch))
    count = len(starts) - 1
    if count > WORDS_MAX:
        raise ValueError(f"{name}: {count:,} distinct texts, expected at most {WORDS_MAX:,}")
    segment.append(bytes(-segment.length % 8))
    starts.append(count)
    segment.append(np.frombuffer(starts, np.uint64).astype("<u8"))


class Vocabulary:
    """Reads sorted words. For many threads.

    Raises
    ------
    CorruptionError
        When the segment cannot be a vocabulary.
    """

    def __init__(self, store: Store, name: str, reader: Reader) -> None:
        info = stored_segment(store, name)
        self._path = info.path
        self._reader = reader
        self._file_bytes = info.length
        self._handle = store.attach(name, reader, held=True)
        if info.payload < 16 or info.payload % 8:
            raise CorruptionError(f"{info.path}: {info.payload} bytes are no vocabulary")
        self._count = int(reader.read(self._handle, [info.payload - 8], 8).view("<u8")[0, 0])
        self._starts_at = info.payload - 8 * (self._count + 2)
        if self._starts_at < 0:
            raise CorruptionError(f"{info.path}: {info.payload} bytes do not hold {self._count} words")

    def __len__(self) -> int:
        return self._count

    def find(self, words: Sequence[bytes]) -> tuple[Ints, npt.NDArray[np.bool_]]:
        """Return how many words of the vocabulary come before each of `words`, and whether it is one itself.

        It seeks all words together: two reads of each word per round, and one round per binary digit of the count.
        """
        # The head of a word is enough to compare it: one byte more than the longest word sought.
        head = max(map(len, words), default=0) + 1
        step = max(1, _BATCH_BYTES // head)
        low = np.zeros(len(words), np.int64)
        high = np.full(len(words), self._count)
        present = np.zeros(len(words), np.bool_)
        while True:
            seeking = np.flatnonzero(low < high)
            if not len(seeking):
                return low, present
            for start in range(0, len(seeking), step):
                part = seeking[start : start + step]
                middle = (low[part] + high[part]) // 2
                for index, rank, word in zip(part, middle, self._read(self._bounds(middle), head), strict=True):
                    if word < words[index]:
                        low[index] = rank + 1
                    else:
                        high[index] = rank
                        present[index] |= word == words[index]

    def words(self, ranks: Ints) -> Reading[list[bytes]]:
        """Read words by rank."""
        (raw,) = yield [Ranges.of(self._handle, self._starts_at + 8 * ranks, 16)]
        bounds = self._checked(raw.view("<i8").reshape(-1, 2))
        lengths = bounds[:, 1] - bounds[:, 0]
        (words,) = yield [Ranges(self._handle, bounds[:, 0], lengths)]
        held, ends = words.tobytes(), np.cumsum(lengths)
        return [held[low:high] for low, high in zip((ends - lengths).tolist(), ends.tolist(), strict=True)]

    def lengths(self, ranks: Ints) -> Ints:
        """Return the bytes of words, int64 ``[n]``."""
        lengths: Ints = np.diff(self._bounds(ranks))[:, 0]
        return lengths

    def take(self, ranks: Ints) -> list[bytes]:
        """Return words by rank."""
        return read_together(CountedReads(self._reader), {0: self.words(ranks)})[0]

    def stream(self) -> Iterator[bytes]:
        """Yield all words in order."""
        for start in range(0, self._count, _STREAM_WORDS):
            ranks = np.arange(start, min(start + _STREAM_WORDS, self._count))
            yield from self.take(ranks)

    def runs(self, low: int, high: int, most: int) -> Iterator[tuple[int, list[bytes]]]:
        """Yield runs of words from one rank up to another, each with the rank of its first.

        Parameters
        ----------
        most
            Bytes that a run and its numbers take; a single longer word is a run of its own.
        """
        while low < high:
            bounds = self._bounds(np.arange(low, min(high, low + max(1, most // _WORD_BYTES))))
            fitting = np.searchsorted(bounds[:, 1], bounds[0, 0] + most // 2, side="right")
            bounds = bounds[: max(1, int(fitting))]
            start, stop = int(bounds[0, 0]), int(bounds[-1, 1])
            raw = self._reader.read(self._handle, [start], stop - start)[0].tobytes() if stop > start else b""
            yield low, [raw[first - start : last - start] for first, last in bounds.tolist()]
            low += len(bounds)

    def close(self) -> None:
        """Detach from the reader."""
        handle, self._handle = self._handle, -1  # which may be another file's from now on
        self._reader.remove(handle)

    def _bounds(self, ranks: Ints) -> npt.NDArray[Any]:
        """Return where words begin and end, int64 [n, 2]."""
        return self._checked(self._reader.read(self._handle, self._starts_at + 8 * ranks, 16).view("<i8"))

    def _checked(self, bounds: npt.NDArray[Any]) -> npt.NDArray[Any]:
        if ((bounds[:, 0] < 0) | (bounds[:, 0] > bounds[:, 1]) | (bounds[:, 1] > self._starts_at)).any():
            raise CorruptionError(f"{self._path}: a word lies outside of the vocabulary")
        return bounds

    def _read(self, bounds: npt.NDArray[Any], length: int) -> list[bytes]:
        """Return words, cut after `length` bytes."""
        length = min(length, self._file_bytes)
        # The last words are shorter than a read: it begins earlier for them.
        offsets = np.minimum(bounds[:, 0], self._file_bytes - length)
        raw = self._reader.read(self._handle, np.ascontiguousarray(offsets), length)
        return [row[low:high].tobytes() for row, (low, high) in zip(raw, bounds - offsets[:, None], strict=True)]
