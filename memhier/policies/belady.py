"""Belady's rule: the key that is needed farthest ahead goes first."""

import itertools
from collections import deque
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from memhier import backend
from memhier.arguments import check_int
from memhier.policies._base import Access, Keys, as_keys, check_capacity, check_lookahead, over_budget, refuse_oversized
from memhier.policies._belady_reference import BeladyReference

if TYPE_CHECKING:
    from memhier_native._core import BeladyPolicy

__all__ = ["Belady"]

_HALF_LIFE_MAX = 2**40


class Belady:
    """Evicts the key that is needed farthest ahead, by the batches announced; keys in none of these go first.

    With the whole future announced this is MIN (Belady, IBM Systems Journal 5(2), 1966): no policy that has to take in
    every key it is asked for has fewer misses. All keys of a batch are needed at one time, for which the rule stays
    optimal. Beyond the announced window, keys are ranked by how often they were accessed while they were resident or
    announced, an access counting half as much as one that comes `half_life` keys later.

    Parameters
    ----------
    capacity
        Keys that may be resident at once.
    half_life
        In accesses, repeats within a batch not counted. By default four times the capacity: half of that forgets too
        much for training data, twice of that is slow to follow traces whose keys change.

    Notes
    -----
    Memory grows with the window: about 12 bytes for each announced access and 80 for each key resident or announced.

    Examples
    --------
    >>> from memhier.policies import Belady
    >>> policy = Belady(2)
    >>> for batch in ([1], [2], [3], [1]):
    ...     policy.announce(batch)
    >>> [policy.access(batch).evicted.tolist() for batch in ([1], [2], [3], [1])]
    [[], [], [2], []]
    """

    def __init__(self, capacity: int, *, half_life: int | None = None) -> None:
        self._capacity = check_capacity(capacity)
        if half_life is None:
            half_life = 4 * self._capacity
        half_life = check_int("half_life", half_life, 1, _HALF_LIFE_MAX, "accesses")
        make = BeladyReference if backend.core is None else backend.core.BeladyPolicy
        self._engine: BeladyPolicy | BeladyReference = make(capacity=self._capacity, half_life=half_life)
        self._next_number = 0
        self._numbers: deque[int] = deque()  # of the announced batches

    @property
    def capacity(self) -> int:
        """Keys that may be resident at once."""
        return self._capacity

    @property
    def pending(self) -> int:
        """Batches announced and not yet accessed."""
        return int(self._engine.pending)

    @property
    def idle(self) -> int:
        """Resident keys that no announced batch needs: while there are any, a longer window tells more."""
        return int(self._engine.idle)

    @property
    def memory_bytes(self) -> int:
        """Bytes of DRAM that the policy itself holds."""
        return int(self._engine.memory_bytes)

    def __len__(self) -> int:
        return len(self._engine)

    def __contains__(self, key: int) -> bool:
        return key in self._engine

    def announce(self, keys: npt.ArrayLike) -> None:
        """Say which keys the batch after those already announced will access.

        Parameters
        ----------
        keys
            int64 [n]; order and repeats do not matter here.

        Raises
        ------
        BudgetError
            When the distinct keys exceed the capacity: such a batch could never be accessed.
        """
        batch = as_keys(keys)
        refuse_oversized(batch, batch[:0], self, self._capacity)
        enough = self._engine.announce(batch)
        if enough:
            raise over_budget(enough, self._capacity)
        self._numbers.append(self._next_number)
        self._next_number += 1

    def announced(self, most: int) -> list[int]:
        """Return the numbers of the oldest announced batches, at most so many; a number is never given again."""
        return list(itertools.islice(tuple(self._numbers), most))

    def awaited(self, number: int) -> Keys:
        """Return the keys of an announced batch that neither are resident nor come in one before it, int64 [n].

        There are none of a batch that was accessed or withdrawn.
        """
        numbers = tuple(self._numbers)
        if not numbers or not numbers[0] <= number <= numbers[-1]:
            return np.empty(0, np.int64)
        return np.frombuffer(self._engine.awaited(after=number - numbers[0]), np.int64)

    def withdraw(self) -> None:
        """Take back every batch that was announced and not accessed: the future has become another."""
        self._engine.withdraw()
        self._numbers.clear()

    def access(self, keys: npt.ArrayLike, *, pinned: npt.ArrayLike = ()) -> Access:
        """Make a batch of keys resident; see :meth:`memhier.policies.Policy.access`.

        Where batches are announced, `keys` are those of the oldest one, in any order.

        Raises
        ------
        ValueError
            When they are others. Nothing has changed then.
        """
        batch, held = as_keys(keys), as_keys(pinned, "pinned")
        refuse_oversized(batch, held, self, self._capacity)
        hit = np.empty(len(batch), np.bool_)
        outcome = self._engine.access(keys=batch, pinned=held, hit=hit)
        if isinstance(outcome, int):
            raise over_budget(outcome, self._capacity)
        self._pass_batch()
        return Access(hit, np.frombuffer(outcome, np.int64))

    def advance(self) -> tuple[Keys, Access]:
        """Access the oldest announced batch, and return its keys.

        Returns
        -------
        keys
            int64 [n]: its distinct keys, in the order in which they were announced first.
        access
            A hit or miss for each of them, and the victims.

        Raises
        ------
        ValueError
            When no batch is announced.
        """
        if not self.pending:
            raise ValueError("no batch is announced: call announce first")
        keys, hit, evicted = self._engine.advance()
        self._pass_batch()
        return np.frombuffer(keys, np.int64), Access(np.frombuffer(hit, np.bool_), np.frombuffer(evicted, np.int64))

    def expire(self) -> Keys:
        """Let all resident keys go that no announced batch needs. Returns them, int64 [m], by time of last access."""
        return np.frombuffer(self._engine.expire(), np.int64)

    def replay(self, keys: npt.ArrayLike, *, lookahead: int | None = None) -> npt.NDArray[np.bool_]:
        """Access keys one at a time, each knowing those that follow.

        Parameters
        ----------
        keys
            int64 [n].
        lookahead
            How many of the following accesses are known at each; all of them by default.

        Returns
        -------
        hit
            bool [n].

        Raises
        ------
        ValueError, TypeError
            When batches are announced already, or `lookahead` is no number of accesses.
        """
        trace = as_keys(keys)
        check_lookahead(lookahead, "accesses")
        if self.pending:
            raise ValueError(f"{self.pending} batches are announced and not accessed: access those before a replay")
        hit = np.empty(len(trace), np.bool_)
        known = len(trace) if lookahead is None else min(int(lookahead), len(trace))
        self._engine.replay(keys=trace, lookahead=known, hit=hit)
        return hit

    def discard(self, keys: npt.ArrayLike) -> None:
        """Let keys go; see :meth:`memhier.policies.Policy.discard`. Announced uses of them stay announced."""
        self._engine.discard(as_keys(keys))

    def _pass_batch(self) -> None:
        """Forget the number of the oldest announced batch, if there is one."""
        if self._numbers:
            self._numbers.popleft()
