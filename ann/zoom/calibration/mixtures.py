"""Queries of different kinds: vectors of the index, those with many copies, and mixtures made up for calibration.

In a recommender, queries are users and vectors are items. A user's factors are about the sum of those of the chosen
items, and some items are chosen by many. So calibration also uses sums of vectors as queries: of two to many vectors,
longer ones drawn more often. Their neighbours lie elsewhere than those of single vectors.

A vector with many copies finds them in few reads. A mean over such queries and all others would tell of neither.

Calibration takes the effort that suffices for each kind.
"""

from dataclasses import replace
from functools import reduce
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.zoom.calibration.calibrate import calibrate
from memhier.ann.zoom.calibration.calibration import Calibration
from memhier.ann.zoom.calibration.truth import NeighbourTruth
from memhier.ann.zoom.preview.preview import Effort, Preview
from memhier.ann.zoom.preview.space import PreviewSpace
from memhier.ann.zoom.preview.stored_scan import Parts

__all__ = ["calibrate_kinds", "calibrate_newest", "play_queries"]

_MOST = 6  # a mixture has up to 2 ** 6 vectors
_ALIKE = 1.2  # times the cost of others: newest vectors cost more where they are of another kind
_FEW = 100  # queries with many copies, or without, below which they are no kind of their own: too few to tell .99

Floats: TypeAlias = npt.NDArray[np.float32]
Ints: TypeAlias = npt.NDArray[np.int64]


def play_queries(space: PreviewSpace, vectors: Floats, own: Ints, count: int, seed: int) -> NeighbourTruth:
    """Return the truth for vectors ``[n, d]`` that play queries; for inner products also for as many mixtures.

    Parameters
    ----------
    own
        int64 ``[n]``: the numbers of the vectors themselves.
    count
        Number of vectors to come.
    seed
        Chooses the mixtures.
    """
    if space.metric != "ip":
        return NeighbourTruth(space.queries(vectors), own, count)
    asked = np.concatenate([vectors, _mixtures(vectors, seed)])
    everyone = np.concatenate([own, np.full(len(vectors), -1, np.int64)])
    return NeighbourTruth(space.queries(asked), everyone, count, space.lengths(asked))


def calibrate_kinds(preview: Preview, parts: Parts, truth: NeighbourTruth, row_bytes: int) -> Calibration:
    """Return the efforts that suffice for queries that are vectors of the index, their copies, or mixtures."""
    copied = truth.hidden & (truth.own >= 0)
    if min(copied.sum(), (~copied & (truth.own >= 0)).sum()) < _FEW:
        copied[:] = False
    kinds = [np.flatnonzero(kind) for kind in ((truth.own >= 0) & ~copied, copied, truth.own < 0)]
    made = [calibrate(preview, parts, truth.of(rows), row_bytes) for rows in kinds if len(rows)]
    return reduce(_stricter, made)


def calibrate_newest(
    preview: Preview, parts: Parts, truth: NeighbourTruth, row_bytes: int, is_new: npt.NDArray[np.bool_]
) -> Calibration:
    """Return the efforts that suffice for queries that are new vectors, where these cost more, and for the others.

    Each kind is measured alone. `is_new` ``[n]`` is of the vectors; mixtures follow in the same order.
    """
    some = np.resize(is_new, len(truth.own))
    kinds = [rows for rows in (np.flatnonzero(some), np.flatnonzero(~some)) if len(rows)]
    made = [calibrate_kinds(preview, parts, truth.of(rows), row_bytes) for rows in kinds]
    both, usual = reduce(_stricter, made), made[-1]
    if made[0].cost > _ALIKE * usual.cost:
        return both
    return replace(both, efforts=usual.efforts, reached=usual.reached, cost=usual.cost)


def _mixtures(vectors: Floats, seed: int) -> Floats:
    """Return sums of vectors, one for each vector."""
    random = np.random.default_rng([seed, 4])
    lengths = np.sqrt(np.einsum("ij,ij->i", vectors, vectors, dtype=np.float64))
    total = float(lengths.sum())
    odds = lengths / total if 0 < total < np.inf else None
    counts = np.exp2(random.uniform(1, _MOST, len(vectors))).astype(np.int64)
    chosen = random.choice(len(vectors), size=int(counts.sum()), p=odds)
    first = np.concatenate([[0], np.cumsum(counts)[:-1]]).astype(np.int64)
    mixed: Floats = np.add.reduceat(vectors[chosen], first, axis=0, dtype=np.float64).astype(np.float32)
    return mixed


def _stricter(one: Calibration, other: Calibration) -> Calibration:
    """Return the calibration with the greater effort of both."""
    efforts: dict[int, list[tuple[float, Effort, float]]] = {}
    for k in one.efforts.keys() & other.efforts.keys():
        pairs = zip(one.efforts[k], other.efforts[k], strict=False)  # one may reach a higher recall than the other
        efforts[k] = [(min(some[0], more[0]), _harder(some[1], more[1]), max(some[2], more[2])) for some, more in pairs]
    if not efforts:  # one of them had nothing to find
        return one if max(one.efforts) > max(other.efforts) else other
    return replace(
        one,
        queries=one.queries + other.queries,
        efforts=dict(sorted(efforts.items())),
        reached={k: min(one.reached[k], other.reached[k]) for k in efforts},
        clear={k: _farther(one.clear[k], other.clear[k]) for k in one.clear.keys() & other.clear.keys()},
        far=min((each.far for each in (one, other) if each.far is not None), default=None),
        alone=[(some[0], max(some[1], more[1])) for some, more in zip(one.alone, other.alone, strict=False)],
        cost=max(one.cost, other.cost),
    )


def _farther(one: list[tuple[float, float]], other: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the greater distance of both, by recall."""
    return [(min(some[0], more[0]), max(some[1], more[1])) for some, more in zip(one, other, strict=False)]


def _harder(one: Effort, other: Effort) -> Effort:
    def most(name: str) -> int | None:
        values = [getattr(each, name) for each in (one, other)]
        return None if None in values else max(values)

    return Effort(
        max(one.nprobe, other.nprobe),
        max(one.eps, other.eps),
        most("candidates"),
        most("most"),
        max(one.least, other.least),
        max(one.gap, other.gap),
        min(one.usual, other.usual),
        border=max(one.border, other.border) * bool(one.border and other.border),
    )
