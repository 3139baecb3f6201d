"""The space of the preview: whatever the metric, nearest by L2 there is nearest by the metric.

Cosine becomes L2 between unit vectors; an added coordinate holds a zero vector as far from every query as cosine
similarity 0 is. The inner product becomes L2 by one added coordinate that gives every
vector the same norm (Bachrach et al., Speeding Up the Xbox Recommender System, RecSys 2014). All values are scaled
into the range where half precision is accurate, and zeros pad the dimension to a whole number of sub-vectors.
"""

from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.zoom.source import Block, VectorSource

__all__ = ["METRICS", "Metric", "PreviewSpace", "fit_space"]

Metric: TypeAlias = Literal["l2", "ip", "cosine"]
FloatMatrix: TypeAlias = npt.NDArray[np.float32]

# Squares of what lies between are well within float32.
_NORM_MIN, _NORM_MAX = 1e-15, 1e18

METRICS: tuple[Metric, ...] = ("l2", "ip", "cosine")


@dataclass(frozen=True, slots=True)
class PreviewSpace:
    """The map from vectors and queries to the preview's L2 space.

    Attributes
    ----------
    metric
        The metric of the index.
    dimension
        Dimension of a vector.
    padded
        Dimension of the preview space.
    max_norm
        The largest norm of an indexed vector; used by ``ip`` alone.
    scale
        Factor that brings values near one.
    """

    metric: Metric
    dimension: int
    padded: int
    max_norm: float
    scale: float

    def vectors(self, block: Block) -> FloatMatrix:
        """Map indexed vectors ``[n, d]`` to float32 ``[n, padded]``."""
        out, squared = self._scaled(block)
        if self.metric == "ip":
            rest = np.maximum((self.max_norm * self.scale) ** 2 - squared, 0.0)
            out[:, self.dimension] = np.sqrt(rest)
        elif self.metric == "cosine":
            out[:, self.dimension] = squared == 0
        return out

    def queries(self, block: FloatMatrix) -> FloatMatrix:
        """Map queries ``[n, d]`` to float32 ``[n, padded]``.

        Raises
        ------
        ValueError
            When a query is so large that distances to it overflow float32, in its own scale or in that of the vectors.
        """
        out, squared = self._scaled(block)
        norms = np.sqrt(squared) * max(1.0, 1.0 / self.scale)
        if len(norms) and norms.max() > _NORM_MAX:
            row = int(norms.argmax())
            raise ValueError(f"queries row {row} is too large: distances to it overflow float32; scale it down")
        return out

    def distances(self, squared: FloatMatrix, queries: FloatMatrix) -> FloatMatrix:
        """Return the metric's distances for squared ones in the preview's space, ``[q]`` or ``[q, c]``."""
        if self.metric == "cosine":
            return squared / np.float32(2)
        unscaled = squared / np.float32(self.scale**2)
        if self.metric == "l2":
            return unscaled
        # |q|^2 + M^2 - 2 <q, x> is what the added coordinate makes of the inner product.
        norms = np.einsum("ij,ij->i", queries, queries) + np.float32(self.max_norm**2)
        shaped: FloatMatrix = (unscaled - norms.reshape(-1, *(1,) * (squared.ndim - 1))) / np.float32(2)
        return shaped

    def squared(self, distances: FloatMatrix, queries: FloatMatrix, slack: float) -> FloatMatrix:
        """Return squared distances ``[q]`` in the preview's space for the metric's: the inverse of :meth:`distances`.

        They are larger by `slack` times the terms that they are made of, so that rounding leaves nothing out.
        """
        wanted = distances.astype(np.float64)
        if self.metric == "cosine":
            return (2 * wanted + slack * (1 + np.abs(wanted))).astype(np.float32)
        terms = np.abs(wanted)
        if self.metric == "ip":
            norms = np.einsum("ij,ij->i", queries, queries, dtype=np.float64) + self.max_norm**2
            wanted, terms = 2 * wanted + norms, 2 * terms + norms
        with np.errstate(over="ignore"):  # everything is within
            return ((wanted + slack * terms) * self.scale**2).astype(np.float32)

    def _scaled(self, block: Block) -> tuple[FloatMatrix, npt.NDArray[np.float64]]:
        """Return scaled, for cosine normalised, vectors with room to spare, and their scaled squared norms."""
        values = block.astype(np.float64)
        values *= self.scale
        squared = np.einsum("ij,ij->i", values, values)
        if self.metric == "cosine":
            values /= np.sqrt(np.where(squared > 0, squared, 1.0))[:, None]
        out = np.zeros((len(block), self.padded), np.float32)
        with np.errstate(over="ignore"):  # queries refuses what does
            out[:, : self.dimension] = values
        return out, squared


def core_dimension(metric: Metric, dimension: int) -> int:
    """Return the dimension of the preview space before padding."""
    return dimension if metric == "l2" else dimension + 1


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
    return PreviewSpace(metric, source.dimension, padded, max_norm, scale)
