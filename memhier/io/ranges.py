"""Ranges of many lengths and files, read together: the readings of several objects share their submissions.

A reading is a generator. It yields the ranges that it needs, gets their bytes, and returns its result in the end. The
ranges that several readings need at a time go out in one submission.
"""

from collections.abc import Generator, Mapping, Sequence
from typing import NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from memhier.io.page_file import PAGE_BYTES
from memhier.io.read_arguments import READ_TALLY, Tallies
from memhier.io.reader import Reader

__all__ = ["CountedReads", "Ranges", "Reading", "read_together", "together"]

Ints: TypeAlias = npt.NDArray[np.int64]
Bytes: TypeAlias = npt.NDArray[np.uint8]

_FEW_BYTES = 1 << 16  # that a submission may take in any case,
_TIMES = 4  # and otherwise as many times the bytes of its ranges

K = TypeVar("K")
V = TypeVar("V")


class Ranges(NamedTuple):
    """Ranges of a file.

    Attributes
    ----------
    file
        The reader's handle of a file of whole pages, as segments are.
    offsets, lengths
        int64 ``[n]``: where each begins, and its bytes, which may be none.
    """

    file: int
    offsets: Ints
    lengths: Ints

    @classmethod
    def of(cls, file: int, offsets: Ints, length: int) -> "Ranges":
        """Return ranges of one length."""
        return cls(file, offsets, np.full(len(offsets), length, np.int64))


Reading: TypeAlias = Generator[Sequence[Ranges], list[Bytes], V]
"""Yields ranges and gets, for each `Ranges`, their bytes end to end."""


class CountedReads:
    """Reads for one call, and counts its work.

    Parameters
    ----------
    reader
        Does the reads.

    Attributes
    ----------
    tally
        `memhier.io.read_arguments.READ_TALLY` ``[1]``: I/Os, and the pages and bytes that they read.
    rounds
        Submissions.
    """

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self.tally: Tallies = np.zeros(1, READ_TALLY)
        self.rounds: int = 0

    def read(self, file: int | npt.NDArray[np.int32], offsets: Ints, length: int) -> Bytes:
        """Return ranges of one length in one submission; see `memhier.io.reader.Reader.read`."""
        self.rounds += len(offsets) > 0
        return self._reader.read(file, offsets, length, tally=self.tally)


def read_together(reads: CountedReads, readings: Mapping[K, Reading[V]]) -> dict[K, V]:
    """Return the result of each reading; those that need ranges at a time share a submission.

    A submission is split only where short ranges beside long ones would take far more DRAM than their bytes.
    """
    every = together(readings)
    try:
        asked = next(every)
        while True:
            asked = every.send(_read(reads, asked))
    except StopIteration as end:
        found: dict[K, V] = end.value
        return found


def together(readings: Mapping[K, Reading[V]]) -> Reading[dict[K, V]]:
    """Return a reading of several, which gives the result of each."""
    found: dict[K, V] = {}
    answers: dict[K, list[Bytes] | None] = dict.fromkeys(readings)
    while answers:
        asked: dict[K, Sequence[Ranges]] = {}
        for key, answer in answers.items():
            try:
                asked[key] = next(readings[key]) if answer is None else readings[key].send(answer)
            except StopIteration as end:
                found[key] = end.value
        if not asked:
            break
        every = iter((yield [ranges for some in asked.values() for ranges in some]))
        answers = {key: [next(every) for _ in some] for key, some in asked.items()}
    return found


def _read(reads: CountedReads, asked: Sequence[Ranges]) -> list[Bytes]:
    """Return the bytes of ranges, end to end, for each of `asked`."""
    if not asked:
        return []
    files = np.concatenate([np.full(len(each.offsets), each.file, np.int32) for each in asked])
    offsets, lengths = (np.concatenate([each[field] for each in asked]) for field in (1, 2))
    sizes = [int(each.lengths.sum()) for each in asked]
    return np.split(_bytes(reads, *_in_pages(files, offsets, lengths)), np.cumsum(sizes)[:-1])


def _in_pages(files: npt.NDArray[np.int32], offsets: Ints, lengths: Ints) -> tuple[npt.NDArray[np.int32], Ints, Ints]:
    """Return the pieces of ranges that lie on one page each, in their order."""
    first = offsets // PAGE_BYTES
    pages = np.where(lengths > 0, (offsets + lengths - 1) // PAGE_BYTES - first + 1, 0)
    of = np.repeat(np.arange(len(pages)), pages)
    page = first[of] + np.arange(len(of)) - np.repeat(np.cumsum(pages) - pages, pages)
    low = np.maximum(offsets[of], page * PAGE_BYTES)
    return files[of], low, np.minimum((offsets + lengths)[of], (page + 1) * PAGE_BYTES) - low


def _bytes(reads: CountedReads, files: npt.NDArray[np.int32], offsets: Ints, lengths: Ints) -> Bytes:
    """Return the bytes of pieces, each within a page, end to end."""
    if not len(lengths):
        return np.empty(0, np.uint8)
    total, most = int(lengths.sum()), int(lengths.max())
    limit = max(_FEW_BYTES, _TIMES * total)
    if len(lengths) * most <= limit:
        return _submitted(reads, files, offsets, lengths, most)
    out, ends = np.empty(total, np.uint8), np.cumsum(lengths)
    order = np.argsort(lengths, kind="stable")  # pieces of like length go together
    start = 0
    while start < len(order):
        taken = lengths[order[start:]] * np.arange(1, len(order) - start + 1)
        some = order[start : start + max(1, int(np.searchsorted(taken, limit, side="right")))]
        raw = _submitted(reads, files[some], offsets[some], lengths[some], int(lengths[some[-1]]))
        at = 0
        for end, length in zip(ends[some].tolist(), lengths[some].tolist(), strict=True):
            out[end - length : end] = raw[at : at + length]
            at += length
        start += len(some)
    return out


def _submitted(reads: CountedReads, files: npt.NDArray[np.int32], offsets: Ints, lengths: Ints, most: int) -> Bytes:
    """Return the bytes of pieces of at most `most` bytes, end to end, from one submission."""
    # Each piece is read with its neighbours on the page, so that all have one length.
    low = np.minimum(offsets, offsets // PAGE_BYTES * PAGE_BYTES + PAGE_BYTES - most)
    raw = reads.read(files, low, most)
    if (lengths == most).all():
        return raw.reshape(-1)
    at, first = np.arange(most, dtype=np.int16), (offsets - low).astype(np.int16)[:, None]
    return raw[(at >= first) & (at < first + lengths.astype(np.int16)[:, None])]
