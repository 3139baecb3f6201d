"""Beam search by proven bounds of log Z: the beginnings that the full layer keeps.

The score of a beginning is a sum of logits less the log Z of each hidden state on its way. Where the bounds of two
leave open which one is the better, the widest bounds on the way of either, that both do not share, give way to the
full product of that state. States that no choice depends on never take it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

__all__ = ["Bounds", "Proof", "Ways"]

Bounds: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Ways:
    """The two ways of a layer to log Z.

    Attributes
    ----------
    bounds
        Maps hidden states ``[n, D]`` to the K largest logits and their words, ``[n, K]``, and to bounds of log Z
        ``[n]``, the lower one first.
    exact
        Maps hidden states to log Z itself.
    """

    bounds: Callable[[Tensor], Bounds]
    exact: Callable[[Tensor], Tensor]


class Proof:
    """The hidden states of a search, with bounds of log Z.

    Attributes
    ----------
    settled
        How many states took the full product.
    """

    def __init__(self, exact: Callable[[Tensor], Tensor]) -> None:
        self._exact = exact
        self._states: list[Tensor] = [torch.empty(0)]
        # State 0 stands for none.
        self._low = self._high = torch.zeros(1, dtype=torch.float64)
        self.settled = 0

    def add(self, states: Tensor, low: Tensor, high: Tensor) -> Tensor:
        """Take states and their bounds; return their numbers."""
        first = len(self._states)
        self._states.extend(states)
        self._low = torch.cat([self._low, low.double()])
        self._high = torch.cat([self._high, high.double()])
        return torch.arange(first, first + len(states))

    def best(self, totals: Tensor, ways: Tensor, keep: int, lengths: Tensor | None = None) -> Tensor:
        """Return the places of the best continuations of each sentence, ``[n, keep]``, beyond doubt.

        Parameters
        ----------
        totals
            Sums of logits, float64 ``[n, b, k]``: the continuations of each beginning.
        ways
            Numbers of the states of each beginning, ``[n, b, t]``; 0 for none. Equal numbers at one place are shared.
        lengths
            Divide the scores of beginnings, ``[n, b]``; None for 1.
        """
        count, beam, k = totals.shape
        weight = torch.ones(count, beam, dtype=torch.float64) if lengths is None else 1 / lengths.double()
        scaled = totals * weight[:, :, None]
        one, other = weight[:, :, None], weight[:, None, :]
        apart = (ways[:, :, None] != ways[:, None]) | (one != other)[..., None]
        while True:
            # log Z is mostly near its lower bound.
            scores = scaled - (self._low[ways].sum(2) * weight)[:, :, None]
            places = torch.topk(scores.reshape(count, -1), keep).indices
            kept = torch.zeros(count, beam * k, dtype=torch.bool).scatter_(1, places, True).reshape(totals.shape)
            least = scaled.masked_fill(~kept, torch.inf).amin(2)
            most = scaled.masked_fill(kept, -torch.inf).amax(2)
            gap = self._high[ways][:, :, None] * one[..., None] - self._low[ways][:, None] * other[..., None]
            gap = torch.where(apart, gap, 0).sum(3)
            doubtful = (least[:, :, None] - gap < most[:, None]) & (most[:, None] > -torch.inf)
            wide = self._widest(ways, apart, doubtful)
            if not len(wide):
                return places
            self._settle(wide)

    def _widest(self, ways: Tensor, apart: Tensor, doubtful: Tensor) -> Tensor:
        """Return the numbers of the states of the widest bounds, one for each pair in doubt."""
        sentence, one, other = torch.nonzero(doubtful, as_tuple=True)
        both = torch.cat([ways[sentence, one], ways[sentence, other]], 1)
        width = (self._high - self._low)[both] * torch.cat(2 * [apart[sentence, one, other]], 1)
        if not width.numel():
            return torch.empty(0, dtype=torch.int64)
        value, place = width.max(1)
        found: Tensor = torch.unique(both.gather(1, place[:, None])[value > 0])
        return found

    def _settle(self, numbers: Tensor) -> None:
        exact = self._exact(torch.stack([self._states[number] for number in numbers.tolist()])).double()
        self._low[numbers] = exact
        self._high[numbers] = exact
        self.settled += len(numbers)
