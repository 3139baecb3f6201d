"""The effort of a search for a declared recall, learnt from held-out queries.

Parts of stored items play queries; the item itself is left out. Their true neighbours are the best by exact MaxSim
among the items of the best estimates. For each of them three needs are known: the lists to probe until it is a
candidate, the gap below the k-th best estimate at which its list score stands, and the standard errors by which its
estimate falls short of the k-th best score. Efforts take quantiles of the needs. Conformal risk control (Angelopoulos
et al., 2022) picks the least one whose loss over the queries, with one more of which all is lost, is small enough.

The fewer vectors a query has, the more the errors of its best items differ from the mean: queries of one vector, of a
few, and of many have efforts of their own.

Queries unlike the items, such as those of another model, lie far from all lists and much the same from each, and
neither lists nor codes tell which items are their best. The least nearness to the lists among the held-out queries is
kept; a query below it is compared with all items. So is a query whose candidates lie further from it than the nearest
items of every held-out query: a filter or removals leave none of the items near it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.multivector.coding.book import QueryTables, TokenBook
from memhier.ann.multivector.coding.scores import estimates, list_scores, max_sims
from memhier.ann.multivector.items import ItemSource
from memhier.ann.multivector.storage.part import ItemArrays
from memhier.ann.zoom.pauses import pause

__all__ = ["NEIGHBOURS", "Calibration", "Effort", "LearntEfforts", "Needs", "Scored", "learn", "learnt_efforts"]

Floats: TypeAlias = npt.NDArray[np.float32]
Ints: TypeAlias = npt.NDArray[np.int64]

RECALLS = (0.8, 0.9, 0.95, 0.98, 0.99, 0.995)
NEIGHBOURS = 10
"""Of a held-out query, that an effort is learnt from."""
_CLASSES = ((1, (1,), 128), (3, (4,), 128), (8, (32, 16, 8), 256))
"""The least vectors of a query, the vectors of held-out queries, in turn, and their number."""
_ESTIMATED = 2048  # items whose codes are scored for a held-out query, those of the best list scores
_FOREIGN_SHARE, _FOREIGN_TIMES = 0.999, 1.05  # of the items, that are not foreign; and of their errors
_ANY_NEARNESS = -1e300  # of efforts of earlier versions
_RANKED = 256  # items whose exact scores are looked at, those of the best estimates
# Shares of a need that are lost.
_LOSSES = (0.3, 0.2, 0.15, 0.1, 0.07, 0.05, 0.03, 0.02, 0.015, 0.01, 0.007, 0.005, 0.003, 0.002, 0.001, 0.0)


@dataclass(frozen=True, slots=True)
class Effort:
    """The effort of a search.

    Attributes
    ----------
    probes
        Lists for each vector of a query.
    gap
        An item's codes are scored if its list score stands at most so many units below the k-th best estimate.
    eps
        Units that an estimate is taken to be too low.
    biases
        By how much list scores and estimates are too low for neighbours, on average, for a query of length one.
    nearness
        The least `QueryTables.nearness` of the queries that it was learnt from.
    listed
        The least list scores of their items nearest by lists, for a query of length one: of the tenth, the twentieth
        and so on, twice as far each; empty where that is not known.
    """

    probes: int
    gap: float
    eps: float
    biases: tuple[float, float]
    nearness: float
    listed: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class LearntEfforts:
    """The efforts for queries of some number of vectors.

    Attributes
    ----------
    vectors
        The least number of vectors.
    biases
        As in :class:`Effort`.
    efforts
        Recall, probes, gap and eps, ascending; see :class:`Effort`.
    nearness, listed
        As in :class:`Effort`.
    """

    vectors: int
    biases: tuple[float, float]
    efforts: Sequence[tuple[float, int, float, float]]
    nearness: float
    listed: tuple[float, ...]


@dataclass(frozen=True)
class Calibration:
    """Efforts by the vectors of a query and by recall.

    Attributes
    ----------
    learnt
        Ascending in vectors, from one on; empty where nothing is known.
    foreign
        Items whose tokens err by more, on average, are unlike those that the efforts were learnt from; 0 tells nothing.
    """

    learnt: Sequence[LearntEfforts] = field(default_factory=tuple)
    foreign: float = 0.0

    def effort(self, recall: float, vectors: int) -> Effort | None:
        """Return the effort that reaches a recall; None where only bounds that hold for certain do."""
        for learnt in reversed(self.learnt):
            if learnt.vectors <= vectors:
                for reached, probes, gap, eps in learnt.efforts:
                    if reached >= recall:
                        return Effort(probes, gap, eps, learnt.biases, learnt.nearness, learnt.listed)
                return None
        return None

    @property
    def known(self) -> bool:
        """Whether any recall is known to be reached."""
        return any(learnt.efforts for learnt in self.learnt)

    @classmethod
    def of_json(cls, value: dict[str, Any]) -> "Calibration":
        """Return it from a value of the catalog."""
        learnt = [
            LearntEfforts(
                int(each["vectors"]),
                (float(each["biases"][0]), float(each["biases"][1])),
                tuple((float(row[0]), int(row[1]), float(row[2]), float(row[3])) for row in each["efforts"]),
                float(each.get("nearness", _ANY_NEARNESS)),
                tuple(map(float, each.get("listed", ()))),
            )
            for each in value["learnt"]
        ]
        return cls(tuple(learnt), value["foreign"])


def learn(book: TokenBook, arrays: ItemArrays, source: ItemSource, seed: int) -> Calibration:
    """Return the efforts learnt from some of the items themselves; see this module."""
    errors = arrays.mean_errors()
    errors = errors[np.isfinite(errors)]
    if len(source.lengths) <= NEIGHBOURS or not len(errors):
        return Calibration()
    learnt = []
    for vectors, lengths, count in _CLASSES:
        random = np.random.default_rng([seed, 4, vectors])
        looked = [each for each in _looked_at(book, arrays, source, lengths, count, random) if each.unit > 0]
        if not looked:
            return Calibration()
        learnt.append(learnt_efforts(vectors, looked))
    limit = _FOREIGN_TIMES * float(np.quantile(errors, _FOREIGN_SHARE, method="higher"))
    return Calibration(tuple(learnt), max(limit, 1e-30))


def _looked_at(
    book: TokenBook, arrays: ItemArrays, source: ItemSource, lengths: Sequence[int], count: int,
    random: np.random.Generator,
) -> "Iterator[Needs]":  # fmt: skip
    """Yield the needs of `count` held-out queries, parts of items with so many vectors each."""
    own = np.sort(random.choice(len(source.lengths), min(count, len(source.lengths)), replace=False))
    for number, item in enumerate(own.tolist()):
        pause()
        tokens = source.take(np.array([item]))
        most = min(len(tokens), lengths[number % len(lengths)])
        query = tokens[np.sort(random.permutation(len(tokens))[:most])].astype(np.float32)
        yield _needs_of_part(book, arrays, source, query, item)


def learnt_efforts(vectors: int, looked: "Sequence[Needs]") -> LearntEfforts:
    """Return the efforts for queries of at least so many vectors: one for each recall that can be reached."""
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
    known = min(len(each.ranked) for each in looked)
    listed = tuple(np.min([each.ranked[:known] / each.length for each in looked], axis=0).tolist())
    return LearntEfforts(vectors, (first, second), efforts, min(each.nearness for each in looked), listed)


@dataclass(frozen=True, slots=True)
class Needs:
    """The scores of a query's neighbours, and the lists that lead to each."""

    scores: Floats
    listed: Floats
    estimated: Floats
    probes: Ints
    kth: float
    length: float
    unit: float
    nearness: float
    ranked: Floats

    @classmethod
    def of(cls, scored: "Scored", best: Ints, scores: Floats) -> Self:
        """Return the needs of neighbours, the items `best` and their exact scores, best first."""
        ranks = []
        for table in scored.tables.blocks():
            order = np.argsort(-table.products, axis=0, kind="stable")
            rank = np.empty_like(order)
            np.put_along_axis(rank, order, np.arange(len(order))[:, None], axis=0)
            ranks.append(rank.min(axis=1))
        nearest, estimated = np.minimum.reduce(ranks) + 1, scored.estimated
        finite = np.sort(estimated[np.isfinite(estimated)])
        return cls(
            scores,
            _known(scored.listed_of(best), scores),
            _known(scored.estimates_of(best), scores),
            scored.over(best, lambda arrays, rows: _least(arrays, rows, nearest)).astype(np.int64),
            float(finite[-min(NEIGHBOURS, len(finite))] if len(finite) else scores[-1]),
            scored.tables.length,
            scored.tables.unit,
            scored.tables.nearness,
            scored.ranked,
        )


class Scored:
    """The list scores of items for one query, and the estimates of those with the best list scores.

    Parameters
    ----------
    book
        Lists and codes.
    parts
        The arrays of the parts; items are numbered through all of them.
    query
        float32 ``[v, d]``.
    every
        The items that may be found, ascending.

    Attributes
    ----------
    tables
        Of the query.
    ranked
        The list scores of the tenth item by these, the twentieth and so on, as in :class:`Effort`.
    some, estimated
        The items of the best list scores, ascending, and their estimates.
    """

    def __init__(self, book: TokenBook, parts: Sequence[ItemArrays], query: Floats, every: Ints) -> None:
        self._book, self._parts = book, parts
        self._bases = np.concatenate([[0], np.cumsum([len(arrays) for arrays in parts])])
        self.tables = QueryTables(book, query)
        listed = self.listed_of(every)
        order = np.argsort(-listed, kind="stable")
        known = listed[order[np.isfinite(listed[order])]]
        self.ranked: Floats = known[[rank - 1 for rank in _ranks(len(known))]]
        self.some: Ints = np.sort(every[order[:_ESTIMATED]])
        self.estimated: Floats = self.estimates_of(self.some)

    def listed_of(self, items: Ints) -> Floats:
        """Return the list scores of items."""
        return self.over(items, lambda arrays, rows: list_scores(self.tables, arrays.coded, *arrays.bounds(rows)))

    def estimates_of(self, items: Ints) -> Floats:
        """Return the estimates of items."""
        return self.over(
            items, lambda arrays, rows: estimates(self._book, self.tables, arrays.coded, *arrays.bounds(rows))
        )

    def over(self, items: Ints, value: Callable[[ItemArrays, Ints], npt.NDArray[Any]]) -> Floats:
        """Return a value of each item, made of the arrays of its part and its row there."""
        found, of = np.empty(len(items), np.float32), np.searchsorted(self._bases, items, side="right") - 1
        for number, arrays in enumerate(self._parts):
            here = np.flatnonzero(of == number)
            if len(here):
                found[here] = value(arrays, items[here] - self._bases[number])
        return found


def _ranks(count: int) -> list[int]:
    """Return the ranks of `Effort.listed` among so many items."""
    return [NEIGHBOURS << step for step in range((count // NEIGHBOURS).bit_length())]


def _least(arrays: ItemArrays, rows: Ints, ranks: Ints) -> Ints:
    """Return the least rank of the lists of each item's tokens."""
    bounds = zip(*(each.tolist() for each in arrays.bounds(rows)), strict=True)
    return np.array([int(ranks[arrays.coded.lists[low:high]].min()) for low, high in bounds], np.int64)


def _needs_of_part(book: TokenBook, arrays: ItemArrays, source: ItemSource, query: Floats, own: int) -> Needs:
    """Return the needs of a query that is a part of the item `own`."""
    scored = Scored(book, [arrays], query, np.flatnonzero(np.arange(len(arrays)) != own))
    read = np.sort(scored.some[np.argsort(-scored.estimated, kind="stable")[:_RANKED]])
    stops = np.cumsum(source.lengths[read])
    exact = max_sims(query, source.take(read), stops - source.lengths[read], stops)
    order = np.lexsort((read, -exact))[:NEIGHBOURS]
    return Needs.of(scored, read[order], exact[order])


def _known(scores: Floats, exact: Floats) -> Floats:
    """Return scores, exact where they are infinite: such an item is always found."""
    return np.where(np.isfinite(scores), scores, exact).astype(np.float32)
