"""Searches of one call that are made together: each with a filter of its own, in one call of the native core."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.limits import ReadLimits
from memhier.ann.zoom.arguments import SearchOptions
from memhier.ann.zoom.search.planning import Plan
from memhier.ann.zoom.search.search import Found, Search, first_round

__all__ = ["Planned", "Room", "find_together"]

Floats: TypeAlias = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Planned:
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

    def nearest(self) -> Found:
        """Return the nearest of each query."""
        return self.search.nearest(self.queries, self.k, self.plan.effort, self.limits, self.radius)


class Room:
    """The DRAM of a search, as searches that are made together share it.

    Parameters
    ----------
    scan_bytes, filter_bytes
        DRAM for candidates, and for the filters beyond the first.
    bitmap_bytes
        DRAM of one filter.
    """

    def __init__(self, scan_bytes: int, filter_bytes: int, bitmap_bytes: int) -> None:
        self._scan, self._filters, self._bitmap = scan_bytes, filter_bytes, bitmap_bytes
        self._taken = self._filters_taken = 0

    def take(self, planned: Planned) -> bool:
        """Return whether one more search fits beside those before, and count it if it does."""
        few = planned.search.candidate_limits(planned.k, planned.plan.effort)[0]
        each = len(planned.queries) * planned.search.query_bytes(planned.plan.effort, few)
        first = not self._taken
        filters = self._filters_taken + 2 * self._bitmap  # with that of a search that is planned, and does not fit
        if not first and (self._taken + each > self._scan or filters > self._filters):
            return False
        self._taken += each
        self._filters_taken += 0 if first else self._bitmap
        return True


def find_together(every: Sequence[Planned]) -> list[Found]:
    """Return what searches of one snapshot find, with equal `k` and limits."""
    found, states = dict[int, Found](), dict[int, Any]()
    together: dict[int, list[int]] = {}  # by the candidates of the first round of reads
    for number, each in enumerate(every):
        effort = each.plan.effort
        if len(every) == 1 or (state := each.search.compiled(effort)) is None:
            found[number] = each.nearest()
        else:
            states[number] = state
            together.setdefault(first_round(each.k, effort), []).append(number)
    for numbers in together.values():
        some = _in_one_call([every[number] for number in numbers], [states[number] for number in numbers])
        found.update(zip(numbers, some, strict=True))
    return [found[number] for number in range(len(every))]


def _in_one_call(every: Sequence[Planned], states: list[Any]) -> list[Found]:
    queries, k = np.concatenate([each.queries for each in every]), every[0].k
    whole = Found.room(len(queries), k)
    ends = np.cumsum([len(each.queries) for each in every]).tolist()
    parts = [slice(stop - len(each.queries), stop) for each, stop in zip(every, ends, strict=True)]
    requests = [
        each.search.request(queries[part], k, each.plan.effort, each.limits, each.radius)
        for each, part in zip(every, parts, strict=True)
    ]
    ranking = every[0].search.find(states, requests, queries, whole)
    results = []
    for each, state, part in zip(every, states, parts, strict=True):
        found = whole.take(part)
        each.search.note(ranking.take(part))
        each.search.complete(state, each.queries, each.plan.effort, each.limits, each.radius, found)
        results.append(found)
    return results
