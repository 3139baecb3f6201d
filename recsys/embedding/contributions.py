"""Gradients of ids that have come to the owner of their rows, and how they become gradients of rows."""

from dataclasses import dataclass
from typing import Any
from weakref import ReferenceType

import numpy as np
import torch
from torch import Tensor

from memhier.recsys.embedding.collectives import Arriving
from memhier.recsys.embedding.exchange import Exchange, Flags
from memhier.recsys.embedding.optimizers import SGD, SparseOptimizer
from memhier.recsys.embedding.tables import Ints, Rows

__all__ = ["Contributions", "Late", "in_order"]


@dataclass(frozen=True, slots=True)
class Contributions:
    """Gradients of ids: the numbers of their rows int64 [n], values float32 [n, widest], from which rank int64 [n]."""

    numbers: Ints
    values: Tensor
    ranks: Ints

    def only(self, wanted: Flags) -> "Contributions":
        """Return those that are wanted."""
        return Contributions(self.numbers[wanted], self.values[torch.from_numpy(wanted)], self.ranks[wanted])

    def then(self, others: "Contributions") -> "Contributions":
        """Return both, in the order of ranks."""
        ranks = np.concatenate((self.ranks, others.ranks))
        order = np.argsort(ranks, kind="stable")
        values = torch.cat((self.values, others.values))[torch.from_numpy(order)]
        return Contributions(np.concatenate((self.numbers, others.numbers))[order], values, ranks[order])


@dataclass(slots=True)
class Late:
    """Contributions to a step that travel while the next one runs.

    Attributes
    ----------
    here
        Those for rows that can wait which came at once, from ranks that did not know.
    counts
        How many come from each rank.
    group, steps
        Hyperparameters and numbers of updates as of the step.
    """

    rows: Rows
    following: "ReferenceType[Exchange] | None"
    here: Contributions
    counts: list[int]
    keys: Arriving
    values: Arriving
    group: dict[str, Any]
    steps: list[int]


def in_order(places: Tensor, values: Tensor, count: int, optimizer: SparseOptimizer) -> Tensor:
    """Return a sparse gradient whose repeats add up in the order in which they came."""
    shape = (count, values.shape[1])
    if isinstance(optimizer, SGD) and not optimizer.momentum and not optimizer.weight_decay:
        # Applied one after the other, as torch does.
        return torch.sparse_coo_tensor(places.unsqueeze(0), values, shape, check_invariants=False)
    distinct, inverse = torch.unique(places, return_inverse=True)
    sums = torch.zeros(len(distinct), values.shape[1]).index_add_(0, inverse, values)
    return torch.sparse_coo_tensor(distinct.unsqueeze(0), sums, shape, is_coalesced=True, check_invariants=False)
