"""Exact ranking of rows on SSD in rounds of reads: what may still be among the nearest is read, and nothing else.

Every candidate comes with a lower bound on its distance. Each round reads, for all queries in one submission, the rows
whose bound does not exceed the k-th nearest distance found so far, a page never twice; a query stops when no bound is
left that could improve on it. Where rows lie whole in their pages, all that is on a page is ranked once it is read.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from memhier.errors import ClosedError
from memhier.io.faults import raise_fault
from memhier.io.kernels import METRICS, ROW_DTYPES
from memhier.io.reader import PAGE_BYTES, Reader
from memhier.rows.python_ranking import rank as rank_in_python
from memhier.rows.rows import rows_per_page

__all__ = ["STOPS", "HotPages", "PageRows", "RankRequest", "Ranking", "page_rows_of", "rank_rows"]

STOPS = ("bound", "all_read", "max_reads", "deadline")  # in the order of the numbers in a tally

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class HotPages:
    """Pages held in DRAM.

    Attributes
    ----------
    keys
        int64 ``[c]``, ascending: ``file << 40 | page`` by the reader's handle of the file.
    pages
        uint8 ``[c, 4096]``.
    """

    keys: Ints
    pages: npt.NDArray[np.uint8]

    @classmethod
    def none(cls) -> "HotPages":
        """Return an empty set of pages."""
        return cls(np.empty(0, np.int64), np.empty((0, PAGE_BYTES), np.uint8))

    @property
    def memory_bytes(self) -> int:
        """DRAM held, in bytes."""
        return self.keys.nbytes + self.pages.nbytes


@dataclass(frozen=True, slots=True)
class PageRows:
    """The rows of a file that lie whole in its pages, one after the other.

    Attributes
    ----------
    file
        The reader's handle.
    ids
        uint32 or int64 ``[n]``: what each row is called.
    allowed
        uint64 words, a bit for each row that may be found; None for all.
    """

    file: int
    ids: npt.NDArray[Any]
    allowed: npt.NDArray[np.uint64] | None = None


def page_rows_of(row_bytes: int) -> int:
    """Return how many rows of this size lie in a page, 0 where rows straddle pages; see `memhier.rows.rows`."""
    if row_bytes <= PAGE_BYTES and PAGE_BYTES % row_bytes == 0:
        return PAGE_BYTES // row_bytes
    return rows_per_page(row_bytes) or 0


@dataclass(frozen=True, slots=True)
class RankRequest:
    """What to rank: the candidates of query ``i`` are those from ``first[i]`` to ``first[i + 1]``, by ascending bound.

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
        int64 ``[n]``: what each is called in the result; at equal distances the smaller goes first.
    thresholds
        float32 ``[q]``: what the k-th nearest distance is sure not to exceed; infinity where nothing is known.
    k
        Neighbours wanted.
    first_round
        How many candidates of a query the first round ranks; later ones take 8, or half as many as were
        ranked before.
    max_reads
        The most pages read for one query.
    deadline
        Seconds after which no further round starts.
    page_rows
        What lies on the pages of each file, where rows lie whole in them (:func:`page_rows_of`): a page that is read
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
        int64 ``[q, 5]``: rows ranked, pages read for them, pages found in DRAM, rounds, and why it stopped, as an index
        into :data:`STOPS`. A page that several queries of the call shared counts for each of them.
    """

    ids: Ints
    distances: Floats
    files: npt.NDArray[np.int32]
    offsets: Ints
    tally: Ints


def rank_rows(
    reader: Reader,
    request: RankRequest,
    workspace: npt.NDArray[np.uint8] | None = None,
    *,
    hot: HotPages | None = None,
    tally: Ints | None = None,
) -> Ranking:
    """Rank candidates by the exact distances of their rows.

    Parameters
    ----------
    reader
        Has the files open.
    request
        What to rank.
    workspace
        Where rows straddle pages (:func:`page_rows_of` is 0), uint8 ``[w, row_bytes]``, at least one row, C-contiguous:
        the rows of one submission. Others are ranked where they land, in the reader's own buffers.
    hot
        Pages that need not be read.
    tally
        int64 ``[3]`` to which the I/Os, pages and bytes read are added; a page that several queries share counts once.

    Raises
    ------
    ValueError
        When `workspace` is not what it should be, or a row straddles pages that is of a size to lie whole in them.
    CorruptionError
        When a page does not match its checksum.
    OSError
        When the device or the system refuses a read.
    """
    count = len(request.queries)
    whole = page_rows_of(request.row_bytes)
    if whole:
        workspace = np.empty((0, request.row_bytes), np.uint8)
        _check_whole(request.offsets, request.row_bytes)
    elif (
        workspace is None
        or workspace.dtype != np.uint8
        or workspace.ndim != 2
        or workspace.shape[1] != request.row_bytes
        or not len(workspace)
    ):
        raise ValueError(f"workspace: expected uint8 [w, {request.row_bytes}] with w of at least 1")
    of_pages = [] if request.page_rows is None else [(rows.file, rows.ids, rows.allowed) for rows in request.page_rows]
    per_page = whole if of_pages else 0
    if of_pages and per_page == 0:
        raise ValueError(f"page_rows: rows of {request.row_bytes} bytes straddle pages")
    if request.k < 1 or request.first_round < 1:
        raise ValueError(f"k={request.k}, first_round={request.first_round}: expected at least 1")
    pages = hot if hot is not None else HotPages.none()
    shape = count, request.k
    found = Ranking(
        np.empty(shape, np.int64), np.empty(shape, np.float32), np.empty(shape, np.int32), np.empty(shape, np.int64),
        np.zeros((count, 5), np.int64),
    )  # fmt: skip
    sums = tally if tally is not None else np.zeros(3, np.int64)
    core: Any = reader._core
    if reader._closed:
        raise ClosedError("ranking with a closed reader")
    if not hasattr(core, "rank"):
        rank_in_python(reader, request, workspace, pages, found, sums)
        return found
    fault = core.rank(
        request.queries, request.queries.shape[1], ROW_DTYPES.index(request.dtype), METRICS.index(request.metric),
        request.row_bytes, request.first, request.files, request.offsets, request.lower, request.ids,
        request.thresholds, request.k, request.first_round, request.max_reads, request.deadline, workspace, pages.keys,
        pages.pages, per_page, of_pages, found.ids, found.distances, found.files, found.offsets, found.tally, sums,
    )  # fmt: skip
    if fault is not None:
        raise_fault(fault, reader.engine)
    return found


def _check_whole(offsets: Ints, row_bytes: int) -> None:
    beyond = (offsets & (PAGE_BYTES - 1)) > PAGE_BYTES - row_bytes
    if beyond.any():
        index = int(beyond.argmax())
        raise ValueError(
            f"offsets[{index}]={int(offsets[index])}: expected rows of {row_bytes} bytes to lie whole in pages of "
            f"{PAGE_BYTES}, as memhier.rows.rows packs them"
        )
