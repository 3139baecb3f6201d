"""Token codes: the list of a token, and a few bits of its residual; and the products of queries with both."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.zoom.preview.clusters import Assigner
from memhier.ann.zoom.preview.codes import CodeBook
from memhier.ann.zoom.storage.catalog import book_arrays, load_book
from memhier.fields import described, stored_array
from memhier.store.store import Store, Transaction

__all__ = ["COLUMNS", "Coded", "QueryTables", "Table", "TokenBook"]

COLUMNS = 64  # vectors of a query that are compared with all centroids at a time
UNKNOWN = 255  # the error of a number whose residual lies far beyond all that the book was made for

Floats: TypeAlias = npt.NDArray[np.float32]


class Coded(NamedTuple):
    """Codes of tokens: lists uint16 ``[t]``, codes uint8 ``[t, code_bytes]``, numbers uint16 ``[2, t]``."""

    lists: npt.NDArray[np.uint16]
    codes: npt.NDArray[np.uint8]
    numbers: npt.NDArray[np.uint16]


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
        One by the largest value at build: a token times it is coded.
    """

    centroids: npt.NDArray[np.float16]
    book: CodeBook
    scale: float

    @property
    def lists(self) -> int:
        """Number of lists."""
        return len(self.centroids)

    @property
    def memory_bytes(self) -> int:
        """DRAM held, in bytes."""
        return self.centroids.nbytes + self.book.memory_bytes

    def turned(self, tokens: npt.NDArray[Any]) -> Floats:
        """Return tokens ``[t, d]`` scaled, in the axes of the codes."""
        return self.book.turn((tokens.astype(np.float64) * self.scale).astype(np.float32))

    def coder(self, seed: int) -> "TokenCoder":
        """Return the object that codes tokens; it takes DRAM of its own."""
        return TokenCoder(self, seed)

    def write(self, tx: Transaction) -> None:
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
    """Codes tokens with a book. Parameters as of :meth:`TokenBook.coder`."""

    def __init__(self, book: TokenBook, seed: int) -> None:
        self._book, self._centroids = book, book.centroids.astype(np.float32)
        self._assigner = Assigner(self._centroids, seed)

    def lists_of(self, tokens: npt.NDArray[Any]) -> npt.NDArray[np.uint16]:
        """Return the nearest list of each token."""
        return self._assigner.assign(self._book.turned(tokens)).astype(np.uint16)

    def encode(self, tokens: npt.NDArray[Any], lists: npt.NDArray[np.uint16]) -> Coded:
        """Return the codes of tokens of these lists."""
        residuals = self._book.turned(tokens) - self._centroids[lists]
        return Coded(lists, *self._book.book.encode(residuals))


class Table(NamedTuple):
    """The products of some vectors of a query with all centroids, and these vectors.

    `products` float32 ``[lists, v]``, `heads` float32 ``[v, coded axes]``, `norms` float32 ``[v]``, all in the unit of
    scores; a head is multiplied with the unit of residuals.
    """

    products: Floats
    heads: Floats
    norms: Floats


class QueryTables:
    """The products of one query with all centroids, 64 of its vectors at a time.

    Parameters
    ----------
    book
        Lists and codes.
    query
        float32 ``[v, d]``.
    """

    def __init__(self, book: TokenBook, query: Floats) -> None:
        self._book = book
        with np.errstate(over="ignore"):
            self._turned = book.book.turn((query.astype(np.float64) / book.scale).astype(np.float32))
        self.norms: Floats = np.sqrt(np.einsum("ij,ij->i", self._turned, self._turned))

    @cached_property
    def length(self) -> float:
        """The sum of the vectors' norms: the unit of a bias."""
        return float(self.norms.sum(dtype=np.float64))

    @cached_property
    def unit(self) -> float:
        """The root of the sum of their squares: the unit of a standard error."""
        return float(np.sqrt(np.square(self.norms, dtype=np.float64).sum()))

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
        for low in range(0, book.lists, 1024):  # centroids are widened to float32 a few at a time
            products[low : low + 1024] = book.centroids[low : low + 1024].astype(np.float32) @ some.T
        heads = some[:, : len(book.book.alpha)] * np.float32(book.book.unit)
        return Table(products, np.ascontiguousarray(heads), self.norms[start : start + COLUMNS])
