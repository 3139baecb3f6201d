"""SASRec: self-attention over a history, to tell the next item."""

import torch
from torch import Tensor, nn

from memhier.benchmarks.workloads.embedding.common import Sample

__all__ = ["SASRec"]


class SASRec(nn.Module):
    """Blocks of causal self-attention over histories of items (Kang and McAuley, arXiv 1808.09781), without dropout.

    A sample has three ids at each place of its history: the item, the next one, and one that was not chosen. Id 0 is
    padding.
    """

    def __init__(self, length: int, dim: int, blocks: int = 2) -> None:
        super().__init__()
        self._length = length
        self.places: nn.Parameter = nn.Parameter(torch.randn(length, dim) * 0.02)
        self.attend: nn.ModuleList = nn.ModuleList(nn.Linear(dim, 3 * dim) for _ in range(blocks))
        self.norms: nn.ModuleList = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2 * blocks + 1))
        self.feed: nn.ModuleList = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, dim)) for _ in range(blocks)
        )

    def forward(self, history: Tensor) -> Tensor:
        """Return the state after each item, [n, length, dim], as `history` is."""
        state = history * history.shape[2] ** 0.5 + self.places
        for block, (attend, feed) in enumerate(zip(self.attend, self.feed, strict=True)):
            query, key, value = attend(self.norms[2 * block](state)).chunk(3, 2)
            state = state + nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
            state = state + feed(self.norms[2 * block + 1](state))
        found: Tensor = self.norms[-1](state)
        return found

    def loss(self, batch: Sample, rows: Tensor) -> Tensor:
        """Return the cross entropy of next items against others; `rows` is [n, 3 * length * dim]."""
        history, following, others = rows.view(len(rows), 3, self._length, -1).unbind(1)
        state = self(history)
        logits = torch.stack([(state * following).sum(2), (state * others).sum(2)])
        wanted = torch.zeros_like(logits)
        wanted[0] = 1
        known = (batch.ids[:, self._length : 2 * self._length] != 0).float()
        losses = nn.functional.binary_cross_entropy_with_logits(logits, wanted, reduction="none").sum(0)
        return (losses * known).sum() / known.sum().clamp(min=1)
