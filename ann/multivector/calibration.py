"""The effort of a search for a declared recall, learnt from held-out queries.

Parts of stored items play queries; the item itself is left out. For each of their true neighbours three needs are
known: the lists to probe until it is a candidate, the gap below the k-th best estimate at which its list score stands,
and the standard errors by which its estimate falls short of the k-th best score. An effort takes of each need a
quantile: a quarter of the loss goes to the lists, a quarter to the gap, the rest to the errors.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.multivector.book import QueryTables, TokenBook
from memhier.ann.multivector.items import Block
from memhier.ann.multivector.part import ItemArrays
from memhier.ann.multivector.scores import estimates, list_scores
from memhier.fields import Check, integer, real, record, row, sequence

__all__ = ["CALIBRATION", "Calibration", "Effort", "held_out", "learn", "true_neighbours"]

Floats: TypeAlias = npt.NDArray[np.float32]
Ints: TypeAlias = npt.NDArray[np.int64]

RECALLS = (0.8, 0.9, 0.95, 0.98, 0.99, 0.995)
NEIGHBOURS = 10
QUERIES = 48
_LENGTHS = (32, 32, 16)  # vectors of held-out queries, in turn
_ESTIMATED = 4096  # items whose codes are scored for a held-out query, those of the best list scores
_COLUMNS = 512  # vectors of held-out queries that are compared with a block of tokens at a time

CALIBRATION: Check = record(
    {"biases": row(real(), real()), "efforts": sequence(row(real(0, 1), integer(1, 2**16), real(), real()))}
)
"""Describes a calibration as JSON."""


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
    """

    biases: tuple[float, float] = (0.0, 0.0)
    efforts: Sequence[tuple[float, int, float, float]] = field(default_factory=tuple)

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
        return cls((first, second), tuple((each[0], each[1], each[2], each[3]) for each in value["efforts"]))


@dataclass(frozen=True, slots=True)
class Neighbours:
    """The best items of a query, best first: their numbers, and exact scores."""

    items: Ints
    scores: Floats


def held_out(blocks: Iterator[Block], chosen: Ints, seed: int) -> list[Floats]:
    """Return queries made of the items `chosen`, which ascend: some of each one's tokens, float32 ``[v, d]``."""
    queries, random = list[Floats](), np.random.default_rng([seed, 5])
    wanted = iter(chosen.tolist())
    item = next(wanted, None)
    for block in blocks:
        while item is not None and item < block.first + len(block.starts) - 1:
            low, high = block.starts[item - block.first : item - block.first + 2].tolist()
            most = min(high - low, _LENGTHS[len(queries) % len(_LENGTHS)])
            rows = low + np.sort(random.permutation(high - low)[:most])
            queries.append(block.tokens[rows].astype(np.float32))
            item = next(wanted, None)
    return queries


def true_neighbours(blocks: Iterator[Block], queries: Sequence[Floats], own: Ints, count: int) -> list[Neighbours]:
    """Return the `count` best items of each query, but for its own item (-1: none); reads all blocks once."""
    bounds = np.concatenate([[0], np.cumsum([len(query) for query in queries])]).astype(np.int64)
    stacked = np.concatenate(queries)
    found: list[tuple[Floats, Ints]] = [(np.empty(0, np.float32), np.empty(0, np.int64))] * len(queries)
    for block in blocks:
        tokens = block.tokens.astype(np.float32)
        numbers = block.first + np.arange(len(block.starts) - 1)
        largest = np.empty((len(numbers), len(stacked)), np.float32)
        for low in range(0, len(stacked), _COLUMNS):
            products = tokens @ stacked[low : low + _COLUMNS].T
            largest[:, low : low + _COLUMNS] = np.maximum.reduceat(products, block.starts[:-1], axis=0)
        scores = np.add.reduceat(largest, bounds[:-1], axis=1)
        for number, (best, items) in enumerate(found):
            of = np.where(numbers == own[number], -np.inf, scores[:, number])
            best, items = np.concatenate([best, of]), np.concatenate([items, numbers])
            order = np.argsort(-best, kind="stable")[:count]
            found[number] = best[order], items[order]
    return [Neighbours(items[best > -np.inf], best[best > -np.inf]) for best, items in found]


def learn(
    book: TokenBook, arrays: ItemArrays, queries: Sequence[Floats], own: Ints, truth: Sequence[Neighbours]
) -> Calibration:
    """Return the efforts for queries like these, whose true neighbours are known; see this module."""
    kept = [number for number, each in enumerate(truth) if len(each.items) and len(queries[number])]
    looked = [_Needs.of(book, arrays, queries[number], int(own[number]), truth[number]) for number in kept]
    looked = [each for each in looked if each.unit > 0]
    if not looked:
        return Calibration()
    first = float(np.mean([np.mean(each.scores - each.listed) / each.length for each in looked]))
    second = float(np.mean([np.mean(each.scores - each.estimated) / each.length for each in looked]))
    probes = np.sort(np.concatenate([each.probes for each in looked]))
    gaps = np.sort(np.concatenate(
        [(each.kth + (second - first) * each.length - each.listed) / each.unit for each in looked]
    ))  # fmt: skip
    eps = np.sort(np.concatenate(
        [(each.scores[-1] - each.estimated - second * each.length) / each.unit for each in looked]
    ))  # fmt: skip
    efforts = []
    for recall in RECALLS:
        loss = 1 - recall
        at = [_place(len(eps), share * loss) for share in (0.25, 0.25, 0.5)]
        efforts.append((recall, int(probes[at[0]]), float(gaps[at[1]]), float(eps[at[2]])))
    return Calibration((first, second), tuple(efforts))


def _place(count: int, loss: float) -> int:
    """Return the place of the quantile that a further need exceeds with a chance of at most `loss`, or the last."""
    return min(count - 1, int(np.ceil((1 - loss) * (count + 1))) - 1)


@dataclass(frozen=True, slots=True)
class _Needs:
    """The scores of a held-out query's neighbours, and the lists that lead to each."""

    scores: Floats
    listed: Floats
    estimated: Floats
    probes: Ints
    kth: float
    length: float
    unit: float

    @classmethod
    def of(cls, book: TokenBook, arrays: ItemArrays, query: Floats, own: int, truth: Neighbours) -> "_Needs":
        tables, coded = QueryTables(book, query), arrays.coded
        every = np.flatnonzero(np.arange(len(arrays)) != own)
        listed = list_scores(tables, coded, *arrays.bounds(every))
        best = every[np.argsort(-listed, kind="stable")[:_ESTIMATED]]
        some = np.union1d(best, truth.items)
        estimated = estimates(book, tables, coded, *arrays.bounds(some))
        finite = np.sort(estimated[np.isfinite(estimated)])
        ranks = []
        for table in tables.blocks():
            order = np.argsort(-table.products, axis=0, kind="stable")
            rank = np.empty_like(order)
            np.put_along_axis(rank, order, np.arange(book.lists)[:, None], axis=0)
            ranks.append(rank.min(axis=1))
        nearest = np.minimum.reduce(ranks) + 1
        bounds = zip(*(each.tolist() for each in arrays.bounds(truth.items)), strict=True)
        probes = [int(nearest[coded.lists[low:high]].min()) for low, high in bounds]
        return cls(
            truth.scores,
            _known(listed[np.searchsorted(every, truth.items)], truth.scores),
            _known(estimated[np.searchsorted(some, truth.items)], truth.scores),
            np.array(probes, np.int64),
            float(finite[-min(NEIGHBOURS, len(finite))] if len(finite) else truth.scores[-1]),
            tables.length,
            tables.unit,
        )


def _known(scores: Floats, exact: Floats) -> Floats:
    """Return scores, exact where they are infinite: such an item is always found."""
    return np.where(np.isfinite(scores), scores, exact).astype(np.float32)
