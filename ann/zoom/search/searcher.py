"""The searches of an open index, and the recall that they keep."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.limits import NO_LIMITS, ReadLimits, RecallWarnings, read_limits
from memhier.ann.zoom.arguments import SearchOptions, check_radius
from memhier.ann.zoom.calibration.calibration import TARGET
from memhier.ann.zoom.filters.bitmaps import Words
from memhier.ann.zoom.preview.space import EVERY, Numbers
from memhier.ann.zoom.search.explaining import explain
from memhier.ann.zoom.search.explanation import Explanation
from memhier.ann.zoom.search.fields import FieldReader, chosen_fields, fields_of_ids
from memhier.ann.zoom.search.grouped import QueryGroup, joined
from memhier.ann.zoom.search.plain import PlainSearch
from memhier.ann.zoom.search.planning import Escalation, Plan, plan_search
from memhier.ann.zoom.search.range_search import WITHIN_TALLY, Within, all_nearest, range_effort, search_range
from memhier.ann.zoom.search.results import Chosen, RangeResult, SearchResult
from memhier.ann.zoom.search.search import Found, Search, Selection
from memhier.ann.zoom.search.together import Planned, find_together, selections
from memhier.ann.zoom.search.trace import Trace
from memhier.ann.zoom.search.turns import Turns
from memhier.ann.zoom.storage.layout import filters_bytes
from memhier.ann.zoom.storage.snapshot import IndexSnapshot
from memhier.io.read_arguments import Tallies
from memhier.io.reader import Reader
from memhier.rows.ranking import STOPS
from memhier.shield import check_interrupt

__all__ = ["Searcher"]

_ROUNDS, _STOPPED = 8, 9  # their places among the numbers of the work
_NO_PAYLOAD = dict.fromkeys(("payload_reads", "payload_pages", "payload_bytes", "payload_rounds"), 0)

Floats: TypeAlias = npt.NDArray[np.float32]
Ints: TypeAlias = npt.NDArray[np.int64]
Columns: TypeAlias = dict[str, npt.NDArray[Any]]
Watch: TypeAlias = Callable[[IndexSnapshot, Floats, SearchOptions, Floats], None]


class Searcher:
    """Searches a snapshot, which its owner may replace at any moment. For many threads.

    Parameters
    ----------
    state
        The snapshot to search.
    reader
        Reads its files.
    searches
        How many run at a time: each has buffers of its own.

    Attributes
    ----------
    state
        The snapshot that the next search takes.
    watch
        Hears of every search that has ended, after its turn; None where nothing listens.
    """

    def __init__(self, state: IndexSnapshot, reader: Reader, searches: int) -> None:
        self.state = state
        self._reader, self.turns = reader, Turns(searches)
        self._warnings = RecallWarnings()
        self.watch: Watch | None = None

    def search(self, queries: Floats, options: SearchOptions, chosen: Chosen | None = None) -> SearchResult:
        """Return the nearest vectors of queries ``[q, d]``; see :meth:`memhier.ann.ZoomIndex.search`.

        The fields are those of the vectors `chosen`, and null for others; None chooses all.
        """
        with self.turns.next():  # a filter's bitmap is made, and held, by no more searches than these
            state = self.state
            result = self._search_plainly(state, queries, options) if chosen is None else None
            if result is None:
                search, _, result = self._search(queries, options, chosen)
                state = search.snapshot
        if (watch := self.watch) is not None and chosen is None:
            watch(state, queries, options, result.distances)
        return result

    def _search_plainly(self, state: IndexSnapshot, queries: Floats, options: SearchOptions) -> SearchResult | None:
        """Return the nearest vectors of one query of a plain search; None of others."""
        if len(queries) != 1 or not options.is_plain or (way := PlainSearch.of(state, self._reader, options)) is None:
            return None
        if (found := way.nearest(state, self._reader, queries)) is None:
            return None
        ids, distances, work = found
        stats = _stats(1, work, work[_STOPPED : _STOPPED + 1], way.plan.calibrated, "no", _NO_PAYLOAD)
        return SearchResult(ids, distances, stats | {"recall": way.plan.kept})

    def search_each(self, queries: Floats, options: SearchOptions, groups: Sequence[QueryGroup]) -> SearchResult:
        """Return the nearest vectors of queries ``[q, d]``, each among those of its own group, in one snapshot."""
        started, ms, radius = time.monotonic(), options.deadline_ms, check_radius(options.radius, len(queries))
        results = list[SearchResult]()
        with self.turns.next():
            state = self.state
            for some in selections(state, groups):
                waiting, taken = list[Planned](), 0
                for group, selection in some:
                    check_interrupt()
                    if ms is not None:  # the rest of the time, which is none where it is over
                        options = replace(options, deadline_ms=max(1e-6, ms - 1e3 * (time.monotonic() - started)))
                    near, several = None if radius is None else radius[group.rows], len(some) > 1
                    planned = self._planned(
                        queries[group.rows], options, state, selection, near, aside=several, numbers=group.rows
                    )
                    if waiting and taken + planned.scan_bytes > planned.search.scan_bytes:
                        results += self._found_together(waiting)
                        waiting, taken = [], 0
                    waiting.append(planned)
                    taken += planned.scan_bytes
                    if ms is not None:
                        results += self._found_together(waiting)
                        waiting = []
                results += self._found_together(waiting)
        if (watch := self.watch) is not None:
            for group, result in zip(groups, results, strict=True):
                near = None if radius is None else radius[group.rows]
                asked = replace(options, where=group.where, allow=group.allow, deny=group.deny, radius=near)
                watch(state, queries[group.rows], asked, result.distances)
        return joined([(group.rows, result) for group, result in zip(groups, results, strict=True)])

    def nearest_exactly(self, state: IndexSnapshot, query: Floats, k: int, where: str | None) -> Floats:
        """Return the distances of the `k` nearest of a query ``[d]`` in a snapshot, as a search of recall 1 does."""
        with self.turns.next():
            selection, k = Selection.of(state, where), min(k, max(1, state.count))
            search = Search(state, self._reader, selection)
            plan = plan_search(state, k, state.count, SearchOptions(k, 1.0, where), selection)
            found = search.nearest(query[None], k, plan.effort)
            distances: Floats = all_nearest(search, query[None], found).distances[0]
            return distances

    def explain(self, query: Floats, options: SearchOptions) -> Explanation:
        """Return the account of the search of a query ``[d]``; see :meth:`memhier.ann.ZoomIndex.explain`."""
        trace = Trace()
        with self.turns.next():
            return explain(*self._search(query[None], options, trace=trace), query[None], trace)

    def _search(
        self, queries: Floats, options: SearchOptions, chosen: Chosen | None = None, trace: Trace | None = None
    ) -> tuple[Search, Plan, SearchResult]:
        state, radius = self.state, check_radius(options.radius, len(queries))
        selection = Selection.of(state, options.where, options.allow, options.deny)
        planned = self._planned(queries, options, state, selection, radius, trace)
        return planned.search, planned.plan, self._finished(planned, planned.nearest(), chosen)

    def _found_together(self, every: Sequence[Planned]) -> list[SearchResult]:
        return [self._finished(each, found) for each, found in zip(every, find_together(every), strict=True)]

    def _planned(
        self, queries: Floats, options: SearchOptions, state: IndexSnapshot, selection: Selection,
        radius: Floats | None, trace: Trace | None = None, *, aside: bool = False, numbers: Numbers = EVERY,
    ) -> Planned:  # fmt: skip
        limits = read_limits(options.max_reads, options.deadline_ms)
        count, named = state.count, state.fresh.texts is not None
        k = int(min(options.k, max(1, count)))
        wanted = chosen_fields(state, options.fields) if options.fields else ()
        plan = plan_search(state, k, count, options, selection)
        noted = named or bool(wanted) or trace is not None
        held = filters_bytes(state.scan_bytes) if aside else 0
        search = Search(
            state, self._reader, selection, named=noted, trace=trace, aside=held, numbers=numbers, turns=self.turns
        )
        return Planned(search, plan, queries, k, options, limits, radius, wanted)

    def _finished(self, planned: Planned, found: Found, chosen: Chosen | None = None) -> SearchResult:
        """Return the result of a search that has found the nearest of each query."""
        search, plan, queries, k = planned.search, planned.plan, planned.queries, planned.k
        options, limits, radius, state = planned.options, planned.limits, planned.radius, planned.search.snapshot
        cut, far, unlimited, exact = found.cut_short, None, limits is NO_LIMITS, plan.escalation == "exact"
        if promises := options.nprobe is None and options.candidates is None:
            far = None if exact else search.near_strays(queries, found.scanned)
        if unlimited and exact:
            found = all_nearest(search, queries, found, radius=radius)
        elif unlimited and far is not None and (strays := state.calibration.strays) is not None:
            plan, beside = replace(plan, escalation="wider"), np.fromiter(strays.lists, np.int64)
            found = all_nearest(search, queries, found, rows=far, radius=radius, beside=beside)
        if unlimited and not exact and any(cut.tolist()) and state.preview.coding == "rabitq":
            found = all_nearest(search, queries, found, plan.effort, cut, radius)
        ids, distances = found.ids, found.distances
        if k < options.k:
            more = ((0, 0), (0, options.k - k))
            ids, distances = np.pad(ids, more, constant_values=-1), np.pad(distances, more, constant_values=np.inf)
        names: npt.NDArray[Any] = ids
        if search.sightings is not None and state.fresh.texts is not None:
            names = search.sightings.named(ids, search.tally)
        with_fields = ids if chosen is None else np.where([chosen(each) for each in names], ids, -1)
        columns, payload = _payload(search, with_fields, planned.wanted)
        stops = found.ranked["stopped"].tolist()
        known = plan.calibrated and far is None
        stats = _stats(len(ids), _work(found, search.tally), stops, known, plan.escalation, payload)
        if promises:
            if unlimited:
                stats["recall"] = self._kept(plan, options)
            else:
                best = plan.kept if far is None else float(plan.kept * np.mean(~far))
                if exact or cut.any():  # a limit leaves no time to make the search exact
                    best = min(best, state.calibration.reached_at(k))
                within = 0.0 if limits.deadline < np.inf else state.calibration.within(k, limits.max_reads)
                stats["recall"] = self._kept_within(best, within, options, stats, limits)
        if search.trace is not None and search.sightings is not None:
            search.trace.found(search.sightings.places(ids[ids != -1]))
        return SearchResult(names, distances, stats, columns)

    def search_range(self, queries: Floats, radii: Floats, options: SearchOptions) -> RangeResult:
        """Return the vectors within `radii` of queries; see :meth:`memhier.ann.ZoomIndex.range_search`.

        Of the options, recall, the filters and the fields count.
        """
        with self.turns.next():
            state = self.state
            wanted = chosen_fields(state, options.fields) if options.fields else ()
            selection = Selection.of(state, options.where, options.allow, options.deny)
            search = Search(state, self._reader, selection, named=state.fresh.texts is not None or bool(wanted))
            recall = TARGET if options.recall is None else float(options.recall)
            effort, calibrated = range_effort(state.calibration, state.preview.lists, recall)
            found = search_range(search, queries, radii, effort)
            if (far := search.near_strays(queries)) is not None:
                exact, _ = range_effort(state.calibration, state.preview.lists, 1.0)
                chosen = np.flatnonzero(far)
                more = search_range(search, queries[chosen], radii[chosen], exact)
                found = [more.pop(0) if is_far else each for each, is_far in zip(found, far.tolist(), strict=True)]
            return _range_result(found, search, wanted, calibrated and not options.filtered and far is None)

    def fetch(self, ids: object, fields: bool | Sequence[str] | None) -> Columns:
        """Return the fields of ids; see :meth:`memhier.ann.ZoomIndex.fetch`."""
        with self.turns.next():  # the pages read together take the place of a search's candidates
            return fields_of_ids(self.state, self._reader, ids, fields)

    @contextmanager
    def selected(self, where: str) -> Iterator[tuple[IndexSnapshot, list[Words], npt.NDArray[np.bool_]]]:
        """Give the vectors that fulfil a filter: their snapshot, a bitmap for each part, and bool ``[n]`` of the fresh.

        It counts as a search until the end of the context, as its bitmaps take the DRAM of one.
        """
        with self.turns.next():
            state = self.state
            chosen = Selection.of(state, where)
            bitmaps = [bits for bits in chosen.rows.bitmaps if bits is not None]
            assert len(bitmaps) == len(state.parts)  # a filter gives every part one
            yield state, bitmaps, np.zeros(len(state.fresh), np.bool_) if chosen.fresh is None else chosen.fresh

    def _kept(self, plan: Plan, options: SearchOptions) -> float:
        """Return the recall that a search without limits keeps; warn where it is less than asked for."""
        recall = TARGET if options.recall is None else float(options.recall)
        if plan.kept < recall:
            self._warnings.warn(
                "codes", f"recall={recall:g} is not kept: about {plan.kept:g} can be had, as codes of preview='pq' "
                "have no bounds; give candidates= and nprobe=, or build with preview='rabitq'"
            )  # fmt: skip
        return plan.kept

    def _kept_within(
        self, best: float, within: float, options: SearchOptions, stats: dict[str, Any], limits: ReadLimits
    ) -> float:
        """Return the recall that a search keeps within its limits; warn where it is less than asked for.

        Parameters
        ----------
        best
            The recall of a search that no limit ends early.
        within
            The recall known for the number of pages allowed; 0 where time is limited.
        """
        recall = TARGET if options.recall is None else float(options.recall)
        early, queries = stats["stopped_early"], stats["queries"]
        if not early and best >= recall:
            return recall
        kept = float(min(best, recall, max((1 - early / max(1, queries)) * recall, within)))
        if options.recall is not None:
            self._warnings.warn_of_limits(recall, kept, early, queries, limits)
        return kept


def _work(found: Found, tally: Tallies) -> list[int]:
    """Return the work done, as `PlainSearch` has that for one query: sums, and the most rounds of a query."""
    work = [*_sums(found.scanned), *_sums(found.ranked), *_sums(tally), sum(found.admitted.tolist())]
    work[_ROUNDS] = max(found.ranked["rounds"].tolist(), default=0)
    return work


def _stats(
    queries: int, work: Sequence[int], stops: Sequence[int], calibrated: bool, escalated: Escalation,
    payload: dict[str, int],
) -> dict[str, Any]:  # fmt: skip
    """Return plain numbers of the `work` done for all queries, each of which `stops`; see :class:`SearchResult`."""
    probed, scanned, cut_short, _, _, ranked, page_requests, hot_pages, rounds, _, reads, pages, size, candidates = work
    early = STOPS.index("max_reads")  # or the deadline
    return {
        "queries": queries, "probed": probed, "scanned": scanned, "cut_short": cut_short, "candidates": candidates,
        "ranked": ranked, "reads": reads, "pages": pages, "bytes": size, "page_requests": page_requests,
        "hot_pages": hot_pages, "rounds": rounds, "stopped_early": sum(stop >= early for stop in stops),
        "stopped": STOPS[stops[0]] if stops else "all_read", "calibrated": calibrated, "escalated": escalated,
        **payload,
    }  # fmt: skip


def _sums(tallies: Tallies) -> tuple[int, ...]:
    """Return the sum of each field over all records."""
    if len(tallies) == 1:  # as most calls have
        one: Any = tallies.item()
        return tuple(one)
    names = tallies.dtype.names or ()
    return tuple(tallies.view(np.int64).reshape(-1, len(names)).sum(axis=0).tolist())


def _payload(search: Search, ids: Ints, wanted: Sequence[str]) -> tuple[Columns, dict[str, int]]:
    """Return the fields of vectors found, each of the shape of `ids`, and the reads for them as plain numbers."""
    if not wanted or search.sightings is None:
        return {}, _NO_PAYLOAD
    fields = FieldReader(search.snapshot, search.reader, wanted)
    columns = fields.found(ids, search.sightings)
    return columns, dict(zip(_NO_PAYLOAD, (*_sums(fields.reads.tally), fields.reads.rounds), strict=True))


def _range_result(found: Sequence[Within], search: Search, wanted: Sequence[str], calibrated: bool) -> RangeResult:
    """Return the vectors within the radius of each query, one query after the other."""
    ids = np.concatenate([np.empty(0, np.int64), *(each.ids for each in found)])
    columns, payload = _payload(search, ids, wanted)
    names: npt.NDArray[Any] = ids
    if search.sightings is not None and search.snapshot.fresh.texts is not None:
        names = search.sightings.named(ids, search.tally)
    work = dict[str, Any](queries=len(found))
    for tallies in (np.array([each.tally for each in found], WITHIN_TALLY), search.tally):
        work |= zip(tallies.dtype.names or (), _sums(tallies), strict=True)
    return RangeResult(
        np.concatenate([[0], np.cumsum([len(each.ids) for each in found], dtype=np.int64)]).astype(np.int64),
        names,
        np.concatenate([np.empty(0, np.float32), *(each.distances for each in found)]),
        work | {"calibrated": calibrated} | payload,
        columns,
    )
