"""Vectors to index: a container, a file or an iterator, read in blocks and never held whole."""

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeAlias, TypeGuard

import numpy as np
import numpy.typing as npt

from memhier.ann.files import SlicedVectors, VectorReader, as_array, as_rows, open_vectors
from memhier.ann.zoom.arguments import AS_FLOAT32, STORED_DTYPES, refuse_rounded, stored_dtype
from memhier.closing import Closing

__all__ = ["Block", "VectorSource", "open_source"]

Block: TypeAlias = npt.NDArray[Any]

_BLOCK_BYTES = 8 << 20
_HINT = "; of a table or data set give one column, such as table['embedding']"


class VectorSource(Closing):
    """A matrix of vectors that can be read in blocks any number of times.

    Parameters
    ----------
    matrix
        Shape ``[n, d]``, of one of the stored dtypes, or of one that is read as float32. It may be a memmap.
    """

    def __init__(self, matrix: Block) -> None:
        self._matrix = matrix
        self.dtype: np.dtype[Any] = stored_dtype(matrix.dtype)
        self.dimension: Any
        self.count: Any
        self.count, self.dimension = matrix.shape

    def blocks(self) -> Iterator[tuple[int, Block]]:
        """Yield ``(first row, block)`` in order; blocks are C-contiguous and at most 8 MiB as float32."""
        rows = max(1, _BLOCK_BYTES // (4 * self.dimension))
        for start in range(0, self.count, rows):
            yield start, _convert(self._matrix[start : start + rows], self.dtype, start)

    def take(self, rows: npt.NDArray[np.int64]) -> Block:
        """Return the given rows (ascending, so that a memmap is read forward)."""
        return _convert(self._matrix[rows], self.dtype)

    def close(self) -> None:
        """Close a file that :func:`open_source` opened. May be called twice."""


class _ReaderSource(VectorSource):
    """A source over a file, or over an array-like that gives slices."""

    def __init__(self, reader: VectorReader, *, owned: bool) -> None:
        _check_matrix((reader.count, reader.dimension), reader.dtype, reader.name)
        self._reader, self._owned = reader, owned
        self.dtype = stored_dtype(reader.dtype)
        self.count, self.dimension = reader.count, reader.dimension

    def blocks(self) -> Iterator[tuple[int, Block]]:
        for start, block in self._reader.blocks():
            yield start, _convert(block, self.dtype, start)

    def take(self, rows: npt.NDArray[np.int64]) -> Block:
        return _convert(self._reader.take(rows), self.dtype)

    def close(self) -> None:
        if self._owned:
            self._reader.close()


def open_source(vectors: object, scratch: Path, beside: Callable[[int], None] | None = None) -> VectorSource:
    """Return a source over `vectors`, staging an iterator in a file under `scratch`.

    Parameters
    ----------
    vectors
        An array ``[n, d]``; the path of a file, or a :class:`VectorReader`; a container that :func:`as_rows` knows, or
        anything with ``shape``, a numpy ``dtype`` and slicing, such as a data set of h5py, which are read by slices; or
        an iterable of blocks ``[rows, d]`` or of vectors ``[d]``.
    scratch
        A directory for vectors that can be read only once.
    beside
        Called with the number of rows of each block of an iterator, after it was staged.

    Raises
    ------
    TypeError, ValueError
        When the vectors are not two-dimensional, come as no blocks at all, have an unknown dtype, or hold NaN, infinity
        or integers that float32 does not hold exactly.
    OSError, FormatError
        When a file cannot be read, or is damaged.
    """
    rows = as_rows(vectors)
    if rows is None and _is_blocks(vectors):
        return _stage(vectors, scratch / "staged-vectors", beside)
    source = _source(vectors if rows is None else rows)
    try:
        if source.count == 0:
            return source  # its dimension is known
        for start, block in source.blocks():
            _check_finite(block, start)
    except BaseException:
        source.close()
        raise
    return source


def _is_blocks(vectors: Any) -> TypeGuard[Iterable[object]]:
    """Whether these are blocks rather than one matrix; a list may be either."""
    if isinstance(vectors, list | tuple):
        first = vectors[0] if len(vectors) else None
        if isinstance(first, list | tuple):
            return len(first) > 0 and np.ndim(first[0]) == 1
        return as_array(first).ndim == 2
    matrix = isinstance(vectors, str | os.PathLike | VectorReader) or _gives_array(vectors)
    return isinstance(vectors, Iterable) and not matrix and not _gives_slices(vectors)


def _gives_slices(vectors: Any) -> bool:
    dtype = getattr(vectors, "dtype", None)
    return hasattr(vectors, "shape") and isinstance(dtype, np.dtype) and dtype.kind != "O"


def _gives_array(vectors: Any) -> bool:
    return hasattr(vectors, "__array__") or hasattr(vectors, "__dlpack__")


def _source(vectors: Any) -> VectorSource:
    if isinstance(vectors, str | os.PathLike):
        reader = open_vectors(vectors)
        try:
            return _ReaderSource(reader, owned=True)
        except BaseException:
            reader.close()
            raise
    if isinstance(vectors, VectorReader):
        return _ReaderSource(vectors, owned=False)
    # Before __array__, which would load all of a data set.
    if _gives_slices(vectors) and not isinstance(vectors, np.ndarray):
        _check_matrix(tuple(vectors.shape), vectors.dtype, "vectors")
        return _ReaderSource(SlicedVectors(vectors, "vectors"), owned=True)
    if isinstance(vectors, list | tuple) or _gives_array(vectors):
        return VectorSource(_check_block(as_array(vectors), "vectors"))
    raise TypeError(
        f"vectors={type(vectors).__name__}: expected an array [n, d], the path of a file of vectors, or an iterable "
        f"of blocks [rows, d] or of vectors [d]"
    )


def _stage(blocks: Iterable[object], path: Path, beside: Callable[[int], None] | None) -> VectorSource:
    """Write the blocks of an iterator, which can be read only once, into a file."""
    count, dimension, dtype = 0, 0, np.dtype(np.float32)
    with path.open("wb") as file:
        for number, item in enumerate(_in_blocks(blocks)):
            block = _check_block(item, f"block {number} of vectors")
            block = _convert(block, stored_dtype(block.dtype), count)
            if count == 0:
                dimension, dtype = block.shape[1], block.dtype
            elif block.shape[1] != dimension or block.dtype != dtype:
                raise ValueError(
                    f"block {number} of vectors is {block.dtype} of dimension {block.shape[1]}: "
                    f"expected {dtype} of dimension {dimension}, as in the blocks before"
                )
            _check_finite(block, count)
            file.write(np.ascontiguousarray(block).data)
            count += len(block)
            if beside is not None:
                beside(len(block))
    if count == 0:
        raise ValueError(
            "vectors is empty: an index of no vectors yet is built from an array of shape [0, d], "
            "such as numpy.empty((0, 128), 'float32')"
        )
    return VectorSource(np.memmap(path, dtype=dtype, mode="r", shape=(count, dimension)))


def _in_blocks(items: Iterable[object]) -> Iterator[Block]:
    """Yield the blocks of an iterator; single vectors are put together."""
    rows: list[Block] = []
    first = 0
    for number, item in enumerate(items):
        piece = as_array(item, f"item {number} of vectors")
        if piece.ndim == 0:
            kind = type(item).__name__
            raise TypeError(f"vectors yields {kind} as item {number}: expected blocks [rows, d] or vectors [d]{_HINT}")
        if piece.ndim == 1:
            rows.append(piece)
        if rows and (piece.ndim > 1 or 4 * piece.size * len(rows) >= _BLOCK_BYTES):
            yield as_array(rows, start=first)
            first += len(rows)
            rows = []
        if piece.ndim > 1:
            yield piece
            first += len(piece)
    if rows:
        yield as_array(rows, start=first)


def _check_block(block: Block, name: str) -> Block:
    _check_matrix(block.shape, block.dtype, name)
    return block


def _check_matrix(shape: tuple[int, ...], dtype: np.dtype[Any], name: str) -> None:
    if len(shape) != 2 or shape[1] == 0:
        raise ValueError(f"{name} has shape {shape}: expected two dimensions [n, d] with d of at least 1")
    if stored_dtype(dtype) not in STORED_DTYPES:
        names = ", ".join(map(str, STORED_DTYPES))
        advice = {"b": "convert it to uint8 (vectors.astype('uint8'))", "O": f"convert it to float32{_HINT}"}
        raise TypeError(
            f"{name} has dtype {dtype}: expected one of {names}, or one that is stored as float32 "
            f"({', '.join(AS_FLOAT32)}); {advice.get(dtype.kind, 'convert it to float32')}"
        )


def _convert(block: Block, dtype: np.dtype[Any], start: int = 0) -> Block:
    with np.errstate(over="ignore"):  # values out of range become infinity, which _check_finite reports
        made = np.ascontiguousarray(block, dtype=dtype)
    refuse_rounded(block, made, start)
    return made


def _check_finite(block: Block, start: int) -> None:
    if block.dtype.kind != "f":
        return
    finite = np.isfinite(block).all(axis=1)
    if not finite.all():
        row = start + int(np.argmin(finite))
        raise ValueError(f"vectors row {row} holds NaN or infinity (in {block.dtype}): every value must be finite")
