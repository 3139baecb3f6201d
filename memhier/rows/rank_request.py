"""The request and the result of a ranking."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from memhier import backend
from memhier.io.page_file import PAGE_BYTES
from memhier.io.read_arguments import Tallies
from memhier.io.reader import Reader

__all__ = [
    "RANK_TALLY",
    "STOPS",
    "HotPages",
    "PageRows",
    "RankRequest",
    "Ranking",
    "page_keys",
    "round_limit",
    "round_sizes",
    "split_keys",
]

STOPS = ("bound", "all_read", "max_reads", "deadline")  # in the order of the numbers in a tally
RANK_TALLY = np.dtype([(name, np.int64) for name in ("ranked", "page_requests", "hot_pages", "rounds", "stopped")])
"""Of a query: rows ranked, pages read for them, pages found in DRAM, rounds, and why it stopped, an index into `STOPS`.

A page that several queries of a call shared counts for each of them.
"""
_PAGE_BITS = 40
_LEAST_ROUND = 8

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


def page_keys(files: Sequence[int] | npt.NDArray[Any], pages: Sequence[int] | Ints) -> Ints:
    """Return the keys of pages, int64 ``[n]``: the reader's handle of the file, then 40 bits of page number."""
    return np.asarray(files, np.int64) << _PAGE_BITS | np.asarray(pages, np.int64)


def split_keys(keys: Ints) -> tuple[Ints, Ints]:
    """Return the handles and the page numbers that make up keys."""
    return keys >> _PAGE_BITS, keys & ((1 << _PAGE_BITS) - 1)


def round_limit(rounds: int, before: int, first_round: int) -> int:
    """Return the most reads of a query's next round, after so many rounds with `before` reads in all."""
    return first_round if rounds == 0 else max(_LEAST_ROUND, before // 2)


def round_sizes(reads: int, first_round: int) -> list[int]:
    """Return the reads of each round of a query that makes so many in all."""
    sizes: list[int] = []
    before = 0
    while before < reads:
        sizes.append(min(round_limit(len(sizes), before, first_round), reads - before))
        before += sizes[-1]
    return sizes


@dataclass(frozen=True, slots=True)
class HotPages:
    """Pages held in DRAM.

    Attributes
    ----------
    keys
        int64 ``[c]``, ascending; see :func:`page_keys`.
    pages
        uint8 ``[c, 4096]``.
    """

    keys: Ints
    pages: npt.NDArray[np.uint8]

    @classmethod
    def none(cls) -> "HotPages":
        """Return an empty set of pages."""
        return cls(np.empty(0, np.int64), np.empty((0, PAGE_BYTES), np.uint8))

    @classmethod
    def load(cls, reader: Reader, keys: Ints) -> "HotPages":
        """Read the pages of ascending keys."""
        files, pages = split_keys(keys)
        return cls(keys, reader.read(files.astype(np.int32), pages * PAGE_BYTES, PAGE_BYTES))

    def within(self, files: Sequence[int]) -> "HotPages":
        """Return those that lie in some files."""
        kept = np.isin(split_keys(self.keys)[0], files)
        return self if kept.all() else HotPages(self.keys[kept], self.pages[kept])

    @property
    def memory_bytes(self) -> int:
        """DRAM held, in bytes."""
        return self.keys.nbytes + self.pages.nbytes


@dataclass(frozen=True)
class PageRows:
    """The rows of a file that lie whole in its pages, one after the other.

    Attributes
    ----------
    file
        The reader's handle.
    ids
        uint32 or int64 ``[n]``: the id of each row; or a range, where ids ascend by one.
    allowed
        uint64 words, a bit for each row that may be found; None for all.
    """

    file: int
    ids: npt.NDArray[Any] | range
    allowed: npt.NDArray[np.uint64] | None = None

    @cached_property
    def compiled(self) -> Any:
        """The rows as the native core takes them, made once for all rankings."""
        assert backend.core is not None
        ids, first = (None, self.ids.start) if isinstance(self.ids, range) else (self.ids, 0)
        return backend.core.PageRows(file=self.file, ids=ids, first=first, rows=len(self.ids), allowed=self.allowed)


@dataclass(frozen=True, slots=True)
class RankRequest:
    """A request to rank. Query ``i`` has the candidates from ``first[i]`` to ``first[i + 1]``, by ascending bound.

    Attributes
    ----------
    queries
        float32 ``[q, d]``.
    metric
        One of ``memhier.io.kernels.METRICS``.
    dtype
        Of the rows' elements, one of ``memhier.io.kernels.ROW_DTYPES``.
    row_bytes
        Bytes read for a row; its ``d`` elements come first.
    first
        int64 ``[q + 1]``.
    files, offsets
        int32 and int64 ``[n]``: the reader's handle, and where in that file the row of each candidate starts.
    lower
        float32 ``[n]``: the least distance each may have, in the unit of the metric.
    ids
        int64 ``[n]``: the id of each in the result; at equal distances the smaller goes first.
    thresholds
        float32 ``[q]``: a distance that the k-th nearest is sure not to exceed; infinity where none is known.
    k
        Neighbours wanted.
    first_round
        The number of candidates of a query that the first round ranks; a later one ranks half as many as all before
        it, and at least 8.
    max_reads
        The most pages read for one query.
    deadline
        Seconds after which no further round starts.
    page_rows
        The rows on the pages of each file, where rows lie whole in them (`page_rows_of`): a page that is read
        for a candidate then costs no more by being ranked whole, and `first_round` counts pages. None ranks
        candidates alone.
    """

    queries: Floats
    metric: str
    dtype: str
    row_bytes: int
    first: Ints
    files: npt.NDArray[np.int32]
    offsets: Ints
    lower: Floats
    ids: Ints
    thresholds: Floats
    k: int
    first_round: int
    max_reads: int = 2**62
    deadline: float = np.inf
    page_rows: Sequence[PageRows] | None = None


@dataclass(frozen=True, slots=True)
class Ranking:
    """The nearest of each query.

    Attributes
    ----------
    ids, distances
        int64 and float32 ``[q, k]``, nearest first; -1 and infinity where there are fewer.
    files, offsets
        int32 and int64 ``[q, k]``: where each of them lies, -1 where there are fewer.
    tally
        `RANK_TALLY` ``[q]``.
    """

    ids: Ints
    distances: Floats
    files: npt.NDArray[np.int32]
    offsets: Ints
    tally: Tallies

    def take(self, rows: slice) -> "Ranking":
        """Return those of some queries, where they lie."""
        return Ranking(self.ids[rows], self.distances[rows], self.files[rows], self.offsets[rows], self.tally[rows])
