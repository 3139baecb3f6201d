"""Parts of the models: a batch, a perceptron, and the loss of a model of clicks."""

from itertools import pairwise

from torch import Tensor, nn

from memhier.benchmarks.workloads.embedding.common import Sample

__all__ = ["ClickModel", "perceptron"]


def perceptron(*widths: int, ends: bool = False) -> nn.Sequential:
    """Return linear layers with a ReLU after each; `ends` adds a linear layer to one number."""
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers, *([nn.Linear(widths[-1], 1)] if ends else []))


class ClickModel(nn.Module):
    """A model whose ``forward(dense, pooled)`` returns logits [n]; `pooled` is [n, tables * dim]."""

    def loss(self, batch: Sample, rows: Tensor) -> Tensor:
        """Return the cross entropy of the clicks."""
        return nn.functional.binary_cross_entropy_with_logits(self(batch.dense, rows), batch.labels)
