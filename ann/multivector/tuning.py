"""Efforts learnt from a user's queries, each compared with all items, and the least of them that searches confirm."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.ladder import Steps, Trial, least_efforts
from memhier.ann.multivector.coding.book import QueryTables
from memhier.ann.multivector.coding.calibration import (
    NEIGHBOURS,
    Calibration,
    Effort,
    LearntEfforts,
    Needs,
    Scored,
    learnt_efforts,
)
from memhier.ann.multivector.search import Allowed, Best, ItemSearch
from memhier.ann.multivector.storage.snapshot import ItemSnapshot
from memhier.ann.zoom.pauses import pause
from memhier.ann.zoom.preview.scan_arguments import split_positions
from memhier.io.reader import Reader

__all__ = ["TUNED_LEAST", "can_tune", "tuned"]

TUNED_LEAST = 128
"""Queries of a class that it is tuned for, at least: so many tell of a recall of 0.99."""
_TUNED_MOST = 512  # of a class
_ROUNDING = 1e-5  # of the k-th score, and of the query's products with a token

Floats: TypeAlias = npt.NDArray[np.float32]
Ints: TypeAlias = npt.NDArray[np.int64]


def tuned(state: ItemSnapshot, reader: Reader, queries: Sequence[Floats]) -> Calibration:
    """Return the calibration with efforts for queries ``[v, d]`` in each class of theirs that has enough.

    Raises
    ------
    ValueError
        When no class has enough queries, nothing is calibrated yet, or few items are on SSD.
    """
    allowed = replace(Allowed.of(state, None), waiting=np.zeros(len(state.waiting), np.bool_))
    if not _has_items(state):
        raise ValueError("the index has too few items on SSD to be tuned: add items, then call compact()")
    least = [each.vectors for each in state.calibration.learnt]
    classes = _classes(state, queries)
    learnt, counts = list[LearntEfforts](), np.bincount(classes, minlength=len(least))
    if counts.max() < TUNED_LEAST:
        shown = ", ".join(f"{count} of {low} unlike vectors and more" for low, count in zip(least, counts, strict=True))
        raise ValueError(f"queries: {shown}: expected at least {TUNED_LEAST} of one of these classes to learn from")
    for number, before in enumerate(state.calibration.learnt):
        some = [query for query, of in zip(queries, classes, strict=True) if of == number]
        chosen = np.sort(np.random.default_rng(0).permutation(len(some))[:_TUNED_MOST])
        enough = len(some) >= TUNED_LEAST
        learnt.append(_learnt(state, reader, allowed, before, [some[at] for at in chosen]) if enough else before)
    return replace(state.calibration, learnt=tuple(learnt))


def can_tune(state: ItemSnapshot, queries: Sequence[Floats]) -> bool:
    """Return whether some class has enough queries, and the index enough items on SSD, to be tuned."""
    return _has_items(state) and np.bincount(_classes(state, queries)).max(initial=0) >= TUNED_LEAST


def _has_items(state: ItemSnapshot) -> bool:
    return state.calibration.known and sum(part.count for part in state.parts) > NEIGHBOURS


def _classes(state: ItemSnapshot, queries: Sequence[Floats]) -> Ints:
    """Return the number of the class of each query."""
    least = [each.vectors for each in state.calibration.learnt]
    vectors = [QueryTables(state.book, query).vectors for query in queries]
    found: Ints = np.searchsorted(least, vectors, side="right") - 1
    return found


def _learnt(
    state: ItemSnapshot, reader: Reader, allowed: Allowed, before: LearntEfforts, queries: Sequence[Floats]
) -> LearntEfforts:
    """Return the efforts for queries of one class."""
    looked, kept, furthest = list[Needs](), list[Floats](), list[float]()
    parts, every = [part.arrays for part in state.parts], allowed.numbers(state)
    for query in queries:
        pause()
        best, _ = ItemSearch(state, reader, query, NEIGHBOURS, allowed).run(None)
        scored = Scored(state.book, parts, query, every)
        if scored.tables.unit > 0:
            looked.append(Needs.of(scored, _numbers(state, best), best.scores))
            kept.append(query)
            length = scored.tables.length * state.book.reach
            furthest.append(best.kth - _ROUNDING * (abs(best.kth) + length))
    if not looked:
        return before
    learnt = learnt_efforts(before.vectors, looked)
    steps: Steps[Effort] = [
        (recall, Effort(probes, gap, eps, learnt.biases, learnt.nearness, learnt.listed), 0.0)
        for recall, probes, gap, eps in learnt.efforts
    ]
    found = least_efforts(_Trials(state, reader, allowed, kept, furthest), steps)
    return replace(learnt, efforts=[(recall, each.probes, each.gap, each.eps) for recall, each, _ in found])


def _numbers(state: ItemSnapshot, best: Best) -> Ints:
    """Return the numbers of items found, through all parts."""
    parts, rows = split_positions(best.positions)
    return state.bases[parts] + rows


class _Trials:
    """Searches for queries; `furthest` are the scores that an item has to reach to be among the best of each."""

    def __init__(
        self, state: ItemSnapshot, reader: Reader, allowed: Allowed, queries: Sequence[Floats],
        furthest: Sequence[float],
    ) -> None:  # fmt: skip
        self._state, self._reader, self._allowed = state, reader, allowed
        self._queries, self._furthest = queries, furthest

    def __len__(self) -> int:
        return len(self._queries)

    def of(self, effort: Effort) -> Trial:
        """Return the trial of an effort."""
        found, pages = 0, 0
        for query, furthest in zip(self._queries, self._furthest, strict=True):
            pause()
            best, tally = ItemSearch(self._state, self._reader, query, NEIGHBOURS, self._allowed).run(effort)
            found += int((best.scores >= furthest).sum())
            pages += tally["pages"]
        count = len(self._queries)
        return Trial(1 - found / (NEIGHBOURS * count), pages / count)

    @staticmethod
    def mixed(few: Effort, enough: Effort, share: float) -> Effort:
        """Return an effort that is greater than `few` by a share of the difference to `enough`."""
        return replace(
            enough, probes=int(np.ceil(few.probes + share * (enough.probes - few.probes))),
            gap=few.gap + share * (enough.gap - few.gap), eps=few.eps + share * (enough.eps - few.eps),
        )  # fmt: skip

    @staticmethod
    def parts(effort: Effort) -> tuple[float, ...]:
        """Return the parts of an effort that grow along a ladder."""
        return effort.probes, effort.gap, effort.eps
