"""Exact ranking of rows on SSD in rounds of reads: only rows that may still be among the nearest are read.

Every candidate comes with a lower bound on its distance. Each round reads, for all queries in one submission, the rows
whose bound does not exceed the k-th nearest distance found so far, a page never twice; a query stops when no bound is
left that could improve on it. Where rows lie whole in their pages, all that is on a page is ranked once it is read.
"""

from functools import partial

import numpy as np
import numpy.typing as npt

from memhier import backend
from memhier.io.kernels import METRICS, ROW_DTYPES
from memhier.io.page_file import PAGE_BYTES
from memhier.io.read_arguments import READ_TALLY, Tallies
from memhier.io.reader import Reader
from memhier.rows.python_ranking import rank as rank_in_python
from memhier.rows.rank_request import RANK_TALLY, STOPS, HotPages, PageRows, Ranking, RankRequest
from memhier.rows.rows import rows_per_page

__all__ = ["RANK_TALLY", "STOPS", "HotPages", "PageRows", "RankRequest", "Ranking", "page_rows_of", "rank_rows"]

Ints = npt.NDArray[np.int64]


def page_rows_of(row_bytes: int) -> int:
    """Return how many rows of this size lie in a page, 0 where rows straddle pages; see `memhier.rows.rows`."""
    if row_bytes <= PAGE_BYTES and PAGE_BYTES % row_bytes == 0:
        return PAGE_BYTES // row_bytes
    return rows_per_page(row_bytes) or 0


def rank_rows(
    reader: Reader,
    request: RankRequest,
    workspace: npt.NDArray[np.uint8] | None = None,
    *,
    hot: HotPages | None = None,
    tally: Tallies | None = None,
    rounds: npt.NDArray[np.int32] | None = None,
) -> Ranking:
    """Rank candidates by the exact distances of their rows.

    Parameters
    ----------
    reader
        Has the files open.
    request
        The candidates and limits.
    workspace
        Where rows straddle pages (:func:`page_rows_of` is 0), uint8 ``[w, row_bytes]``, at least one row, C-contiguous:
        the rows of one submission. Others are ranked where they land, in the reader's own buffers.
    hot
        Pages that need not be read.
    tally
        A record of `memhier.io.read_arguments.READ_TALLY` ``[1]``, to which the I/Os, pages and bytes read are added; a
        page that several queries share counts once.
    rounds
        int32 ``[n]`` of zeros, to be filled: the round that ranked each candidate, from 1 on. Where pages are ranked
        whole, only the first candidate on a page has the number.

    Raises
    ------
    ValueError
        When `workspace` has another type or shape, or a row straddles pages although its size lets it lie in one.
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
    if request.page_rows and whole == 0:
        raise ValueError(f"page_rows: rows of {request.row_bytes} bytes straddle pages")
    if request.k < 1 or request.first_round < 1:
        raise ValueError(f"k={request.k}, first_round={request.first_round}: expected at least 1")
    pages = hot if hot is not None else HotPages.none()
    shape = count, request.k
    found = Ranking(
        np.empty(shape, np.int64), np.empty(shape, np.float32), np.empty(shape, np.int32), np.empty(shape, np.int64),
        np.zeros(count, RANK_TALLY),
    )  # fmt: skip
    sums = tally if tally is not None else np.zeros(1, READ_TALLY)
    core, compiled = backend.core, reader.compiled
    if core is None or compiled is None:
        rank_in_python(reader, request, workspace, pages, found, sums, rounds)
        return found
    known = [each.compiled for each in request.page_rows or ()]
    ranking = partial(
        compiled.rank,
        request=core.RankRequest(
            queries=request.queries, type=ROW_DTYPES.index(request.dtype), metric=METRICS.index(request.metric),
            row_bytes=request.row_bytes, first=request.first, files=request.files, offsets=request.offsets,
            lower=request.lower, ids=request.ids, thresholds=request.thresholds, k=request.k,
            first_round=request.first_round, max_reads=request.max_reads, deadline=request.deadline,
        ),
        result=core.RankResult(
            ids=found.ids, distances=found.distances, files=found.files, offsets=found.offsets, tally=found.tally,
            rounds=rounds,
        ),
        workspace=workspace, hot_keys=pages.keys, hot_pages=pages.pages,
        page_rows=known, per_page=whole if known else 0, tally=sums,
    )  # fmt: skip
    reader.run(ranking)
    return found


def _check_whole(offsets: Ints, row_bytes: int) -> None:
    beyond = (offsets & (PAGE_BYTES - 1)) > PAGE_BYTES - row_bytes
    if beyond.any():
        index = int(beyond.argmax())
        raise ValueError(
            f"offsets[{index}]={int(offsets[index])}: expected rows of {row_bytes} bytes to lie whole in pages of "
            f"{PAGE_BYTES}, as memhier.rows.rows packs them"
        )
