"""The least effort that keeps a recall for given queries, found by searching for them.

Calibration adds up the neighbours that lists lose and those that bounds lose, and counts no neighbour that is read for
another's sake by a query it does not expect. So its efforts find more than declared, mostly for queries unlike the
vectors. Its efforts for ascending recalls are steps of one ladder: no part of a step exceeds that of the next. Here the
queries are searched with steps of the ladder, and with a step between two of them. The least one whose mean loss, by
conformal risk control, stays below the loss that a recall allows is taken.
"""

from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.zoom.calibration.calibrate import Calibration, Steps
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
_ATTEMPTS = 2  # at a step between two
_SAFE = 0.1  # of the way between two efforts, beyond the place where their losses suggest the loss allowed
_CLOSE = 0.002  # below the loss allowed, where no better step is looked for
_ROUNDING = 1e-6  # of the terms of a distance

Floats: TypeAlias = npt.NDArray[np.float32]


def try_efforts(
    state: IndexSnapshot, reader: Reader, calibration: Calibration, truth: NeighbourTruth, queries: Floats
) -> Calibration:
    """Return the calibration with the efforts that searches for `queries` ``[q, d]`` confirm; `truth` is theirs."""
    tried = {}
    for k, steps in calibration.efforts.items():
        if k <= truth.neighbours:
            tried[k] = _least_efforts(_Trials(state, reader, truth, queries, k), steps)
    return replace(calibration, tried=tried)


@dataclass(frozen=True, slots=True)
class _Trial:
    """The mean share of the neighbours lost, and the pages read for a query."""

    loss: float
    pages: float


class _Trials:
    """Searches for the `k` nearest of queries, with one effort after another."""

    def __init__(self, state: IndexSnapshot, reader: Reader, truth: NeighbourTruth, queries: Floats, k: int) -> None:
        has_all = np.flatnonzero(truth.found[:, k - 1] >= 0)
        if k > _MANY:
            has_all = has_all[:: min(4, max(1, len(has_all) // _LEAST))]
        self._k, self._queries = k, queries[has_all]
        furthest = truth.distances[has_all, k - 1]
        slack = _ROUNDING * (np.abs(furthest) + np.square(truth.queries[has_all]).sum(axis=1))
        self._furthest: Floats = state.space.distances(furthest + slack, self._queries)
        # Vectors that wait in DRAM are no neighbours that `truth` knows.
        on_ssd = replace(Selection.of(state, None), fresh=np.zeros(len(state.fresh.ids), np.bool_))
        self._search = Search(state, reader, on_ssd)
        self._done: dict[Effort, _Trial] = {}

    def __len__(self) -> int:
        return len(self._queries)

    def of(self, effort: Effort) -> _Trial:
        """Return the trial of an effort."""
        if effort not in self._done:
            found, pages = 0, 0
            for start in range(0, len(self), _BLOCK):
                pause()
                part = slice(start, start + _BLOCK)
                nearest = self._search.nearest(self._queries[part], self._k, effort)
                found += int((nearest.distances <= self._furthest[part, None]).sum())
                pages += int((nearest.ranked["page_requests"] + nearest.ranked["hot_pages"]).sum())
            self._done[effort] = _Trial(1 - found / (self._k * len(self)), pages / len(self))
        return self._done[effort]


def _least_efforts(trials: _Trials, steps: Steps) -> Steps:
    """Return the least effort of each recall that `steps` keep, by ascending recall, with the pages of a query."""
    least: Steps = []
    count, at = len(trials), 0
    for number, (recall, _, _) in enumerate(steps):
        allowed = ((1 - recall) * (count + 1) - 1) / max(1, count)
        if allowed < 0:  # these queries are too few to tell; steps before `at` lose too much even for lower recalls
            at = max(at, number)
            least.append((recall, *steps[at][1:]))
            continue
        while at < len(steps) and trials.of(steps[at][1]).loss > allowed:
            at += 1
        if at == len(steps):
            break
        effort = steps[at][1]
        if at > 0:
            effort = _between(trials, steps[at - 1][1], effort, allowed)
        least.append((recall, effort, trials.of(effort).pages))
    for number in reversed(range(len(least) - 1)):
        if _parts(least[number][1]) > _parts(least[number + 1][1]):  # that is enough for the lower recall as well
            least[number] = (least[number][0], *least[number + 1][1:])
    return least


def _parts(effort: Effort) -> tuple[float, ...]:
    """Return the parts of an effort that grow along a ladder."""
    return effort.nprobe, effort.least, effort.gap, effort.eps, effort.usual, effort.most or 0


def _between(trials: _Trials, few: Effort, enough: Effort, allowed: float) -> Effort:
    """Return an effort near the loss allowed, between one that loses more and one that is `enough`."""
    low, high, chosen = 0.0, 1.0, enough
    lost, kept = trials.of(few).loss, trials.of(enough).loss
    for _ in range(_ATTEMPTS):
        if allowed - kept < _CLOSE:
            break
        share = low + (high - low) * min(1.0, (lost - allowed) / (lost - kept) + _SAFE)
        effort = _mixed(few, enough, share)
        loss = trials.of(effort).loss
        if loss <= allowed:
            high, kept, chosen = share, loss, effort
        else:
            low, lost = share, loss
    return chosen


def _mixed(few: Effort, enough: Effort, share: float) -> Effort:
    """Return an effort that is greater than `few` by a share of the difference to `enough`."""

    def between(one: float, other: float) -> float:
        return other if np.isinf(other) else one + share * (other - one)

    most = None if few.most is None or enough.most is None else int(np.ceil(between(few.most, enough.most)))
    return replace(
        enough, eps=between(few.eps, enough.eps), most=most, least=int(np.ceil(between(few.least, enough.least))),
        gap=between(few.gap, enough.gap), usual=int(np.ceil(between(few.usual, enough.usual))),
    )  # fmt: skip
