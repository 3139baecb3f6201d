"""Token codes: the list of a token, and a few bits of its residual; and the products of queries with both.

A code stands for ``scale * values``: the values of `CodeBook` on its axes, at the scale that comes nearest to the
residual. Beside it stands the length of the error that is left, so that a product with any vector is bounded by Cauchy
and Schwarz. Scale and error are a byte each, on a logarithmic scale.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.zoom.preview.clusters import Assigner, train_centroids
from memhier.ann.zoom.preview.codes import CodeBook, chunks, train_codes
from memhier.ann.zoom.storage.catalog import book_arrays, load_book
from memhier.fields import described, stored_array
from memhier.store.store import Staging, Store, Transaction

__all__ = ["COLUMNS", "LEVELS", "NUMBER_BYTES", "UNKNOWN", "Coded", "QueryTables", "Table", "TokenBook", "TokenCoder"]

COLUMNS = 32  # vectors of a query that are compared with all centroids at a time
NUMBER_BYTES = 4  # of a token beside its code: list, scale and error
UNKNOWN = 255  # the error of a code that tells nothing
_NEAREST = 4  # lists of a vector, which tell whether others look for the same token
_ROWS = 2048  # coded at a time
_WIDENED_BYTES = 1 << 17  # of centroids in single precision, at a time
_MOST = 1e15  # of a value that is coded; tokens beyond have an unknown error
_CENTROID_MOST = 6e4  # of a value in half precision
_LEAST = 2.0**-11  # the unit of residuals: centroids are rounded to half precision
# Bytes of scales and errors, in the root mean square length of residuals: twelve to an octave, 0 for nothing.
_STEPS, _MIDDLE = 12, 149
LEVELS = (2.0 ** ((np.arange(256) - _MIDDLE) / _STEPS)).astype(np.float32)
LEVELS[0], LEVELS[UNKNOWN] = 0, np.inf
"""Scales and errors by their bytes, in the unit of residuals."""

Floats: TypeAlias = npt.NDArray[np.float32]
Bytes: TypeAlias = npt.NDArray[np.uint8]


class Coded(NamedTuple):
    """Codes of tokens: lists uint16 ``[t]``, codes uint8 ``[t, code_bytes]``, scales and errors uint8 ``[t]``."""

    lists: npt.NDArray[np.uint16]
    codes: Bytes
    scales: Bytes
    errors: Bytes

    def take(self, rows: Any) -> "Coded":
        """Return the codes of some tokens."""
        return Coded(*(array[rows] for array in self))

    @classmethod
    def joined(cls, parts: "list[Coded]") -> Self:
        """Return codes end to end."""
        return cls(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))

    @classmethod
    def empty(cls, code_bytes: int) -> Self:
        """Return the codes of no token."""
        none = np.empty(0, np.uint8)
        return cls(np.empty(0, np.uint16), np.empty((0, code_bytes), np.uint8), none, none)


@dataclass(frozen=True)
class TokenBook:
    """Lists and code book of tokens.

    Attributes
    ----------
    centroids
        float16 ``[lists, d]``, in the axes of the codes.
    book
        Codes of the residuals.
    scale
        One by the root mean square length at build: a token times it is coded.
    """

    centroids: npt.NDArray[np.float16]
    book: CodeBook
    scale: float

    @classmethod
    def train(cls, sample: npt.NDArray[Any], lists: int, code_bytes: int, seed: int, *, rotate: bool) -> Self:
        """Return lists and codes for tokens like those of a sample ``[s, d]``."""
        lengths = np.square(sample.astype(np.float64)).sum(axis=1)
        root = float(np.sqrt(lengths.mean()))
        scale = 1 / root if root > 0 else 1.0
        scaled = _scaled(sample, scale)
        centroids = np.clip(train_centroids(scaled, lists, seed), -_CENTROID_MOST, _CENTROID_MOST)
        residuals = scaled - centroids[Assigner(centroids, seed).assign(scaled)]
        book = train_codes(residuals, code_bytes, seed, rotate=rotate, least=_LEAST)
        return cls(book.turn(centroids).astype(np.float16), book, scale)

    @property
    def lists(self) -> int:
        """Number of lists."""
        return len(self.centroids)

    @property
    def dimension(self) -> int:
        """Dimension of a token."""
        return int(self.centroids.shape[1])

    @property
    def memory_bytes(self) -> int:
        """DRAM held, in bytes."""
        return self.centroids.nbytes + self.book.memory_bytes

    @cached_property
    def reach(self) -> float:
        """The largest length of a centroid."""
        blocks = range(0, self.lists, _ROWS)
        squares = (np.square(self.centroids[low : low + _ROWS].astype(np.float32)).sum(axis=1) for low in blocks)
        return float(np.sqrt(max(float(each.max()) for each in squares)))

    @cached_property
    def value_reach(self) -> float:
        """The largest length of the values of a code."""
        half = np.repeat((2.0 ** np.array((8, 4, 2, 1)) - 1) / 2, self.book.dimensions)
        return float(np.sqrt(np.square(half * self.book.alpha).sum()))

    @cached_property
    def chunks(self) -> npt.NDArray[np.int64]:
        """The chunks of a code, int64 ``[c, 4]``: first byte, first axis, width and axes."""
        return np.array(chunks(self.book.dimensions), np.int64).reshape(-1, 4)

    @cached_property
    def levels(self) -> Floats:
        """The scales by their bytes, float32 ``[256]``."""
        return LEVELS * np.float32(self.book.unit)

    def turned(self, tokens: npt.NDArray[Any]) -> Floats:
        """Return tokens ``[t, d]`` scaled, in the axes of the codes."""
        return self.book.turn(_scaled(tokens, self.scale))

    def scales_of(self, coded: Coded) -> Floats:
        """Return the scales of codes, float32 ``[t]``."""
        return self.levels[coded.scales]

    def errors_of(self, coded: Coded) -> Floats:
        """Return the most that is left of each residual, float32 ``[t]``; infinity where nothing is known."""
        return self.levels[coded.errors]

    def residuals(self, coded: Coded) -> Floats:
        """Return the residuals that codes stand for, on the coded axes, float32 ``[t, coded]``."""
        values = self.book.values_of(coded.codes)
        values *= self.scales_of(coded)[:, None]
        return values

    def write(self, tx: Transaction | Staging) -> None:
        """Write centroids and code book."""
        for name, array in (("centroids", self.centroids), *book_arrays(self.book).items()):
            tx.segment(name).append(np.ascontiguousarray(array).reshape(-1).view(np.uint8))

    @classmethod
    def load(cls, store: Store, lists: int, dimension: int, scale: float) -> Self:
        """Return the book of a store."""
        with described(f"{store.path}: the token book"):
            centroids = stored_array(store, "centroids", np.float16, (lists, dimension))
            return cls(centroids, load_book(store, dimension), scale)


class TokenCoder:
    """Codes tokens with a book. It holds the centroids in single precision.

    Parameters
    ----------
    book
        Lists and codes.
    seed
        Fixes the groups of many centroids.
    """

    def __init__(self, book: TokenBook, seed: int) -> None:
        self._book, self._centroids = book, book.centroids.astype(np.float32)
        self._assigner = Assigner(self._centroids, seed)

    def encode(self, tokens: npt.NDArray[Any]) -> Coded:
        """Return the codes of tokens ``[t, d]``."""
        starts = range(0, len(tokens), _ROWS)
        parts = [self._encoded(tokens[low : low + _ROWS]) for low in starts]
        return Coded.joined(parts) if parts else Coded.empty(self._book.book.code_bytes)

    def _encoded(self, tokens: npt.NDArray[Any]) -> Coded:
        book = self._book.book
        turned = self._book.turned(tokens)
        lists = self._assigner.assign(turned)
        residuals = turned - self._centroids[lists]
        fields, values, _ = book.fields_of(residuals)
        head, tail = residuals[:, : values.shape[1]], residuals[:, values.shape[1] :]
        product = np.einsum("ij,ij->i", values, head)
        best = product / np.maximum(np.einsum("ij,ij->i", values, values), np.float32(1e-30))
        scales = _nearest_levels(best / np.float32(book.unit))
        wrong = head - (LEVELS[scales] * np.float32(book.unit))[:, None] * values
        error = np.sqrt(np.square(wrong, dtype=np.float64).sum(axis=1) + np.square(tail, dtype=np.float64).sum(axis=1))
        return Coded(lists.astype(np.uint16), book.pack(fields), scales, _levels_above(error / book.unit))


def _scaled(tokens: npt.NDArray[Any], scale: float) -> Floats:
    return np.clip(tokens.astype(np.float64) * scale, -_MOST, _MOST).astype(np.float32)


def _nearest_levels(values: Floats) -> Bytes:
    """Return the bytes of the levels nearest to values."""
    with np.errstate(divide="ignore", invalid="ignore"):
        place = np.rint(np.log2(np.maximum(values, 0)) * _STEPS + _MIDDLE)
    levels: Bytes = np.clip(np.nan_to_num(place, nan=0, neginf=0, posinf=UNKNOWN - 1), 0, UNKNOWN - 1).astype(np.uint8)
    return levels


def _levels_above(values: npt.NDArray[np.float64]) -> Bytes:
    """Return the bytes of the least levels that are not below values."""
    return np.searchsorted(LEVELS[:UNKNOWN], values * (1 + 2**-12)).astype(np.uint8)


class Table(NamedTuple):
    """The products of some vectors of a query with all centroids, and these vectors.

    `products` float32 ``[lists, v]``, `heads` float32 ``[coded axes, v]``, `norms` float32 ``[v]``, all in the unit of
    scores.
    """

    products: Floats
    heads: Floats
    norms: Floats


class QueryTables:
    """The products of one query with all centroids, 32 of its vectors at a time.

    Parameters
    ----------
    book
        Lists and codes.
    query
        float32 ``[v, d]``.
    """

    def __init__(self, book: TokenBook, query: Floats) -> None:
        self._book = book
        self._turned = book.book.turn((query.astype(np.float64) / book.scale).astype(np.float32))
        self.norms: Floats = np.sqrt(np.square(self._turned, dtype=np.float64).sum(axis=1)).astype(np.float32)

    @cached_property
    def length(self) -> float:
        """The sum of the vectors' norms: the unit of a bias."""
        return float(self.norms.sum(dtype=np.float64))

    @cached_property
    def unit(self) -> float:
        """The unit of a standard error: of different vectors, the root of the sum of their squared norms.

        Vectors that look for the same token share its error, by their cosine. They do as far as the lists nearest to
        each are the same: the cosine alone does not tell, as all tokens of some models are alike.
        """
        norms, nearest = np.maximum(self.norms.astype(np.float64), 1e-300), self._nearest()
        directions, squared = self._turned / norms[:, None], 0.0
        for start in range(0, len(norms), COLUMNS):
            some = slice(start, start + COLUMNS)
            same = (nearest[some, None, :, None] == nearest[None, :, None, :]).sum(axis=(2, 3)) / nearest.shape[1]
            squared += float(norms[some] @ (same * np.maximum(directions[some] @ directions.T, 0)) @ norms)
        return math.sqrt(squared)

    def _nearest(self) -> npt.NDArray[np.uint16]:
        """Return the few lists nearest to each vector, ``[v, m]``."""
        few = min(_NEAREST, self._book.lists)
        columns = (column for table in self.blocks() for column in table.products.T)
        return np.array([np.argpartition(-column, few - 1)[:few] for column in columns], np.uint16)

    @cached_property
    def vectors(self) -> int:
        """How many vectors the query stands for: few where they look for one token, or some outweigh the others."""
        return max(1, min(len(self.norms), round(2 * (self.length / self.unit) ** 2))) if self.unit > 0 else 1

    @cached_property
    def nearness(self) -> float:
        """The mean product of its vectors and the list nearest to each, for a query of length one."""
        nearest = sum(float(table.products.max(axis=0).sum(dtype=np.float64)) for table in self.blocks())
        return nearest / self.length if self.length > 0 else 0.0

    @cached_property
    def _only(self) -> Table | None:
        return self._table(0) if len(self._turned) <= COLUMNS else None

    def blocks(self) -> Iterator[Table]:
        """Yield the tables of all vectors; that of a short query is made once."""
        if self._only is not None:
            yield self._only
        else:
            for start in range(0, len(self._turned), COLUMNS):
                yield self._table(start)

    def _table(self, start: int) -> Table:
        book, some = self._book, self._turned[start : start + COLUMNS]
        products = np.empty((book.lists, len(some)), np.float32)
        step = max(16, _WIDENED_BYTES // (4 * book.dimension))
        for low in range(0, book.lists, step):  # centroids are widened to float32 a few at a time
            products[low : low + step] = book.centroids[low : low + step].astype(np.float32) @ some.T
        heads = np.ascontiguousarray(some[:, : len(book.book.alpha)].T)
        return Table(products, heads, self.norms[start : start + COLUMNS])
