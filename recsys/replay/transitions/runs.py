"""Runs of transitions that follow each other in one trajectory: n-step returns and slices."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memhier.arguments import check_int, check_number
from memhier.recsys.replay.schema import Columns

__all__ = ["NStep", "Runs", "Slices", "Trajectories", "decoded_runs", "encoded_runs", "end_fields", "flags_of"]

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]

_ENDS = ("terminated", "truncated", "done")
_LONGEST = 2**16


@dataclass(frozen=True)
class NStep:
    """Returns of several steps, computed when a batch is drawn.

    A sampled transition has the sum of the rewards of up to `steps` transitions from it on, each discounted, and the
    fields of `last` from the last of these. The sum ends with its trajectory, and before a transition that is not
    there yet; ``batch.steps`` holds how many rewards it has, ``batch.discounts`` the factor of the value that follows.

    Parameters
    ----------
    steps
        At most so many rewards.
    discount
        Factor from one step to the next.
    reward
        Name of the field. By default ``next.reward``, or ``reward``. Sums of integers are float32.
    last
        Names of the fields taken from the last transition. By default those whose names begin with ``next``, and those
        that end trajectories.

    Examples
    --------
    >>> from memhier.recsys.replay.transitions import NStep
    >>> NStep(3, 0.99).steps
    3
    """

    steps: int
    discount: float = 0.99
    reward: str | None = None
    last: Sequence[str] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", check_int("steps", self.steps, 1, _LONGEST))
        object.__setattr__(self, "discount", check_number("discount", self.discount, 0, 1))

    @property
    def length(self) -> int:
        """Transitions read for one of a batch, at most."""
        return self.steps

    def fields(self, names: Sequence[str], ends: Sequence[str]) -> tuple[str, list[str]]:
        """Return the name of the reward, and those of the fields of the last transition."""
        found = [name for name in ("next.reward", "reward") if name in names]
        reward = self.reward or (found[0] if found else "")
        if reward not in names:
            raise ValueError(f"reward={self.reward!r}: expected one of the fields {list(names)}")
        if self.last is None:
            return reward, [name for name in names if name != reward and (name.startswith("next") or name in ends)]
        unknown = [name for name in self.last if name not in names or name == reward]
        if unknown:
            raise ValueError(f"last: {unknown} are no fields beside the reward; those are {list(names)}")
        return reward, list(self.last)


@dataclass(frozen=True)
class Slices:
    """Several transitions that follow each other in one trajectory; every such slice is as likely as any other.

    Priorities are those of the slice that begins at a transition. `batch` counts slices.

    Parameters
    ----------
    length
        Transitions of a slice.
    padded
        True has a trajectory shorter than `length` as one slice, filled up with zeros; ``batch.mask`` tells which
        transitions are real. False leaves such trajectories out.

    Examples
    --------
    >>> from memhier.recsys.replay.transitions import Slices
    >>> Slices(8).padded
    False
    """

    length: int
    padded: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "length", check_int("length", self.length, 1, _LONGEST))


Runs = NStep | Slices
_KINDS: Mapping[str, type[NStep] | type[Slices]] = {"nstep": NStep, "slices": Slices}


def encoded_runs(runs: Runs | None) -> dict[str, Any] | None:
    """Return the argument of `decoded_runs`, for JSON."""
    return None if runs is None else {"kind": type(runs).__name__.lower(), **asdict(runs)}


def decoded_runs(value: dict[str, Any] | None) -> Runs | None:
    """Return the runs that `encoded_runs` described."""
    if value is None:
        return None
    settings = dict(value)
    return _KINDS[settings.pop("kind")](**settings)


def end_fields(names: Sequence[str]) -> list[str]:
    """Return the fields that end a trajectory by their usual names; of the next step, if it has such fields."""
    found = [name for name in names if name.split(".")[-1] in _ENDS]
    return [name for name in found if name.startswith("next")] or found


class Trajectories:
    """Which transitions end a trajectory, a byte each, and how far the trajectory under way has come.

    Attributes
    ----------
    ends
        bool [capacity], of transition p at p modulo `capacity`; not to be written to by others.
    open_steps
        Transitions of the trajectory that has not ended.
    """

    def __init__(self, capacity: int) -> None:
        self.ends: Flags = np.zeros(capacity, np.bool_)
        self.open_steps: int = 0

    @property
    def memory_bytes(self) -> int:
        """DRAM held, in bytes."""
        return self.ends.nbytes

    def add(self, first: int, ends: Flags, slices: Slices | None) -> Ints:
        """Take in transitions from the number `first` on; return where slices begin that are whole now."""
        count, capacity = len(ends), len(self.ends)
        self.ends[np.arange(first, first + count) % capacity] = ends
        # Number of the step in its trajectory, from 1 on.
        at = np.arange(count)
        before = np.maximum.accumulate(np.where(ends, at, -1))
        before = np.concatenate([[-1], before[:-1]])
        steps = at - before + np.where(before < 0, self.open_steps, 0)
        self.open_steps = 0 if ends[-1] else int(steps[-1])
        if slices is None:
            return np.empty(0, np.int64)
        whole = np.flatnonzero(steps >= slices.length)
        starts = first + whole - slices.length + 1
        if slices.padded:
            short = np.flatnonzero(ends & (steps < slices.length))
            starts = np.concatenate([starts, first + short - steps[short] + 1])
        found: Ints = starts[starts >= max(0, first + count - capacity)]
        return found

    def restore(self, ends: Flags, open_steps: int) -> None:
        """Take over the ends of a checkpoint, from the first place on."""
        self.ends[: len(ends)] = ends
        self.open_steps = open_steps

    def lengths(self, numbers: Ints, most: int, stop: int) -> NDArray[np.int32]:
        """Return how many transitions from each number on are in its trajectory and before `stop`, up to `most`."""
        following = numbers[:, None] + np.arange(most)
        last = self.ends[following % len(self.ends)] | (following >= stop - 1)
        last[:, -1] = True
        lengths: NDArray[np.int32] = (last.argmax(axis=1) + 1).astype(np.int32)
        return lengths


def flags_of(columns: Columns, names: Sequence[str], count: int) -> Flags:
    """Return which transitions end a trajectory: those with a value of these fields that is not zero."""
    flags: Flags = np.zeros(count, np.bool_)
    for name in names:
        flags |= (columns[name].reshape(count, -1) != 0).any(axis=1)
    return flags
