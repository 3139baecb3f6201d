"""Two towers: users and items in one space, for retrieval."""

import torch
from torch import Tensor, nn

from memhier.benchmarks.workloads.embedding.common import Sample
from memhier.benchmarks.workloads.embedding.models.base import perceptron

__all__ = ["TwoTower"]


class TwoTower(nn.Module):
    """A perceptron for users and one for items, trained with the batch's other items as negatives (Yi et al., 2019)."""

    def __init__(self, dim: int, width: int = 64, temperature: float = 0.1) -> None:
        super().__init__()
        self._temperature = temperature
        self.towers: nn.ModuleList = nn.ModuleList(
            nn.Sequential(perceptron(dim, width), nn.Linear(width, dim)) for _ in range(2)
        )

    def forward(self, rows: Tensor) -> Tensor:
        """Return cosines [n, n] of users and items over the temperature; `rows` is [n, 2 * dim]."""
        users, items = (
            nn.functional.normalize(tower(part)) for tower, part in zip(self.towers, rows.chunk(2, 1), strict=True)
        )
        cosines: Tensor = users @ items.T / self._temperature
        return cosines

    def loss(self, batch: Sample, rows: Tensor) -> Tensor:
        """Return the cross entropy of each user's item among all of the batch."""
        return nn.functional.cross_entropy(self(rows), torch.arange(len(rows)))
