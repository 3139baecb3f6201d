"""All vectors within a radius: the search scans every list and reads the vectors that the bounds admit.

The radius is a threshold known beforehand, while a search for the k nearest has to find its own. It may admit any
number of vectors, so lists whose candidates would not fit are scanned a few at a time.
"""

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.zoom.calibration.calibration import Calibration
from memhier.ann.zoom.preview.preview import Effort
from memhier.ann.zoom.preview.scan_arguments import Candidates
from memhier.ann.zoom.preview.space import Numbers
from memhier.ann.zoom.search.search import CANDIDATE_BYTES, Found, Search
from memhier.io.read_arguments import Tallies
from memhier.shield import check_interrupt

__all__ = ["WITHIN_TALLY", "Within", "all_nearest", "range_effort", "search_range"]

_LIMIT = 1024  # candidates of a query that are read together
_LIST_BYTES = 24  # of its number, for a query that probes all of them
_NEAR = 64  # lists around a query, that hold nearly all of its neighbours
_ROUNDING = 1e-5  # of the terms of a distance
WITHIN_TALLY = np.dtype([(name, np.int64) for name in ("probed", "scanned", "ranked", "page_requests", "hot_pages")])
"""Of a query: the numbers of these names in `SCAN_TALLY` and `RANK_TALLY`."""

Floats: TypeAlias = npt.NDArray[np.float32]
Ints: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Within:
    """Ids and distances of one query, in their order, and a record of `WITHIN_TALLY`."""

    ids: Ints
    distances: Floats
    tally: np.void


def range_effort(calibration: Calibration, lists: int, recall: float) -> tuple[Effort, bool]:
    """Return the effort for `recall`, and whether it is known to reach it.

    A radius is the distance of some k-th neighbour. As k is unknown, the widest bounds of all are taken.
    """
    if recall == 1:
        return Effort(lists, eps=calibration.exact_eps), False
    known = [calibration.measured(k, recall) for k in calibration.efforts]
    if not all(reached for _, reached in known):
        return Effort(lists, eps=calibration.exact_eps), False
    return Effort(lists, eps=max(effort.eps for effort, _ in known)), True


def search_range(
    search: Search, queries: Floats, radii: Floats, effort: Effort, beside: Ints | None = None
) -> list[Within]:
    """Return the vectors within `radii`, in the metric's unit ``[q]``, of queries float32 ``[q, d]``.

    They are those of all lists, or of the lists nearest to each query and of some `beside` these.
    """
    snapshot = search.snapshot
    each = _LIMIT * CANDIDATE_BYTES + 16 * snapshot.space.padded + _LIST_BYTES * snapshot.preview.lists
    each += 0 if beside is None else (_NEAR + 1) * _LIST_BYTES * (1 + len(beside))
    step = max(1, search.scan_bytes // each)
    results = []
    for start in range(0, len(queries), step):
        check_interrupt()
        part = slice(start, start + step)
        scan = _Scan(search, queries[part], radii[part], effort.eps, search.numbers[start:])
        if search.selection.rows.total:
            scan.all_lists() if beside is None else scan.near_lists(beside)
        if len(snapshot.fresh):
            every = len(snapshot.fresh)
            near = snapshot.fresh.nearest(queries[part], snapshot.space.metric, every, search.selection.fresh)
            for number in range(len(scan.queries)):
                scan.take(number, near[0][number], near[1][number])
        results += scan.finish()
    return results


def all_nearest(
    search: Search,
    queries: Floats,
    found: Found,
    effort: Effort | None = None,
    rows: npt.NDArray[np.bool_] | None = None,
    radius: Floats | None = None,
    beside: Ints | None = None,
) -> Found:
    """Return the nearest of each query among everything as near as the k-th of `found`, with `found` completed.

    By themselves the widest bounds leave too much to rank; the distances of near vectors exclude the most of it.

    Parameters
    ----------
    effort
        Its bounds decide which vectors may be as near; the widest when not given.
    rows
        bool ``[q]``: the queries to do it for; all when not given.
    radius
        float32 ``[q]``: the largest distance wanted; none when not given.
    beside
        As for :func:`search_range`.
    """
    snapshot = search.snapshot
    k = found.ids.shape[1]
    radii = found.distances[:, -1]
    if radius is not None:
        radii = np.minimum(radii, radius)
    wanted = np.isfinite(radii) if rows is None else np.isfinite(radii) & rows
    complete = np.flatnonzero(wanted)  # fewer than k are all there are
    effort = effort or Effort(snapshot.preview.lists, eps=snapshot.calibration.exact_eps)
    if search.trace is not None and len(complete):
        most = snapshot.space.remoteness(radii[complete], queries[complete], _ROUNDING)
        search.trace.completed(effort.eps, float(most[0]), float(radii[complete[0]]))
    within = search_range(search, queries[complete], radii[complete], effort, beside)
    found = Found(
        found.ids, found.distances, found.scanned.copy(), found.admitted, found.ranked.copy(), found.cut_short
    )  # fmt: skip
    for query, more in zip(complete.tolist(), within, strict=True):
        # A vector found before stays, also where its bound is so wrong that the search within the radius misses it.
        alone = ~np.isin(found.ids[query], more.ids)
        ids = np.concatenate([more.ids, found.ids[query, alone]])
        away = np.concatenate([more.distances, found.distances[query, alone]])
        order = np.lexsort((ids, away))[:k]
        found.ids[query], found.distances[query] = ids[order], away[order]
        for name, value in (("probed", more.tally["probed"]), ("scanned", more.tally["scanned"]), ("cut_short", 0)):
            found.scanned[name][query] = value
        _add(found.ranked, query, more.tally)
        found.ranked["rounds"][query] += 1
    return found


def _add(sums: Tallies, rows: int | Ints, more: Tallies | np.void) -> None:
    """Add tallies to rows of others, in the fields that both have."""
    for name in set(sums.dtype.names or ()) & set(more.dtype.names or ()):
        sums[name][rows] += more[name]


class _Scan:
    """One block of queries on its way."""

    def __init__(self, search: Search, queries: Floats, radii: Floats, eps: float, numbers: Numbers) -> None:
        self.queries = queries
        self._search, self._snapshot, self._radii, self._eps = search, search.snapshot, radii, eps
        space = search.snapshot.space
        self._turned = search.snapshot.preview.turn(space.queries(queries, numbers))
        self._most = space.remoteness(radii, queries, _ROUNDING)
        self._ids: list[list[Ints]] = [[] for _ in queries]
        self._near: list[list[Floats]] = [[] for _ in queries]
        self._tally = np.zeros(len(queries), WITHIN_TALLY)

    def all_lists(self) -> None:
        """Look for the vectors within the radius of each query."""
        every = np.arange(len(self.queries))
        lists = self._search.selection.rows.lists
        if lists is None:
            lists = np.arange(self._snapshot.preview.lists)
        self._lists(every, np.broadcast_to(lists, (len(every), len(lists))), _LIMIT)

    def near_lists(self, beside: Ints) -> None:
        """Look for them in the lists nearest to each query, and in those `beside`."""
        preview = self._snapshot.preview
        near = preview.route(self._turned, min(_NEAR, preview.lists))
        more = np.where((near[:, :, None] == beside).any(axis=1), -1, beside)
        self._lists(np.arange(len(near)), -np.sort(-np.hstack([near, more])), _LIMIT)

    def _lists(self, chosen: Ints, probes: Ints, limit: int) -> None:
        """Look for the vectors of some queries in lists of each, ``[chosen, p]``."""
        found = self._scan(chosen, probes, limit)
        # A full list of candidates may have left some out.
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
        """Keep the vectors within the radius of a query."""
        inside = near <= self._radii[number]
        self._ids[number].append(ids[inside])
        self._near[number].append(near[inside])

    def finish(self) -> list[Within]:
        """Return the vectors found for each query."""
        results = []
        for ids, near, tally in zip(self._ids, self._near, self._tally, strict=True):
            names = np.concatenate([np.empty(0, np.int64), *ids])
            away = np.concatenate([np.empty(0, np.float32), *near])
            order = np.lexsort((names, away))
            results.append(Within(names[order], away[order], tally))
        return results

    def _scan(self, chosen: Ints, probes: Ints, limit: int) -> Candidates:
        found = self._snapshot.preview.scan(
            self._turned[chosen], np.ascontiguousarray(probes), self._search.selection.rows.coded, limit,
            eps=self._eps, limit=limit, most=self._most[chosen],
        )  # fmt: skip
        self._search.count_reads(found)
        return found

    def _rank(self, chosen: Ints, found: Candidates, rows: Ints) -> None:
        counts = found.counts[rows]
        _add(self._tally, chosen, found.tally[rows])
        if not counts.sum():
            return
        search, most = self._search, int(counts.max())
        inside = np.arange(found.positions.shape[1]) < counts[:, None]
        everything = np.full(int(counts.sum()), -np.inf, np.float32)
        ranking = search.rank(
            self.queries[chosen], found.positions[rows][inside], counts, lower=everything,
            thresholds=np.full(len(chosen), np.inf, np.float32), k=most, first_round=most,
            ids=None if found.ids is None else found.ids[rows][inside],
        )  # fmt: skip
        _add(self._tally, chosen, ranking.tally)
        search.note(ranking, ranking.distances <= self._radii[chosen, None])
        for place, (number, count) in enumerate(zip(chosen.tolist(), counts.tolist(), strict=True)):
            self.take(number, ranking.ids[place, :count], ranking.distances[place, :count])
