"""Gradients of ids that ranks send to the owner of their rows, and the gradients of rows made of them."""

from dataclasses import dataclass
from typing import Any
from weakref import ReferenceType

import numpy as np
import torch
from torch import Tensor

from memhier.recsys.embedding.optimizers import SparseOptimizer, adds_in_turn
from memhier.recsys.embedding.sharding.collectives import Arriving
from memhier.recsys.embedding.sharding.exchange import Exchange, Flags
from memhier.recsys.embedding.tables import Ints, StepRows
from memhier.recsys.embedding.torch_internals import row_sums, sparse_rows

__all__ = ["Contributions", "Late", "in_order"]


@dataclass(frozen=True, slots=True)
class Contributions:
    """Gradients of ids, in the order in which they add up.

    Attributes
    ----------
    numbers
        int64 [n]: the numbers of their rows at the owner.
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
        """Return contributions that came in any order."""
        if bool((turns[1:] >= turns[:-1]).all()):
            return cls(numbers, values, turns)
        order = np.argsort(turns, kind="stable")
        return cls(numbers[order], values[torch.from_numpy(order)], turns[order])

    def only(self, wanted: Flags) -> "Contributions":
        """Return the contributions that are wanted."""
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
        Contributions to rows that can wait, sent at once by ranks that did not know so.
    counts
        int64 [ranks, turns]: contributions from each rank, of the first feature of a table, the second ...
    groups, steps
        Hyperparameters and numbers of updates as of the step; no numbers as long as its other gradients wait.
    graph_pass
        The number of the backward pass.
    """

    rows: StepRows
    following: "ReferenceType[Exchange] | None"
    here: Contributions
    counts: Ints
    keys: Arriving
    values: Arriving
    groups: list[dict[str, Any]]
    graph_pass: int
    steps: list[int] | None = None


def in_order(places: Tensor, values: Tensor, count: int, optimizer: SparseOptimizer) -> Tensor:
    """Return a sparse gradient whose repeats add up in the order in which they came."""
    shape = (count, values.shape[1])
    if adds_in_turn(optimizer):
        return sparse_rows(places, values, shape)  # torch applies them one after the other
    return row_sums(places, values, shape)
