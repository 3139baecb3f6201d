"""Choices among beginnings of texts by proven bounds of log Z: those that the full layer makes.

The score of a beginning is a sum of logits less the log Z of each hidden state on its way. Where the bounds of two
leave open which one is the better, the widest bounds on the way of either, that both do not share, give way to the
full product of that state. States that no choice depends on never take it.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

__all__ = ["Proof"]


class Proof:
    """The hidden states of a search, with bounds of log Z.

    Parameters
    ----------
    exact
        Maps hidden states ``[n, D]`` to log Z itself, ``[n]``.

    Attributes
    ----------
    settled
        How many states took the full product.
    """

    def __init__(self, exact: Callable[[Tensor], Tensor]) -> None:
        self._exact = exact
        # State 0 stands for none.
        self._low = self._high = torch.zeros(1, dtype=torch.float64)
        self._states: dict[int, Tensor] = {}
        self.settled = 0

    def add(self, states: Tensor, low: Tensor, high: Tensor) -> Tensor:
        """Take states and their bounds; return their numbers."""
        numbers = torch.arange(len(self._low), len(self._low) + len(states))
        self._states.update(zip(numbers.tolist(), states, strict=True))
        self._low = torch.cat([self._low, low.double()])
        self._high = torch.cat([self._high, high.double()])
        return numbers

    def keep(self, ways: Tensor) -> None:
        """Let go of all states that are on none of the ways, or whose log Z is known."""
        known = self._low == self._high
        left = [number for number in torch.unique(ways).tolist() if not known[number]]
        self._states = {number: self._states[number] for number in left}

    def bounds(self, ways: Tensor) -> tuple[Tensor, Tensor]:
        """Return bounds of the sums of log Z on ways ``[..., t]``, float64 ``[...]``."""
        return self._low[ways].sum(-1), self._high[ways].sum(-1)

    def settle(self, ways: Tensor) -> None:
        """Take the full product for all states on the ways whose log Z is open."""
        numbers = torch.unique(ways)
        self._settle(numbers[self._low[numbers] < self._high[numbers]])

    def best(self, totals: Tensor, ways: Tensor, keep: int | Sequence[int], lengths: Tensor | None = None) -> Tensor:
        """Return the places of the best continuations of each sentence beyond doubt, ``[n, keep]``, -1 for none.

        Parameters
        ----------
        totals
            Sums of logits, float64 ``[n, b, k]``: the continuations of each beginning.
        ways
            Numbers of the states of each beginning, ``[n, b, t]``; 0 for none. Equal numbers at one place are shared.
        keep
            How many, for all sentences or for each.
        lengths
            Divide the scores of beginnings, ``[n, b]``; None for 1.
        """
        count, beam, k = totals.shape
        wanted = torch.tensor([keep] * count if isinstance(keep, int) else list(keep))
        weight = torch.ones(count, beam, dtype=torch.float64) if lengths is None else 1 / lengths.double()
        scaled = totals * weight[:, :, None]
        one, other = weight[:, :, None], weight[:, None, :]
        apart = (ways[:, :, None] != ways[:, None]) | (one != other)[..., None]
        while True:
            # log Z is mostly near its lower bound.
            scores = scaled - (self._low[ways].sum(2) * weight)[:, :, None]
            places = torch.topk(scores.reshape(count, -1), int(wanted.max())).indices
            among = torch.arange(places.shape[1]) < wanted[:, None]
            kept = torch.zeros(count, beam * k, dtype=torch.bool).scatter_(1, places, among).reshape(totals.shape)
            least = scaled.masked_fill(~kept, torch.inf).amin(2)
            most = scaled.masked_fill(kept, -torch.inf).amax(2)
            gap = self._high[ways][:, :, None] * one[..., None] - self._low[ways][:, None] * other[..., None]
            gap = torch.where(apart, gap, 0).sum(3)
            doubtful = (least[:, :, None] - gap < most[:, None]) & (most[:, None] > -torch.inf)
            wide = self._widest(ways, apart, doubtful)
            if not len(wide):
                return places.masked_fill(~among, -1)
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
        if not len(numbers):
            return
        exact = self._exact(torch.stack([self._states[number] for number in numbers.tolist()])).double()
        self._low[numbers] = exact
        self._high[numbers] = exact
        self.settled += len(numbers)
