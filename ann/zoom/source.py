"""Vectors to index, from an array, a memmap or an iterator of blocks, read in blocks and never held whole."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["Block", "VectorSource", "open_source"]

Block: TypeAlias = npt.NDArray[Any]

STORED_DTYPES = tuple(np.dtype(name) for name in ("float32", "float16", "int8", "uint8"))
_BLOCK_BYTES = 8 << 20


class VectorSource:
    """A matrix of vectors that can be read in blocks any number of times.

    Parameters
    ----------
    matrix
        Shape ``[n, d]``, of one of the stored dtypes, or float64, which is read as float32. It may be a memmap.
    """

    def __init__(self, matrix: Block) -> None:
        self._matrix = matrix
        self.dtype = _stored_dtype(matrix.dtype)
        self.count, self.dimension = matrix.shape

    def blocks(self) -> Iterator[tuple[int, Block]]:
        """Yield ``(first row, block)`` in order; blocks are C-contiguous and at most 8 MiB as float32."""
        rows = max(1, _BLOCK_BYTES // (4 * self.dimension))
        for start in range(0, self.count, rows):
            yield start, _convert(self._matrix[start : start + rows], self.dtype)

    def take(self, rows: npt.NDArray[np.int64]) -> Block:
        """Return the given rows (ascending, so that a memmap is read forward)."""
        return _convert(self._matrix[rows], self.dtype)


def open_source(vectors: object, scratch: Path) -> VectorSource:
    """Return a source over `vectors`, staging an iterator in a file under `scratch`.

    Raises
    ------
    TypeError, ValueError
        When the vectors are not two-dimensional, are empty, have an unknown dtype, or hold NaN or infinity.
    """
    if isinstance(vectors, np.ndarray | list | tuple) or hasattr(vectors, "__array__"):
        source = VectorSource(_check_block(np.asarray(vectors), "vectors"))
        if source.count == 0:
            raise ValueError("vectors is empty: an index needs at least one vector")
        for start, block in source.blocks():
            _check_finite(block, start)
        return source
    if isinstance(vectors, Iterable):
        return _stage(vectors, scratch / "staged-vectors")
    raise TypeError(f"vectors={type(vectors).__name__}: expected an array [n, d] or an iterable of such blocks")


def _stage(blocks: Iterable[object], path: Path) -> VectorSource:
    """Write the blocks of an iterator, which can be read only once, one after the other into a file."""
    count, dimension, dtype = 0, 0, np.dtype(np.float32)
    with path.open("wb") as file:
        for number, item in enumerate(blocks):
            block = _check_block(np.asarray(item), f"block {number} of vectors")
            block = _convert(block, _stored_dtype(block.dtype))
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
    if count == 0:
        raise ValueError("vectors is empty: an index needs at least one vector")
    return VectorSource(np.memmap(path, dtype=dtype, mode="r", shape=(count, dimension)))


def _check_block(block: Block, name: str) -> Block:
    if block.ndim != 2 or block.shape[1] == 0:
        raise ValueError(f"{name} has shape {block.shape}: expected two dimensions [n, d] with d of at least 1")
    if _stored_dtype(block.dtype) not in STORED_DTYPES:
        names = ", ".join(map(str, STORED_DTYPES))
        raise TypeError(f"{name} has dtype {block.dtype}: expected one of {names} (float64 is stored as float32)")
    return block


def _stored_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    native = dtype.newbyteorder("=")
    return np.dtype(np.float32) if native == np.float64 else native


def _convert(block: Block, dtype: np.dtype[Any]) -> Block:
    with np.errstate(over="ignore"):  # what leaves the range becomes infinity, which _check_finite reports
        return np.ascontiguousarray(block, dtype=dtype)


def _check_finite(block: Block, start: int) -> None:
    if block.dtype.kind != "f":
        return
    finite = np.isfinite(block).all(axis=1)
    if not finite.all():
        row = start + int(np.argmin(finite))
        raise ValueError(f"vectors row {row} holds NaN or infinity (in {block.dtype}): every value must be finite")
