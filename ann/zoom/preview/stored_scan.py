"""Scan of codes that lie on SSD: wave by wave, the nearest lists first, as long as a list may hold a neighbour.

Each wave reads the next lists of some queries in one submission: of a query at most as many as it had before, and none
that lies beyond its end as far as it is known. A query has the waves that it would have alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.zoom.preview.blocks import BLOCK_ROWS
from memhier.ann.zoom.preview.code_waves import CodeWaves
from memhier.ann.zoom.preview.scan_arguments import Candidates, CodedPart, CodeLists, ScanLimits, ScanQueries, WavePart
from memhier.ann.zoom.preview.stored_codes import StoredCodes
from memhier.io.read_arguments import READ_TALLY, Tallies
from memhier.shield import check_interrupt

__all__ = ["WAVE_COPIES", "Parts", "StoredPart", "stored_scan"]

WAVE_COPIES = 3  # of the blocks of a wave: as read, as columns of their own, and what goes with them
_FIRST = 4  # lists of the first wave, at least
_WINDOW = 128  # lists of a query in one wave, at most

Ints: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True)
class StoredPart:
    """The codes of rows that were written together, on SSD.

    Attributes
    ----------
    codes
        Reads them.
    wave_bytes
        Of blocks that a scan reads at a time, at most; a longer list is read whole.
    allowed
        uint64 words, a bit for each row that may be found; None for all.
    """

    codes: StoredCodes
    wave_bytes: int
    allowed: npt.NDArray[np.uint64] | None = None

    @property
    def starts(self) -> Ints:
        """int64 ``[lists + 1]``."""
        return self.codes.starts

    @property
    def rows(self) -> int:
        """The number of rows."""
        return len(self.codes)

    @cached_property
    def compiled(self) -> Any:
        """The part as the native core takes it, made once for all searches of a snapshot."""
        return self.codes.compiled(self.allowed)


Parts: TypeAlias = Sequence[CodedPart | StoredPart]


def stored_scan(queries: ScanQueries, lists: CodeLists, parts: Sequence[StoredPart], limits: ScanLimits) -> Candidates:
    """Return the rows of each query whose lower bound is at most the k-th smallest upper bound, with their ids."""
    waves, tally = CodeWaves(queries, lists, limits), np.zeros(1, READ_TALLY)
    total = parts[0].wave_bytes // min(part.codes.block_bytes for part in parts)
    while (counts := waves.ahead(_FIRST, _WINDOW, total)).any():
        check_interrupt()
        wanted = _fitting(queries.probes, waves.done, counts, parts)
        chosen = np.unique(wanted[wanted >= 0])
        waves.scan([_read(part, chosen, tally) for part in parts], chosen, counts)
    return replace(waves.finish(), reads=tally)


def _fitting(probes: Ints, done: Ints, counts: Ints, parts: Sequence[StoredPart]) -> Ints:
    """Return the next lists of the first queries, as many as a wave has room for, and -1; lower `counts` to these."""
    rows = np.flatnonzero(counts)
    each = np.arange(counts.max())
    inside = each < counts[rows, None]
    places = np.where(inside, done[rows, None] + each, 0)
    lists = np.where(inside, np.take_along_axis(probes[rows], places, 1), -1)
    size = np.where(inside, sum(part.codes.bytes_of(lists) for part in parts), 0)
    taken = np.cumsum(size.sum(axis=1)) <= parts[0].wave_bytes
    if not taken[0]:  # a query alone takes several waves
        fits = np.cumsum(size[0]) <= parts[0].wave_bytes
        lists[0, max(1, int(fits.sum())) :] = -1
        taken[0] = True
    counts[rows] = np.where(taken, (lists >= 0).sum(axis=1), 0)
    return np.asarray(lists[taken])


def _read(part: StoredPart, lists: Ints, tally: Tallies) -> WavePart:
    """Read the codes of some lists."""
    blocks = part.codes.blocks_of(lists)
    at = (np.cumsum(blocks) - blocks) * BLOCK_ROWS
    begin, stop = part.starts[lists], part.starts[lists + 1]
    found = part.codes.lists(lists, tally)
    return WavePart(
        lists, at, at + stop - begin, begin - at, found.codes, found.numbers, found.ids.astype(np.int64), part.rows,
        part.allowed,
    )  # fmt: skip
