"""The least effort that keeps a recall for given queries, found by searching for them; see `memhier.ann.ladder`.

Calibration adds up the neighbours that lists lose and those that bounds lose, and counts no neighbour that is read for
another's sake by a query it does not expect. So its efforts find more than declared, mostly for queries unlike the
vectors.
"""

from dataclasses import replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.ladder import Trial, least_efforts
from memhier.ann.zoom.calibration.calibration import Calibration
from memhier.ann.zoom.calibration.truth import NeighbourTruth
from memhier.ann.zoom.pauses import pause
from memhier.ann.zoom.preview.preview import Effort
from memhier.ann.zoom.search.search import Search, Selection
from memhier.ann.zoom.storage.snapshot import IndexSnapshot
from memhier.io.reader import Reader

__all__ = ["try_efforts"]

_BLOCK = 64  # queries searched together, which bounds the DRAM
_MANY = 10  # neighbours of a query, beyond which a quarter of the queries tells enough,
_LEAST = 64  # if that is no fewer than these
_ROUNDING = 1e-6  # of the terms of a distance

Floats: TypeAlias = npt.NDArray[np.float32]


def try_efforts(
    state: IndexSnapshot, reader: Reader, calibration: Calibration, truth: NeighbourTruth, queries: Floats
) -> Calibration:
    """Return the calibration with the efforts that searches for `queries` ``[q, d]`` confirm; `truth` is theirs."""
    tried = {}
    for k, steps in calibration.efforts.items():
        if k <= truth.neighbours:
            tried[k] = least_efforts(_Trials(state, reader, truth, queries, k), steps)
    return replace(calibration, tried=tried)


class _Trials:
    """Searches for the `k` nearest of queries, with one effort after another."""

    def __init__(self, state: IndexSnapshot, reader: Reader, truth: NeighbourTruth, queries: Floats, k: int) -> None:
        has_all = np.flatnonzero(truth.found[:, k - 1] >= 0)
        if k > _MANY:
            has_all = has_all[:: min(4, max(1, len(has_all) // _LEAST))]
        self._k, self._queries = k, queries[has_all]
        furthest = truth.distances[has_all, k - 1]
        norms = np.square(truth.queries[has_all]).sum(axis=1)
        slack = _ROUNDING * (np.abs(furthest) + truth.norms[has_all] + np.sqrt(np.abs(furthest) * norms))
        self._furthest: Floats = state.space.distances(furthest + slack, self._queries)
        # Vectors that wait in DRAM are no neighbours that `truth` knows.
        on_ssd = Selection(state.findable, fresh=np.zeros(len(state.fresh.ids), np.bool_))
        self._search = Search(state, reader, on_ssd)

    def __len__(self) -> int:
        return len(self._queries)

    def of(self, effort: Effort) -> Trial:
        """Return the trial of an effort."""
        found, pages = 0, 0
        for start in range(0, len(self), _BLOCK):
            pause()
            part = slice(start, start + _BLOCK)
            nearest = self._search.nearest(self._queries[part], self._k, effort)
            found += int((nearest.distances <= self._furthest[part, None]).sum())
            pages += int((nearest.ranked["page_requests"] + nearest.ranked["hot_pages"]).sum())
        return Trial(1 - found / (self._k * len(self)), pages / len(self))

    @staticmethod
    def parts(effort: Effort) -> tuple[float, ...]:
        """Return the parts of an effort that grow along a ladder."""
        return effort.nprobe, effort.least, effort.gap, effort.eps, effort.usual, effort.most or 0, effort.border

    @staticmethod
    def mixed(few: Effort, enough: Effort, share: float) -> Effort:
        """Return an effort that is greater than `few` by a share of the difference to `enough`."""

        def between(one: float, other: float) -> float:
            return other if np.isinf(other) else one + share * (other - one)

        most = None if few.most is None or enough.most is None else int(np.ceil(between(few.most, enough.most)))
        return replace(
            enough, eps=between(few.eps, enough.eps), most=most, least=int(np.ceil(between(few.least, enough.least))),
            gap=between(few.gap, enough.gap), usual=int(np.ceil(between(few.usual, enough.usual))),
            border=between(few.border, enough.border) if enough.border else 0.0,
        )  # fmt: skip
