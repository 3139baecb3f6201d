"""DLRM: two perceptrons, and products of all pairs of features between."""

import torch
from torch import Tensor, nn

from memhier.benchmarks.workloads.embedding.models.base import ClickModel, perceptron

__all__ = ["DLRM"]


class DLRM(ClickModel):
    """The dense part of DLRM (Naumov et al., arXiv 1906.00091)."""

    def __init__(self, tables: int, dim: int) -> None:
        super().__init__()
        self.bottom: nn.Sequential = perceptron(13, 128, dim)
        features = tables + 1
        rows, columns = torch.tril_indices(features, features, -1)
        self._pairs = rows * features + columns
        self._dim = dim
        self.top: nn.Sequential = perceptron(dim + features * (features - 1) // 2, 256, 64, ends=True)

    def forward(self, dense: Tensor, pooled: Tensor) -> Tensor:
        """Return logits [n]; `pooled` is [n, tables * dim]."""
        below = self.bottom(dense)
        features = torch.cat([below, pooled], 1).view(len(dense), -1, self._dim)
        products = torch.bmm(features, features.transpose(1, 2)).view(len(dense), -1)[:, self._pairs]
        logits: Tensor = self.top(torch.cat([below, products], 1)).squeeze(1)
        return logits
