"""Swap policies: which of the samples just used leave memory, and which come in for them.

A sample that leaves needs no I/O: storage has it. The sample that comes in for it is of the same class, or any sample
if swaps do not keep classes. `RandomSwap` and `AgeSwap` choose slots without looking at their samples, so that memory
stays a uniform subset of storage at all times; with `DeckSwap` it does since new samples trade places in the deck;
`GateSwap` and `LossSwap` keep hard samples, so that memory is not uniform.
"""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from memhier import backend
from memhier.arguments import by_name, check_number
from memhier.errors import FormatError
from memhier.fields import described
from memhier.recsys.replay.placement.placement import Placement
from memhier.recsys.replay.streams import mixed

__all__ = [
    "AgeSwap", "DeckSwap", "FixedRatio", "GateSwap", "LossSwap", "Pool", "RandomSwap", "Ratio", "SteeredRatio",
    "SwapPolicy", "Used", "as_floats", "encoded_policy", "gate_scores", "stored_policy", "swap_policy", "swaps",
]  # fmt: skip

Ints = NDArray[np.int64]

_HAND = 256  # positions that a deck deals at a time, at least
_ATTEMPTS = 16
_FEW = 256  # positions that the core compares with each other
_PEERS = 0x2545F4914F6CDD1D  # sets the draws of peers apart from the order of the deck


class Ratio(Protocol):
    """The share of the used samples that a step swaps; a class of your own may decide it.

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np
    >>> from memhier.recsys.replay import CarouselBuffer, RandomSwap
    >>> class Halving:
    ...     now = 2.0
    ...     def share(self):
    ...         self.now /= 2
    ...         return self.now
    ...     def stalled(self, seconds, step_seconds):
    ...         pass
    >>> with CarouselBuffer(
    ...     tempfile.mkdtemp() + "/buffer", memory=4, schema={"x": "int64"}, swap=RandomSwap(Halving()), delay=0
    ... ) as buffer:
    ...     _ = buffer.add({"x": np.arange(20)})
    ...     for _ in range(2):
    ...         buffer.feedback(buffer.sample(4))
    ...         print(buffer.stats()["swapped"])
    4
    6
    """

    def share(self) -> float:
        """Return the share for this step, 0 to 1."""

    def stalled(self, seconds: float, step_seconds: float) -> None:
        """Note how long the last step waited for swaps, and how long it took."""


class FixedRatio:
    """The same share of the used samples in every step.

    Parameters
    ----------
    share
        0 to 1; the number of samples is rounded up.

    Examples
    --------
    >>> from memhier.recsys.replay import FixedRatio, RandomSwap
    >>> FixedRatio(0.25).share(), RandomSwap(0.25)  # a number becomes a FixedRatio
    (0.25, RandomSwap(0.25))
    """

    def __init__(self, share: float) -> None:
        self._share = check_number("ratio", share, 0, 1)

    def share(self) -> float:
        """See :class:`Ratio`."""
        return self._share

    def stalled(self, seconds: float, step_seconds: float) -> None:
        """Take no notice."""
        return

    def __repr__(self) -> str:
        return f"{self._share}"


class SteeredRatio:
    """As large a share as storage sustains: it shrinks when a step had to wait, and grows slowly otherwise.

    Swaps then depend on the speed of the machine, so that runs no longer repeat each other.

    Parameters
    ----------
    largest
        Share to start with and not to exceed, 0 to 1.
    tolerance
        The share of a step's time that it may wait, 0 to 1.

    Examples
    --------
    >>> from memhier.recsys.replay import RandomSwap, SteeredRatio
    >>> ratio = SteeredRatio(largest=0.5, tolerance=0.01)
    >>> policy = RandomSwap(ratio)
    >>> ratio.stalled(seconds=0.1, step_seconds=1.0)  # the buffer calls it at the end of each step
    >>> round(ratio.share(), 2)
    0.35
    """

    def __init__(self, largest: float = 1.0, tolerance: float = 0.01) -> None:
        self.largest: float = check_number("largest", largest, 0, 1)
        self.tolerance: float = check_number("tolerance", tolerance, 0, 1)
        self._share = self.largest

    def share(self) -> float:
        """See :class:`Ratio`."""
        return self._share

    def stalled(self, seconds: float, step_seconds: float) -> None:
        """Shrink the share after a step that waited longer than `tolerance` allows, or let it grow by 0.005."""
        if seconds > self.tolerance * step_seconds:
            self._share *= 0.7
        else:
            self._share = min(self.largest, self._share + 0.005)

    def __repr__(self) -> str:
        return f"SteeredRatio({self.largest}, {self.tolerance})"


def as_ratio(ratio: float | Ratio) -> Ratio:
    """Return a fixed ratio for a number, and any other as it is."""
    return FixedRatio(ratio) if isinstance(ratio, int | float) else ratio


def swaps(ratio: Ratio, used: int) -> int:
    """Return how many of the used samples leave: the share, rounded up."""
    # 0.1 * 30 is a little more than 3.
    return min(used, math.ceil(round(ratio.share() * used, 9)))


@dataclass(frozen=True, slots=True)
class Used:
    """The samples of a batch that may leave.

    Attributes
    ----------
    groups
        int64 [n]: class of each, or 0 if swaps do not keep classes.
    labels
        int64 [n]; -1 for samples without one.
    swapped
        int64 [n]: the step in which the slot of each was last swapped, -1 for never.
    scores
        Those given to `feedback`, for each of them; None for none.

    Examples
    --------
    >>> import numpy as np
    >>> from memhier.recsys.replay import LossSwap, Used
    >>> zeros = np.zeros(3, np.int64)
    >>> used = Used(groups=zeros, labels=zeros, swapped=zeros - 1, scores=np.array([0.5, 0.1, 2.0]))
    >>> LossSwap().victims(used, 2, np.random.default_rng(0)).tolist()
    [1, 0]
    """

    groups: Ints
    labels: Ints
    swapped: Ints
    scores: NDArray[Any] | None

    def __len__(self) -> int:
        return len(self.groups)


class Pool:
    """The samples of a group that may come in: those in storage but not in memory.

    Attributes
    ----------
    group
        Its number: the class, or 0 if swaps do not keep classes.
    positions
        int64: the positions of all its samples in storage, those in memory too.

    Examples
    --------
    A policy that brings in the newest samples:

    >>> import tempfile
    >>> import numpy as np
    >>> from memhier.recsys.replay import CarouselBuffer, RandomSwap
    >>> class NewestSwap(RandomSwap):
    ...     name = "newest"
    ...     def incoming(self, pool, count, random):
    ...         return np.sort(pool.positions[pool.outside(pool.positions)])[-count:]
    >>> path = tempfile.mkdtemp() + "/buffer"
    >>> with CarouselBuffer(path, memory=2, schema={"x": "int64"}, swap=NewestSwap(1.0), delay=0, seed=1) as buffer:
    ...     _ = buffer.add({"x": np.arange(100)})
    ...     buffer.feedback(buffer.sample(2))
    ...     sorted(buffer.sample(2)["x"].tolist())
    [98, 99]
    """

    def __init__(self, placement: Placement, group: int) -> None:
        self.group = group
        self._members = placement.members
        self._slots = placement.slot_of
        there = self._members.groups.get(group)
        self.positions: Ints = np.empty(0, np.int64) if there is None else there.positions
        self._size = len(self.positions) - placement.of_group.get(group, 0)

    def __len__(self) -> int:
        return self._size

    def outside(self, positions: Ints) -> NDArray[np.bool_]:
        """Return which positions are not in memory."""
        return self._slots[positions] < 0

    def has(self, position: int) -> bool:
        """Whether a position that may be out of date is of the group, and not in memory."""
        if position >= self._members.size or self._slots[position] >= 0:
            return False
        return self._members.group_at(position) == self.group

    def includes(self, positions: Ints) -> NDArray[np.bool_]:
        """Return which positions, that may be out of date, are of the group."""
        found: NDArray[np.bool_] = positions < self._members.size
        found[found] = self._members.groups_at(positions[found]) == self.group
        return found

    def ranks(self, positions: Ints) -> Ints:
        """Return the places of positions of the group in `positions`."""
        return self._members.ranks[positions].astype(np.int64)

    def peer(self, position: int, key: int) -> int:
        """Return one of the group that came before a position, or itself, in memory as it is or outside as it is.

        All are equally likely; the choice depends on the key and the position alone.
        """
        count, inside = int(self._members.ranks[position]) + 1, bool(self._slots[position] >= 0)
        for draw in (mixed(_ATTEMPTS * position + np.arange(_ATTEMPTS), key ^ _PEERS) >> np.uint64(11)).tolist():
            there = int(self.positions[draw * count >> 53])
            if (self._slots[there] >= 0) == inside:
                return there
        some = self.positions[:count]
        some = some[(self._slots[some] >= 0) == inside]
        return int(some[draw * len(some) >> 53])

    def draw(self, count: int, random: np.random.Generator) -> Ints:
        """Return `count` positions drawn at random, or all if there are fewer, in random order."""
        count = min(count, self._size)
        every = len(self.positions)
        if 8 * self._size < every or count > self._size // 2:
            return random.permutation(self.positions[self.outside(self.positions)])[:count]
        drawn: dict[int, None] = {}
        while len(drawn) < count:
            uniforms = random.random(2 * (count - len(drawn)) + 4)
            if backend.core is not None and not drawn and count <= _FEW:
                chosen: Ints = np.empty(count, np.int64)
                if count == backend.core.draw_outside(
                    positions=self.positions, slot_of=self._slots, uniforms=uniforms, chosen=chosen
                ):
                    return chosen
            some = self.positions[(uniforms * every).astype(np.int64)]
            drawn.update(dict.fromkeys(some[self.outside(some)].tolist()))
        return np.array([*drawn][:count], np.int64)


class SwapPolicy(Protocol):
    """Chooses samples that leave memory and samples that come in. May keep state, and so serves one buffer.

    Attributes
    ----------
    name
        A name of its own. A checkpoint holds only the policies of this library: give `CarouselBuffer.open` any other.
    ratio
        How many of the samples just used are swapped.

    Examples
    --------
    A policy of your own, made from one of the library's; samples of the smallest label leave first:

    >>> import tempfile
    >>> import numpy as np
    >>> from memhier.recsys.replay import CarouselBuffer, RandomSwap
    >>> class LabelSwap(RandomSwap):
    ...     name = "label"
    ...     def victims(self, used, count, random):
    ...         return np.argsort(used.labels, kind="stable")[:count]
    >>> path = tempfile.mkdtemp() + "/buffer"
    >>> with CarouselBuffer(path, memory=4, schema={"x": "int64"}, swap=LabelSwap(0.5), delay=0) as buffer:
    ...     _ = buffer.add({"x": np.arange(100)}, labels=np.arange(100))
    ...     batch = buffer.sample(4)
    ...     buffer.feedback(batch)
    ...     stayed = np.isin(batch.ids, buffer.reader().ids())
    >>> sorted(batch.labels[stayed].tolist()) == sorted(batch.labels.tolist())[2:]
    True
    """

    name: str
    ratio: Ratio

    def check_scores(self, scores: Any, count: int) -> NDArray[Any] | None:
        """Return the scores given to `feedback` as an array [count, ...]; raise for unfit ones."""

    def victims(self, used: Used, count: int, random: np.random.Generator) -> Ints:
        """Return which of the used samples leave: `count` distinct numbers below ``len(used)``."""

    def incoming(self, pool: Pool, count: int, random: np.random.Generator) -> Ints:
        """Return the positions that come in, distinct and out of `pool`: `count`, or as many as it has."""

    def renamed(self, position: int, old: int) -> None:
        """Note that the sample at position `old` is at another now."""

    def state(self) -> Any:
        """Return the state for a checkpoint, for JSON."""

    def restore(self, state: Any) -> None:
        """Take over a state that `state` returned."""


class RandomSwap:
    """Swaps a share of the used samples, drawn at random, for others drawn at random.

    Parameters
    ----------
    ratio
        The share, 0 to 1, or a `Ratio`; the number of samples is rounded up.

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np
    >>> from memhier.recsys.replay import CarouselBuffer, RandomSwap
    >>> path = tempfile.mkdtemp() + "/buffer"
    >>> with CarouselBuffer(path, memory=4, schema={"x": "int64"}, swap=RandomSwap(0.25), delay=0) as buffer:
    ...     _ = buffer.add({"x": np.arange(100)})
    ...     batch = buffer.sample(4)
    ...     buffer.feedback(batch)
    ...     int(np.isin(batch.ids, buffer.reader().ids()).sum())
    3
    """

    name = "random"

    def __init__(self, ratio: float | Ratio = 0.5) -> None:
        self.ratio: Ratio = as_ratio(ratio)

    def check_scores(self, scores: Any, count: int) -> NDArray[Any] | None:
        """Take no notice of scores: this policy needs none."""
        return None

    def victims(self, used: Used, count: int, random: np.random.Generator) -> Ints:
        """Return numbers of used samples; see :class:`SwapPolicy`."""
        return random.permutation(len(used))[:count]

    def incoming(self, pool: Pool, count: int, random: np.random.Generator) -> Ints:
        """Return positions out of `pool`; see :class:`SwapPolicy`."""
        return pool.draw(count, random)

    def renamed(self, position: int, old: int) -> None:
        """Note a new position; see :class:`SwapPolicy`."""
        return

    def state(self) -> Any:
        """Return the state for a checkpoint."""
        return None

    def restore(self, state: Any) -> None:
        """Take over a state."""
        return

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.ratio!r})"


class AgeSwap(RandomSwap):
    """Swaps the slots with the oldest swap first.

    Parameters
    ----------
    ratio
        As in :class:`RandomSwap`.

    Examples
    --------
    >>> import numpy as np
    >>> from memhier.recsys.replay import AgeSwap, Used
    >>> zeros = np.zeros(3, np.int64)
    >>> used = Used(groups=zeros, labels=zeros, swapped=np.array([4, -1, 2]), scores=None)
    >>> AgeSwap(0.5).victims(used, 2, np.random.default_rng(0)).tolist()
    [1, 2]
    """

    name = "age"

    def victims(self, used: Used, count: int, random: np.random.Generator) -> Ints:
        return np.lexsort((random.random(len(used)), used.swapped))[:count]


class LossSwap(RandomSwap):
    """Swaps the samples of the smallest loss first; `feedback` takes the losses, ``[n]``.

    Parameters
    ----------
    ratio
        As in :class:`RandomSwap`.

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np
    >>> from memhier.recsys.replay import CarouselBuffer, LossSwap
    >>> path = tempfile.mkdtemp() + "/buffer"
    >>> with CarouselBuffer(path, memory=4, schema={"x": "int64"}, swap=LossSwap(0.5), delay=0) as buffer:
    ...     _ = buffer.add({"x": np.arange(100)})
    ...     batch = buffer.sample(4)
    ...     buffer.feedback(batch, scores=[0.1, 2.0, 0.2, 3.0])
    ...     np.isin(batch.ids, buffer.reader().ids()).tolist()
    [False, True, False, True]
    """

    name = "loss"

    def check_scores(self, scores: Any, count: int) -> NDArray[Any] | None:
        """Return losses as float64 [count]; raise for others."""
        return _as_scores(scores, (count,), "the loss of each sample, shape [n]")

    def victims(self, used: Used, count: int, random: np.random.Generator) -> Ints:
        assert used.scores is not None
        return np.lexsort((random.random(len(used)), used.scores))[:count]


class GateSwap(RandomSwap):
    """CarM's gate: samples that the model knows leave first, those that it is wrong about and sure of stay longest.

    `feedback` takes the logits, ``[n, classes]``, with a column for each label. The score is half the entropy of their
    softmax over its maximum if the prediction is right, and one minus that if it is wrong; the smallest leave.
    Each class swaps its share of the used samples, rounded down, and classes drawn at random give the missing ones
    (``hybrid_balanced_p`` of the authors' code; arXiv 2110.07276).

    Parameters
    ----------
    ratio
        As in :class:`RandomSwap`.

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np
    >>> from memhier.recsys.replay import CarouselBuffer, GateSwap
    >>> path = tempfile.mkdtemp() + "/buffer"
    >>> with CarouselBuffer(path, memory=4, schema={"x": "int64"}, swap=GateSwap(0.5), delay=0) as buffer:
    ...     _ = buffer.add({"x": np.arange(100)}, labels=[0] * 100)
    ...     batch = buffer.sample(4)
    ...     buffer.feedback(batch, scores=[[9, 0], [0, 9], [9, 0], [1, 0]])  # known, wrong, known, unsure
    ...     np.isin(batch.ids, buffer.reader().ids()).tolist()
    [False, True, False, True]
    """

    name = "gate"

    def check_scores(self, scores: Any, count: int) -> NDArray[Any] | None:
        """Return logits as float64 [count, classes]; raise for others."""
        array = np.empty(0) if scores is None else as_floats(scores)
        shape = (count, *(max(1, length) for length in array.shape[-1:]))
        return _as_scores(scores, shape, "the logits of each sample, shape [n, classes]")

    def check_labels(self, scores: NDArray[Any], labels: Ints) -> None:
        """Raise ValueError for labels that have no column in the logits, which no prediction can be compared with."""
        classes = scores.shape[1]
        unfit = labels[(labels < 0) | (labels >= classes)]
        if len(unfit) and int(unfit[0]) < 0:
            raise ValueError("scores: the gate compares predictions with labels, and samples of the batch have none")
        if len(unfit):
            raise ValueError(f"scores: logits of {classes} classes, but the batch has the label {int(unfit.max())}; "
                             "the gate needs a column for every label, 0 to the largest")  # fmt: skip

    def victims(self, used: Used, count: int, random: np.random.Generator) -> Ints:
        assert used.scores is not None
        order = np.argsort(gate_scores(used.scores, used.labels), kind="stable")
        groups, members = np.unique(used.groups, return_inverse=True)
        sizes = np.bincount(members, minlength=len(groups))
        quotas = np.floor(sizes * (count / max(1, len(used))) + 1e-9).astype(np.int64)
        while (missing := count - int(quotas.sum())) > 0:
            short = np.flatnonzero(quotas < sizes)
            quotas[random.permutation(short)[:missing]] += 1
        # The rank of each sample within its class, the easiest first.
        ranks = np.empty(len(used), np.int64)
        for group in range(len(groups)):
            of_group = order[members[order] == group]
            ranks[of_group] = np.arange(len(of_group))
        chosen: Ints = order[ranks[order] < quotas[members[order]]][:count]
        return chosen


class DeckSwap(RandomSwap):
    """Brings in every sample once, in shuffled order, before any a second time; victims are drawn at random.

    Every position has a random number that depends on the pass, and they come in by rising number. So the order needs
    no memory: the deck holds only a hand of the next few. A sample that comes trades its place in the order with one
    drawn at random: it is as likely as any other to have had its turn. The deck notes such places until the pass ends.

    Parameters
    ----------
    ratio
        As in :class:`RandomSwap`.

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np
    >>> from memhier.recsys.replay import CarouselBuffer, DeckSwap
    >>> path, seen = tempfile.mkdtemp() + "/buffer", set()
    >>> with CarouselBuffer(path, memory=2, schema={"x": "int64"}, swap=DeckSwap(1.0), delay=0) as buffer:
    ...     _ = buffer.add({"x": np.arange(6)})
    ...     for _ in range(4):
    ...         batch = buffer.sample(2)
    ...         seen.update(batch["x"].tolist())
    ...         buffer.feedback(batch)
    >>> sorted(seen)
    [0, 1, 2, 3, 4, 5]
    """

    name = "deck"

    def __init__(self, ratio: float | Ratio = 0.5) -> None:
        super().__init__(ratio)
        self._decks: dict[int, _Deck] = {}

    def incoming(self, pool: Pool, count: int, random: np.random.Generator) -> Ints:
        drawn: list[int] = []
        while len(drawn) < min(count, len(pool)):
            position = self._decks.setdefault(pool.group, _Deck()).draw(pool, random)
            if position not in drawn:
                drawn.append(position)
        return np.array(drawn, np.int64)

    def entered(self, pool: Pool, position: int, replaced: int) -> None:
        """Give a position that has joined a group a place in its deck, as likely any as another.

        Parameters
        ----------
        pool
            Of the group.
        position
            The new one.
        replaced
            The position of the group whose slot of memory it took; -1 for none.
        """
        deck = self._decks.get(pool.group)
        if deck is not None and deck.key is not None:
            deck.trade(position, pool.peer(position, deck.key) if replaced < 0 else replaced)

    def renamed(self, position: int, old: int) -> None:
        for deck in self._decks.values():
            deck.hand = [position if held == old else held for held in deck.hand if held != position]
            deck.places.pop(position, None)
            deck.places.pop(old, None)

    def state(self) -> Any:
        return [
            [group, deck.key, deck.dealt, deck.hand, [[*place] for place in deck.places.items()]]
            for group, deck in self._decks.items()
        ]

    def restore(self, state: Any) -> None:
        # Decks of version 2 have no places.
        self._decks = {
            group: _Deck(key, dealt, list(hand), dict(*places)) for group, key, dealt, hand, *places in state
        }


@dataclass(slots=True)
class _Deck:
    """A pass over a group.

    Attributes
    ----------
    key
        Of the pass; None before the first.
    dealt
        The random number up to which positions were dealt.
    hand
        Positions dealt, but not drawn yet, the next one last.
    places
        The numbers from which some positions have their random ones; others have their own.
    """

    key: int | None = None
    dealt: int = 0
    hand: list[int] = field(default_factory=list)
    places: dict[int, int] = field(default_factory=dict)

    def trade(self, position: int, other: int) -> None:
        """Let a new position and another have each other's place."""
        if position in self.hand:  # of its time in the group before
            self.hand.remove(position)
        self.places.pop(position, None)
        if position != other:
            self.places[position], self.places[other] = self.places.get(other, other), position
            self.hand = [position if held == other else held for held in self.hand]

    def draw(self, pool: Pool, random: np.random.Generator) -> int:
        """Return the next position that is not in memory: one in memory was brought in already."""
        while True:
            while not self.hand:
                self._deal(pool, random)
            position = self.hand.pop()
            if pool.has(position):
                return position

    def _deal(self, pool: Pool, random: np.random.Generator) -> None:
        if self.key is None:
            self.key, self.dealt = int(random.integers(2**62)), 0
        numbers = mixed(self._numbers(pool), self.key)
        waiting = np.flatnonzero(numbers > np.uint64(self.dealt))
        if len(waiting) == 0:
            self.key = None
            self.places.clear()
            return
        count = min(len(waiting), max(_HAND, len(numbers) // 64))
        some = waiting[np.argpartition(numbers[waiting], count - 1)[:count]]
        some = some[np.argsort(numbers[some])]
        self.dealt = int(numbers[some[-1]])
        self.hand = pool.positions[some][::-1].tolist()

    def _numbers(self, pool: Pool) -> Ints:
        """Return the number of the place of each position of a group."""
        if not self.places:
            return pool.positions
        numbers = pool.positions.copy()
        positions, places = np.array([*self.places.items()], np.int64).T
        there = pool.includes(positions)
        numbers[pool.ranks(positions[there])] = places[there]
        return numbers


def gate_scores(logits: NDArray[Any], labels: Ints) -> NDArray[np.float64]:
    """Return CarM's score of predictions, 0 (right and sure) to 1 (wrong and sure), float64 [n].

    Parameters
    ----------
    logits
        [n, classes].
    labels
        int64 [n]: the right columns.
    """
    shifted = logits - logits.max(axis=1, keepdims=True)
    weights = np.exp(shifted)
    total = weights.sum(axis=1)
    entropy = np.log(total) - (weights * shifted).sum(axis=1) / total
    doubt = 0.5 * entropy / math.log(max(2, logits.shape[1]))
    scores: NDArray[np.float64] = np.where(logits.argmax(axis=1) == labels, doubt, 1 - doubt)
    return scores


def _as_scores(scores: Any, shape: tuple[int, ...], expected: str) -> NDArray[Any]:
    if scores is None:
        raise ValueError(f"scores: this swap policy needs {expected}")
    array = as_floats(scores)
    if array.shape != shape:
        raise ValueError(f"scores: expected {expected} with n={shape[0]}, got shape {list(array.shape)}")
    if not np.isfinite(array).all():
        raise ValueError("scores: expected finite numbers; a model that diverged has none")
    return array


def as_floats(scores: Any) -> NDArray[np.float64]:
    """Return numbers, which may be a torch tensor of any floating dtype and device, as float64."""
    if hasattr(scores, "detach"):
        scores = scores.detach().cpu().double().numpy()  # numpy has no bfloat16
    try:
        return np.asarray(scores, np.float64)
    except (TypeError, ValueError) as error:
        raise TypeError(f"scores: expected an array of numbers ({error})") from error


_POLICIES: dict[str, type[RandomSwap]] = {
    policy.name: policy for policy in (RandomSwap, DeckSwap, GateSwap, LossSwap, AgeSwap)
}


def encoded_policy(policy: SwapPolicy | None) -> Any:
    """Return the name and the ratio of a policy, for JSON; `stored_policy` makes it again."""
    if policy is None:
        return None
    ratio = policy.ratio
    if isinstance(ratio, FixedRatio):
        return [policy.name, ratio.share()]
    if isinstance(ratio, SteeredRatio):
        return [policy.name, [ratio.largest, ratio.tolerance]]
    return [policy.name, None]


def stored_policy(spec: Any, given: SwapPolicy | None, path: Path) -> SwapPolicy | None:
    """Return the policy of a checkpoint, or the one given in its place.

    Raises
    ------
    FormatError
        For a policy of the caller's own, if none is given.
    """
    if given is not None or spec is None:
        return given
    name, ratio = spec
    kind = _POLICIES.get(name)
    if kind is None or ratio is None:
        raise FormatError(f"{path}: the buffer was made with swap policy {name!r} of its owner; pass swap=")
    with described(f"{path}: the swap policy"):
        return kind(SteeredRatio(*ratio) if isinstance(ratio, list) else ratio)


def swap_policy(swap: str | SwapPolicy | None) -> SwapPolicy | None:
    """Return the policy of a name, with a ratio of one half: ``"random"``, ``"deck"``, ``"gate"``, ``"loss"``,
    ``"age"``.

    Raises
    ------
    ValueError
        For any other name.
    TypeError
        For a class.
    """
    found: SwapPolicy | None = by_name("swap", swap, _POLICIES, "a policy, such as {}(0.5)", ", a policy, or None")
    return found
