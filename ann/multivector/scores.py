"""Estimates and bounds of MaxSim from token codes, and MaxSim itself.

MaxSim of a query and an item is the sum, over the query's vectors, of the largest inner product with a token of the item
(Khattab and Zaharia, SIGIR 2020).
"""

from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.multivector.book import UNKNOWN, Coded, QueryTables, TokenBook
from memhier.ann.multivector.items import spans

__all__ = ["estimates", "list_scores", "max_sim", "max_sims", "upper_bounds"]

Floats: TypeAlias = npt.NDArray[np.float32]
Ints: TypeAlias = npt.NDArray[np.int64]

_TOKENS = 4096  # scored together in Python
_ROUNDING = 2.0**-10  # of a radius in half precision, and of sums of products, relative


def list_scores(tables: QueryTables, coded: Coded, starts: Ints, items: Ints) -> Floats:
    """Return MaxSim of items with every token moved to the centroid of its list, float32 ``[m]``.

    Work is linear in the tokens of the items times the vectors of the query.
    """
    out = np.zeros(len(items), np.float32)
    for table in tables.blocks():
        for some, rows, bounds in _blocks(starts, items):
            _add_maxima(out[some], table.products[coded.lists[rows]], bounds)
    return out


def estimates(book: TokenBook, tables: QueryTables, coded: Coded, starts: Ints, items: Ints) -> Floats:
    """Return MaxSim of items as their codes tell it, float32 ``[m]``; infinity where a code tells nothing."""
    out = np.zeros(len(items), np.float32)
    for table in tables.blocks():
        for some, rows, bounds in _blocks(starts, items):
            numbers = coded.numbers[:, rows]
            products = book.book.decode(coded.codes[rows], numbers) @ table.heads.T
            products += table.products[coded.lists[rows]]
            products[numbers[1] >> 8 == UNKNOWN] = np.inf
            _add_maxima(out[some], products, bounds)
    return out


def upper_bounds(book: TokenBook, tables: QueryTables, coded: Coded, starts: Ints, items: Ints) -> Floats:
    """Return a number that MaxSim of each item certainly does not exceed, float32 ``[m]``.

    By the inequality of Cauchy and Schwarz: a residual adds at most its length times that of the query's vector.
    """
    out = np.zeros(len(items), np.float32)
    reach = float(np.sqrt(np.square(book.centroids.astype(np.float32)).sum(axis=1).max()))
    for table in tables.blocks():
        for some, rows, bounds in _blocks(starts, items):
            radii, _, errors = book.book.numbers_of(coded.numbers[:, rows])
            radii = np.where(np.isfinite(errors), radii * book.book.unit, np.inf).astype(np.float32)
            radii += np.float32(_ROUNDING) * (radii + np.float32(reach + book.book.unit))
            with np.errstate(invalid="ignore"):  # nothing times infinity
                far = np.nan_to_num(radii[:, None] * table.norms, nan=np.inf, posinf=np.inf)
            _add_maxima(out[some], table.products[coded.lists[rows]] + far, bounds)
    return out


def max_sim(query: Floats, tokens: npt.NDArray[Any]) -> np.float32:
    """Return MaxSim of a query ``[v, d]`` and the tokens ``[t, d]`` of an item, exact but for rounding."""
    products = tokens.astype(np.float32) @ query.T
    return np.float32(products.max(axis=0).sum(dtype=np.float64))


def max_sims(query: Floats, tokens: npt.NDArray[Any], starts: Ints) -> Floats:
    """Return MaxSim of a query and several items, float32 ``[n]``; equal items have equal scores."""
    found = (max_sim(query, tokens[low:high]) for low, high in zip(starts[:-1], starts[1:], strict=True))
    return np.fromiter(found, np.float32, len(starts) - 1)


def _blocks(starts: Ints, items: Ints) -> Iterator[tuple[slice, Ints, Ints]]:
    """Yield some of the items as a slice, the rows of their tokens, and where in these each item begins."""
    lengths = starts[items + 1] - starts[items]
    ends = np.concatenate([[0], np.cumsum(lengths)])
    for first, stop in spans(ends, 1, _TOKENS):
        within = np.arange(ends[first], ends[stop])
        rows = within + np.repeat(starts[items[first:stop]] - ends[first:stop], lengths[first:stop])
        yield slice(first, stop), rows, ends[first:stop] - ends[first]


def _add_maxima(out: Floats, products: Floats, bounds: Ints) -> None:
    """Add to each item the sum of the largest products; in one order."""
    largest = np.maximum.reduceat(products, bounds, axis=0)
    for column in range(largest.shape[1]):
        out += largest[:, column]
