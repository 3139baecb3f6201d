"""Items as callers give them: sequences of token vectors, checked, in blocks."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.files import as_array
from memhier.ann.zoom.arguments import AS_FLOAT32, STORED_DTYPES, refuse_rounded, stored_dtype
from memhier.arguments import as_ints

__all__ = ["BLOCK_BYTES", "Block", "GivenItems", "ItemSource", "as_queries", "spans", "token_rows"]

BLOCK_BYTES = 1 << 20  # of tokens that are looked at together, where an item alone has not more
_VECTORS_MOST = 4096  # of a query, and of which the sum of products with the largest values is a float32

Floats: TypeAlias = npt.NDArray[np.float32]
Ints: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Block:
    """Some items that follow one another.

    Attributes
    ----------
    first
        The number of the first item.
    starts
        int64 ``[n + 1]``: item ``first + i`` has the tokens ``starts[i]`` to ``starts[i + 1]``.
    tokens
        ``[starts[n], d]``.
    """

    first: int
    starts: Ints
    tokens: npt.NDArray[Any]


class ItemSource(Protocol):
    """Items that can be read several times, in order."""

    @property
    def lengths(self) -> Ints:
        """Tokens of each item, int64 ``[n]``."""

    @property
    def dimension(self) -> int:
        """Dimension of a token."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Their dtype as stored."""

    def blocks(self, limit: int = BLOCK_BYTES) -> Iterator[Block]:
        """Yield all items, at most `limit` bytes of tokens or one item at a time."""

    def take(self, items: Ints) -> npt.NDArray[Any]:
        """Return the tokens of some items, which ascend, end to end, ``[t, d]``."""


class GivenItems:
    """Items of a caller.

    Parameters
    ----------
    items
        A sequence of matrices ``[tokens, d]``; or, with `lengths`, one matrix of the tokens of all items.
    lengths
        Integers ``[n]``: the tokens of each item.
    like
        Dimension and dtype that the items must have; None takes those of the first.

    Raises
    ------
    ValueError, TypeError
        For items that cannot be stored. Values are checked as blocks are read.
    """

    def __init__(self, items: Any, lengths: Any = None, like: tuple[int, np.dtype[Any]] | None = None) -> None:
        self._matrix: Any = None
        self._items: Sequence[Any] = ()
        if lengths is not None:
            self._matrix, self.lengths = _matrix_of(items), _checked_lengths(lengths)
            found = self._matrix.shape[1], self._matrix.dtype
            if int(self.lengths.sum()) != len(self._matrix):
                raise ValueError(
                    f"lengths add up to {int(self.lengths.sum()):,}: expected {len(self._matrix):,}, the rows of items"
                )
        else:
            if not isinstance(items, Sequence) and getattr(items, "ndim", 0) == 3:
                items = as_array(items, "items")
            elif not isinstance(items, Sequence) or isinstance(items, str | bytes):
                raise TypeError(
                    f"items is {type(items).__name__}: expected a list of matrices [tokens, d], an array "
                    f"[items, tokens, d], or a matrix of all tokens with lengths="
                )
            self._items = items
            if not len(items) and like is None and not isinstance(items, np.ndarray):
                raise ValueError(
                    "items is empty: an index takes dimension and dtype from its items; for one without any, give "
                    "np.empty((0, d), dtype) with lengths=[]"
                )
            first = None if not len(items) else as_array(items[0], "items")
            found = (0, np.dtype(np.float32)) if first is None or first.ndim != 2 else (first.shape[1], first.dtype)
            if isinstance(items, np.ndarray):
                found = items.shape[2], items.dtype
            self.lengths = np.array([_rows(item, number) for number, item in enumerate(items)], np.int64)
        self.dimension: int = found[0] if like is None else like[0]
        self.dtype: np.dtype[Any] = stored_dtype(found[1]) if like is None else like[1]
        if self.dimension < 1 or self.dtype not in STORED_DTYPES:
            raise TypeError(
                f"items has dtype {found[1]} and {found[0]} dimensions: expected float32, float16, int8 or uint8, and "
                f"at least one dimension"
            )
        empty = np.flatnonzero(self.lengths == 0)
        if len(empty):
            raise ValueError(
                f"item {int(empty[0])} has no vectors: expected at least one; MaxSim of none is not defined"
            )

    def __len__(self) -> int:
        return len(self.lengths)

    def blocks(self, limit: int = BLOCK_BYTES) -> Iterator[Block]:
        """Yield all items, at most `limit` bytes of tokens or one item at a time.

        Raises
        ------
        ValueError, TypeError
            For values that are not finite or not held by the dtype, and for items of another dimension.
        """
        starts = np.concatenate([[0], np.cumsum(self.lengths)])
        for first, stop in spans(starts, self.dimension * self.dtype.itemsize, limit):
            if self._matrix is not None:
                tokens = self._stored(np.asarray(self._matrix[int(starts[first]) : int(starts[stop])]), first)
            else:
                tokens = self.take(np.arange(first, stop))
            if len(tokens) != starts[stop] - starts[first]:
                raise ValueError(f"items {first} to {stop - 1} have another number of vectors than a moment ago")
            yield Block(first, starts[first : stop + 1] - starts[first], tokens)

    def take(self, items: Ints) -> npt.NDArray[Any]:
        """Return the tokens of some items, which ascend, end to end, ``[t, d]``."""
        starts, numbers = np.concatenate([[0], np.cumsum(self.lengths)]), items.tolist()
        if self._matrix is None:
            raw = [as_array(self._items[number], "items") for number in numbers]
        else:
            raw = [np.asarray(self._matrix[int(starts[number]) : int(starts[number + 1])]) for number in numbers]
        return np.concatenate([self._stored(each, number) for each, number in zip(raw, numbers, strict=True)])

    def _stored(self, raw: npt.NDArray[Any], number: int) -> npt.NDArray[Any]:
        if raw.ndim != 2 or raw.shape[1] != self.dimension:
            raise ValueError(f"item {number} has shape {raw.shape}: expected [tokens, {self.dimension}]")
        if stored_dtype(raw.dtype) not in STORED_DTYPES and raw.dtype.name not in AS_FLOAT32:
            raise TypeError(f"item {number} has dtype {raw.dtype}: expected {self.dtype}")
        with np.errstate(over="ignore", invalid="ignore"):
            stored = np.ascontiguousarray(raw, dtype=self.dtype)
        if self.dtype.kind == "f":
            if not np.isfinite(stored).all():
                raise ValueError(f"item {number} holds NaN or infinity (in {self.dtype}): every value must be finite")
            _refuse_large(stored, f"item {number}")
            refuse_rounded(raw, stored, 0, f"item {number}")
        elif not np.array_equal(stored, raw):
            raise ValueError(f"item {number} does not fit {self.dtype}, that of the index: expected such values")
        return stored


def spans(starts: Ints, token_bytes: int, limit: int = BLOCK_BYTES) -> Iterator[tuple[int, int]]:
    """Yield ranges of items with at most `limit` bytes of tokens in all, or of one item."""
    first, step = 0, max(1, limit // token_bytes)
    while first < len(starts) - 1:
        stop = max(first + 1, int(np.searchsorted(starts, starts[first] + step, side="right")) - 1)
        yield first, stop
        first = stop


def token_rows(lows: Ints, highs: Ints) -> Ints:
    """Return the rows of the tokens of some items, which lie from `lows` to `highs`, one item after the other."""
    lengths = highs - lows
    ends = np.concatenate([[0], np.cumsum(lengths)])
    rows: Ints = np.arange(ends[-1]) + np.repeat(lows - ends[:-1], lengths)
    return rows


def as_queries(queries: Any, dimension: int) -> tuple[list[Floats], bool]:
    """Return queries as float32 matrices ``[vectors, d]``, and whether there was a single one.

    Raises
    ------
    ValueError, TypeError
        For other shapes, types, or values that are not finite.
    """
    single = not isinstance(queries, list | tuple) and getattr(queries, "ndim", 3) == 2
    if not single and not isinstance(queries, list | tuple) and getattr(queries, "ndim", 0) != 3:
        raise TypeError(
            f"queries is {type(queries).__name__}: expected a matrix [vectors, {dimension}] for one query, or a list "
            f"of such matrices"
        )
    found = []
    for number, query in enumerate([queries] if single else queries):
        array = as_array(query, "queries")
        array = array.astype(np.float32) if array.dtype.name == "bfloat16" else array
        if array.dtype.kind not in "fiu":
            raise TypeError(f"query {number} has dtype {array.dtype}: expected real numbers")
        if array.ndim != 2 or array.shape[1] != dimension:
            raise ValueError(
                f"query {number} has shape {array.shape}: expected [vectors, {dimension}], the dimension of the index"
            )
        with np.errstate(over="ignore"):  # reported below, as infinity
            matrix = np.ascontiguousarray(array, dtype=np.float32)
        if not 1 <= len(matrix) <= _VECTORS_MOST:
            raise ValueError(f"query {number} has {len(matrix)} vectors: expected 1 to {_VECTORS_MOST}")
        if not np.isfinite(matrix).all():
            raise ValueError(f"query {number} holds NaN or infinity: every value must be finite")
        _refuse_large(matrix, f"query {number}")
        found.append(matrix)
    return found, single


def _refuse_large(values: npt.NDArray[Any], name: str) -> None:
    """Refuse values whose sums of products overflow float32."""
    most = float(np.finfo(np.float32).max / (_VECTORS_MOST * values.shape[1])) ** 0.5
    if len(values) and float(np.abs(values).max()) > most:
        raise ValueError(f"{name} holds values beyond {most:.3g}: their products overflow float32; scale them down")


def _matrix_of(items: Any) -> Any:
    matrix = items if isinstance(items, np.ndarray) else as_array(items, "items")
    if matrix.ndim != 2:
        raise ValueError(f"items has shape {matrix.shape}: expected [tokens of all items, d] with lengths=")
    return matrix


def _checked_lengths(lengths: Any) -> Ints:
    found = as_ints("lengths", lengths)
    if found.ndim != 1 or (len(found) and int(found.min()) < 0):
        raise ValueError(f"lengths has shape {found.shape}: expected the number of tokens of each item, none negative")
    return found


def _rows(item: Any, number: int) -> int:
    shape = getattr(item, "shape", None)
    if shape is None:
        shape = np.shape(item)
    if len(shape) != 2:
        raise ValueError(f"item {number} has shape {tuple(shape)}: expected [tokens, d]")
    return int(shape[0])
