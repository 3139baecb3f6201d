"""Random numbers that depend on the seed, on their purpose and on a number, and on nothing else.

Philox (Salmon et al., SC 2011) turns a key and a counter into random bits. With the seed and the purpose as the key and
the step in the counter, three numbers repeat every decision: there is no state to save.
"""

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

__all__ = ["Purpose", "Uniforms", "mixed", "stream"]

_BLOCK = 4096


class Purpose(IntEnum):
    """Purposes of random numbers: no two kinds of decision share a stream."""

    SAMPLE = 1
    ADMIT = 2
    SWAP = 3
    DECK = 4
    RESIZE = 5
    HOLD = 6
    DEAL = 7
    FIT = 8


def stream(seed: int, purpose: Purpose, number: int) -> np.random.Generator:
    """Return the generator of one decision."""
    key = np.array([seed, purpose], np.uint64)
    counter = np.array([0, 0, 0, number], np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter))


class Uniforms:
    """Numbers in [0, 1), one after the other or from any place on, drawn in blocks of their own streams.

    Attributes
    ----------
    position
        How many were taken by `take`.
    """

    def __init__(self, seed: int, purpose: Purpose, position: int = 0) -> None:
        self.position: int = position
        self._seed = seed
        self._purpose = purpose
        self._number = -1
        self._block: NDArray[np.float64] = np.empty(0)

    def take(self, count: int) -> NDArray[np.float64]:
        """Return the next numbers; not to be written to."""
        offset = self.position % _BLOCK
        if self.position // _BLOCK == self._number and offset + count <= _BLOCK:
            taken = self._block[offset : offset + count]
        else:
            taken = self.at(self.position, count)
        self.position += count
        return taken

    def distinct(self, n: int, count: int) -> NDArray[np.int64]:
        """Draw distinct integers below `count`, every set of n equally likely."""
        if n == 0:
            return np.empty(0, np.int64)
        if 2 * n > count:
            return np.argpartition(self.take(count), n - 1)[:n]
        drawn: NDArray[np.int64] = (self.take(n) * count).astype(np.int64)
        if len(set(drawn.tolist())) == n:
            return drawn
        # Integers drawn a second time are drawn anew. By symmetry no set of n is favoured.
        while True:
            again: NDArray[np.bool_] = np.ones(n, np.bool_)
            again[np.unique(drawn, return_index=True)[1]] = False
            if not again.any():
                return drawn
            drawn[again] = (self.take(int(again.sum())) * count).astype(np.int64)

    def at(self, start: int, count: int) -> NDArray[np.float64]:
        """Return the numbers from a place on."""
        pieces = []
        stop = start + count
        while start < stop:
            number, offset = divmod(start, _BLOCK)
            if number != self._number:
                self._block = stream(self._seed, self._purpose, number).random(_BLOCK)
                self._number = number
            pieces.append(self._block[offset : offset + stop - start])
            start += len(pieces[-1])
        return pieces[0] if len(pieces) == 1 else np.concatenate([np.empty(0), *pieces])


def mixed(values: NDArray[np.int64], key: int) -> NDArray[np.uint64]:
    """Return 64 random bits for each number, as SplitMix64 mixes them with a key (Steele et al., OOPSLA 2014)."""
    bits = values.astype(np.uint64) + np.uint64(key)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))
