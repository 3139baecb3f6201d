"""Vectors behind an array-like that gives slices, such as a dataset of HDF5 or Zarr."""

from typing import Any

import numpy as np

from memhier.ann.files._containers import as_array
from memhier.ann.files._reader import Block, VectorReader
from memhier.errors import FormatError

__all__ = ["SlicedVectors"]


class SlicedVectors(VectorReader):
    """Rows of anything with ``shape``, a numpy ``dtype`` and slicing.

    Parameters
    ----------
    matrix
        The array-like; where it has ``chunks``, rows of one chunk are read together.
    name
        Its name in messages.

    Raises
    ------
    FormatError
        When it is not a matrix of real numbers.
    """

    def __init__(self, matrix: Any, name: str) -> None:
        shape, dtype = tuple(matrix.shape), np.dtype(matrix.dtype)
        if len(shape) != 2 or shape[1] < 1 or dtype.kind not in "fiu":
            raise FormatError(
                f"{name}: holds {dtype} of shape {shape}, expected real numbers of shape [n, d] with d of at least 1"
            )
        super().__init__(name, int(shape[0]), int(shape[1]), dtype)
        self._matrix = matrix
        chunks = getattr(matrix, "chunks", None)
        if chunks:  # a chunk is read, and unpacked, as a whole: skipping rows within it saves nothing
            self._gap_bytes = max(self._gap_bytes, int(chunks[0]) * self.dimension * dtype.itemsize)

    def close(self) -> None:
        """Let go of the array-like. May be called twice."""
        super().close()
        self._matrix = None

    def _read(self, start: int, stop: int) -> Block:
        block = np.ascontiguousarray(as_array(self._matrix[start:stop], self.name), self.dtype)
        if block.shape != (stop - start, self.dimension):
            raise FormatError(
                f"{self.name}: rows {start} to {stop - 1} came as an array of shape {block.shape}, "
                f"expected {(stop - start, self.dimension)}"
            )
        return block
