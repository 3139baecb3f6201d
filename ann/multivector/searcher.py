"""The searches of an open index of items, and the recall that they keep."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.limits import NO_LIMITS, ReadLimits, RecallWarnings, read_limits
from memhier.ann.multivector.allowance import Allowance
from memhier.ann.multivector.explaining import explain
from memhier.ann.multivector.explanation import ItemExplanation
from memhier.ann.multivector.results import ItemResult
from memhier.ann.multivector.search import TALLY, Allowed, Best, ItemSearch
from memhier.ann.multivector.storage.snapshot import ItemSnapshot
from memhier.ann.multivector.trace import ItemTrace
from memhier.ann.zoom.arguments import SearchOptions
from memhier.ann.zoom.search.fields import FieldReader, chosen_fields
from memhier.ann.zoom.search.grouped import QueryGroup
from memhier.ann.zoom.search.turns import Turns
from memhier.ann.zoom.storage.ids import Sightings
from memhier.io.reader import Reader

__all__ = ["ItemSearcher"]

TARGET = 0.99

Floats: TypeAlias = npt.NDArray[np.float32]
Asked: TypeAlias = tuple[npt.NDArray[np.int64], SearchOptions]  # numbers of queries, and the options of their search
Watch: TypeAlias = Callable[[ItemSnapshot, Sequence[Floats], SearchOptions, Floats], None]


@dataclass(frozen=True)
class _Found:
    """The items found for each query of a call, the sums of the work done, and why the first of them ended."""

    best: list[Best]
    tally: dict[str, int]
    stopped: str
    exact: bool


class ItemSearcher:
    """Searches a snapshot, which its owner may replace at any moment. For many threads.

    Parameters
    ----------
    state
        The snapshot to search.
    reader
        Reads its files.
    searches
        How many run at a time.

    Attributes
    ----------
    state
        The snapshot that the next search takes.
    turns
        Of the searches; whatever else takes the DRAM of one takes a turn as well.
    watch
        Hears of every search that has ended, after its turn; None where nothing listens.
    """

    def __init__(self, state: ItemSnapshot, reader: Reader, searches: int) -> None:
        self.state, self.turns = state, Turns(searches)
        self._reader, self._warnings = reader, RecallWarnings()
        self.watch: Watch | None = None

    def search(
        self, queries: Sequence[Floats], options: SearchOptions, groups: Sequence[QueryGroup] | None = None
    ) -> ItemResult:
        """Return the best items of queries ``[v, d]``; see :meth:`memhier.ann.MultiVectorIndex.search`.

        With `groups`, each query finds items of its own group; their filters and lists stand for those of the options.
        """
        each = [(np.arange(len(queries)), options)]
        if groups is not None:
            each = [
                (group.rows, replace(options, where=group.where, allow=group.allow, deny=group.deny))
                for group in groups
            ]
        with self.turns.next():
            state = self.state
            result = self._search(state, queries, each, None)
        if (watch := self.watch) is not None:
            for rows, asked in each:
                watch(state, [queries[row] for row in rows.tolist()], asked, -result.scores[rows])
        return result

    def nearest_exactly(self, state: ItemSnapshot, query: Floats, k: int, where: str | None) -> Floats:
        """Return the negative scores of the `k` best items of a query in a snapshot, as a search of recall 1 does."""
        with self.turns.next():
            best, _ = ItemSearch(state, self._reader, query, k, Allowed.of(state, where)).run(None)
            return -best.scores

    def explain(self, query: Floats, options: SearchOptions) -> ItemExplanation:
        """Return the account of the search of a query; see :meth:`memhier.ann.MultiVectorIndex.explain`."""
        with self.turns.next():
            state = self.state
            trace = ItemTrace(int(state.bases[-1]))
            return explain(state, self._search(state, [query], [(np.arange(1), options)], trace), trace)

    def _search(
        self, state: ItemSnapshot, queries: Sequence[Floats], each: Sequence[Asked], trace: ItemTrace | None
    ) -> ItemResult:
        options = each[0][1]
        k, limits = int(options.k), read_limits(options.max_reads, options.deadline_ms)
        names = chosen_fields(state, options.fields)
        found = self._best(state, queries, each, limits, trace)
        ids = np.full((len(queries), k), -1, np.int64)
        scores = np.full((len(queries), k), -np.inf, np.float32)
        sightings = Sightings(state.parts, state.fresh)
        for row, best in enumerate(found.best):
            ids[row, : len(best.ids)], scores[row, : len(best.ids)] = best.ids, best.scores
            sightings.note(best.ids, best.positions)
        fields_of = FieldReader(state, self._reader, names)
        columns, payload = fields_of.found(ids, sightings), fields_of.reads.tally
        named: npt.NDArray[Any] = ids
        if state.id_kind == "str":
            named = sightings.named(ids, payload)
        stats: dict[str, Any] = {"queries": len(queries)} | found.tally
        filtered = any(asked.filtered for _, asked in each)
        stats |= {"stopped": found.stopped, "calibrated": found.exact or not filtered}
        stats["recall"] = self._kept(options, limits, stats, exact=found.exact)
        stats["escalated"] = "exact" if found.tally["escalated"] else "no"
        stats |= {f"payload_{name}": int(payload[name][0]) for name in ("reads", "pages", "bytes")}
        return ItemResult(named, scores, stats, columns)

    def _best(
        self, state: ItemSnapshot, queries: Sequence[Floats], each: Sequence[Asked], limits: ReadLimits,
        trace: ItemTrace | None,
    ) -> _Found:  # fmt: skip
        """Return the best items of each query; ``escalated`` counts the queries that were compared with all."""
        started, every = time.monotonic(), dict[int, Best]()
        tally, stopped, exact = dict.fromkeys(TALLY, 0), "all_read", True
        for rows, options in each:
            allowed = Allowed.of(state, options.where, options.allow, options.deny)
            recall = TARGET if options.recall is None else float(options.recall)
            for row in rows.tolist():
                query = queries[row]
                allowance = None if limits is NO_LIMITS else Allowance(limits, started)
                search = ItemSearch(
                    state, self._reader, query, int(options.k), allowed, allowance=allowance, trace=trace
                )
                effort = state.calibration.effort(recall, search.tables.vectors)
                every[row], work = search.run(effort)
                work["escalated"] |= effort is None
                exact = exact and effort is None
                tally = {name: tally[name] + work[name] for name in TALLY}
                stopped = stopped if row else search.stopped
        return _Found([every[row] for row in range(len(queries))], tally, stopped, exact)

    def _kept(self, options: SearchOptions, limits: ReadLimits, stats: dict[str, Any], *, exact: bool) -> float:
        """Return the recall that a search keeps; warn where limits make it less than asked for."""
        recall = TARGET if options.recall is None else float(options.recall)
        early, queries = stats["stopped_early"], stats["queries"]
        if not early:
            return 1.0 if exact else recall
        kept: float = (1 - early / queries) * recall
        if options.recall is not None:
            self._warnings.warn_of_limits(recall, kept, early, queries, limits)
        return kept
