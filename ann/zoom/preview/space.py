"""The space of the preview, and the remoteness of vectors from queries there: nearer by the metric is less remote.

For L2 and cosine, remoteness is a squared distance. Cosine becomes L2 between unit vectors; an added coordinate keeps a
zero vector as far from every query as cosine similarity 0. For the inner product, remoteness is ``-2 <q, x>``, with the
query scaled to length one, which changes no order. An added coordinate that makes it a distance (Bachrach et al.,
RecSys 2014) would be as large as the largest norm, so that the error of its code would exceed most inner products. All
values are scaled into the range where half precision is accurate, and zeros pad the dimension.
"""

from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.zoom.source import Block, VectorSource

__all__ = ["EVERY", "METRICS", "Metric", "Numbers", "PreviewSpace", "directions", "fit_space"]

Metric: TypeAlias = Literal["l2", "ip", "cosine"]
Numbers: TypeAlias = range | npt.NDArray[np.int64]
FloatMatrix: TypeAlias = npt.NDArray[np.float32]

# Squares of values between these are well within float32.
_NORM_MIN, _NORM_MAX = 1e-15, 1e18

METRICS: tuple[Metric, ...] = ("l2", "ip", "cosine")
EVERY = range(2**31)  # numbers of queries that are all of their call


@dataclass(frozen=True, slots=True)
class PreviewSpace:
    """The map from vectors and queries to the preview's space.

    Attributes
    ----------
    metric
        The metric of the index.
    dimension
        Dimension of a vector.
    padded
        Dimension of the preview space.
    scale
        Factor that brings values near one; for ``ip`` the largest norm at build.
    """

    metric: Metric
    dimension: int
    padded: int
    scale: float

    @property
    def reach(self) -> float:
        """The largest norm of an indexed vector, for ``ip``; for others the largest value."""
        return 1 / self.scale

    def vectors(self, block: Block) -> FloatMatrix:
        """Map indexed vectors ``[n, d]`` to float32 ``[n, padded]``."""
        out, squared = self._scaled(block, unit=self.metric == "cosine")
        if self.metric == "cosine":
            out[:, self.dimension] = squared == 0
        return out

    def queries(self, block: FloatMatrix, numbers: Numbers = EVERY) -> FloatMatrix:
        """Map queries ``[n, d]`` to float32 ``[n, padded]``; `numbers` are those of the queries in their call.

        Raises
        ------
        ValueError
            When distances to a query overflow float32, in its own scale or in that of the vectors.
        """
        out, squared = self._scaled(block, unit=self.metric != "l2")
        norms = np.sqrt(squared) * max(1.0, 1.0 / self.scale)
        if len(norms) and norms.max() > _NORM_MAX:
            row = numbers[int(norms.argmax())]
            raise ValueError(f"queries row {row} is too large: distances to it overflow float32; scale it down")
        return out

    def lengths(self, block: Block) -> FloatMatrix:
        """Return the norms ``[n]`` of mapped vectors of the inner product."""
        return np.sqrt(self._scaled(block, unit=False)[1]).astype(np.float32)

    def distances(self, remoteness: FloatMatrix, queries: FloatMatrix) -> FloatMatrix:
        """Return the metric's distances for remoteness in the preview's space, ``[q]`` or ``[q, c]``."""
        if self.metric == "cosine":
            return remoteness / np.float32(2)
        if self.metric == "l2":
            return remoteness / np.float32(self.scale**2)
        norms = (_norms(queries) / (2 * self.scale)).reshape(-1, *(1,) * (remoteness.ndim - 1))
        with np.errstate(over="ignore", invalid="ignore"):
            unscaled = remoteness * norms
        # An unknown distance stays unknown, to a zero query as well.
        shaped: FloatMatrix = np.where(np.isinf(remoteness), remoteness, unscaled).astype(np.float32)
        return shaped

    def remoteness(self, distances: FloatMatrix, queries: FloatMatrix, slack: float) -> FloatMatrix:
        """Return remoteness ``[q]`` in the preview's space for distances of the metric; inverts :meth:`distances`.

        It is larger by `slack` times its terms, so that rounding leaves no vector out.
        """
        wanted = distances.astype(np.float64)
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):  # everything is within
            if self.metric == "cosine":
                return (2 * wanted + slack * (1 + np.abs(wanted))).astype(np.float32)
            if self.metric == "l2":
                return ((wanted + slack * np.abs(wanted)) * self.scale**2).astype(np.float32)
            unscaled = wanted * 2 * self.scale / _norms(queries)
            # To a zero query all distances are zero.
            unscaled = np.where(np.isnan(unscaled), np.inf, unscaled)
            return (unscaled + slack * (2 + np.abs(unscaled))).astype(np.float32)

    def _scaled(self, block: Block, *, unit: bool) -> tuple[FloatMatrix, npt.NDArray[np.float64]]:
        """Return padded vectors, scaled or of length one, and their scaled squared norms."""
        values = block.astype(np.float64)
        values *= self.scale
        squared = np.einsum("ij,ij->i", values, values)
        if unit:
            values /= np.sqrt(np.where(squared > 0, squared, 1.0))[:, None]
        out = np.zeros((len(block), self.padded), np.float32)
        with np.errstate(over="ignore"):  # `queries` refuses values that do
            out[:, : self.dimension] = values
        return out, squared


def _norms(queries: FloatMatrix) -> npt.NDArray[np.float64]:
    norms: npt.NDArray[np.float64] = np.sqrt(np.einsum("ij,ij->i", queries, queries, dtype=np.float64))
    return norms


def core_dimension(metric: Metric, dimension: int) -> int:
    """Return the dimension of the preview space before padding.

    For inner products the last two coordinates are those by which the router finds the lists; see
    `memhier.ann.zoom.preview.preview`.
    """
    return dimension + {"l2": 0, "cosine": 1, "ip": 2}[metric]


def fit_space(source: VectorSource, metric: Metric, padded: int) -> PreviewSpace:
    """Return the preview space for `source`, reading it once."""
    largest, max_squared = 0.0, 0.0
    for _, block in source.blocks():
        values = block.astype(np.float64)
        largest = max(largest, float(np.abs(values).max()))
        if metric == "ip":
            max_squared = max(max_squared, float(np.einsum("ij,ij->i", values, values).max()))
    max_norm = max_squared**0.5
    reach = max(largest, max_norm)
    if reach**2 * 4 * source.dimension > float(np.finfo(np.float32).max):
        raise ValueError(
            f"vectors hold values up to {largest:.3g}: their squared distances overflow float32; scale them down"
        )
    if 0 < reach < _NORM_MIN:
        raise ValueError(
            f"vectors hold values up to {largest:.3g} only: their squared distances underflow float32; scale them up"
        )
    scale = 1.0 / reach if reach > 0 else 1.0
    return PreviewSpace(metric, source.dimension, padded, scale)


def directions(vectors: FloatMatrix) -> FloatMatrix:
    """Return vectors ``[n, d]`` at length one; of length zero as they are."""
    lengths: FloatMatrix = np.sqrt(np.einsum("ij,ij->i", vectors, vectors))[:, None]
    return np.divide(vectors, lengths, out=vectors.copy(), where=lengths > 0)
