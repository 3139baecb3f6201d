"""Plain searches: one query, without filter, limit or field, as most are. They are planned once for a snapshot."""

from functools import partial
from typing import Any, Literal, NamedTuple, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.limits import NO_LIMITS
from memhier.ann.zoom.arguments import SearchOptions
from memhier.ann.zoom.preview.space import EVERY
from memhier.ann.zoom.search.planning import Plan, keep_plan, plan_search
from memhier.ann.zoom.search.search import NO_WORKSPACE, Search, Selection
from memhier.ann.zoom.storage.fullview import make_workspace
from memhier.ann.zoom.storage.snapshot import IndexSnapshot
from memhier.io.reader import Reader

__all__ = ["PlainSearch"]

_NUMBERS, _CUT_SHORT = 14, 2  # of the work for a query, and the place of the one that tells of candidates left out

Floats: TypeAlias = npt.NDArray[np.float32]
Ints: TypeAlias = npt.NDArray[np.int64]


class PlainSearch(NamedTuple):
    """How one call of the native core makes such searches.

    Attributes
    ----------
    k
        Neighbours.
    plan
        How hard the search looks.
    state, request
        The same as the core takes it; the request is of another query.
    """

    k: int
    plan: Plan
    state: Any
    request: Any

    @classmethod
    def of(cls, snapshot: IndexSnapshot, reader: Reader, options: SearchOptions) -> Self | None:
        """Return the way of a plain search; None where it takes more than that call."""
        key = "plain", int(options.k), None if options.recall is None else float(options.recall)
        found: Self | Literal[False] | None = snapshot.plans.get(key, False)
        if found is False:  # not tried yet
            found = cls._made(snapshot, reader, options)
            keep_plan(snapshot.plans, key, found)
        return found

    @classmethod
    def _made(cls, snapshot: IndexSnapshot, reader: Reader, options: SearchOptions) -> Self | None:
        k, count, fresh, strays = int(options.k), snapshot.count, snapshot.fresh, snapshot.calibration.strays
        if k > count or len(fresh.ids) or fresh.texts is not None or (strays is not None and strays.lists):
            return None
        selection = Selection.of(snapshot, None)
        plan, search = plan_search(snapshot, k, count, options, selection), Search(snapshot, reader, selection)
        state = search.compiled(plan.effort)
        if plan.escalation != "no" or state is None:
            return None
        other, kept = np.zeros((1, snapshot.space.dimension), np.float32), search.candidate_limits(k, plan.effort)
        return cls(k, plan, state, search.request(other, k, plan.effort, NO_LIMITS, None, kept))

    def nearest(self, snapshot: IndexSnapshot, reader: Reader, query: Floats) -> tuple[Ints, Floats, list[int]] | None:
        """Return ids and distances ``[1, k]`` of the nearest of a query ``[1, d]``, and the work done.

        Of the work these are the numbers of `SCAN_TALLY`, `RANK_TALLY` and `READ_TALLY`, and the candidates. None where
        there are more of these than there is room for.
        """
        core, numbers = reader.compiled, np.empty(_NUMBERS, np.int64)
        assert core is not None
        ids, distances = np.empty((1, self.k), np.int64), np.empty((1, self.k), np.float32)
        workspace = NO_WORKSPACE if snapshot.page_rows else make_workspace(snapshot.row_bytes)
        try:
            reader.run(
                partial(
                    core.search_plainly, state=self.state, request=self.request, query=query, ids=ids,
                    distances=distances, workspace=workspace, numbers=numbers,
                )
            )  # fmt: skip
        except OverflowError:
            snapshot.space.queries(query, EVERY)  # which tells of the query
            raise
        work = numbers.tolist()
        return None if work[_CUT_SHORT] else (ids, distances, work)
