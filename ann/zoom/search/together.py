"""Searches of one call that are made together: each with a filter of its own, in one call of the native core."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.limits import ReadLimits
from memhier.ann.zoom.arguments import SearchOptions
from memhier.ann.zoom.filters.bitmaps import Words
from memhier.ann.zoom.filters.where import parse_for
from memhier.ann.zoom.search.grouped import QueryGroup
from memhier.ann.zoom.search.planning import Plan
from memhier.ann.zoom.search.search import Found, Search, Selection
from memhier.ann.zoom.storage.layout import filters_bytes
from memhier.ann.zoom.storage.snapshot import IndexSnapshot

__all__ = ["Planned", "find_together", "selections"]

Floats: TypeAlias = npt.NDArray[np.float32]


class Planned(NamedTuple):
    """A search of queries that may find the same vectors, as it is planned.

    Attributes
    ----------
    search, plan
        The search, and how hard it looks.
    queries
        float32 ``[q, d]``.
    k
        Neighbours of each: no more than there are vectors.
    options, limits
        Of the call.
    radius
        float32 ``[q]``: the largest distance wanted of each query; None where there is none.
    wanted
        The fields that are read.
    """

    search: Search
    plan: Plan
    queries: Floats
    k: int
    options: SearchOptions
    limits: ReadLimits
    radius: Floats | None
    wanted: Sequence[str]

    @property
    def scan_bytes(self) -> int:
        """DRAM for candidates at first."""
        search, effort = self.search, self.plan.effort
        return len(self.queries) * search.query_bytes(effort, search.candidate_limits(self.k, effort)[0])

    def nearest(self) -> Found:
        """Return the nearest of each query."""
        return self.search.nearest(self.queries, self.k, self.plan.effort, self.limits, self.radius)


def selections(snapshot: IndexSnapshot, groups: Sequence[QueryGroup]) -> Iterator[list[tuple[QueryGroup, Selection]]]:
    """Yield groups with the vectors that each may find: as many at a time as there is room for their filters."""
    room = filters_bytes(snapshot.scan_bytes)
    step = max(1, room // max(1, snapshot.bitmap_bytes)) if snapshot.preview.coding == "rabitq" else 1
    for start in range(0, len(groups), step):
        some = groups[start : start + step]
        parsed = [None if each.where is None else parse_for(each.where, snapshot.schema) for each in some]
        selected = dict[int, list[Words]]()
        filtered = [number for number, each in enumerate(parsed) if each is not None]
        expressions = [each for each in parsed if each is not None]
        if len(filtered) > 1 and all(part.attributes is not None for part in snapshot.parts):
            of_parts = [part.attributes.bitmaps(expressions) for part in snapshot.parts if part.attributes is not None]
            selected = {number: [each[row] for each in of_parts] for row, number in enumerate(filtered)}
        yield [
            (group, Selection.of(snapshot, where, group.allow, group.deny, selected.pop(number, None)))
            for number, (group, where) in enumerate(zip(some, parsed, strict=True))
        ]


def find_together(every: Sequence[Planned]) -> list[Found]:
    """Return the results of searches of one snapshot, with equal `k` and limits."""
    found, states = dict[int, Found](), dict[int, Any]()
    for number, each in enumerate(every):
        if len(every) == 1 or (state := each.search.compiled(each.plan.effort)) is None:
            found[number] = each.nearest()
        else:
            states[number] = state
    if states:
        some = _in_one_call([every[number] for number in states], [*states.values()])
        found.update(zip(states, some, strict=True))
    return [found[number] for number in range(len(every))]


def _in_one_call(every: Sequence[Planned], states: list[Any]) -> list[Found]:
    queries, k = np.concatenate([each.queries for each in every]), every[0].k
    whole = Found.room(len(queries), k)
    ends = np.cumsum([len(each.queries) for each in every]).tolist()
    parts = [slice(stop - len(each.queries), stop) for each, stop in zip(every, ends, strict=True)]
    requests = [
        each.search.request(
            queries[part], k, each.plan.effort, each.limits, each.radius,
            each.search.candidate_limits(k, each.plan.effort),
        )
        for each, part in zip(every, parts, strict=True)
    ]  # fmt: skip
    numbers = np.concatenate([each.search.numbers for each in every])
    ranking = every[0].search.find(states, requests, queries, whole, numbers)
    results = []
    for each, state, part in zip(every, states, parts, strict=True):
        found = whole.take(part)
        each.search.note(ranking.take(part))
        each.search.complete(state, each.queries, each.plan.effort, each.limits, each.radius, found)
        results.append(found)
    return results
