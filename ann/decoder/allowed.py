"""The words that constrained answers may hold, as bits for the core."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.decoder.coding.codes import CHUNK_ROWS
from memhier.ann.decoder.core.core import allow_words
from memhier.ann.decoder.core.python_core import unpacked
from memhier.ann.decoder.layer import Floats, Ints

__all__ = ["Allowed", "check_allowed", "split_with"]

_FORMS = "a mask (bool [V]), bits (int32 [ceil(V / 32)]), ids (int64 [c]), or one of these for each hidden state"

Bits: TypeAlias = npt.NDArray[np.uint64]
Array: TypeAlias = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Allowed:
    """Words that answers may hold, the same for all hidden states of a call or others for each.

    Attributes
    ----------
    words
        V.
    bits
        uint64 ``[n or 1, padded / 64]``, lowest first, no bit beyond V.
    counts
        int64 ``[n or 1]``: how many words each state may have.
    """

    words: int
    bits: Bits
    counts: Ints

    @property
    def shared(self) -> bool:
        """Whether all hidden states may have the same words."""
        return len(self.counts) == 1

    def of(self, states: Array) -> "Allowed":
        """Return the words of some states, named by a mask or by numbers."""
        return (
            self if self.shared else Allowed(self.words, np.ascontiguousarray(self.bits[states]), self.counts[states])
        )

    def mask(self) -> npt.NDArray[np.bool_]:
        """Return the words as a mask, bool ``[n or 1, V]``."""
        return unpacked(self.bits, self.words)

    def holds(self, names: Ints) -> npt.NDArray[np.bool_]:
        """Say of a word of each state if it is allowed."""
        which = np.zeros(len(names), np.int64) if self.shared else np.arange(len(names))
        found: npt.NDArray[np.bool_] = (self.bits[which, names // 64] >> (names % 64).astype(np.uint64)) & 1 == 1
        return found


def check_allowed(allowed: Any, count: int, words: int) -> Allowed | None:
    """Return the allowed words of `count` hidden states of a layer of so many words; None if `allowed` is None.

    Parameters
    ----------
    allowed
        The dtype tells the form. bool: a mask ``[V]`` or ``[n, V]``. int32 or uint32: bits, lowest first,
        ``[ceil(V / 32)]`` or ``[n, ceil(V / 32)]``, as grammar engines fill them; bits beyond V do not count. int64, or
        a list of integers: ids ``[c]``, in any order; a list of n lists or arrays of ids: those of each state.

    Raises
    ------
    TypeError, ValueError
        If it has another form, an id is out of range, or a state has no word left.
    """
    if allowed is None:
        return None
    return _of_lists(allowed, count, words) if _is_nested(allowed) else _of_array(np.asarray(allowed), count, words)


def split_with(hidden: Floats, allowed: Allowed | None, step: int) -> list[tuple[Floats, Allowed | None]]:
    """Return a batch in parts of at most so many states, each with its allowed words."""
    starts = range(0, max(1, len(hidden)), step)
    numbers = np.arange(len(hidden))
    return [
        (hidden[start : start + step], None if allowed is None else allowed.of(numbers[start : start + step]))
        for start in starts
    ]


def _is_nested(allowed: Any) -> bool:
    """Say if it holds ids, or a mask or bits, of each state."""
    if isinstance(allowed, np.ndarray):
        return allowed.ndim == 2 and allowed.dtype.kind in "iu" and not _are_bits(allowed)
    return isinstance(allowed, Sequence) and len(allowed) > 0 and np.ndim(allowed[0]) == 1


def _of_lists(allowed: Any, count: int, words: int) -> Allowed:
    if len(allowed) != count:
        raise ValueError(f"allowed: expected one for each of the {count} hidden states, got {len(allowed)}")
    parts = [np.asarray(each) for each in allowed]
    if len(parts) and all(part.dtype.kind == "b" or _are_bits(part) for part in parts):
        if len({(part.shape, part.dtype) for part in parts}) > 1:
            raise ValueError("allowed: expected masks or bits of one length and dtype, got several")
        return _of_array(np.stack(parts), count, words)
    ids = [_ids(part, f"allowed[{number}]") for number, part in enumerate(parts)]
    ends = np.cumsum([0, *map(len, ids)], dtype=np.int64)
    return _made(np.concatenate([*ids, np.empty(0, np.int64)]), count, words, ends)


def _of_array(array: Array, count: int, words: int) -> Allowed:
    # One word costs little more than the first look at all of this code: few calls, and none of them of ufuncs.
    if array.dtype.kind == "b":
        length, form = words, "a mask of bool"
    elif _are_bits(array):
        length, form = -(-words // 32), "bits of int32; give ids as int64:"
    else:
        return _made(_ids(array, "allowed"), 1, words, None, needed=count > 0)
    if array.shape != (length,) and array.shape != (count, length):
        raise ValueError(f"allowed: {form} expected [{length}] or [{count}, {length}], got {list(array.shape)}")
    return _made(np.ascontiguousarray(array), 1 if array.ndim == 1 else count, words, None, needed=count > 0)


def _are_bits(array: Array) -> bool:
    return array.dtype.kind in "iu" and array.dtype.itemsize == 4


def _ids(ids: Array, where: str) -> Ints:
    if ids.ndim != 1 or (ids.size and (ids.dtype.kind not in "iu" or _are_bits(ids))):
        raise TypeError(f"{where}: expected {_FORMS}; got {ids.dtype} {list(ids.shape)}")
    return np.ascontiguousarray(ids, np.int64)


def _made(array: Array, rows: int, words: int, ends: Ints | None, *, needed: bool = True) -> Allowed:
    """Return the words of `rows` states; those are needed unless there is no state to answer."""
    bits, counts = np.zeros((rows, -(-words // CHUNK_ROWS) * CHUNK_ROWS // 64), np.uint64), np.empty(rows, np.int64)
    bad = allow_words(array, words, ends, bits, counts)
    if bad >= 0:
        row = "" if ends is None else f"[{int(np.searchsorted(ends, bad, 'right')) - 1}]"
        raise ValueError(f"allowed{row}: expected ids of 0 to {words - 1}, got {array[bad]}")
    if bad < -1 and needed:
        row = "" if ends is None and rows == 1 else f"[{-2 - bad}]"
        raise ValueError(f"allowed{row} holds no word: expected at least one of 0 to {words - 1} for each hidden state")
    return Allowed(words, bits, counts)
