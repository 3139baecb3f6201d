"""The least effort that keeps a recall for given queries, found by searching for them with steps of a ladder.

Efforts for ascending recalls are steps of one ladder: no part of a step exceeds that of the next. The queries are
searched with steps of the ladder, and with a step between two of them. The least one whose mean loss, by conformal risk
control (Angelopoulos et al., 2022), stays below the loss that a recall allows is taken.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Protocol, TypeAlias, TypeVar

__all__ = ["Steps", "Trial", "Trials", "least_efforts"]

E = TypeVar("E")
Steps: TypeAlias = list[tuple[float, E, float]]
"""Recall, effort, and pages of a query, ascending."""

_ATTEMPTS = 2  # at a step between two
_SAFE = 0.1  # of the way between two efforts, beyond the place where their losses suggest the loss allowed
_CLOSE = 0.002  # below the loss allowed, where no better step is looked for


@dataclass(frozen=True, slots=True)
class Trial:
    """The mean share of the neighbours lost, and the pages read for a query."""

    loss: float
    pages: float


class Trials(Protocol[E]):
    """Searches for the same queries, with one effort after another."""

    def __len__(self) -> int:
        """The number of queries."""

    def of(self, effort: E) -> Trial:
        """Return the trial of an effort, which is asked for once."""

    def mixed(self, few: E, enough: E, share: float) -> E:
        """Return an effort that is greater than `few` by a share of the difference to `enough`."""

    def parts(self, effort: E) -> tuple[float, ...]:
        """Return the parts of an effort that grow along a ladder."""


def least_efforts(trials: Trials[E], steps: Steps[E]) -> Steps[E]:
    """Return the least effort of each recall that `steps` keep, by ascending recall, with the pages of a query."""
    least: Steps[E] = []
    of, count, at = cache(trials.of), len(trials), 0
    for number, (recall, _, _) in enumerate(steps):
        allowed = ((1 - recall) * (count + 1) - 1) / max(1, count)
        if allowed < 0:  # these queries are too few to tell; steps before `at` lose too much even for lower recalls
            at = max(at, number)
            least.append((recall, *steps[at][1:]))
            continue
        while at < len(steps) and of(steps[at][1]).loss > allowed:
            at += 1
        if at == len(steps):
            break
        effort = steps[at][1]
        if at > 0:
            effort = _between(of, trials.mixed, (steps[at - 1][1], effort), allowed)
        least.append((recall, effort, of(effort).pages))
    for number in reversed(range(len(least) - 1)):
        # An effort that is enough for a higher recall is enough for the lower one as well.
        if trials.parts(least[number][1]) > trials.parts(least[number + 1][1]):
            least[number] = (least[number][0], *least[number + 1][1:])
    return least


def _between(of: Callable[[E], Trial], mixed: Callable[[E, E, float], E], ends: tuple[E, E], allowed: float) -> E:
    """Return an effort near the loss allowed, between one that loses more and one that is enough."""
    few, enough = ends
    low, high, chosen = 0.0, 1.0, enough
    lost, kept = of(few).loss, of(enough).loss
    for _ in range(_ATTEMPTS):
        if allowed - kept < _CLOSE:
            break
        share = low + (high - low) * min(1.0, (lost - allowed) / (lost - kept) + _SAFE)
        effort = mixed(few, enough, share)
        loss = of(effort).loss
        if loss <= allowed:
            high, kept, chosen = share, loss, effort
        else:
            low, lost = share, loss
    return chosen
