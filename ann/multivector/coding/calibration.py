"""The effort of a search for a declared recall, learnt from held-out queries.

Parts of stored items play queries; the item itself is left out. Their true neighbours are the best by exact MaxSim
among the items of the best estimates. For each of them three needs are known: the lists to probe until it is a
candidate, the gap below the k-th best estimate at which its list score stands, and the standard errors by which its
estimate falls short of the k-th best score. Efforts take quantiles of the needs. Conformal risk control (Angelopoulos
et al., 2022) picks the least one whose loss over the queries, with one more of which all is lost, is small enough.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.multivector.coding.book import QueryTables, TokenBook
from memhier.ann.multivector.coding.scores import estimates, list_scores, max_sims
from memhier.ann.multivector.items import ItemSource
from memhier.ann.multivector.storage.part import ItemArrays
from memhier.ann.zoom.pauses import pause

__all__ = ["NEIGHBOURS", "Calibration", "Effort", "learn"]

Floats: TypeAlias = npt.NDArray[np.float32]
Ints: TypeAlias = npt.NDArray[np.int64]

RECALLS = (0.8, 0.9, 0.95, 0.98, 0.99, 0.995)
NEIGHBOURS = 10
"""Of a held-out query, that an effort is learnt from."""
QUERIES = 320
_LENGTHS = (32, 32, 16)  # vectors of held-out queries, in turn
_ESTIMATED = 2048  # items whose codes are scored for a held-out query, those of the best list scores
_FOREIGN_SHARE, _FOREIGN_TIMES = 0.999, 1.05  # of the items, that are not foreign; and of their errors
_RANKED = 256  # items whose exact scores are looked at, those of the best estimates
_LOSSES = (
    0.3,
    0.2,
    0.15,
    0.1,
    0.07,
    0.05,
    0.03,
    0.02,
    0.015,
    0.01,
    0.007,
    0.005,
    0.003,
    0.002,
    0.001,
    0.0,
)  # of a need


@dataclass(frozen=True, slots=True)
class Effort:
    """The effort of a search.

    Attributes
    ----------
    probes
        Lists for all vectors of a query together: as many for each.
    gap
        An item's codes are scored if its list score stands at most so many units below the k-th best estimate.
    eps
        Units that an estimate is taken to be too low.
    """

    probes: int
    gap: float
    eps: float


@dataclass(frozen=True)
class Calibration:
    """Efforts by recall.

    Attributes
    ----------
    biases
        By how much list scores and estimates are too low for neighbours, on average, for a query of length one.
    efforts
        Recall, probes, gap and eps, ascending; see :class:`Effort`.
    foreign
        Items whose tokens err by more, on average, are unlike those that the efforts were learnt from; 0 tells nothing.
    """

    biases: tuple[float, float] = (0.0, 0.0)
    efforts: Sequence[tuple[float, int, float, float]] = field(default_factory=tuple)
    foreign: float = 0.0

    def effort(self, recall: float) -> Effort | None:
        """Return the effort that reaches a recall; None where only bounds that hold for certain do."""
        for reached, probes, gap, eps in self.efforts:
            if reached >= recall:
                return Effort(int(probes), gap, eps)
        return None

    @classmethod
    def of_json(cls, value: dict[str, Any]) -> "Calibration":
        """Return it from a value as `CALIBRATION` describes it."""
        first, second = value["biases"]
        efforts = tuple((each[0], each[1], each[2], each[3]) for each in value["efforts"])
        return cls((first, second), efforts, value["foreign"])


def learn(book: TokenBook, arrays: ItemArrays, source: ItemSource, seed: int) -> Calibration:
    """Return the efforts learnt from some of the items themselves; see this module."""
    count, random = len(source.lengths), np.random.default_rng([seed, 4])
    if count <= NEIGHBOURS:
        return Calibration()
    looked = []
    for number, own in enumerate(np.sort(random.choice(count, min(QUERIES, count), replace=False)).tolist()):
        pause()
        tokens = source.take(np.array([own]))
        most = min(len(tokens), _LENGTHS[number % len(_LENGTHS)])
        query = tokens[np.sort(random.permutation(len(tokens))[:most])].astype(np.float32)
        looked.append(_Needs.of(book, arrays, source, query, own))
    looked = [each for each in looked if each.unit > 0]
    errors = arrays.mean_errors()
    errors = errors[np.isfinite(errors)]
    if not looked or not len(errors):
        return Calibration()
    limit = _FOREIGN_TIMES * float(np.quantile(errors, _FOREIGN_SHARE, method="higher"))
    return replace(_calibration(looked), foreign=max(limit, 1e-30))


def _calibration(looked: "Sequence[_Needs]") -> Calibration:
    first = float(np.mean([np.mean(each.scores - each.listed) / each.length for each in looked]))
    second = float(np.mean([np.mean(each.scores - each.estimated) / each.length for each in looked]))
    probes = np.stack([each.probes for each in looked])
    gaps = np.stack([(each.kth + (second - first) * each.length - each.listed) / each.unit for each in looked])
    eps = np.stack([(each.scores[-1] - each.estimated - second * each.length) / each.unit for each in looked])
    choices = []
    for share in _LOSSES:
        effort = tuple(np.quantile(each, 1 - share, method="higher") for each in (probes, gaps, eps))
        lost = (probes > effort[0]) | (gaps > effort[1]) | (eps > effort[2])
        choices.append(((float(lost.mean()) * len(looked) + 1) / (len(looked) + 1), effort))
    efforts = []
    for recall in RECALLS:
        for risk, (lists, gap, error) in choices:
            if risk <= 1 - recall:
                efforts.append((recall, int(lists), float(gap), float(error)))
                break
    return Calibration((first, second), tuple(efforts))


@dataclass(frozen=True, slots=True)
class _Needs:
    """The scores of a held-out query's neighbours, `NEIGHBOURS` of them, and the lists that lead to each."""

    scores: Floats
    listed: Floats
    estimated: Floats
    probes: Ints
    kth: float
    length: float
    unit: float

    @classmethod
    def of(cls, book: TokenBook, arrays: ItemArrays, source: ItemSource, query: Floats, own: int) -> "_Needs":
        tables, coded = QueryTables(book, query), arrays.coded
        every = np.flatnonzero(np.arange(len(arrays)) != own)
        listed = list_scores(tables, coded, *arrays.bounds(every))
        some = np.sort(every[np.argsort(-listed, kind="stable")[:_ESTIMATED]])
        estimated = estimates(book, tables, coded, *arrays.bounds(some))
        read = np.sort(some[np.argsort(-estimated, kind="stable")[:_RANKED]])
        starts = np.concatenate([[0], np.cumsum(source.lengths[read])])
        exact = max_sims(query, source.take(read), starts)
        order = np.lexsort((read, -exact))[:NEIGHBOURS]
        best, scores = read[order], exact[order]
        ranks = []
        for table in tables.blocks():
            order = np.argsort(-table.products, axis=0, kind="stable")
            rank = np.empty_like(order)
            np.put_along_axis(rank, order, np.arange(book.lists)[:, None], axis=0)
            ranks.append(rank.min(axis=1))
        nearest = np.minimum.reduce(ranks) + 1
        bounds = zip(*(each.tolist() for each in arrays.bounds(best)), strict=True)
        finite = np.sort(estimated[np.isfinite(estimated)])
        return cls(
            scores,
            _known(listed[np.searchsorted(every, best)], scores),
            _known(estimated[np.searchsorted(some, best)], scores),
            len(query) * np.array([int(nearest[coded.lists[low:high]].min()) for low, high in bounds], np.int64),
            float(finite[-min(NEIGHBOURS, len(finite))] if len(finite) else scores[-1]),
            tables.length,
            tables.unit,
        )


def _known(scores: Floats, exact: Floats) -> Floats:
    """Return scores, exact where they are infinite: such an item is always found."""
    return np.where(np.isfinite(scores), scores, exact).astype(np.float32)
