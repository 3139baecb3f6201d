"""The interface of every policy: batches of keys in, hits and victims out.

A policy keeps no rows; it decides which keys are resident. One :meth:`Policy.access` makes a whole batch resident:

1. the batch's own keys and the pinned ones may not leave;
2. if the batch does not fit beside the resident keys, room for all of it is made first;
3. then its keys are accessed in their order, misses entering as they come.

With batches of one key this is the textbook's access-by-access cache, as :meth:`Policy.replay` runs it.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from memhier import backend
from memhier.arguments import as_ints, check_int
from memhier.errors import BudgetError
from memhier.policies._reference import Order, Reference

if TYPE_CHECKING:
    from memhier_native._core import LFUPolicy, LRUPolicy, S3FIFOPolicy

__all__ = [
    "CAPACITY_MAX", "Access", "EvictionPolicy", "Keys", "Policy", "as_keys", "check_capacity", "check_lookahead",
    "over_budget", "refuse_oversized",
]  # fmt: skip

Keys = npt.NDArray[np.int64]
_INT64 = np.dtype(np.int64)

# Compiled policies number the resident keys and those of one batch, three times the capacity at most, with 31 bits.
CAPACITY_MAX = 2**29


class Access(NamedTuple):
    """The result of one batch.

    Attributes
    ----------
    hit
        bool [n]: whether the key was resident when its turn came. A key's second turn in a batch is a hit.
    evicted
        int64 [m]: the keys that left to make room, first victim first. They left before any of the batch entered.

    Examples
    --------
    >>> from memhier.policies import LRU
    >>> policy = LRU(2)
    >>> done = policy.access([1, 2, 1])
    >>> done.hit.tolist(), done.evicted.tolist()
    ([False, False, True], [])
    >>> policy.access([3]).evicted.tolist()
    [2]
    """

    hit: npt.NDArray[np.bool_]
    evicted: Keys


class Policy(Protocol):
    """Decides which keys stay resident. Deterministic, and safe to call from one thread at a time.

    Examples
    --------
    One of the library's, changed:

    >>> from memhier.policies import LRU
    >>> class Told(LRU):
    ...     def access(self, keys, *, pinned=()):
    ...         done = super().access(keys, pinned=pinned)
    ...         print("left:", done.evicted.tolist())
    ...         return done
    >>> policy = Told(2)
    >>> for batch in ([1, 2], [3]):
    ...     done = policy.access(batch)
    left: []
    left: [1]
    """

    @property
    def capacity(self) -> int:
        """Keys that may be resident at once."""

    @property
    def memory_bytes(self) -> int:
        """Bytes of DRAM that the policy itself holds."""

    def __len__(self) -> int:
        """Return the number of resident keys."""

    def __contains__(self, key: int) -> bool:
        """Return whether a key is resident."""

    def access(self, keys: npt.ArrayLike, *, pinned: npt.ArrayLike = ()) -> Access:
        """Make a batch of keys resident.

        If the batch does not fit beside the resident keys, room for all of it is made first; keys of the batch and
        pinned ones stay. Then its keys are accessed in their order, and misses enter as they come.

        Parameters
        ----------
        keys
            int64 [n], in access order; repeats allowed.
        pinned
            int64 [p]: keys in use elsewhere that must not be evicted. Those that are not resident are ignored.

        Raises
        ------
        BudgetError
            When the batch's distinct keys and the pinned ones exceed the capacity. Nothing has changed then.
        """

    def replay(self, keys: npt.ArrayLike) -> npt.NDArray[np.bool_]:
        """Access keys one at a time: each is a batch of its own. Returns bool [n], the hits."""

    def discard(self, keys: npt.ArrayLike) -> None:
        """Let keys go without counting it as an eviction; keys that are not resident are ignored."""


def as_keys(keys: npt.ArrayLike, name: str = "keys") -> Keys:
    """Return `keys` as a contiguous, aligned int64 [n], copied only if they are not one already."""
    ready = type(keys) is np.ndarray and keys.dtype == _INT64 and keys.flags.c_contiguous and keys.flags.aligned
    array: Keys = keys if ready else as_ints(name, keys)  # type: ignore[assignment]
    if array.ndim != 1:
        raise ValueError(f"{name} has shape {array.shape}: expected one dimension, int64 [n]")
    return array


def check_capacity(capacity: int, name: str = "capacity", most: int = CAPACITY_MAX) -> int:
    """Return a capacity in rows."""
    return check_int(name, capacity, 1, most, "rows")


def check_lookahead(lookahead: int | None, unit: str) -> None:
    """Raise unless `lookahead` is None or a number of `unit`."""
    if lookahead is not None:
        check_int("lookahead", lookahead, 0, unit=f"{unit}, or None for all")


def refuse_oversized(batch: Keys, pinned: Keys, policy: Policy, capacity: int) -> None:
    """Raise for a batch far too large, so that no table grows to its size before that is found out.

    Smaller ones are refused by the policies themselves, at no cost to those that fit.
    """
    if len(batch) <= 2 * capacity:
        return
    distinct = len(np.unique(batch))
    if distinct > capacity:
        held = [key for key in pinned.tolist() if key in policy]
        raise over_budget(len(np.union1d(batch, np.array(held, np.int64))), capacity)


def over_budget(enough: int, capacity: int) -> BudgetError:
    """Return the error for a batch that cannot be resident all at once."""
    return BudgetError(
        f"capacity={capacity}: the batch's distinct keys and the pinned ones are {enough} rows; a capacity of {enough} "
        "would be enough, or smaller batches"
    )


class EvictionPolicy:
    """A policy run by the compiled core, or by its own Python order where the core is missing."""

    def __init__(self, capacity: int, native: str, order: Callable[[int], Order]) -> None:
        self._capacity = check_capacity(capacity)
        core = backend.core
        self._engine: LFUPolicy | LRUPolicy | S3FIFOPolicy | Reference = (
            Reference(self._capacity, order(self._capacity)) if core is None else getattr(core, native)(self._capacity)
        )

    @property
    def capacity(self) -> int:
        """Keys that may be resident at once."""
        return self._capacity

    @property
    def memory_bytes(self) -> int:
        """Bytes of DRAM that the policy itself holds."""
        return int(self._engine.memory_bytes)

    def __len__(self) -> int:
        return len(self._engine)

    def __contains__(self, key: int) -> bool:
        return key in self._engine

    def access(self, keys: npt.ArrayLike, *, pinned: npt.ArrayLike = ()) -> Access:
        """Make a batch of keys resident; see :meth:`Policy.access`."""
        batch, held = as_keys(keys), as_keys(pinned, "pinned")
        refuse_oversized(batch, held, self, self._capacity)
        hit = np.empty(len(batch), np.bool_)
        outcome = self._engine.access(keys=batch, pinned=held, hit=hit)
        if isinstance(outcome, int):
            raise over_budget(outcome, self._capacity)
        return Access(hit, np.frombuffer(outcome, np.int64))

    def replay(self, keys: npt.ArrayLike) -> npt.NDArray[np.bool_]:
        """Access keys one at a time; see :meth:`Policy.replay`."""
        trace = as_keys(keys)
        hit = np.empty(len(trace), np.bool_)
        self._engine.replay(keys=trace, hit=hit)
        return hit

    def discard(self, keys: npt.ArrayLike) -> None:
        """Let keys go; see :meth:`Policy.discard`."""
        self._engine.discard(as_keys(keys))
