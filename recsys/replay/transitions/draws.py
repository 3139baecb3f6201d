"""Draws of transitions: uniform, with or without replacement, or by priority (Schaul et al., ICLR 2016)."""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memhier.arguments import check_number
from memhier.errors import CorruptionError
from memhier.recsys.replay.streams import Purpose, Uniforms
from memhier.recsys.replay.transitions.sum_tree import SumTree

__all__ = ["Draw", "Draws", "Prioritised", "Uniform", "decoded_draw", "encoded_draw", "has_tree"]

Ints = NDArray[np.int64]
Doubles = NDArray[np.float64]

_TINY = float(np.finfo(np.float32).tiny)
_HUGE = float(np.finfo(np.float32).max)
_BLOCK = 2**14


@dataclass(frozen=True)
class Uniform:
    """Each transition is as likely as any other.

    Parameters
    ----------
    replace
        True draws each transition of a batch from all that are stored. False makes passes: no transition comes a
        second time before all have come; those that are added join the pass under way.

    Examples
    --------
    >>> from memhier.recsys.replay.transitions import Uniform
    >>> Uniform(replace=False)
    Uniform(replace=False)
    """

    replace: bool = True


@dataclass(frozen=True)
class Prioritised:
    """A transition is drawn, with replacement, in proportion to (priority + epsilon) to the power alpha.

    A new transition has the largest priority that was ever given, 1 at first. The weight of a drawn one is its
    probability to the power -beta, divided by that of the transition least likely of all stored.

    Parameters
    ----------
    alpha
        0 draws uniformly.
    beta
        1 corrects for the draw in full; `TransitionBuffer.sample` takes another one for a batch.
    epsilon
        Added to each priority, above 0.

    Examples
    --------
    >>> from memhier.recsys.replay.transitions import Prioritised
    >>> Prioritised(alpha=0.7)
    Prioritised(alpha=0.7, beta=0.4, epsilon=1e-06)
    """

    alpha: float = 0.6
    beta: float = 0.4
    epsilon: float = 1e-6

    def __post_init__(self) -> None:
        for name, most in (("alpha", 10.0), ("beta", 10.0)):
            object.__setattr__(self, name, check_number(name, getattr(self, name), 0, most))
        object.__setattr__(self, "epsilon", check_number("epsilon", self.epsilon, 0, 1e30, above=True))

    def leaves(self, priorities: Doubles) -> NDArray[np.float32]:
        """Return the numbers of the sum tree for priorities, above zero."""
        with np.errstate(over="ignore", under="ignore"):
            powers = np.power(priorities + self.epsilon, self.alpha)
        return np.minimum(np.maximum(powers, _TINY), _HUGE).astype(np.float32)  # np.clip takes three times as long


Draw = Uniform | Prioritised
_KINDS: dict[str, type[Uniform] | type[Prioritised]] = {"uniform": Uniform, "prioritised": Prioritised}


def encoded_draw(draw: Draw) -> dict[str, Any]:
    """Return the argument of `decoded_draw`, for JSON."""
    return {"kind": type(draw).__name__.lower(), **asdict(draw)}


def decoded_draw(value: dict[str, Any]) -> Draw:
    """Return the draw that `encoded_draw` described."""
    settings = dict(value)
    return _KINDS[settings.pop("kind")](**settings)


class Draws:
    """Numbers of the transitions drawn, and the sum tree that they are drawn by.

    Number p has leaf p modulo `capacity`. A leaf is zero where its transition is not to be drawn.

    Parameters
    ----------
    starts
        Whether only the transitions given to `allow` are drawn, those at which a slice begins.
    uniforms
        How many random numbers were taken before.

    Attributes
    ----------
    tree
        None for uniform draws with replacement from all.
    largest
        The largest priority so far.
    """

    def __init__(
        self, draw: Draw, capacity: int, seed: int, *, starts: bool, uniforms: int = 0, largest: float = 1.0
    ) -> None:
        self.draw = draw
        self.capacity = capacity
        self.largest: float = largest
        self.tree: SumTree | None = SumTree(capacity) if has_tree(draw, starts) else None
        self._starts = starts
        self._uniforms = Uniforms(seed, Purpose.SAMPLE, uniforms)

    @property
    def taken(self) -> int:
        """How many random numbers were taken."""
        return self._uniforms.position

    @property
    def memory_bytes(self) -> int:
        """DRAM held, in bytes."""
        return 0 if self.tree is None else self.tree.memory_bytes

    def add(self, first: int, last: int) -> None:
        """Take in the transitions `first` to `last` - 1, which replace those `capacity` before them."""
        if self.tree is not None:
            leaf = np.float32(0.0) if self._starts else self._new_leaf()
            self.tree.set(np.arange(first, last) % self.capacity, np.full(last - first, leaf))

    def restore(self, leaves: NDArray[np.float32], where: object) -> None:
        """Take over the leaves of a checkpoint, from the first place on."""
        assert self.tree is not None
        for start in range(0, len(leaves), _BLOCK):
            block = leaves[start : start + _BLOCK]
            if not (np.isfinite(block) & (block >= 0)).all():
                raise CorruptionError(f"{where}: a priority is not a finite number of at least 0")
            self.tree.set(np.arange(start, start + len(block)), block)

    def allow(self, numbers: Ints) -> None:
        """Let slices begin at these transitions."""
        if self.tree is not None:
            self.tree.set(numbers % self.capacity, np.full(len(numbers), self._new_leaf()))

    def take(self, count: int, oldest: int, stop: int) -> tuple[Ints, Doubles, Doubles]:
        """Draw from the transitions `oldest` to `stop` - 1.

        Returns
        -------
        numbers, probabilities, ratios
            int64 [count]; their probabilities; and that of the least likely one divided by these, float64 [count].
        """
        stored = stop - oldest
        if self.tree is None:
            numbers = oldest + (self._uniforms.take(count) * stored).astype(np.int64)
            return numbers, np.full(count, 1 / stored), np.ones(count)
        if isinstance(self.draw, Uniform):
            slots = self._pass(count, oldest, stop) if not self.draw.replace else self._drawn(count)
            share = 1 / stored if not self._starts else 1 / self.tree.total
            return self._numbers(slots, stop), np.full(count, share), np.ones(count)
        slots = self._drawn(count)
        leaves = self.tree.leaves[slots].astype(np.float64)
        return self._numbers(slots, stop), leaves / self.tree.total, self.tree.least / leaves

    def update(self, numbers: Ints, priorities: Doubles, oldest: int) -> int:
        """Give transitions priorities; those that are gone, or begin no slice any more, are left out. Return how many.

        A number that comes twice has the last priority.
        """
        assert isinstance(self.draw, Prioritised)
        assert self.tree is not None
        slots = numbers % self.capacity
        kept = ((numbers >= oldest) & (self.tree.leaves[slots] > 0)).nonzero()[0]
        if len(kept) < len(slots):
            slots, priorities = slots[kept], priorities[kept]
        if len(kept):
            self.largest = max(self.largest, float(priorities.max()))
            self.tree.set(slots, self.draw.leaves(priorities))
        return len(kept)

    def _new_leaf(self) -> np.float32:
        if isinstance(self.draw, Uniform):
            return np.float32(1.0)
        leaf: np.float32 = self.draw.leaves(np.array([self.largest]))[0]
        return leaf

    def _drawn(self, count: int) -> Ints:
        assert self.tree is not None
        return self.tree.draw(self._uniforms.take(count))

    def _pass(self, count: int, oldest: int, stop: int) -> Ints:
        """Draw without replacement; a pass that ends begins anew with all transitions."""
        assert self.tree is not None
        slots = self.tree.take(self._uniforms.take(count))
        while (left := int(np.count_nonzero(slots < 0))) > 0:
            for start in range(oldest, stop, _BLOCK):
                stored = np.arange(start, min(start + _BLOCK, stop)) % self.capacity
                self.tree.set(stored, np.ones(len(stored), np.float32))
            slots[count - left :] = self.tree.take(self._uniforms.take(left))
        return slots

    def _numbers(self, slots: Ints, stop: int) -> Ints:
        """Return the newest number of each slot."""
        return stop - 1 - (stop - 1 - slots) % self.capacity


def has_tree(draw: Draw, starts: bool) -> bool:
    """Return whether draws need a sum tree."""
    return starts or draw != Uniform(replace=True)
