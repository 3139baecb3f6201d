"""The items of each list, ascending and each once, as gaps of a byte or two."""

from dataclasses import dataclass
from typing import Any, Self, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["MARK_BYTES", "Postings", "postings_bytes"]

Ints: TypeAlias = npt.NDArray[np.int64]

_TOGETHER = 1 << 12  # gaps that are decoded at a time
MARK_BYTES = 56 * _TOGETHER
"""DRAM of :meth:`Postings.mark`, marks apart."""


@dataclass(frozen=True)
class Postings:
    """The items of each list.

    Attributes
    ----------
    starts
        int64 ``[lists + 1]``: the gaps of list ``l`` are ``gaps[starts[l]:starts[l + 1]]``.
    gaps
        uint8 or uint16: how many items lie between an item of the list and the one before, or the first item of all;
        the largest value adds itself to the gap that follows.
    """

    starts: Ints
    gaps: npt.NDArray[Any]

    @classmethod
    def of(cls, lists: npt.NDArray[np.uint16], starts: Ints, count: int) -> Self:
        """Return the items of each of `count` lists.

        Parameters
        ----------
        lists
            The list of each token.
        starts
            int64 ``[n + 1]``: item ``i`` has the tokens ``starts[i]`` to ``starts[i + 1]``.
        """
        items = np.repeat(np.arange(len(starts) - 1, dtype=np.int64), np.diff(starts))
        keys = np.unique(lists.astype(np.int64) << 32 | items)
        of, items = keys >> 32, keys & 0xFFFFFFFF
        gaps = np.diff(items, prepend=-1) - 1
        first = np.diff(of, prepend=-1) != 0
        gaps[first] = items[first]
        sizes = {dtype: int((gaps // top + 1).sum()) * dtype.itemsize for dtype, top in _TOPS.items()}
        dtype = min(sizes, key=lambda each: sizes[each])
        top = _TOPS[dtype]
        pieces = gaps // top + 1
        ends = np.cumsum(pieces)
        out = np.full(int(pieces.sum()), top, dtype)
        out[ends - 1] = gaps % top
        before = np.searchsorted(of, np.arange(count + 1))
        return cls(np.concatenate([[0], ends])[before].astype(np.int64), out)

    def mark(self, lists: Ints, marks: npt.NDArray[np.bool_]) -> None:
        """Set the marks, bool ``[n]``, of all items of some lists."""
        lows, highs = self.starts[lists], self.starts[lists + 1]
        ends = np.cumsum(highs - lows)
        first = 0
        while first < len(lists):
            before = int(ends[first - 1]) if first else 0
            stop = int(np.searchsorted(ends, before + _TOGETHER, side="right"))
            if stop > first:
                self._mark_some(lows[first:stop], highs[first:stop], marks)
            else:
                self._mark_long(int(lows[first]), int(highs[first]), marks)
                stop = first + 1
            first = stop

    def _mark_some(self, lows: Ints, highs: Ints, marks: npt.NDArray[np.bool_]) -> None:
        lengths = highs - lows
        ends = np.cumsum(lengths)
        total = int(ends[-1])
        places = np.arange(total) + np.repeat(lows - ends + lengths, lengths)
        gaps = self.gaps[places].astype(np.int64)
        last = gaps < _TOPS[self.gaps.dtype]
        sums = np.cumsum(gaps + last)
        before = np.concatenate([[0], sums])[ends - lengths]
        marks[(sums - np.repeat(before, lengths))[last] - 1] = True

    def _mark_long(self, low: int, high: int, marks: npt.NDArray[np.bool_]) -> None:
        before = -1
        for start in range(low, high, _TOGETHER):
            gaps = self.gaps[start : min(high, start + _TOGETHER)].astype(np.int64)
            last = gaps < _TOPS[self.gaps.dtype]
            sums = before + np.cumsum(gaps + last)
            marks[sums[last]] = True
            before = int(sums[-1])


_TOPS: dict[np.dtype[Any], int] = {np.dtype(np.uint8): 2**8 - 1, np.dtype(np.uint16): 2**16 - 1}


def postings_bytes(tokens: int, items: int, lists: int) -> int:
    """Return the most bytes of the postings of so many tokens."""
    return 8 * (lists + 1) + min(dtype.itemsize * (tokens + lists * items // top + 1) for dtype, top in _TOPS.items())
