"""Patches of the photographs of CIFAR-10 as a stream of vectors: millions of real ones, which nothing holds at once."""

from collections.abc import Iterator
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.benchmarks.datasets import load_images

__all__ = ["PatchStream"]

_SIDE = 8  # of a patch, in pixels
_CHUNK_ROWS = 16_384
_SAMPLE_ROWS = 65_536
_SAMPLE_STREAM, _QUERY_STREAM = 2**32 - 2, 2**32 - 1

Floats: TypeAlias = npt.NDArray[np.float32]
Pixels: TypeAlias = npt.NDArray[np.uint8]


class PatchStream:
    """Colour patches of 8 x 8 pixels on their leading principal axes; queries are from other photographs.

    Parameters
    ----------
    n, d
        Number and dimension of the vectors; the dimension is at most 192.
    seed
        Fixes every row and query. Rows are drawn in chunks of a seed of their own, so a longer stream begins with the
        shorter one.
    white
        Whether each axis is divided by its standard deviation. Such patches have hardly a near neighbour.

    Raises
    ------
    ValueError
        When a number is out of range.
    FileNotFoundError
        When the data set is missing.
    """

    def __init__(self, n: int, d: int, seed: int, white: bool = False) -> None:
        pixels = _SIDE * _SIDE * 3
        if n < 1:
            raise ValueError(f"n={n}: expected at least 1")
        if not 1 <= d <= pixels:
            raise ValueError(f"d={d}: expected 1 to {pixels}")
        self.n, self._seed = n, seed
        images = load_images("cifar10")
        self._photographs, self._others = images.train, images.test
        sample = self._cut(self._photographs, _SAMPLE_STREAM, _SAMPLE_ROWS)
        self._mean = sample.mean(axis=0)
        variances, axes = np.linalg.eigh(np.cov(sample.T))
        leading = axes[:, ::-1][:, :d]
        self._axes = (leading / np.sqrt(variances[::-1][:d]) if white else leading).astype(np.float32)

    def blocks(self) -> Iterator[Floats]:
        """Yield all vectors in order, float32 ``[rows, d]``."""
        for chunk in range(-(-self.n // _CHUNK_ROWS)):
            whole = self._turned(self._cut(self._photographs, chunk, _CHUNK_ROWS))
            yield whole[: self.n - chunk * _CHUNK_ROWS]

    def queries(self, count: int) -> Floats:
        """Return `count` queries, float32 ``[count, d]``."""
        return self._turned(self._cut(self._others, _QUERY_STREAM, count))

    def _turned(self, cut: Floats) -> Floats:
        turned: Floats = (cut - self._mean) @ self._axes
        return turned

    def _cut(self, photographs: Pixels, stream: int, count: int) -> Floats:
        """Return `count` squares of photographs ``[n, side, side, 3]``, flat."""
        random = np.random.default_rng([self._seed, stream])
        which = random.integers(0, len(photographs), (count, 1, 1))
        across, down = random.integers(0, photographs.shape[1] - _SIDE + 1, (2, count, 1, 1))
        steps = np.arange(_SIDE)
        cut: Pixels = photographs[which, across + steps[:, None], down + steps]
        return cut.reshape(count, -1).astype(np.float32)
