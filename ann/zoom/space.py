"""The space of the preview: whatever the metric, nearest by L2 there is nearest by the metric.

Cosine becomes L2 between unit vectors. The inner product becomes L2 by one added coordinate that gives every
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
        out = self._base(block)
        if self.metric == "ip":
            values = block.astype(np.float64) * self.scale
            squared = np.einsum("ij,ij->i", values, values)
            rest = np.maximum((self.max_norm * self.scale) ** 2 - squared, 0.0)
            out[:, self.dimension] = np.sqrt(rest)
        return out

    def queries(self, block: FloatMatrix) -> FloatMatrix:
        """Map queries ``[n, d]`` to float32 ``[n, padded]``."""
        return self._base(block)

    def _base(self, block: Block) -> FloatMatrix:
        out = np.zeros((len(block), self.padded), np.float32)
        np.multiply(block, self.scale, out=out[:, : self.dimension], casting="unsafe")
        if self.metric == "cosine":
            norms = np.sqrt(np.einsum("ij,ij->i", out, out, dtype=np.float64))
            out /= np.where(norms > 0, norms, 1.0)[:, None].astype(np.float32)
        return out


def core_dimension(metric: Metric, dimension: int) -> int:
    """Return the dimension of the preview space before padding."""
    return dimension + 1 if metric == "ip" else dimension


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
    scale = 1.0 / reach if reach > 0 else 1.0
    return PreviewSpace(metric, source.dimension, padded, max_norm, scale)
