"""Plans: the keys to load, keep, evict and write, batch by batch, when the keys of the next batches are known.

The planner is Belady's rule over a moving window (:class:`memhier.policies.Belady`): at a fixed capacity its loads are
the fewest there can be for this window. The embedding cache feeds it the ids that the data loader has read
ahead; the replay buffer feeds it the schedule that its seed makes known.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from memhier.policies import Belady
from memhier.policies._base import check_lookahead

__all__ = ["Lookahead", "Step", "plan"]

Keys = npt.NDArray[np.int64]
Beyond = Literal["keep", "drop"]

_NONE = np.empty(0, np.int64)
_NONE.flags.writeable = False


@dataclass(frozen=True, slots=True)
class Step:
    """The work of the tiers for one batch, in this order: write, evict, load; then the batch may run.

    Attributes
    ----------
    index
        Number of the batch, from 0.
    needed
        int64 [u]: the batch's distinct keys, in the order in which they first occur.
    load
        int64 [l]: those of them that are not resident, in the same order.
    keep
        int64 [u - l]: those that are, in the same order.
    evict
        int64 [e]: keys to let go before the loads, first victim first. None of them is among `needed`.
    write
        int64 [w]: those of `evict` that may have changed since they were loaded, in the same order.
    """

    index: int
    needed: Keys
    load: Keys
    keep: Keys
    evict: Keys
    write: Keys


class Lookahead:
    """Plans batches one after another, knowing those that are announced.

    :class:`memhier.recsys.Lookahead` is another class: it reads a loader ahead of the training.

    Parameters
    ----------
    capacity
        Rows that fit in DRAM.
    dirty
        Whether a batch changes the rows it needs, as training does. Otherwise evicted rows need no write.
    beyond
        The fate of a row that no announced batch needs. ``"keep"``: it stays while there is room, the more often
        used the longer. ``"drop"``: it leaves with the next step, so that DRAM holds only the rows that the window
        needs. This is the rule of Bagpipe (arXiv 2202.12429), VMIN by its older name: of all rules with the same mean
        number of resident rows it loads the fewest.

    Notes
    -----
    Memory follows the number of announced keys and of resident rows, not the length of the stream.

    Examples
    --------
    >>> from memhier import Lookahead
    >>> planner = Lookahead(2)
    >>> for batch in ([1, 2], [3], [1]):
    ...     planner.announce(batch)
    >>> [(step.load.tolist(), step.evict.tolist()) for step in (planner.next(), planner.next(), planner.next())]
    [([1, 2], []), ([3], [2]), ([], [])]
    """

    def __init__(self, capacity: int, *, dirty: bool = True, beyond: Beyond = "keep") -> None:
        if beyond not in get_args(Beyond):
            raise ValueError(f"beyond={beyond!r}: expected 'keep' or 'drop'")
        self._policy = Belady(capacity)
        self._dirty = dirty
        self._drops = beyond == "drop"
        self._dropped = _NONE
        self._index = 0

    @property
    def capacity(self) -> int:
        """Rows that fit in DRAM."""
        return self._policy.capacity

    @property
    def pending(self) -> int:
        """Batches announced and not yet planned."""
        return self._policy.pending

    @property
    def resident(self) -> int:
        """Rows that are resident once the last step has been carried out."""
        return len(self._policy) + len(self._dropped)

    @property
    def memory_bytes(self) -> int:
        """Bytes of DRAM that the planner holds."""
        return self._policy.memory_bytes + self._dropped.nbytes

    def announce(self, keys: npt.ArrayLike) -> None:
        """Add the batch that follows those already announced.

        Parameters
        ----------
        keys
            int64 [n], repeats allowed.

        Raises
        ------
        BudgetError
            When the batch's distinct keys exceed the capacity; the message names a sufficient one.
        """
        self._policy.announce(keys)

    def next(self) -> Step:
        """Plan the oldest announced batch by the batches announced until now.

        Returns
        -------
        Step
            int64 arrays of keys: ``needed``, ``load``, ``keep``, ``evict`` and ``write``; ``index`` of the batch.

        Raises
        ------
        ValueError
            When no batch is announced.
        """
        needed, (hit, evicted) = self._policy.advance()
        if len(self._dropped):
            evicted = np.concatenate((self._dropped, evicted))
        self._dropped = self._not_awaited(needed)
        write = evicted if self._dirty else _NONE
        step = Step(self._index, needed, needed[~hit], needed[hit], evicted, write)
        self._index += 1
        return step

    def _not_awaited(self, needed: Keys) -> Keys:
        """Return the rows that the next step lets go because no announced batch needs them."""
        if not self._drops or not self._policy.pending:
            # With nothing announced, nothing is known: the next batch may need any row.
            return _NONE
        return self._policy.expire()


def plan(
    batches: Iterable[npt.ArrayLike],
    capacity: int,
    *,
    lookahead: int | None = None,
    dirty: bool = True,
    beyond: Beyond = "keep",
) -> Iterator[Step]:
    """Plan a stream of batches, reading `lookahead` batches ahead of the one being planned.

    Parameters
    ----------
    batches
        Keys of one batch after another, int64 [n] each. Read no further than the window needs.
    capacity, dirty, beyond
        As in :class:`Lookahead`.
    lookahead
        Batches known beyond the one being planned. None reads the whole stream before the first step: an epoch that is
        recorded, or whose order is seeded, gets the fewest loads there can be.

    Yields
    ------
    Step
        One for every batch, in order.

    Raises
    ------
    BudgetError
        When a batch's distinct keys exceed the capacity. Steps of earlier batches that were not taken yet are lost.

    Examples
    --------
    >>> from memhier.planning.plan import plan
    >>> [step.load.tolist() for step in plan([[1, 2], [3], [2], [1]], capacity=2, lookahead=1)]
    [[1, 2], [3], [], [1]]
    """
    check_lookahead(lookahead, "batches")
    planner = Lookahead(capacity, dirty=dirty, beyond=beyond)
    return _steps(planner, batches, lookahead)


def _steps(planner: Lookahead, batches: Iterable[npt.ArrayLike], lookahead: int | None) -> Iterator[Step]:
    for batch in batches:
        planner.announce(batch)
        if lookahead is not None and planner.pending > lookahead:
            yield planner.next()
    while planner.pending:
        yield planner.next()
