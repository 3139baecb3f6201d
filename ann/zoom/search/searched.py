"""The searches of an open index, whatever else is done with it."""

import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.zoom.arguments import check_count, check_finite, check_fraction, check_milliseconds, check_queries
from memhier.ann.zoom.calibration.calibrate import TARGET
from memhier.ann.zoom.calibration.planning import Plan, plan_search
from memhier.ann.zoom.ids.ids import Sightings, as_ids, locate, with_repeats
from memhier.ann.zoom.preview.preview import Effort
from memhier.ann.zoom.preview.space import Metric
from memhier.ann.zoom.search.explain import Explanation
from memhier.ann.zoom.search.range_search import RangeResult, all_nearest, range_effort, search_range
from memhier.ann.zoom.search.results import SearchResult, iterate, padded, range_result, search_stats
from memhier.ann.zoom.search.search import (
    Found,
    Limits,
    Selection,
    Snapshot,
    is_cut_short,
    search_snapshot,
    vectors_by_id,
)
from memhier.ann.zoom.search.turns import Turns
from memhier.callers import user_stacklevel
from memhier.errors import ClosedError, RecallWarning
from memhier.io.reader import Reader

__all__ = ["SearchedIndex"]

Ints: TypeAlias = npt.NDArray[np.int64]


class SearchedIndex:
    """A snapshot of an index, which may be replaced by another at any moment, and the searches in it.

    Parameters
    ----------
    state
        What is searched.
    reader
        Reads its files.
    searches
        How many may run at a time: each has buffers of its own.
    """

    def __init__(self, state: Snapshot, reader: Reader, searches: int) -> None:
        self._state, self._reader = state, reader
        self._turns = Turns(searches)
        self._closed = False
        self._said: set[str] = set()  # why a recall was not kept

    def search(
        self,
        queries: npt.ArrayLike,
        k: int,
        *,
        recall: float | None = None,
        where: str | None = None,
        candidates: int | None = None,
        nprobe: int | None = None,
        max_reads: int | None = None,
        deadline_ms: float | None = None,
    ) -> SearchResult:
        """Return the `k` nearest vectors of each query.

        Parameters
        ----------
        queries
            ``[q, d]``, or ``[d]`` for one; any real dtype, compared as float32.
        k
            Number of neighbours; beyond ``len(index)`` ids of -1 (None of an index of strings) at infinity follow, as
            where a filter leaves fewer.
        recall
            The mean share of the true neighbours to find, above 0 and at most 1; 0.99 when nothing is said. What it
            takes was calibrated on held-out vectors at build (see :meth:`tune` for queries of another kind). A query
            looks as far as its own neighbours are, so one unlike those vectors, or under a filter, looks further.
            Where calibration does not know of an effort that is enough, the search looks wider, at last exactly:
            ``stats["escalated"]``. At 1 every list is scanned as well, and every vector read that may be nearer than
            those found, were its code wrong by eight standard errors.
        where
            Only vectors whose attributes fulfil this, such as ``"price < 10 and lang == 'en'"``, are looked at.
        candidates
            Instead of a recall: this many of the nearest by their codes, at least `k`, are read, whatever their
            bounds. With all vectors and all lists the result is that of exact search.
        nprobe
            Instead of what `recall` takes: inverted lists scanned per query. More are scanned where these hold fewer
            than `k` vectors.
        max_reads
            The most pages read for one query.
        deadline_ms
            Milliseconds after which no further round of reads starts; what was ranked until then is returned.

        Warns
        -----
        RecallWarning
            When limits, or codes without bounds (``preview="pq"``), keep a search from the recall asked for; once for
            each cause. ``stats["recall"]`` says what can be had.

        Raises
        ------
        ValueError, TypeError
            When the dimension is wrong, a query holds NaN or infinity, or a number is out of range.
        CorruptionError
            When a page read from SSD is not what was written.
        """
        self._check_open()
        matrix, single = check_queries(queries, self.dimension)
        limits = Limits(
            2**62 if max_reads is None else check_count("max_reads", max_reads, 1, None),
            np.inf if deadline_ms is None else check_milliseconds("deadline_ms", deadline_ms) / 1000,
        )
        with self._turns.next():  # a filter's bitmap is held, and made, by no more than these
            found = self._search(matrix, k, recall, where, candidates, nprobe, limits)
        return SearchResult(found.ids[0], found.distances[0], found.stats) if single else found

    def _search(
        self,
        matrix: npt.NDArray[np.float32],
        k: int,
        recall: float | None,
        where: str | None,
        candidates: int | None,
        nprobe: int | None,
        limits: Limits,
    ) -> SearchResult:
        state, tally = self._state, np.zeros(3, np.int64)
        wanted, k = k, min(check_count("k", k, 1, None), max(1, state.count))
        selection = Selection.everything(state) if where is None else Selection.of(state, where)
        plan = self._plan(state, k, recall, candidates, nprobe, selection)
        seen = _sightings(state)
        found = search_snapshot(state, self._reader, matrix, k, plan.effort, limits, selection, tally, seen)
        if limits == Limits():
            cut = is_cut_short(found, k, plan.effort, state.scan_bytes)
            if plan.escalation == "exact":
                found = all_nearest(state, self._reader, matrix, found, selection, tally, seen)
            elif cut.any() and state.preview.coding == "rabitq":
                found = all_nearest(
                    state, self._reader, matrix, found, selection, tally, seen, effort=plan.effort, rows=cut
                )
        found = padded(found, wanted)
        ids = found.ids if seen is None else seen.named(found.ids, tally)
        stats = search_stats(found, tally) | {"calibrated": plan.calibrated, "escalated": plan.escalation}
        if nprobe is None and candidates is None:
            stats["recall"] = self._kept(state, k, recall, plan, limits, found, stats)
        return SearchResult(ids, found.distances, stats)

    def _kept(
        self,
        state: Snapshot,
        k: int,
        asked: float | None,
        plan: Plan,
        limits: Limits,
        found: Found,
        stats: dict[str, Any],
    ) -> float:
        """Return the recall that a search keeps, and say so where it is less than was asked for."""
        recall = TARGET if asked is None else asked
        if limits == Limits():
            if plan.kept < recall:
                self._say(
                    "codes", f"recall={recall:g} is not kept: about {plan.kept:g} can be had, as codes of preview='pq' "
                    "have no bounds; give candidates= and nprobe=, or build with preview='rabitq'"
                )  # fmt: skip
            return plan.kept
        early, queries = stats["stopped_early"], max(1, len(found.ids))
        cut = bool(is_cut_short(found, k, plan.effort, state.scan_bytes).any())
        # A limit leaves no time for what makes a search exact.
        best = min(plan.kept, state.calibration.reached_at(k)) if plan.escalation == "exact" or cut else plan.kept
        if not early and best >= recall:
            return recall
        timed = limits.deadline < np.inf
        within = 0.0 if timed else state.calibration.within(k, limits.max_reads)
        kept = float(min(best, recall, max((1 - early / queries) * recall, within)))
        if asked is not None:
            limit = "deadline_ms=" if timed else f"max_reads={limits.max_reads}"
            had = f"about {kept:.2g}" if kept > 0.005 else "less than 0.5"
            self._say(
                "limits", f"recall={recall:g} is not kept: {limit} ended {early} of {queries} queries early, and {had} "
                "can be had within it; allow more, or ask for that recall"
            )  # fmt: skip
        return kept

    def _say(self, cause: str, words: str) -> None:
        """Warn of a recall that is not kept, once for each cause."""
        if cause not in self._said:
            self._said.add(cause)
            warnings.warn(words, RecallWarning, stacklevel=user_stacklevel())

    def range_search(
        self, queries: npt.ArrayLike, radius: float, *, recall: float | None = None, where: str | None = None
    ) -> RangeResult:
        """Return all vectors within `radius` of each query.

        Parameters
        ----------
        queries
            ``[q, d]``, or ``[d]`` for one.
        radius
            The largest distance, as :class:`SearchResult` has them: squared for ``l2``, negative for inner products
            above zero.
        recall, where
            As in :meth:`search`; how many vectors lie within a radius is not known, so the widest bounds that any
            number of neighbours needs for the recall are taken.

        Raises
        ------
        ValueError, TypeError
            When an argument is no radius, recall, filter or array of queries of this index, or the index has
            ``preview="pq"``, whose codes have no bounds.
        """
        self._check_open()
        if self._state.preview.coding != "rabitq":
            raise ValueError("range_search needs bounds, which preview='pq' does not have: build with preview='rabitq'")
        matrix, _ = check_queries(queries, self.dimension)
        radii = np.full(len(matrix), check_finite("radius", radius), np.float32)
        wanted = TARGET if recall is None else check_fraction("recall", recall)
        with self._turns.next():
            state, tally = self._state, np.zeros(3, np.int64)
            selection = Selection.everything(state) if where is None else Selection.of(state, where)
            effort, calibrated = range_effort(state.calibration, state.preview.lists, wanted)
            seen = _sightings(state)
            found = search_range(state, self._reader, matrix, radii, effort, selection, tally, seen)
            return range_result(found, seen, tally, calibrated and where is None)

    def search_iter(self, query: npt.ArrayLike, batch: int = 10, **options: Any) -> Iterator[SearchResult]:
        """Yield neighbours of one query, `batch` at a time and each once, the nearest first, until there are no more.

        Every round searches for twice as many. What a recall below 1 missed may come up in a later batch; what is added
        or removed meanwhile may or may not.

        Parameters
        ----------
        query
            ``[d]``.
        batch
            How many are yielded at a time; the last may hold fewer.
        **options
            As in :meth:`search`.
        """
        if np.ndim(query) != 1:
            raise ValueError(f"query has shape {np.shape(query)}: expected [{self.dimension}], one query")
        size = check_count("batch", batch, 1, None)

        def nearest(k: int) -> SearchResult:
            k = min(k, max(1, len(self)))
            if (wanted := options.get("candidates")) is None:
                return self.search(query, k, **options)
            most = max(k, check_count("candidates", wanted, min(size, k), None))  # as many as are to be found
            return self.search(query, k, **options | {"candidates": most})

        return iterate(nearest, size)

    def explain(self, query: npt.ArrayLike, k: int = 10, **options: Any) -> Explanation:
        """Search for one query and tell what was done: lists scanned, candidates admitted, pages read, why it stopped.

        Parameters
        ----------
        query
            ``[d]``.
        k, **options
            As in :meth:`search`.
        """
        if np.ndim(query) != 1:
            raise ValueError(f"query has shape {np.shape(query)}: expected [{self.dimension}], one query")
        stats = self.search(query, k, **options).stats
        state = self._state
        where = options.get("where")
        with self._turns.next():
            selection = Selection.everything(state) if where is None else Selection.of(state, where)
        effort = self._plan(
            state, k, options.get("recall"), options.get("candidates"), options.get("nprobe"), selection
        ).effort
        lists = state.preview.lists
        return Explanation(
            lists, stats["probed"], min(max(effort.nprobe, stats["probed"]), lists), state.count, stats["scanned"],
            stats["candidates"], None if effort.candidates is not None else effort.eps, stats["ranked"],
            stats["page_requests"], stats["hot_pages"], stats["rounds"], stats["stopped"], stats["calibrated"],
        )  # fmt: skip

    def reconstruct(self, ids: object) -> npt.NDArray[Any]:
        """Return the vectors of these ids, of which some may be equal, as they are stored: ``[n, d]``.

        Raises
        ------
        KeyError
            For an id that is not in the index.
        """
        self._check_open()
        state = self._state
        wanted, inverse = with_repeats(ids, state.id_kind)
        return vectors_by_id(state, self._reader, wanted)[inverse]

    def __contains__(self, name: object) -> bool:
        """Whether a vector has this id; passes over all ids, as every look-up does: ask for many with `reconstruct`.

        Raises
        ------
        TypeError
            When the ids of the index are of another kind.
        """
        self._check_open()
        state = self._state
        try:
            wanted = as_ids([name], state.id_kind, "id")
        except ValueError:  # which no vector can have
            return False
        return bool(locate(state.parts, state.fresh, wanted).known[0])

    def _plan(
        self,
        state: Snapshot,
        k: int,
        recall: float | None,
        candidates: int | None,
        nprobe: int | None,
        selection: Selection,
    ) -> Plan:
        """Return how hard the arguments ask to look, and whether that is known to reach the recall."""
        wanted = TARGET if recall is None else check_fraction("recall", recall)
        if recall is not None and (candidates is not None or nprobe is not None):
            raise ValueError(f"recall={recall}: expected either a recall, or nprobe= and candidates=, not both")
        plan = plan_search(state, k, wanted, selection)
        effort, most = plan.effort, max(k, state.count)
        if nprobe is not None or candidates is not None:  # as many lists and candidates as they say
            effort = state.calibration.effort(k, wanted)[0]
            plan = Plan(effort, False, "no", 0.0)
        if nprobe is not None:
            probed = min(check_count("nprobe", nprobe, 1, None), state.preview.lists)
            effort = Effort(probed, effort.eps, effort.candidates)
        if candidates is not None:
            effort = replace(effort, candidates=min(check_count("candidates", candidates, k, None), most))
        elif effort.candidates is not None:
            effort = replace(effort, candidates=min(max(k, effort.candidates), most))
        return replace(plan, effort=effort)

    def __len__(self) -> int:
        return self._state.count

    @property
    def dimension(self) -> int:
        """Dimension of a vector."""
        return self._state.space.dimension

    @property
    def metric(self) -> Metric:
        """The metric chosen at build."""
        return self._state.space.metric

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this ZoomIndex is closed: open it again with ZoomIndex.open")


def _sightings(state: Snapshot) -> Sightings | None:
    """Return what notes where vectors are found, of an index whose ids have to be read."""
    return None if state.id_kind == "int64" else Sightings(state.parts, state.fresh)
