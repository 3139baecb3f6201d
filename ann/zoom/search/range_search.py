"""All vectors within a radius: every list is scanned, and what the bounds admit is read.

The radius is a threshold known beforehand, where a search for the k nearest has to find its own. It may admit any
number of vectors, so lists are scanned a few at a time wherever what they hold would not fit.
"""

from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.zoom.calibration.calibrate import Calibration
from memhier.ann.zoom.ids.ids import Sightings
from memhier.ann.zoom.preview.code_scan import Candidates, CodedPart
from memhier.ann.zoom.preview.preview import Effort
from memhier.ann.zoom.search.search import CANDIDATE_BYTES, Found, Selection, Snapshot, found_positions
from memhier.ann.zoom.storage.fullview import make_workspace
from memhier.ann.zoom.storage.part import gather
from memhier.io.reader import Reader
from memhier.rows.ranking import RankRequest, rank_rows
from memhier.shield import check_interrupt

__all__ = ["RangeResult", "Within", "all_nearest", "range_effort", "search_range"]

_LIMIT = 1024  # candidates of a query that are read together
_LIST_BYTES = 24  # of its number, for a query that probes all of them
_ROUNDING = 1e-5  # of the terms of a distance

Floats: TypeAlias = npt.NDArray[np.float32]
Ints: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RangeResult:
    """Vectors within a radius of each query, nearest first, ties by id.

    Attributes
    ----------
    offsets
        int64 ``[q + 1]``: those of query ``i`` stand from ``offsets[i]`` to ``offsets[i + 1]``.
    ids, distances
        int64, or strings as objects, and float32, ``[n]``; the distances as :class:`memhier.ann.SearchResult` has them.
    stats
        Plain numbers of this call, as far as they apply those of :class:`memhier.ann.SearchResult`.
    """

    offsets: Ints
    ids: npt.NDArray[Any]
    distances: Floats
    stats: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Within:
    """Ids and distances of one query, in their order; tally int64 ``[5]``: lists, codes, ranked, pages, hot pages."""

    ids: Ints
    distances: Floats
    tally: Ints


def range_effort(calibration: Calibration, lists: int, recall: float) -> tuple[Effort, bool]:
    """Return how hard to look for `recall`, and whether that is known to reach it.

    A radius is the distance of some k-th neighbour, but nobody knows of which, so the widest bounds of all are taken.
    """
    if recall == 1:
        return Effort(lists, eps=calibration.exact_eps), False
    known = [calibration.effort(k, recall) for k in calibration.efforts]
    if not all(reached for _, reached in known):
        return Effort(lists, eps=calibration.exact_eps), False
    return Effort(lists, eps=max(effort.eps for effort, _ in known)), True


def search_range(
    snapshot: Snapshot,
    reader: Reader,
    queries: Floats,
    radii: Floats,
    effort: Effort,
    selection: Selection,
    sums: Ints,
    seen: Sightings | None,
) -> list[Within]:
    """Return what lies within `radii`, in the metric's unit ``[q]``, of queries float32 ``[q, d]``.

    Parameters
    ----------
    selection
        What may be found.
    sums
        int64 ``[3]`` to which the I/Os, pages and bytes read are added.
    seen
        Notes where the vectors found are; None where nobody asks.
    """
    workspace = make_workspace(snapshot.row_bytes)
    coded = [each.coded(bits) for each, bits in zip(snapshot.parts, selection.parts, strict=True)]
    each = _LIMIT * CANDIDATE_BYTES + 16 * snapshot.space.padded + _LIST_BYTES * snapshot.preview.lists
    step = max(1, snapshot.scan_bytes // each)
    results = []
    for start in range(0, len(queries), step):
        check_interrupt()
        part = slice(start, start + step)
        scan = _Scan(snapshot, reader, queries[part], radii[part], effort, coded, workspace, sums, seen)
        if coded:
            scan.all_lists()
        if len(snapshot.fresh):
            near = snapshot.fresh.nearest(queries[part], snapshot.space.metric, len(snapshot.fresh), selection.fresh)
            for number in range(len(scan.queries)):
                scan.take(number, near[0][number], near[1][number])
        results += scan.finish()
    return results


def all_nearest(
    snapshot: Snapshot,
    reader: Reader,
    queries: Floats,
    found: Found,
    selection: Selection,
    sums: Ints,
    seen: Sightings | None,
    *,
    effort: Effort | None = None,
    rows: npt.NDArray[np.bool_] | None = None,
) -> Found:
    """Return the nearest of each query among everything as near as the k-th of `found`: what that missed is put in.

    The widest bounds leave too much to be ranked by themselves; by the distances of near vectors they exclude the most.

    Parameters
    ----------
    effort
        The lists and bounds that decide what may be as near; all lists and the widest bounds when not given.
    rows
        bool ``[q]``: the queries to do it for; all when not given.
    """
    k = found.ids.shape[1]
    radii = found.distances[:, -1]
    wanted = np.isfinite(radii) if rows is None else np.isfinite(radii) & rows
    complete = np.flatnonzero(wanted)  # fewer than k are all there are
    effort = effort or Effort(snapshot.preview.lists, eps=snapshot.calibration.exact_eps)
    within = search_range(snapshot, reader, queries[complete], radii[complete], effort, selection, sums, seen)
    found = replace(found, scanned=found.scanned.copy(), ranked=found.ranked.copy())
    for query, more in zip(complete.tolist(), within, strict=True):
        # What is found stays, though its own bound, were it wrong by more, would keep it out of what is within.
        alone = ~np.isin(found.ids[query], more.ids)
        ids = np.concatenate([more.ids, found.ids[query, alone]])
        away = np.concatenate([more.distances, found.distances[query, alone]])
        order = np.lexsort((ids, away))[:k]
        found.ids[query], found.distances[query] = ids[order], away[order]
        found.scanned[query, :2], found.scanned[query, 2] = more.tally[:2], 0
        found.ranked[query, :3] += more.tally[2:]
        found.ranked[query, 3] += 1
    return found


class _Scan:
    """One block of queries on its way."""

    def __init__(
        self,
        snapshot: Snapshot,
        reader: Reader,
        queries: Floats,
        radii: Floats,
        effort: Effort,
        coded: list[CodedPart],
        workspace: npt.NDArray[np.uint8],
        sums: Ints,
        seen: Sightings | None,
    ) -> None:
        self.queries = queries
        self._snapshot, self._reader, self._radii, self._effort = snapshot, reader, radii, effort
        self._coded, self._workspace, self._sums, self._seen = coded, workspace, sums, seen
        self._turned = snapshot.preview.turn(snapshot.space.queries(queries))
        self._most = snapshot.space.remoteness(radii, queries, _ROUNDING)
        self._ids: list[list[Ints]] = [[] for _ in queries]
        self._near: list[list[Floats]] = [[] for _ in queries]
        self._tally = np.zeros((len(queries), 5), np.int64)

    def all_lists(self) -> None:
        """Look for what lies within the radius of each query."""
        every = np.arange(len(self.queries))
        lists = np.arange(self._snapshot.preview.lists)
        self._lists(every, np.broadcast_to(lists, (len(every), len(lists))), _LIMIT)

    def _lists(self, chosen: Ints, probes: Ints, limit: int) -> None:
        """Look for the vectors of some queries in lists of each, ``[chosen, p]``."""
        found = self._scan(chosen, probes, limit)
        # With as many as there is room for, some may have been left out.
        fits = found.counts < limit
        self._rank(chosen[fits], found, np.flatnonzero(fits))
        for row in np.flatnonzero(~fits):
            query, lists = chosen[row : row + 1], probes[row : row + 1]
            if lists.shape[1] == 1:
                self._lists(query, lists, 4 * limit)
                continue
            for half in np.array_split(lists, 2, axis=1):
                self._lists(query, half, limit)

    def take(self, number: int, ids: Ints, near: Floats) -> None:
        """Keep what lies within the radius of a query."""
        inside = near <= self._radii[number]
        self._ids[number].append(ids[inside])
        self._near[number].append(near[inside])

    def finish(self) -> list[Within]:
        """Return what was found of each query."""
        results = []
        for ids, near, tally in zip(self._ids, self._near, self._tally, strict=True):
            names, away = (
                np.concatenate([np.empty(0, np.int64), *ids]),
                np.concatenate([np.empty(0, np.float32), *near]),
            )
            order = np.lexsort((names, away))
            results.append(Within(names[order], away[order], tally))
        return results

    def _scan(self, chosen: Ints, probes: Ints, limit: int) -> Candidates:
        return self._snapshot.preview.scan(
            self._turned[chosen], np.ascontiguousarray(probes), self._coded, limit,
            eps=self._effort.eps, limit=limit, most=self._most[chosen],
        )  # fmt: skip

    def _rank(self, chosen: Ints, found: Candidates, rows: Ints) -> None:
        counts = found.counts[rows]
        self._tally[chosen, :2] += found.tally[rows, :2]
        if not counts.sum():
            return
        snapshot, most = self._snapshot, int(counts.max())
        inside = np.arange(found.positions.shape[1]) < counts[:, None]
        positions = found.positions[rows][inside]
        files, offsets, ids = gather(snapshot.parts, positions)
        everything = np.full(len(ids), -np.inf, np.float32)
        request = RankRequest(
            self.queries[chosen], snapshot.space.metric, snapshot.dtype.name, snapshot.row_bytes,
            np.concatenate([[0], np.cumsum(counts)]), files, offsets, everything, ids,
            np.full(len(chosen), np.inf, np.float32), most, most,
        )  # fmt: skip
        ranking = rank_rows(self._reader, request, self._workspace, hot=snapshot.hot, tally=self._sums)
        self._tally[chosen, 2:] += ranking.tally[:, :3]
        if self._seen is not None:
            within = ranking.distances <= self._radii[chosen, None]
            self._seen.note(ranking.ids[within], found_positions(snapshot, ranking)[within])
        for place, (number, count) in enumerate(zip(chosen.tolist(), counts.tolist(), strict=True)):
            self.take(number, ranking.ids[place, :count], ranking.distances[place, :count])
