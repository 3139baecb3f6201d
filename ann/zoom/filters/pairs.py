"""Two columns compared row by row: numbers exactly, and strings of two vocabularies by their words."""

import operator
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["COMPARE", "WordReads", "compare", "compare_words"]

Ints: TypeAlias = npt.NDArray[np.int64]
Flags: TypeAlias = npt.NDArray[np.bool_]

COMPARE: dict[str, Callable[..., Flags]] = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "==": operator.eq, "!=": operator.ne,
}  # fmt: skip
_ROW_BYTES = 160  # of a row under way, with the bounds of its words
_WORDS_BYTES = 512  # of two words, beside their letters
_LETTER_COPIES = 3


class WordReads(NamedTuple):
    """Reads the words of a column of strings, UTF-8.

    Attributes
    ----------
    lengths, words
        Take ranks, int64 ``[n]``, to the lengths in bytes, int64 ``[n]``, and to the words.
    room
        DRAM for a comparison, in bytes. Two words that are longer are compared on their own.
    """

    lengths: Callable[[Ints], Ints]
    words: Callable[[Ints], list[bytes]]
    room: int


def compare(left: npt.NDArray[Any], right: npt.NDArray[Any], sign: str) -> Flags:
    """Return how numbers compare, bool ``[n]``; neither side is rounded where one is integer and the other float.

    Examples
    --------
    >>> import numpy as np
    >>> from memhier.ann.zoom.filters.pairs import compare
    >>> compare(np.array([2**53 + 1, 2]), np.array([2.0**53, 2.5]), "<").tolist()
    [False, True]
    """
    if left.dtype.kind == right.dtype.kind:
        return COMPARE[sign](left, right)
    if left.dtype.kind == "f":
        return COMPARE[sign](0, _order(right, left))
    return COMPARE[sign](_order(left, right), 0)


def _order(integers: npt.NDArray[Any], floats: npt.NDArray[Any]) -> npt.NDArray[np.int8]:
    """Return -1, 0 or 1 where an integer is below, equal to or above a float; anything where that is NaN."""
    floors = np.floor(floats)
    inside = (floors >= -(2.0**63)) & (floors < 2.0**63)
    fraction = floats > floors
    beyond = np.where(floats > 0, -1, 1).astype(np.int8)
    floors[~inside] = 0
    whole = floors.astype(np.int64)
    order: npt.NDArray[np.int8] = (integers > whole).astype(np.int8)
    order -= (integers < whole) | ((integers == whole) & fraction)
    order[~inside] = beyond[~inside]
    return order


def compare_words(left: npt.NDArray[Any], right: npt.NDArray[Any], sign: str, one: WordReads, two: WordReads) -> Flags:
    """Return how strings of two vocabularies compare by their code points, bool ``[n]``.

    Parameters
    ----------
    left, right
        Ranks ``[n]`` in the vocabularies `one` and `two`; a row with a negative one is False.

    Notes
    -----
    Each different pair of ranks is read once in a run of rows; a run and its words fit the room of `one`.
    """
    found = np.zeros(len(left), np.bool_)
    known = np.flatnonzero((left >= 0) & (right >= 0))
    step = max(1, one.room // 2 // _ROW_BYTES)
    for start in range(0, len(known), step):
        rows = known[start : start + step]
        pairs, inverse = np.unique(left[rows].astype(np.int64) << 32 | right[rows], return_inverse=True)
        firsts, seconds = pairs >> 32, pairs & (2**32 - 1)
        here = np.zeros(len(pairs), np.bool_)
        letters = one.lengths(firsts) + two.lengths(seconds)
        for run in _runs(_WORDS_BYTES + _LETTER_COPIES * letters, one.room // 2):
            here[run] = COMPARE[sign](_words(one, firsts[run]), _words(two, seconds[run]))
        found[rows] = here[inverse]
    return found


def _runs(sizes: Ints, most: int) -> Iterator[slice]:
    """Yield runs of sizes whose sum is at most `most`; a larger one is a run of its own."""
    ends, low = np.cumsum(sizes), 0
    while low < len(sizes):
        fitting = int(np.searchsorted(ends, ends[low] - sizes[low] + most, side="right"))
        yield slice(low, low := max(low + 1, fitting))


def _words(source: WordReads, ranks: Ints) -> npt.NDArray[np.object_]:
    different, inverse = np.unique(ranks, return_inverse=True)
    return np.fromiter(source.words(different), object, len(different))[inverse]
