"""DCN V2: products of features with all others, layer after layer."""

import torch
from torch import Tensor, nn

from memhier.benchmarks.workloads.embedding.models.base import ClickModel, perceptron

__all__ = ["DCN"]


class DCN(ClickModel):
    """Low-rank cross layers (DCN V2, arXiv 2008.13535) between perceptrons, as in MLPerf's DLRM-DCNv2.

    Parameters
    ----------
    tables, dim
        The number of tables, and the width of a row.
    bottom, top
        Widths of the perceptrons below and above.
    layers, rank
        Cross layers, and the rank of their matrices.
    """

    def __init__(
        self, tables: int, dim: int, *, bottom: tuple[int, ...] = (128,), top: tuple[int, ...] = (256, 64),
        layers: int = 3, rank: int = 64,
    ) -> None:  # fmt: skip
        super().__init__()
        width = (tables + 1) * dim
        self.bottom: nn.Sequential = perceptron(13, *bottom, dim)
        self.down: nn.ModuleList = nn.ModuleList(nn.Linear(width, rank, bias=False) for _ in range(layers))
        self.up: nn.ModuleList = nn.ModuleList(nn.Linear(rank, width) for _ in range(layers))
        self.top: nn.Sequential = perceptron(width, *top, ends=True)

    def forward(self, dense: Tensor, pooled: Tensor) -> Tensor:
        """Return logits [n]; `pooled` is [n, tables * dim]."""
        crossed = first = torch.cat([self.bottom(dense), pooled], 1)
        for down, up in zip(self.down, self.up, strict=True):
            crossed = first * up(down(crossed)) + crossed
        logits: Tensor = self.top(crossed).squeeze(1)
        return logits
