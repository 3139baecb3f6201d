"""DeepFM: a factorization machine beside a perceptron on the same rows."""

import torch
from torch import Tensor, nn

from memhier.benchmarks.workloads.embedding.models.base import ClickModel, perceptron

__all__ = ["DeepFM"]


class DeepFM(ClickModel):
    """A factorization machine and a perceptron that share rows (Guo et al., arXiv 1703.04247).

    The first number of a row is its weight of first order, the others are its factors.
    """

    def __init__(self, tables: int, dim: int) -> None:
        super().__init__()
        self._dim = dim
        self.first: nn.Linear = nn.Linear(13, 1)
        self.deep: nn.Sequential = perceptron(13 + tables * (dim - 1), 256, 128, 64, ends=True)

    def forward(self, dense: Tensor, pooled: Tensor) -> Tensor:
        """Return logits [n]; `pooled` is [n, tables * dim]."""
        rows = pooled.view(len(dense), -1, self._dim)
        factors = rows[:, :, 1:]
        first: Tensor = self.first(dense).squeeze(1) + rows[:, :, 0].sum(1)
        # Products of all pairs: half of the square of the sum less the sum of squares.
        second = (factors.sum(1).square() - factors.square().sum(1)).sum(1) / 2
        deep: Tensor = self.deep(torch.cat([dense, factors.flatten(1)], 1)).squeeze(1)
        return first + second + deep
