"""Wide & Deep: a linear model of the ids beside a perceptron."""

import torch
from torch import Tensor, nn

from memhier.benchmarks.workloads.embedding.models.base import ClickModel, perceptron

__all__ = ["WideDeep"]


class WideDeep(ClickModel):
    """A linear model beside a perceptron (Cheng et al., arXiv 1606.07792).

    The first number of a row is its weight in the linear model, so one look-up serves both parts.
    """

    def __init__(self, tables: int, dim: int) -> None:
        super().__init__()
        self._dim = dim
        self.wide: nn.Linear = nn.Linear(13, 1)
        self.deep: nn.Sequential = perceptron(13 + tables * (dim - 1), 256, 128, 64, ends=True)

    def forward(self, dense: Tensor, pooled: Tensor) -> Tensor:
        """Return logits [n]; `pooled` is [n, tables * dim]."""
        rows = pooled.view(len(dense), -1, self._dim)
        wide: Tensor = self.wide(dense).squeeze(1) + rows[:, :, 0].sum(1)
        deep: Tensor = self.deep(torch.cat([dense, rows[:, :, 1:].flatten(1)], 1)).squeeze(1)
        return wide + deep
