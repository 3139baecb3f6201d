"""A source of vectors: a matrix read in blocks and by row numbers, and never held whole."""

import os
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.closing import Closing
from memhier.errors import ClosedError

__all__ = ["Block", "VectorReader", "block_rows", "path_text", "take_in_windows"]

Block: TypeAlias = npt.NDArray[Any]

_BLOCK_BYTES = 8 << 20
_GAP_BYTES = 64 << 10  # skipping less than this takes longer than reading it


class VectorReader(Closing):
    """Vectors on disk, read in blocks, forward, any number of times.

    Made by :func:`memhier.ann.files.open_vectors`; a context manager. Several threads may read one at once, each
    through its own call of :meth:`blocks` or :meth:`take`; readers of HDF5 and Parquet take turns.

    Attributes
    ----------
    name
        The path, and the data set or column within it, for messages.
    count, dimension
        Shape of the matrix.
    dtype
        dtype of the values in native byte order, as the blocks have it.

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np
    >>> from memhier.ann import open_vectors, write_vectors
    >>> path = tempfile.mkdtemp() + "/vectors.fbin"
    >>> write_vectors(path, np.arange(6, dtype="float32").reshape(3, 2))
    >>> with open_vectors(path) as vectors:
    ...     for start, block in vectors.blocks():
    ...         print(start, block.shape, vectors.take([0, 2]).tolist())
    0 (3, 2) [[0.0, 1.0], [4.0, 5.0]]
    """

    def __init__(self, name: str, count: int, dimension: int, dtype: np.dtype[Any]) -> None:
        self.dimension: int
        self.count: int
        self.name: str
        self.name, self.count, self.dimension = name, count, dimension
        self.dtype: np.dtype[Any] = dtype.newbyteorder("=")
        self._gap_bytes = _GAP_BYTES
        self._closed = False

    def blocks(self) -> Iterator[tuple[int, Block]]:
        """Yield ``(first row, block)`` in order.

        Blocks are C-contiguous ``[rows, dimension]`` of `dtype`, at most 8 MiB as float32, and the caller's to keep.

        Raises
        ------
        FormatError
            When the file is damaged where it is read, or became shorter since it was opened.
        ClosedError
            When this object was closed.
        """
        rows = block_rows(self.dimension, self.dtype)
        for start in range(0, self.count, rows):
            self._check_open()
            yield start, self._read(start, min(start + rows, self.count))

    def take(self, rows: npt.ArrayLike) -> Block:
        """Return the given rows, ``[len(rows), dimension]``.

        Parameters
        ----------
        rows
            Row numbers in ascending order, so that the file is read forward; a row may repeat.

        Raises
        ------
        ValueError, TypeError
            When `rows` is not one-dimensional integers, not ascending or not within the file.
        FormatError, ClosedError
            As :meth:`blocks`.
        """
        self._check_open()
        return self._take(_check_rows(rows, self.count, self.name))

    def close(self) -> None:
        """Close the file. May be called twice."""
        self._closed = True

    def __repr__(self) -> str:
        return f"VectorReader({self.name!r}, {self.count} x {self.dimension} {self.dtype})"

    def _read(self, start: int, stop: int) -> Block:
        """Return rows `start` to `stop`, at least one, C-contiguous in native byte order."""
        raise NotImplementedError

    def _take(self, rows: npt.NDArray[np.int64]) -> Block:
        return take_in_windows(self._read, rows, self.dimension, self.dtype, self._gap_bytes)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"{self.name} was closed: open it again with open_vectors")


def path_text(path: object) -> str:
    """Return a path as text.

    Raises
    ------
    TypeError
        When it is neither text nor the path of a file as ``pathlib`` has it.
    """
    name = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(name, str):
        raise TypeError(f"path={path!r}: expected a path as str or PathLike")
    return name


def block_rows(dimension: int, dtype: np.dtype[Any]) -> int:
    """Return the rows of a block: 8 MiB of them as float32, fewer where a value is wider."""
    return max(1, _BLOCK_BYTES // (max(4, dtype.itemsize) * dimension))


def take_in_windows(
    read: Callable[[int, int], Block],
    rows: npt.NDArray[np.int64],
    dimension: int,
    dtype: np.dtype[Any],
    gap_bytes: int = _GAP_BYTES,
) -> Block:
    """Return ascending `rows` by reading runs of rows: near rows in one piece of at most 8 MiB."""
    out = np.empty((len(rows), dimension), dtype)
    gap = gap_bytes // (dimension * dtype.itemsize) + 1
    reach = block_rows(dimension, dtype)
    first = 0
    for end in [*(np.flatnonzero(np.diff(rows) > gap) + 1).tolist(), len(rows)]:
        while first < end:
            start = int(rows[first])
            last = min(int(np.searchsorted(rows, start + reach)), end)
            out[first:last] = read(start, int(rows[last - 1]) + 1)[rows[first:last] - start]
            first = last
    return out


def _check_rows(rows: npt.ArrayLike, count: int, name: str) -> npt.NDArray[np.int64]:
    array = np.asarray(rows)
    if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
        raise TypeError(f"rows has dtype {array.dtype} and shape {array.shape}: expected integers of shape [n]")
    if array.size and (int(array.min()) < 0 or int(array.max()) >= count):
        at = int(np.flatnonzero((array < 0) | (array >= count))[0])
        raise ValueError(f"rows[{at}]={array[at]}: {name} has rows 0 to {count - 1}")
    numbers = array.astype(np.int64)
    if (np.diff(numbers) < 0).any():
        at = int(np.flatnonzero(np.diff(numbers) < 0)[0])
        raise ValueError(
            f"rows[{at + 1}]={numbers[at + 1]} comes after {numbers[at]}: expected ascending rows; sort them first"
        )
    return numbers
