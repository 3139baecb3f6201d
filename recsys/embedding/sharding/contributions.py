"""Gradients of ids that have come to the owner of their rows, and how they become gradients of rows."""

from dataclasses import dataclass
from typing import Any
from weakref import ReferenceType

import numpy as np
import torch
from torch import Tensor

from memhier.recsys.embedding.optimizers import SparseOptimizer, adds_in_turn
from memhier.recsys.embedding.sharding.collectives import Arriving
from memhier.recsys.embedding.sharding.exchange import Exchange, Flags
from memhier.recsys.embedding.tables import Ints, Rows

__all__ = ["Contributions", "Late", "in_order"]


@dataclass(frozen=True, slots=True)
class Contributions:
    """Gradients of ids, in the order in which they add up.

    Attributes
    ----------
    numbers
        int64 [n]: of their rows.
    values
        float32 [n, widest].
    turns
        int64 [n], rising: feature after feature of a table, and within one rank after rank.
    """

    numbers: Ints
    values: Tensor
    turns: Ints

    @classmethod
    def in_turn(cls, numbers: Ints, values: Tensor, turns: Ints) -> "Contributions":
        """Return what came in any order."""
        if bool((turns[1:] >= turns[:-1]).all()):
            return cls(numbers, values, turns)
        order = np.argsort(turns, kind="stable")
        return cls(numbers[order], values[torch.from_numpy(order)], turns[order])

    def only(self, wanted: Flags) -> "Contributions":
        """Return those that are wanted."""
        return Contributions(self.numbers[wanted], self.values[torch.from_numpy(wanted)], self.turns[wanted])

    def then(self, others: "Contributions") -> "Contributions":
        """Return both, in the order in which they add up."""
        return Contributions.in_turn(
            np.concatenate((self.numbers, others.numbers)),
            torch.cat((self.values, others.values)),
            np.concatenate((self.turns, others.turns)),
        )


@dataclass(slots=True)
class Late:
    """Contributions to a step that travel while the next one runs.

    Attributes
    ----------
    here
        Those for rows that can wait which came at once, from ranks that did not know.
    counts
        int64 [ranks, turns]: how many come from each rank, of the features that are first of their table, second ...
    group, steps
        Hyperparameters and numbers of updates as of the step; no numbers as long as its other gradients wait.
    graph_pass
        The number of the backward pass.
    """

    rows: Rows
    following: "ReferenceType[Exchange] | None"
    here: Contributions
    counts: Ints
    keys: Arriving
    values: Arriving
    group: dict[str, Any]
    graph_pass: int
    steps: list[int] | None = None


def in_order(places: Tensor, values: Tensor, count: int, optimizer: SparseOptimizer) -> Tensor:
    """Return a sparse gradient whose repeats add up in the order in which they came."""
    shape = (count, values.shape[1])
    if adds_in_turn(optimizer):
        # Applied one after the other, as torch does.
        return torch.sparse_coo_tensor(places.unsqueeze(0), values, shape, check_invariants=False)
    distinct, inverse = torch.unique(places, return_inverse=True)
    sums = torch.zeros(len(distinct), values.shape[1]).index_add_(0, inverse, values)
    return torch.sparse_coo_tensor(distinct.unsqueeze(0), sums, shape, is_coalesced=True, check_invariants=False)
