"""The way of a search: from queries to lists, to candidates with bounds, to rounds of reads, to ids."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier import backend
from memhier.ann.limits import NO_LIMITS, ReadLimits
from memhier.ann.zoom.calibration.needs import USUAL_MOST
from memhier.ann.zoom.filters.bitmaps import Words
from memhier.ann.zoom.filters.where import Expression, evaluate, parse_for
from memhier.ann.zoom.ids.collection import collected
from memhier.ann.zoom.preview.preview import Effort
from memhier.ann.zoom.preview.routing.router import WIDER
from memhier.ann.zoom.preview.scan_arguments import SCAN_TALLY, Candidates, positions_of
from memhier.ann.zoom.preview.space import EVERY, Numbers
from memhier.ann.zoom.preview.stored_scan import Parts
from memhier.ann.zoom.search.trace import Trace
from memhier.ann.zoom.search.turns import Turns
from memhier.ann.zoom.storage.fullview import make_workspace
from memhier.ann.zoom.storage.ids import Located, Sightings, locate, with_repeats
from memhier.ann.zoom.storage.part import Findable, findable, gather, ids_at
from memhier.ann.zoom.storage.snapshot import IndexSnapshot
from memhier.io.read_arguments import READ_TALLY, Tallies
from memhier.io.reader import Reader
from memhier.rows.ranking import RANK_TALLY, Ranking, RankRequest, rank_rows
from memhier.shield import ShieldedContext, check_interrupt

__all__ = ["CANDIDATE_BYTES", "NO_WORKSPACE", "Found", "Search", "Selection", "candidate_limit"]

CANDIDATE_BYTES = 64  # position, bound, estimate, file, offset and id of one candidate
_AXIS_BYTES = 16  # of a query on its way into the preview's space
_STRAY_AXIS = 32  # likewise, where its residual is compared with those of far vectors
_PROBE_BYTES = 8  # of a list that a query is routed to
# Of the native core: queries that it routes together, and lists that it compares at a time; bytes of an axis of
# one of these (of inner products half as many again), of a distance and of a candidate before the ranking; and bytes of
# a neighbour of any query.
_ROUTED, _COMPARED = 4, 256
_ROUTED_AXIS, _DISTANCE, _SCANNED, _NEIGHBOUR = 8, 4, 48, 48
_LIMIT = 512  # candidates with bounds that are kept of a query, where there is no room for more
_LIMIT_FEW = 96  # likewise at first where their number is not known, as under a filter
_CALLS_LENT = 16  # of the native core for which rooms stay lent at most: a thread may wait for one unnoticed

NO_WORKSPACE = np.empty((0, 1), np.uint8)
_NONE_LENT = nullcontext(0)

Floats: TypeAlias = npt.NDArray[np.float32]
Ints: TypeAlias = npt.NDArray[np.int64]


class Selection(NamedTuple):
    """The vectors that a search may find.

    Attributes
    ----------
    rows
        Those on SSD.
    fresh
        bool ``[n]`` of the fresh vectors; None for all.
    share, left
        The share of the vectors on SSD that the filter leaves, and their number; None where it leaves all.
    """

    rows: Findable
    fresh: npt.NDArray[np.bool_] | None = None
    share: float = 1.0
    left: int | None = None

    @classmethod
    def of(
        cls, snapshot: IndexSnapshot, where: str | Expression | None, allow: object = None, deny: object = None,
        selected: Sequence[Words] | None = None,
    ) -> Self:  # fmt: skip
        """Return the vectors that fulfil a filter, have one of the ids `allow` and none of `deny`; None is no limit.

        `selected` are the rows of each part that fulfil the filter, which is parsed, where they are known.

        Raises
        ------
        ValueError, TypeError
            When it is no filter, or names attributes that the index does not have; for lists of other ids.
        """
        if where is None and allow is None and deny is None:
            return cls(snapshot.findable)
        if snapshot.preview.coding == "pq":
            raise ValueError("an index with preview='pq' cannot be filtered: build with preview='rabitq'")
        expression = parse_for(where, snapshot.schema) if isinstance(where, str) else where
        fresh = None
        if waiting := len(snapshot.fresh.ids):
            fresh = np.ones(waiting, np.bool_)
            if expression is not None:
                fresh = evaluate(expression, snapshot.fresh.attributes)
        allowed, denied = _located(snapshot, allow, "allow"), _located(snapshot, deny, "deny")
        if fresh is not None and allowed is not None:
            fresh &= np.isin(np.arange(waiting), allowed.fresh)
        if fresh is not None and denied is not None:
            fresh &= ~np.isin(np.arange(waiting), denied.fresh)
        rows = findable(
            snapshot.parts, snapshot.compiled, expression, _on_disk(allowed), _on_disk(denied), selected
        )  # fmt: skip
        every = snapshot.findable.total
        return cls(rows, fresh, rows.total / every if every else 1.0, rows.total if rows.total < every else None)


def _located(snapshot: IndexSnapshot, ids: object, name: str) -> Located | None:
    """Return the places of a list of ids; those that are not in the index have none."""
    if ids is None:
        return None
    return locate(snapshot.parts, snapshot.fresh, with_repeats(collected(ids, name), snapshot.id_kind, name)[0])


def _on_disk(places: Located | None) -> Ints | None:
    return None if places is None else places.positions[places.positions >= 0]


class Found(NamedTuple):
    """The nearest vectors of each query, and the work done for them.

    Attributes
    ----------
    ids, distances
        int64 and float32 ``[q, k]``.
    scanned, ranked
        `SCAN_TALLY` and `RANK_TALLY` ``[q]``.
    admitted
        int64 ``[q]``: candidates that the bounds left.
    cut_short
        bool ``[q]``: whether candidates were dropped that the search should have looked at.
    """

    ids: Ints
    distances: Floats
    scanned: Tallies
    admitted: Ints
    ranked: Tallies
    cut_short: npt.NDArray[np.bool_]

    @classmethod
    def room(cls, count: int, k: int) -> Self:
        """Return room for the `k` nearest of each query."""
        return cls(
            np.empty((count, k), np.int64),
            np.empty((count, k), np.float32),
            np.zeros(count, SCAN_TALLY),
            np.zeros(count, np.int64),
            np.zeros(count, RANK_TALLY),
            np.zeros(count, np.bool_),
        )

    def take(self, rows: slice | npt.NDArray[np.bool_]) -> Self:
        """Return some rows, those of a slice where they lie."""
        return type(self)(
            self.ids[rows], self.distances[rows], self.scanned[rows], self.admitted[rows], self.ranked[rows],
            self.cut_short[rows],
        )  # fmt: skip

    def put(self, rows: npt.NDArray[np.bool_], more: Self) -> None:
        """Put others in the place of some rows."""
        for name in self._fields:
            getattr(self, name)[rows] = getattr(more, name)


def candidate_limit(k: int, effort: Effort, scan_bytes: int) -> int:
    """Return how many candidates of a query are kept, as far as there is room for them."""
    if effort.candidates is not None:
        return effort.candidates
    room = max(_LIMIT, 4 * k, scan_bytes // CANDIDATE_BYTES)
    return room if effort.most is None else min(room, max(k, USUAL_MOST * max(effort.most, effort.usual)))


class Search:
    """One call: the snapshot that it searches, the vectors that it may find, and the reads that it makes.

    Parameters
    ----------
    snapshot, reader
        The state of the index, and the reader of its files.
    selection
        The vectors that may be found.
    named
        Whether the call notes where it finds vectors, to read the strings that are their ids.
    trace
        Takes down the decisions of a call of one query; None where nothing asks.
    aside
        DRAM that other searches of the call take, out of that for candidates.
    numbers
        Those of the queries in the call.
    turns
        Of all searches, one of which the call has: a batch takes the room of others that are free. None for none.

    Attributes
    ----------
    scan_bytes
        DRAM for the candidates of queries that are searched together.
    tally
        `memhier.io.read_arguments.READ_TALLY` ``[1]``.
    sightings
        Where the vectors found are; None where nothing asks.
    workspace
        Room for the vectors of one submission; None where they lie whole in pages.
    """

    def __init__(
        self, snapshot: IndexSnapshot, reader: Reader, selection: Selection, *, named: bool = False,
        trace: Trace | None = None, aside: int = 0, numbers: Numbers = EVERY, turns: Turns | None = None,
    ) -> None:  # fmt: skip
        self.snapshot: IndexSnapshot = snapshot
        self.reader: Reader = reader
        self.selection: Selection = selection
        self.trace: Trace | None = trace
        self.numbers: Numbers = numbers
        self._turns = turns
        self.scan_bytes: int = snapshot.scan_bytes - aside
        self.tally: npt.NDArray[np.void] = np.zeros(1, READ_TALLY)
        self.sightings: Sightings | None = Sightings(snapshot.parts, snapshot.fresh) if named else None
        self.workspace: npt.NDArray[np.uint8] | None = (
            None if snapshot.page_rows else make_workspace(snapshot.row_bytes)
        )

    def nearest(
        self, queries: Floats, k: int, effort: Effort, limits: ReadLimits = NO_LIMITS, radius: Floats | None = None
    ) -> Found:
        """Return the `k` nearest of each query, float32 ``[q, d]``; -1 and infinity where there are fewer.

        Vectors farther than `radius`, float32 ``[q]``, are left out, and are not read where their bounds say so.
        """
        found = Found.room(len(queries), k)
        if not self.selection.rows.total:
            found.ids[:], found.distances[:] = -1, np.inf
        if (state := self.compiled(effort)) is None:
            self._find_in_steps(queries, k, effort, limits, radius, found)
            self._leave_far(radius, found)
        else:
            self._find_in_calls(state, queries, effort, limits, radius, found, self.candidate_limits(k, effort))
            self.complete(state, queries, effort, limits, radius, found)
        return found

    def near_strays(self, queries: Floats, scanned: Tallies | None = None) -> npt.NDArray[np.bool_] | None:
        """Return which queries ``[q, d]`` lie where vectors far from their centroids may; None if none.

        `scanned` are their tallies, where they were searched for.
        """
        snapshot, preview = self.snapshot, self.snapshot.preview
        if (strays := snapshot.calibration.strays) is None or not strays.lists:
            return None
        some = list(range(len(queries))) if scanned is None else strays.perhaps_near(scanned)
        far = np.zeros(len(queries), np.bool_)
        step = max(1, self.scan_bytes // (_STRAY_AXIS * snapshot.space.padded))
        for start in range(0, len(some), step):
            part = some[start : start + step]
            far[part] = strays.near(preview.turn(snapshot.space.queries(queries[part])), preview)
        return far if some and far.any() else None

    def compiled(self, effort: Effort) -> Any:
        """Return the state that one call of the native core searches with an effort; None where it takes steps."""
        if effort.candidates is not None or self.trace is not None or self.reader.compiled is None:
            return None
        rows, snapshot = self.selection.rows, self.snapshot
        if not rows.total:
            return None
        return snapshot.compiled if rows is snapshot.findable else rows.compiled

    def complete(
        self, state: Any, queries: Floats, effort: Effort, limits: ReadLimits, radius: Floats | None, found: Found
    ) -> None:
        """Complete `found` after calls of the native core: by queries put off for more room, and by fresh vectors."""
        if any(found.scanned["cut_short"].tolist()):
            few, most = self.candidate_limits(found.ids.shape[1], effort)
            cut = found.scanned["cut_short"] > 0
            if few < most:
                more = found.take(cut)
                near = None if radius is None else radius[cut]
                self._find_in_calls(state, queries[cut], effort, limits, near, more, (most, most))
                more.scanned["scanned"] += found.scanned["scanned"][cut]  # scanned once more
                found.put(cut, more)
            if effort.most is None or most < USUAL_MOST * effort.most:
                found.cut_short[:] = found.scanned["cut_short"] > 0
        self._add_fresh(found, slice(None), queries, found.ids.shape[1])
        self._leave_far(radius, found)

    def _leave_far(self, radius: Floats | None, found: Found) -> None:
        """Leave vectors out that are farther than wanted."""
        if radius is not None:
            far = found.distances > radius[:, None]
            found.ids[far], found.distances[far] = -1, np.inf

    def _find_in_calls(
        self, state: Any, queries: Floats, effort: Effort, limits: ReadLimits, radius: Floats | None, found: Found,
        kept: tuple[int, int],
    ) -> None:  # fmt: skip
        """Fill `found` by calls of the native core, each for as many queries as there is room for; `kept` as there."""
        start, count, k = 0, len(queries), found.ids.shape[1]
        own = 1 if count == 1 else self._queries_in_call(effort, kept[0], k, 1)
        while start < count:
            turns = self._turns if own < count - start else None
            with _NONE_LENT if turns is None or not turns.spare else ShieldedContext(turns.lent) as lent:
                step = self._queries_in_call(effort, kept[0], k, 1 + lent) if lent else own
                last = min(count, start + step * (_CALLS_LENT if lent else 1))
                while start < last:
                    if start:
                        check_interrupt()
                    part = slice(start, start + step)
                    some, near = queries[part], None if radius is None else radius[part]
                    request = self.request(some, k, effort, limits, near, kept)
                    room = found if len(some) == count else found.take(part)
                    self.note(self.find([state], [request], some, room, self.numbers[start:]))
                    start += step
                    if turns is not None and turns.awaited:
                        break

    def request(
        self, queries: Floats, k: int, effort: Effort, limits: ReadLimits, radius: Floats | None, kept: tuple[int, int]
    ) -> Any:
        """Return a request to the native core, for as many candidates as are `kept`: now, and at most."""
        core, preview = backend.core, self.snapshot.preview
        assert core is not None
        limit, most = kept
        hard = core.SearchEffort(
            k=k, eps=effort.eps, **effort.reach, most=effort.most or 0, usual=effort.usual, most_times=USUAL_MOST,
            limit=limit, first_round=_first_round(k), max_reads=limits.max_reads, deadline=limits.deadline,
            loss=effort.loss, put_off=limit < most,
        )  # fmt: skip
        held = self.selection.rows.held
        routes = preview.router.routes(preview.routed(effort, held), in_order=effort.gap < np.inf, chosen=held)
        return core.SearchRequest(queries=queries, routes=routes, effort=hard, radius=radius)

    def find(
        self, states: list[Any], requests: list[Any], queries: Floats, found: Found, numbers: Numbers
    ) -> Ranking:  # fmt: skip
        """Fill `found` by a call of the native core, and return where the vectors found are.

        `queries` are those of all requests, `numbers` those that they have in the call.
        """
        core, reader = backend.core, self.reader.compiled
        assert core is not None
        assert reader is not None
        shape = found.ids.shape
        ranking = Ranking(
            found.ids, found.distances, np.empty(shape, np.int32), np.empty(shape, np.int64), found.ranked
        )
        result = core.SearchOutput(
            ids=found.ids, distances=found.distances, files=ranking.files, offsets=ranking.offsets,
            scanned=found.scanned, admitted=found.admitted, ranked=found.ranked,
        )  # fmt: skip
        workspace = NO_WORKSPACE if self.workspace is None else self.workspace
        try:
            self.reader.run(
                partial(
                    reader.search, states=states, requests=requests, result=result, workspace=workspace,
                    tally=self.tally,
                )
            )  # fmt: skip
        except OverflowError:
            self.snapshot.space.queries(queries, numbers)  # which tells of the query
            raise
        return ranking

    def candidate_limits(self, k: int, effort: Effort) -> tuple[int, int]:
        """Return how many candidates of a query are kept at first, and of one that has more."""
        most = candidate_limit(k, effort, self.scan_bytes)
        if self.selection.left is not None:
            most = min(most, max(k, self.selection.left))
        known, times = effort.most is not None or effort.candidates is not None, 2 if effort.loss else USUAL_MOST
        return most if known else min(most, max(4 * k, times * effort.usual, _LIMIT_FEW)), most

    def _find_in_steps(
        self, queries: Floats, k: int, effort: Effort, limits: ReadLimits, radius: Floats | None, found: Found
    ) -> None:
        """Fill `found` by a scan, then a ranking, of as many queries at a time as there is room for."""
        few, most = self.candidate_limits(k, effort)
        rows = np.arange(len(queries))
        for limit in sorted({few, most}):  # only the queries with more candidates take the room for them
            is_last = limit == most
            short = is_last and effort.candidates is None and (effort.most is None or limit < USUAL_MOST * effort.most)
            step = self.queries_together(effort, limit)
            left = []
            for start in range(0, len(rows), step):
                if start:
                    check_interrupt()
                part: Any = slice(start, start + step) if limit == few else rows[start : start + step]
                if self.selection.rows.total:
                    candidates = self._candidates(queries[part], self.numbers[int(rows[start]) :], k, effort, limit)
                    cut = candidates.tally["cut_short"] > 0
                    if limit > few:  # scanned once more
                        candidates.tally["scanned"] += found.scanned["scanned"][part]
                    found.scanned[part] = candidates.tally
                    if not is_last and cut.any():
                        left.append(rows[part][cut])
                        candidates, part, cut = candidates.take(~cut), rows[part][~cut], cut[~cut]
                        if not len(part):
                            continue
                    ranking = self._rank(
                        queries[part], candidates, k, effort, limits, None if radius is None else radius[part]
                    )
                    found.ids[part], found.distances[part] = ranking.ids, ranking.distances
                    found.admitted[part] = candidates.counts
                    found.ranked[part] = ranking.tally
                    found.cut_short[part] = cut & short
                self._add_fresh(found, part, queries, k)
            rows = np.concatenate(left) if left else rows[:0]

    def queries_together(self, effort: Effort, limit: int) -> int:
        """Return how many queries with so many candidates each are searched together."""
        return max(1, self.scan_bytes // self.query_bytes(effort, limit))

    def _queries_in_call(self, effort: Effort, limit: int, k: int, rooms: int) -> int:
        """Return how many queries with so many candidates each one call of the native core searches in some rooms."""
        lists, space, scan_bytes = self.snapshot.preview.lists, self.snapshot.space, rooms * self.scan_bytes
        routed = space.padded * _ROUTED_AXIS * (3 if space.metric == "ip" else 2) // 2 + limit * _SCANNED
        routed += min(2 * effort.nprobe + _COMPARED, lists) * _PROBE_BYTES + min(_COMPARED, lists) * _DISTANCE
        kept = limit * CANDIDATE_BYTES + k * _NEIGHBOUR
        fitting = max(1, scan_bytes // (routed + kept), (scan_bytes - _ROUTED * routed) // kept)
        return fitting - fitting % _ROUTED if fitting > _ROUTED else fitting

    def query_bytes(self, effort: Effort, limit: int) -> int:
        """Return the DRAM of a query with so many candidates."""
        snapshot, held = self.snapshot, self.selection.rows.held
        held = snapshot.preview.lists if held is None else held
        return limit * CANDIDATE_BYTES + snapshot.space.padded * _AXIS_BYTES + min(effort.nprobe, held) * _PROBE_BYTES

    def _add_fresh(self, found: Found, part: slice | Ints, queries: Floats, k: int) -> None:
        """Add the fresh vectors that are nearer than those found."""
        fresh = self.snapshot.fresh
        if len(fresh.ids):
            near = fresh.nearest(queries[part], self.snapshot.space.metric, k, self.selection.fresh)
            _merge(found, part, near, k)

    def rank(
        self, queries: Floats, positions: Ints, counts: Ints, *, ids: Ints | None = None,
        rounds: npt.NDArray[np.int32] | None = None, **bounds: Any,
    ) -> Ranking:  # fmt: skip
        """Read the vectors at positions, `counts` of each query; `bounds` are the rest of a `RankRequest`.

        `rounds` is filled as `memhier.rows.ranking.rank_rows` does. Where ids stay on SSD, `ids` are those known of the
        positions.
        """
        snapshot = self.snapshot
        files, offsets, names = gather(snapshot.parts, positions)
        first = np.zeros(len(counts) + 1, np.int64)
        counts.cumsum(out=first[1:])
        request = RankRequest(
            queries=queries, metric=snapshot.space.metric, dtype=snapshot.dtype_name, row_bytes=snapshot.row_bytes,
            first=first, files=files, offsets=offsets, ids=names, **bounds,
        )  # fmt: skip
        ranking = rank_rows(self.reader, request, self.workspace, hot=snapshot.hot, tally=self.tally, rounds=rounds)
        return self._named(ranking, positions, ids) if snapshot.preview.on_ssd else ranking

    def count_reads(self, candidates: Candidates) -> None:
        """Count the reads of codes on SSD."""
        if candidates.reads is not None:
            for name in READ_TALLY.names or ():
                self.tally[name] += candidates.reads[name]

    def _named(self, ranking: Ranking, positions: Ints, ids: Ints | None) -> Ranking:
        """Return a ranking with ids in the place of positions; `ids` are those of `positions`, as far as known."""
        found = ranking.ids
        wanted = np.unique(found[found >= 0])
        names = np.full(len(wanted), -1, np.int64)
        is_known = np.zeros(len(wanted), np.bool_)
        if ids is not None and len(ids):
            order = np.argsort(positions, kind="stable")
            place = order[np.minimum(np.searchsorted(positions, wanted, sorter=order), len(order) - 1)]
            is_known = positions[place] == wanted
            names[is_known] = ids[place[is_known]]
        names[~is_known] = ids_at(self.snapshot.parts, wanted[~is_known], self.tally)
        out = np.full_like(found, -1)
        out[found >= 0] = names[np.searchsorted(wanted, found[found >= 0])]
        return replace(ranking, ids=out)

    def note(self, ranking: Ranking, wanted: npt.NDArray[np.bool_] | None = None) -> None:
        """Note where the ranked vectors are, or those `wanted`, to read their strings; nothing where nothing asks."""
        if self.sightings is None:
            return
        positions = np.full(ranking.ids.shape, -1, np.int64)
        for number, part in enumerate(self.snapshot.parts):
            here = ranking.files == part.file
            positions[here] = positions_of(number, part.rows_at(ranking.offsets[here]))
        chosen = slice(None) if wanted is None else wanted
        self.sightings.note(ranking.ids[chosen], positions[chosen])

    def _candidates(self, queries: Floats, numbers: Numbers, k: int, effort: Effort, limit: int) -> Candidates:
        """Return the candidates of queries, which have `numbers` in the call.

        A query whose lists hold fewer than `k` rows, or that did not scan all near lists, scans more of them.
        """
        snapshot, rows = self.snapshot, self.selection.rows
        coded, among, held = rows.coded, rows.lists, rows.held
        lists = snapshot.preview.lists if held is None else held
        turned = snapshot.preview.turn(snapshot.space.queries(queries, numbers))
        candidates = self._scanned(turned, coded, k, effort, limit, among)
        wider = effort
        if snapshot.preview.routed(wider, held) < lists:
            is_open = candidates.counts < k
            if effort.gap < np.inf:
                is_open |= candidates.tally["open"] > 0
            short = np.flatnonzero(is_open)
        while snapshot.preview.routed(wider, held) < lists and len(short):
            wider = replace(wider, nprobe=min(WIDER * wider.nprobe, lists))
            step = max(1, self.scan_bytes // (wider.nprobe * _PROBE_BYTES))
            left = []
            for start in range(0, len(short), step):
                some = short[start : start + step]
                more = self._scanned(turned[some], coded, k, wider, limit, among)
                more.tally["scanned"] += candidates.tally["scanned"][some]  # once more
                candidates.put(some, more)
                left.append(some[(more.counts < k) | ((more.tally["open"] > 0) & (wider.gap < np.inf))])
            short = np.concatenate(left)
        if self.trace is not None:
            self.trace.routed(wider.nprobe)
        counts = candidates.counts
        if effort.candidates is None and effort.most is not None and counts.max(initial=0) > max(k, effort.most):
            # The number of candidates is unknown where some were dropped for lack of room.
            times = np.where(candidates.tally["cut_short"] > 0, USUAL_MOST, counts / effort.usual)
            most = np.maximum(k, (effort.most * np.minimum(np.maximum(times, 1), USUAL_MOST)).astype(np.int64))
            np.minimum(counts, most, out=counts)
        if effort.loss > 0:
            candidates = replace(candidates, counts=candidates.likely(k, effort.eps, effort.loss))
        return candidates

    def _scanned(
        self, turned: Floats, coded: Parts, k: int, effort: Effort, limit: int, among: Ints | None
    ) -> Candidates:
        candidates = self.snapshot.preview.search(turned, coded, k, effort, limit, among)
        self.count_reads(candidates)
        return candidates

    def _rank(
        self, queries: Floats, candidates: Candidates, k: int, effort: Effort, limits: ReadLimits,
        radius: Floats | None,
    ) -> Ranking:  # fmt: skip
        """Read the vectors of candidates and return the nearest."""
        space, bounded = self.snapshot.space, effort.candidates is None
        counts = candidates.counts
        widest = int(counts.max(initial=0))
        inside: Any = (0, slice(widest)) if len(counts) == 1 else np.arange(widest) < counts[:, None]
        lower, thresholds = candidates.lower[:, :widest], candidates.thresholds
        lower, thresholds = space.distances(lower, queries), space.distances(thresholds, queries)
        if radius is not None:
            thresholds = np.minimum(thresholds, radius)
        positions = candidates.positions[:, :widest][inside]
        rounds = None if self.trace is None else np.zeros(len(positions), np.int32)
        ranking = self.rank(
            queries, positions, counts, lower=lower[inside], thresholds=thresholds, k=k, rounds=rounds,
            ids=None if candidates.ids is None else candidates.ids[:, :widest][inside],
            first_round=effort.candidates or _first_round(k),
            max_reads=limits.max_reads, deadline=limits.deadline,
            page_rows=self.selection.rows.page_rows if self.snapshot.page_rows and bounded else None,
        )  # fmt: skip
        if self.trace is not None and rounds is not None:
            self.trace.ranked(positions, rounds, float(thresholds[0]))
        self.note(ranking)
        return ranking


def _first_round(k: int) -> int:
    """Return the most candidates of the first round of reads: another round costs as much as a dozen pages."""
    return k + k // 2


def _merge(found: Found, part: slice | Ints, near: tuple[Ints, Floats], k: int) -> None:
    ids = np.hstack([found.ids[part], near[0]])
    distances = np.hstack([found.distances[part], near[1]])
    # Missing neighbours have an infinite distance and so go last.
    order = np.lexsort((ids, distances), axis=1)[:, :k]
    found.ids[part] = np.take_along_axis(ids, order, 1)
    found.distances[part] = np.take_along_axis(distances, order, 1)
