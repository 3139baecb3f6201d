"""Scan of codes that lie on SSD: wave by wave, the nearest lists first, as long as a list may hold a neighbour.

Each wave reads the lists of some queries in one submission, and scans them as a part of these lists alone. Of its
candidates those stay whose lower bound is at most the k-th smallest upper bound of all waves so far. A wave reads at
most twice as many lists as those before it, and ends at the first list beyond the gap of the effort, which
`memhier.ann.zoom.preview.code_scan` knows too: a query scans the same lists as in DRAM, or a few more.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.zoom.filters.bitmaps import pack
from memhier.ann.zoom.preview.blocks import BLOCK_ROWS
from memhier.ann.zoom.preview.code_scan import (
    REACH,
    SCAN_TALLY,
    Candidates,
    CodedPart,
    CodeLists,
    ScanLimits,
    ScanQueries,
    code_scan,
    positions_of,
    split_positions,
)
from memhier.ann.zoom.preview.stored_codes import StoredCodes
from memhier.io.read_arguments import READ_TALLY
from memhier.shield import check_interrupt

__all__ = ["WAVE_COPIES", "Parts", "StoredPart", "stored_scan"]

WAVE_COPIES = 3  # of the blocks of a wave: as read, as columns of their own, and what goes with them
_FIRST = 4  # lists of the first wave, at least
_WINDOW = 128  # lists of a query that are looked at in one wave, at most

Floats: TypeAlias = npt.NDArray[np.float32]
Ints: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
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


Parts: TypeAlias = Sequence[CodedPart | StoredPart]


def stored_scan(queries: ScanQueries, lists: CodeLists, parts: Sequence[StoredPart], limits: ScanLimits) -> Candidates:
    """Return the rows of each query whose lower bound is at most the k-th smallest upper bound, with their ids."""
    scan = _Waves(queries, lists, parts, limits)
    while len(chosen := scan.next()):
        check_interrupt()
        scan.run(chosen)
    return scan.found()


class _Waves:
    """The queries of one scan on their way."""

    def __init__(self, queries: ScanQueries, lists: CodeLists, parts: Sequence[StoredPart], limits: ScanLimits) -> None:
        self._queries, self._lists, self._parts, self._limits = queries, lists, parts, limits
        count = len(queries.queries)
        shape = count, limits.limit
        self._positions, self._ids = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        self._lower, self._estimates = np.full(shape, np.inf, np.float32), np.full(shape, np.inf, np.float32)
        self._counts = np.zeros(count, np.int64)
        self._thresholds = queries.most.copy()
        self._tally = np.zeros(count, SCAN_TALLY)
        self._tally["open"] = 1
        self._reads = np.zeros(1, READ_TALLY)
        self._done, self._first = np.zeros(count, np.int64), np.full(count, np.nan, np.float32)
        self._widest = np.zeros(count, np.float32)
        self._ends = (queries.probes >= 0).sum(axis=1)
        sizes = np.sum([np.diff(part.starts) for part in parts], axis=0)
        self._sizes: Ints = sizes
        self._each = max(part.codes.block_bytes for part in parts)

    def next(self) -> dict[int, Ints]:
        """Return the lists that the next wave scans, by query; none at the end."""
        chosen: dict[int, Ints] = {}
        room = self._parts[0].wave_bytes
        for query in np.flatnonzero((self._tally["open"] > 0) & (self._done < self._ends)).tolist():
            lists = self._wanted(query)
            if not len(lists):
                continue
            size = (self._sizes[lists] // BLOCK_ROWS + 2 * len(self._parts)) * self._each
            fits = max(int(np.searchsorted(np.cumsum(size), room, side="right")), 0 if chosen else 1)
            if not fits:
                break
            chosen[query] = lists[:fits]
            room -= int(size[:fits].sum())
        return chosen

    def _wanted(self, query: int) -> Ints:
        """Return the next lists of a query; closes the query where the first of them is beyond the gap."""
        limits, done = self._limits, int(self._done[query])
        stop = min(int(self._ends[query]), done + min(max(limits.least, _FIRST, done), _WINDOW))
        lists: Ints = self._queries.probes[query, done:stop]
        if not np.isfinite(limits.gap) or stop <= limits.least:
            return lists
        beyond = self._beyond(query, lists)
        beyond[: max(0, limits.least - done)] = False
        if not beyond.any():
            return lists
        end = int(beyond.argmax())
        if end == 0:
            self._tally["open"][query] = 0
        return lists[:end]

    def _beyond(self, query: int, lists: Ints) -> npt.NDArray[np.bool_]:
        """Return which lists lie beyond the gap from the k-th estimate so far, bool ``[n]``."""
        limits, inner = self._limits, self._queries.inner
        count = int(self._counts[query])
        kth = float(self._queries.most[query])
        if count >= limits.k:
            kth = min(kth, float(np.partition(self._estimates[query, :count], limits.k - 1)[limits.k - 1]))
        if not np.isfinite(kth):
            return np.zeros(len(lists), np.bool_)
        turned, centroids = self._queries.queries[query], self._lists.centroids[lists].astype(np.float32)
        if inner is not None:
            along, radii = float(inner[query, 1]), self._lists.radii[lists]
            widest = np.maximum.accumulate(np.maximum(radii, self._widest[query]))
            away = -2 * (centroids @ turned) - REACH * 2 * along * radii - kth
            return np.asarray(away >= limits.gap * 2 * along * widest)
        centroids -= turned
        squared = np.einsum("ij,ij->i", centroids, centroids)
        first = squared[0] if np.isnan(self._first[query]) else self._first[query]
        return np.asarray((squared - first >= limits.gap * abs(kth)) & (squared >= limits.clear * kth))

    def run(self, chosen: dict[int, Ints]) -> None:
        """Read and scan lists of some queries."""
        rows = np.fromiter(chosen, np.int64)
        every = np.unique(np.concatenate([*chosen.values()]))
        coded, read = [], []
        for part in self._parts:
            blocks = part.codes.blocks_of(every)
            at, begin = (np.cumsum(blocks) - blocks) * BLOCK_ROWS, part.starts[every]
            lengths = part.starts[every + 1] - begin
            lists = part.codes.lists(every, self._reads)
            allowed = None
            if part.allowed is not None:
                places = np.repeat(at - (np.cumsum(lengths) - lengths), lengths) + np.arange(int(lengths.sum()))
                bits = np.zeros(len(lists.ids), np.bool_)
                bits[places] = _are_set(part.allowed, np.repeat(begin - at, lengths) + places)
                allowed = pack(bits)
            coded.append(CodedPart(_borders(at, lengths, len(lists.ids)), lists.codes, lists.numbers, allowed))
            read.append((at, begin, lists.ids))
        found = self._scanned(rows, chosen, every, coded)
        self._note(rows, chosen, found.tally)
        number, local = split_positions(found.positions)
        inside = np.arange(found.positions.shape[1]) < found.counts[:, None]
        positions, names = np.zeros_like(local), np.zeros_like(local)
        for which, (at, begin, ids) in enumerate(read):
            here = inside & (number == which)
            each = np.searchsorted(at, local[here], side="right") - 1
            positions[here] = positions_of(which, begin[each] + local[here] - at[each])
            names[here] = ids[local[here]]
        self._keep(rows, positions, names, found, inside)

    def _scanned(self, rows: Ints, chosen: dict[int, Ints], every: Ints, parts: Sequence[CodedPart]) -> Candidates:
        """Return the candidates of some queries in the lists that were read, which have odd numbers among these."""
        centroids = np.zeros((2 * len(every) + 1, self._lists.centroids.shape[1]), np.float16)
        centroids[1::2] = self._lists.centroids[every]
        radii = np.zeros(len(centroids), np.float32)
        radii[1::2] = self._lists.radii[every]
        probes = np.full((len(rows), max(map(len, chosen.values()))), -1, np.int64)
        for row, lists in enumerate(chosen.values()):
            probes[row, : len(lists)] = 2 * np.searchsorted(every, lists) + 1
        inner, limits = self._queries.inner, self._limits
        return code_scan(
            ScanQueries(
                self._queries.queries[rows], probes, self._thresholds[rows], None if inner is None else inner[rows]
            ),
            CodeLists(centroids, radii, self._lists.book),
            parts,
            ScanLimits(limits.k, limits.eps, limits.limit),
        )

    def _note(self, rows: Ints, chosen: dict[int, Ints], tally: npt.NDArray[np.void]) -> None:
        """Note the lists that were scanned."""
        for name in ("probed", "scanned", "cut_short"):
            self._tally[name][rows] += tally[name]
        for query, lists in chosen.items():
            self._done[query] += len(lists)
            if self._queries.inner is not None:
                self._widest[query] = max(self._widest[query], self._lists.radii[lists].max())
            elif np.isnan(self._first[query]):
                apart = self._queries.queries[query] - self._lists.centroids[lists[0]].astype(np.float32)
                self._first[query] = apart @ apart

    def _keep(self, rows: Ints, positions: Ints, ids: Ints, found: Candidates, inside: npt.NDArray[np.bool_]) -> None:
        """Take over the candidates of a wave, as far as the bounds of all waves let them through."""
        k, limit = self._limits.k, self._limits.limit
        kept, more = int(self._counts[rows].max(initial=0)), int(found.counts.max(initial=0))
        had = np.arange(kept) < self._counts[rows, None]
        inf = np.float32(np.inf)
        old, new = (rows, slice(kept)), (slice(None), slice(more))
        lower = np.concatenate(
            [np.where(had, self._lower[old], inf), np.where(inside[new], found.lower[new], inf)], axis=1
        )
        estimates = np.concatenate([self._estimates[old], found.estimates[new]], axis=1)
        places = np.concatenate([self._positions[old], positions[new]], axis=1)
        names = np.concatenate([self._ids[old], ids[new]], axis=1)
        if lower.shape[1] >= k:
            with np.errstate(invalid="ignore"):
                upper = np.where(np.isfinite(lower), 2 * estimates - lower, inf)
            kth = np.partition(upper, k - 1, axis=1)[:, k - 1]
            self._thresholds[rows] = np.minimum(self._thresholds[rows], kth)
        order = np.lexsort((places, lower), axis=-1)
        lower = np.take_along_axis(lower, order, 1)
        within = ((lower <= self._thresholds[rows, None]) & (lower < inf)).sum(axis=1)
        self._tally["cut_short"][rows] |= within > limit
        self._counts[rows] = np.minimum(within, limit)
        width = min(limit, lower.shape[1])
        self._lower[rows, :width] = lower[:, :width]
        for mine, each in ((self._estimates, estimates), (self._positions, places), (self._ids, names)):
            mine[rows, :width] = np.take_along_axis(each, order[:, :width], 1)

    def found(self) -> Candidates:
        """Return the candidates of all waves."""
        np.minimum(self._tally["cut_short"], 1, out=self._tally["cut_short"])
        return Candidates(
            self._positions, self._lower, self._estimates, self._counts, self._thresholds, self._tally,
            ids=self._ids, reads=self._reads,
        )  # fmt: skip


def _borders(at: Ints, lengths: Ints, count: int) -> Ints:
    """Return where lists begin among rows read: list ``2 i + 1`` is the i-th, even lists are the rows between."""
    starts = np.empty(2 * len(at) + 2, np.int64)
    starts[0], starts[-1] = 0, count
    starts[1:-1:2], starts[2:-1:2] = at, at + lengths
    return starts


def _are_set(bits: npt.NDArray[np.uint64], rows: Ints) -> npt.NDArray[np.bool_]:
    """Return which of the rows are in a bitmap, bool ``[n]``."""
    return np.asarray(bits[rows >> 6] >> (rows & 63).astype(np.uint64) & np.uint64(1), np.bool_)
