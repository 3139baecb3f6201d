"""Lists of Arrow, one vector each, as a matrix."""

from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["holds_vectors", "list_matrix"]


def holds_vectors(kind: Any, *, of_any: bool = False) -> bool:
    """Whether values of this Arrow type are lists of numbers; with `of_any`, lists of anything."""
    types = import_module("pyarrow").types
    if not (types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)):
        return False
    return of_any or bool(types.is_floating(kind.value_type) or types.is_integer(kind.value_type))


def list_matrix(column: Any, name: str, start: int = 0, dimension: int | None = None) -> npt.NDArray[Any]:
    """Return a column of lists as ``[n, d]``; without a copy if it is one piece.

    Parameters
    ----------
    column
        An Array or ChunkedArray of lists of numbers.
    name, start
        The column and the number of its first row, for messages.
    dimension
        The length that every list has to have; by default that of the type, or else of the first list.

    Raises
    ------
    TypeError
        When these are no lists of numbers.
    ValueError
        For a null, a null in a list, a list of another length, and no rows of a type that tells no length.
    """
    kind = getattr(column.type, "storage_type", column.type)
    if not holds_vectors(kind):
        raise TypeError(f"{name}: a column of {column.type}, expected lists of numbers")
    pieces = []
    for piece in getattr(column, "chunks", [column]):
        piece = getattr(piece, "storage", piece)
        if dimension is None and len(piece):
            dimension = _first_length(piece, name, start)
        if len(piece):
            assert dimension is not None
            pieces.append(_matrix(piece, name, start, dimension))
        start += len(piece)
    if not pieces:
        length = getattr(kind, "list_size", dimension)
        if length is None:
            raise ValueError(f"{name}: no rows of {kind}, expected at least one: their length is the dimension")
        return np.empty((0, length), kind.value_type.to_pandas_dtype())
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def _first_length(piece: Any, name: str, start: int) -> int:
    size = getattr(piece.type, "list_size", None)
    if size is not None:
        return int(size)
    if not piece[0].is_valid:
        raise ValueError(f"{name} row {start} is null: expected a vector")
    return len(piece[0])


def _matrix(piece: Any, name: str, start: int, dimension: int) -> npt.NDArray[Any]:
    if piece.null_count:
        row = start + int(np.argmax(piece.is_null().to_numpy(zero_copy_only=False)))
        raise ValueError(f"{name} row {row} is null: expected a vector of dimension {dimension}")
    fixed = getattr(piece.type, "list_size", None)
    lengths = np.full(len(piece), fixed) if fixed is not None else piece.value_lengths().to_numpy()
    wrong = np.flatnonzero(lengths != dimension)
    if len(wrong):
        row = int(wrong[0])
        raise ValueError(
            f"{name} row {start + row} has dimension {lengths[row]}: expected {dimension}, as in the rows before"
        )
    values = piece.flatten()  # unlike `values` it keeps to the rows of this piece
    if values.null_count:
        row = start + int(np.argmax(values.is_null().to_numpy(zero_copy_only=False))) // dimension
        raise ValueError(f"{name} row {row} holds a null: expected numbers")
    matrix: npt.NDArray[Any] = values.to_numpy().reshape(len(piece), dimension)
    return matrix
