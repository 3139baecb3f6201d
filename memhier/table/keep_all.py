"""The policy of a tier whose slots are as many as its possible keys: none ever leaves."""

from collections import deque

import numpy as np
import numpy.typing as npt

from memhier.policies import Access
from memhier.policies._base import as_keys

__all__ = ["KeepAll"]

Keys = npt.NDArray[np.int64]

_NONE = np.empty(0, np.int64)


class KeepAll:
    """Keeps all keys, 0 to ``capacity - 1``. It takes announcements as Belady does, and holds calls to them.

    Attributes
    ----------
    capacity
        The number of keys that there may be.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity: int = capacity
        self._announced: deque[Keys] = deque()
        self._resident = np.zeros(capacity, np.bool_)

    def __len__(self) -> int:
        return int(np.count_nonzero(self._resident))

    def __contains__(self, key: int) -> bool:
        return 0 <= key < self.capacity and bool(self._resident[key])

    @property
    def memory_bytes(self) -> int:
        """DRAM held, in bytes."""
        return self._resident.nbytes + sum(keys.nbytes for keys in tuple(self._announced))

    @property
    def pending(self) -> int:
        """Batches announced and not yet accessed."""
        return len(self._announced)

    def announce(self, keys: npt.ArrayLike) -> None:
        """Say which keys the batch after those already announced will access."""
        batch = as_keys(keys)
        self._announced.append(batch.copy() if batch.flags.writeable else batch)

    def withdraw(self) -> None:
        """Take back every batch that was announced and not accessed."""
        self._announced.clear()

    def access(self, keys: npt.ArrayLike, *, pinned: npt.ArrayLike = ()) -> Access:
        """Make a batch of keys resident; ValueError for other keys than were announced."""
        batch = as_keys(keys)
        if self._announced:
            planned = self._announced[0]
            # The same order comes back in most calls.
            if not np.array_equal(planned, batch) and not np.array_equal(np.unique(planned), np.unique(batch)):
                raise ValueError("keys differ from the batch that was announced for this turn")
            self._announced.popleft()
        hit = self._resident[batch]
        if not hit.all():
            missing = np.flatnonzero(~hit)
            first = missing[np.unique(batch[missing], return_index=True)[1]]
            hit[missing] = True  # a key's second turn is a hit
            hit[first] = False
            self._resident[batch[first]] = True
        return Access(hit, _NONE)

    def replay(self, keys: npt.ArrayLike) -> npt.NDArray[np.bool_]:
        """Access keys one at a time."""
        return self.access(keys).hit

    def discard(self, keys: npt.ArrayLike) -> None:
        """Let keys go."""
        batch = as_keys(keys)
        self._resident[batch[(batch >= 0) & (batch < self.capacity)]] = False
