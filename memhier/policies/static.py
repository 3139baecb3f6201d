"""A fixed set of keys that never leave."""

import numpy as np
import numpy.typing as npt

from memhier.errors import BudgetError
from memhier.policies._base import Access, Keys, as_keys, check_capacity
from memhier.policies.lru import LRU

__all__ = ["Static"]


class Static:
    """Keeps the given keys once they have come; the rest of the capacity passes other keys through, by LRU.

    Parameters
    ----------
    capacity
        Keys that may be resident at once; more than the given keys by at least one, so that others can be used at all.
    keys
        int64 [n]: the keys that stay; repeats are ignored. A place is kept for each, and its first access is a miss.

    Examples
    --------
    >>> from memhier.policies import Static
    >>> policy = Static(3, [1, 2])
    >>> policy.replay([1, 5, 6, 1, 5]).tolist()
    [False, False, False, True, False]
    """

    def __init__(self, capacity: int, keys: npt.ArrayLike) -> None:
        self._capacity = check_capacity(capacity)
        self._kept = np.unique(as_keys(keys))
        if len(self._kept) >= self._capacity:
            raise BudgetError(
                f"capacity={capacity}: {len(self._kept)} keys never leave and others need a place to pass through; "
                f"a capacity of {len(self._kept) + 1} would be enough"
            )
        self._came = np.zeros(len(self._kept), np.bool_)
        self._others = LRU(self._capacity - len(self._kept))

    @property
    def capacity(self) -> int:
        """Keys that may be resident at once."""
        return self._capacity

    @property
    def memory_bytes(self) -> int:
        """Bytes of DRAM that the policy itself holds."""
        return self._kept.nbytes + self._came.nbytes + self._others.memory_bytes

    def __len__(self) -> int:
        return int(np.count_nonzero(self._came)) + len(self._others)

    def __contains__(self, key: int) -> bool:
        place = int(np.searchsorted(self._kept, key))
        if place < len(self._kept) and self._kept[place] == key:
            return bool(self._came[place])
        return key in self._others

    def access(self, keys: npt.ArrayLike, *, pinned: npt.ArrayLike = ()) -> Access:
        """Make a batch of keys resident; see :meth:`memhier.policies.Policy.access`.

        Raises
        ------
        BudgetError
            When the batch's other keys and the pinned ones do not fit beside the keys that never leave.
        """
        batch = as_keys(keys)
        is_kept, place = self._find(batch)
        hit = np.empty(len(batch), np.bool_)
        others = as_keys(pinned, "pinned")
        try:
            hit[~is_kept], evicted = self._others.access(batch[~is_kept], pinned=others[~self._find(others)[0]])
        except BudgetError as error:
            raise BudgetError(
                f"capacity={self._capacity}: {len(self._kept)} keys never leave; for the others, {error}"
            ) from None
        hit[is_kept] = self._meet(place)
        return Access(hit, evicted)

    def replay(self, keys: npt.ArrayLike) -> npt.NDArray[np.bool_]:
        """Access keys one at a time; see :meth:`memhier.policies.Policy.replay`."""
        trace = as_keys(keys)
        is_kept, place = self._find(trace)
        hit = np.empty(len(trace), np.bool_)
        # The two parts share no key and no place, so their turns do not matter to each other.
        hit[~is_kept] = self._others.replay(trace[~is_kept])
        hit[is_kept] = self._meet(place)
        return hit

    def discard(self, keys: npt.ArrayLike) -> None:
        """Let keys go; a key that never leaves keeps its place, and its next access is a miss again."""
        gone = as_keys(keys)
        is_kept, place = self._find(gone)
        self._came[place] = False
        self._others.discard(gone[~is_kept])

    def _find(self, keys: Keys) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.intp]]:
        """Return which keys are kept ones, and the places of those."""
        if not len(self._kept):
            return np.zeros(len(keys), np.bool_), np.empty(0, np.intp)
        place = np.minimum(np.searchsorted(self._kept, keys), len(self._kept) - 1)
        is_kept = self._kept[place] == keys
        return is_kept, place[is_kept]

    def _meet(self, place: npt.NDArray[np.intp]) -> npt.NDArray[np.bool_]:
        """Return which kept keys had come before their turn, and note that all of these have come now."""
        hit = self._came[place]
        first = np.unique(place, return_index=True)[1]
        repeat = np.ones(len(place), np.bool_)
        repeat[first] = False
        self._came[place] = True
        return hit | repeat
