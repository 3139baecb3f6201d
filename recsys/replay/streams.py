"""Random numbers that depend on the seed, on their purpose and on a number, and on nothing else.

Philox (Salmon et al., SC 2011) turns a key and a counter into random bits. With the seed and the purpose as the key and
the step in the counter, three numbers repeat every decision: there is no state to save.
"""

from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memhier import backend

__all__ = ["Purpose", "Streams", "Uniforms", "mixed", "stream"]

_BLOCK = 4096
_SPARE = 8  # numbers to draw anew with, beside as many as are asked for


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


class Streams:
    """The generators of a kind of decision, one at a time: to make each anew takes twenty times as long."""

    def __init__(self, seed: int, purpose: Purpose) -> None:
        self._bits = np.random.Philox(key=np.array([seed, purpose], np.uint64))
        self._random = np.random.Generator(self._bits)
        state: Any = self._bits.state
        # Lists: the generator reads numbers from these in half the time.
        self._counter: list[int] = state["state"]["counter"].tolist()
        counts = {"counter": self._counter, "key": state["state"]["key"].tolist()}
        self._state = state | {"state": counts, "buffer": state["buffer"].tolist()}

    def at(self, number: int) -> np.random.Generator:
        """Return the generator of one decision; that of the decision before is no more."""
        self._counter[3] = number
        self._bits.state = self._state
        return self._random


def stream(seed: int, purpose: Purpose, number: int) -> np.random.Generator:
    """Return the generator of one decision."""
    return Streams(seed, purpose).at(number)


class Uniforms:
    """Numbers in [0, 1), one after the other or from any place on, drawn in blocks of their own streams.

    Attributes
    ----------
    position
        How many were taken. One assignment moves it, whatever was drawn, so that an interrupt leaves no half of a draw.
    """

    def __init__(self, seed: int, purpose: Purpose, position: int = 0) -> None:
        self.position: int = position
        self._seed = seed
        self._purpose = purpose
        self._drawn: tuple[int, NDArray[np.float64]] = (0, np.empty(0))  # a block, and where it begins

    def take(self, count: int) -> NDArray[np.float64]:
        """Return the next numbers; not to be written to."""
        taken = self.at(self.position, count)
        self.position += count
        return taken

    def distinct(self, n: int, count: int) -> NDArray[np.int64]:
        """Draw distinct integers below `count`, every set of n equally likely."""
        if n == 0:
            return np.empty(0, np.int64)
        if 2 * n > count:
            return np.argpartition(self.take(count), n - 1)[:n]
        if backend.core is not None:
            chosen: NDArray[np.int64] = np.empty(n, np.int64)
            uniforms = self.at(self.position, 2 * n + _SPARE)
            if taken := backend.core.draw_distinct(uniforms=uniforms, count=count, chosen=chosen):
                self.position += taken
                return chosen
        position = self.position
        numbers: list[int] = (self.at(position, n) * count).astype(np.int64).tolist()
        position += n
        # Integers drawn a second time are drawn anew. By symmetry no set of n is favoured.
        while len(set(numbers)) < n:
            firsts: dict[int, int] = {}
            again = [index for index, number in enumerate(numbers) if firsts.setdefault(number, index) != index]
            drawn = (self.at(position, len(again)) * count).astype(np.int64)
            position += len(again)
            for index, number in zip(again, drawn.tolist(), strict=True):
                numbers[index] = number
        self.position = position
        return np.array(numbers, np.int64)

    def at(self, start: int, count: int) -> NDArray[np.float64]:
        """Return the numbers from a place on; not to be written to."""
        first, block = self._drawn
        if first <= start and start + count <= first + len(block):
            return block[start - first : start - first + count]
        pieces = []
        stop = start + count
        while start < stop:
            number, offset = divmod(start, _BLOCK)
            if number * _BLOCK != first or not len(block):
                first, block = number * _BLOCK, stream(self._seed, self._purpose, number).random(_BLOCK)
                self._drawn = (first, block)
            pieces.append(block[offset : offset + stop - start])
            start += len(pieces[-1])
        return pieces[0] if len(pieces) == 1 else np.concatenate([np.empty(0), *pieces])


def mixed(values: NDArray[np.int64], key: int) -> NDArray[np.uint64]:
    """Return 64 random bits for each number, as SplitMix64 mixes them with a key (Steele et al., OOPSLA 2014)."""
    bits = values.astype(np.uint64) + np.uint64(key)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))
