"""MaxSim of items: from the lists of their tokens, from their codes, the most that it may be, and exactly.

MaxSim of a query and an item is the sum, over the query's vectors, of the largest inner product with a token of the
item (ColBERT, Khattab and Zaharia, SIGIR 2020).
"""

from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier import backend
from memhier.ann.multivector.coding.book import COLUMNS, UNKNOWN, Coded, QueryTables, Table, TokenBook
from memhier.ann.multivector.items import spans, token_rows

__all__ = ["SCORE_BYTES", "TOKEN_DTYPES", "estimates", "list_scores", "max_sims", "upper_bounds"]

Floats: TypeAlias = npt.NDArray[np.float32]
Ints: TypeAlias = npt.NDArray[np.int64]

TOKEN_DTYPES = tuple(np.dtype(name) for name in ("float32", "float16", "int8", "uint8"))
"""Dtypes of tokens, in the order of the core."""
SCORE_BYTES = 1 << 17  # of the tokens that are scored together, unless one item has more
_ROUNDING = 2.0**-22  # of sums of products in single precision, relative, for each of them
_MORE = 64  # products as many as these err in the turn of the axes


def list_scores(tables: QueryTables, coded: Coded, lows: Ints, highs: Ints) -> Floats:
    """Return MaxSim of items with every token moved to the centroid of its list, float32 ``[m]``.

    It is infinite where nothing is known of a token. Work is linear in the tokens of the items times the vectors of the
    query.

    Parameters
    ----------
    tables
        Of the query.
    coded
        Codes of the part's tokens.
    lows, highs
        int64 ``[m]``: the tokens of each item.
    """
    out = np.zeros(len(lows), np.float32)
    if backend.core is not None:
        for table in tables.blocks():
            backend.core.list_max_sims(
                products=table.products, lists=coded.lists, errors=coded.errors, lows=lows, highs=highs, out=out
            )
        return out
    for some, rows, bounds in _blocks(lows, highs, 0):
        lists, unknown = coded.lists[rows], np.flatnonzero(coded.errors[rows] == UNKNOWN)
        for table in tables.blocks():
            products = table.products[lists]
            products[unknown] = np.inf
            _add_maxima(out[some], products, bounds)
    return out


def estimates(book: TokenBook, tables: QueryTables, coded: Coded, lows: Ints, highs: Ints) -> Floats:
    """Return MaxSim of items as their codes tell it, float32 ``[m]``; infinity where a code tells nothing."""
    out = np.zeros(len(lows), np.float32)
    if backend.core is not None:
        for table in tables.blocks():
            backend.core.code_max_sims(
                products=table.products, lists=coded.lists, errors=coded.errors, lows=lows, highs=highs,
                codes=coded.codes, scales=coded.scales, chunks=book.chunks, alpha=book.book.alpha, levels=book.levels,
                heads=table.heads, out=out,
            )  # fmt: skip
        return out
    for some, rows, bounds in _blocks(lows, highs, book.dimension):
        of = coded.take(rows)
        residuals, unknown = book.residuals(of), np.flatnonzero(of.errors == UNKNOWN)
        for table in tables.blocks():
            products = _products(table, of, residuals)
            products[unknown] = np.inf
            _add_maxima(out[some], products, bounds)
    return out


def upper_bounds(book: TokenBook, tables: QueryTables, coded: Coded, lows: Ints, highs: Ints) -> Floats:
    """Return a number that MaxSim of each item certainly does not exceed, float32 ``[m]``.

    By the inequality of Cauchy and Schwarz: the error of a code adds at most its length times that of the query's
    vector.
    """
    out = np.zeros(len(lows), np.float32)
    rounding = np.float32(_ROUNDING * (book.dimension + len(tables.norms) + _MORE))
    for some, rows, bounds in _blocks(lows, highs, book.dimension):
        of = coded.take(rows)
        residuals, errors = book.residuals(of), book.errors_of(of)
        sizes = np.float32(book.reach) + errors + book.scales_of(of) * np.float32(book.value_reach)
        errors += rounding * sizes
        for table in tables.blocks():
            with np.errstate(invalid="ignore"):  # nothing times infinity
                far = np.nan_to_num(errors[:, None] * table.norms, nan=np.inf, posinf=np.inf)
            _add_maxima(out[some], _products(table, of, residuals) + far, bounds)
    return out


def max_sims(query: Floats, tokens: npt.NDArray[Any], lows: Ints, highs: Ints) -> Floats:
    """Return MaxSim of a query ``[v, d]`` and items, exact but for rounding, float32 ``[n]``.

    Equal items have equal scores: a product does not depend on the tokens beside it.

    Parameters
    ----------
    tokens
        ``[t, d]``.
    lows, highs
        int64 ``[n]``: the tokens of each item, at least one.
    """
    found = np.empty(len(lows), np.float32)
    if backend.core is not None:
        backend.core.exact_max_sims(
            query=np.ascontiguousarray(query), tokens=np.ascontiguousarray(tokens),
            dtype=TOKEN_DTYPES.index(tokens.dtype), lows=lows, highs=highs, out=found,
        )  # fmt: skip
        return found
    turned = np.ascontiguousarray(query.T)
    for item, (low, high) in enumerate(zip(lows.tolist(), highs.tolist(), strict=True)):
        products = tokens[low:high].astype(np.float32) @ turned
        found[item] = products.max(axis=0).sum(dtype=np.float64)
    return found


def _products(table: Table, coded: Coded, residuals: Floats) -> Floats:
    products: Floats = residuals @ table.heads
    products += table.products[coded.lists]
    return products


def _blocks(lows: Ints, highs: Ints, dimension: int) -> Iterator[tuple[slice, Ints, Ints]]:
    """Yield some of the items as a slice, the rows of their tokens, and where in these each item begins."""
    ends = np.concatenate([[0], np.cumsum(highs - lows)])
    for first, stop in spans(ends, 8 * dimension + 12 * COLUMNS + 24, SCORE_BYTES):
        rows = token_rows(lows[first:stop], highs[first:stop])
        yield slice(first, stop), rows, ends[first:stop] - ends[first]


def _add_maxima(out: Floats, products: Floats, bounds: Ints) -> None:
    """Add to each item the sum of the largest products; in one order."""
    largest = np.maximum.reduceat(products, bounds, axis=0)
    for column in range(largest.shape[1]):
        out += largest[:, column]
