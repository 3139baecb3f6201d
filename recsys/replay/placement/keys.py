"""Keys of samples, of which the largest goes first: those of weighted admission."""

from bisect import insort

import numpy as np
from numpy.typing import NDArray

__all__ = ["Keys"]

_HAND = 256  # of the largest keys, known in order


class Keys:
    """A float32 key for each position; of equal keys the one of the last position counts as larger."""

    def __init__(self) -> None:
        self.values: NDArray[np.float32] = np.zeros(0, np.float32)
        self._hand: list[tuple[float, int]] = []  # the largest of all, rising; empty if nobody asked since a change

    @property
    def memory_bytes(self) -> int:
        """DRAM held."""
        return self.values.nbytes + 144 * _HAND

    def allocate(self, capacity: int) -> None:
        """Make room for so many positions."""
        grown = np.zeros(capacity, np.float32)
        kept = min(capacity, len(self.values))
        grown[:kept] = self.values[:kept]
        self.values = grown

    def fill(self, values: NDArray[np.float32]) -> None:
        """Set the keys of the first positions."""
        self.values[: len(values)] = values
        self.forget_order()

    def at(self, position: int) -> float:
        """Return the key of a position."""
        return float(self.values[position])

    def put(self, positions: NDArray[np.int64] | int, values: NDArray[np.float32] | float) -> None:
        """Set the keys of positions."""
        self.values[positions] = values
        self.forget_order()

    def forget_order(self) -> None:
        """Look at all keys again, since positions came, moved or went."""
        self._hand.clear()

    def largest(self, size: int) -> tuple[float, int]:
        """Return the largest key among the first `size` positions, and its position."""
        if not self._hand:
            keys = self.values[:size]
            count = min(size, _HAND)
            least = np.partition(keys, size - count)[size - count]
            above, equal = np.flatnonzero(keys > least), np.flatnonzero(keys == least)
            some = np.concatenate([equal[len(equal) - (count - len(above)) :], above])
            self._hand = sorted(zip(keys[some].tolist(), some.tolist(), strict=True))
        return self._hand[-1]

    def order(self, size: int) -> NDArray[np.int64]:
        """Return the first `size` positions by rising keys."""
        return np.argsort(self.values[:size], kind="stable")

    def replace_largest(self, key: float) -> None:
        """Give the position of the largest key, which `largest` has told, a smaller one."""
        position = self._hand.pop()[1]
        self.values[position] = key
        # As float32, which is what a resumed run finds.
        entry = (float(self.values[position]), position)
        if self._hand and entry > self._hand[0]:
            insort(self._hand, entry)
