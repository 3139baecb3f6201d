"""The words that constrained answers may hold, from masks, bits or ids, as the core takes them."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.decoder.coding.codes import CHUNK_ROWS
from memhier.ann.decoder.layer import Floats, Ints

__all__ = ["Allowed", "check_allowed", "split_with"]

_FORMS = "a mask (bool [V]), bits (int32 [ceil(V / 32)]), ids (int64 [c]), or one of these for each hidden state"

Bits: TypeAlias = npt.NDArray[np.uint64]


class Allowed:
    """Words that answers may hold, the same for all hidden states of a call or others for each.

    Make it of `bits` or of `rows` and `starts`; the other form is computed when it is asked for.

    Parameters
    ----------
    words
        V.
    bits
        uint64 ``[n or 1, padded / 64]``, lowest first, no bit beyond V.
    rows, starts
        int64: ids that ascend, and ``[n + 1]``, or ``[2]`` for all states, their ends.
    """

    def __init__(
        self, words: int, *, bits: Bits | None = None, rows: Ints | None = None, starts: Ints | None = None
    ) -> None:
        self.words: int = words
        self.counts: Ints
        self._bits, self._rows, self._starts = bits, rows, starts
        if bits is not None:
            self.counts = np.bitwise_count(bits).sum(1, dtype=np.int64)
        else:
            assert starts is not None
            self.counts = np.diff(starts)

    @property
    def shared(self) -> bool:
        """Whether all hidden states may have the same words."""
        return len(self.counts) == 1

    def bits(self) -> Bits:
        """Return the words as bits."""
        if self._bits is None:
            rows, starts = self.lists()
            ends = pairwise(starts.tolist())
            self._bits = np.concatenate([_packed(_mask(rows[start:stop], self.words)) for start, stop in ends])
        return self._bits

    def lists(self) -> tuple[Ints, Ints]:
        """Return the words as ids, and where those of each state start and end."""
        if self._rows is None or self._starts is None:
            assert self._bits is not None
            self._rows = np.concatenate([_ids(row) for row in self._bits])
            self._starts = np.concatenate([[0], np.cumsum(self.counts)])
        return self._rows, self._starts

    def of(self, states: npt.NDArray[Any]) -> "Allowed":
        """Return the words of some states, of whom a mask or numbers are given."""
        if self.shared:
            return self
        if self._bits is not None:
            return Allowed(self.words, bits=np.ascontiguousarray(self._bits[states]))
        rows, starts = self.lists()
        numbers = np.flatnonzero(states) if states.dtype == np.bool_ else states
        return _of_parts([rows[starts[number] : starts[number + 1]] for number in numbers], self.words)

    def mask(self) -> npt.NDArray[np.bool_]:
        """Return the words as a mask, bool ``[n or 1, V]``."""
        octets = self.bits().astype("<u8", copy=False).view(np.uint8)
        return np.unpackbits(octets, axis=1, bitorder="little", count=self.words).view(np.bool_)

    def holds(self, names: Ints) -> npt.NDArray[np.bool_]:
        """Say of a word of each state if it is allowed."""
        bits = self.bits()
        which = np.zeros(len(names), np.int64) if self.shared else np.arange(len(names))
        found: npt.NDArray[np.bool_] = (bits[which, names // 64] >> (names % 64).astype(np.uint64)) & 1 == 1
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
    found = _of_lists(allowed, count, words) if _is_nested(allowed) else _of_array(np.asarray(allowed), count, words)
    empty = np.flatnonzero(found.counts == 0)
    if len(empty) and count:
        where = "allowed" if found.shared else f"allowed[{empty[0]}]"
        raise ValueError(f"{where} holds no word: expected at least one of 0 to {words - 1} for each hidden state")
    return found


def _is_nested(allowed: Any) -> bool:
    """Say if it is a sequence of ids for each state, or an array of ids of two axes."""
    if isinstance(allowed, Sequence) and not isinstance(allowed, str | bytes):
        return len(allowed) > 0 and np.ndim(allowed[0]) == 1
    return getattr(allowed, "ndim", 0) == 2 and np.asarray(allowed).dtype == np.int64


def _of_lists(allowed: Any, count: int, words: int) -> Allowed:
    if len(allowed) != count:
        raise ValueError(f"allowed: expected ids of each of the {count} hidden states, got {len(allowed)} lists")
    if all(np.asarray(each).dtype == np.bool_ for each in allowed):
        return _of_array(np.stack([np.asarray(each) for each in allowed]), count, words)
    parts = [_checked_ids(np.asarray(each), words, f"allowed[{number}]") for number, each in enumerate(allowed)]
    return _of_parts(parts, words)


def _of_parts(parts: list[Ints], words: int) -> Allowed:
    ends = np.cumsum([0, *map(len, parts)], dtype=np.int64)
    return Allowed(words, rows=np.concatenate([*parts, np.empty(0, np.int64)]), starts=ends)


def _of_array(array: npt.NDArray[Any], count: int, words: int) -> Allowed:
    if array.dtype == np.bool_:
        return Allowed(words, bits=_packed(_fitting(array, count, words, "a mask of bool")))
    if array.dtype in (np.int32, np.uint32):
        bits = np.ascontiguousarray(_fitting(array, count, -(-words // 32), "bits of int32; give ids as int64:"))
        return Allowed(words, bits=_padded(bits.astype("<i4", copy=False).view(np.uint8), words))
    if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
        raise TypeError(f"allowed: expected {_FORMS}; got {array.dtype} {list(array.shape)}")
    ids = _checked_ids(array, words, "allowed")
    return Allowed(words, rows=ids, starts=np.array([0, len(ids)]))


def _fitting(array: npt.NDArray[Any], count: int, length: int, form: str) -> npt.NDArray[Any]:
    """Return a mask or bits of one row or `count` rows of that length."""
    if array.shape == (length,):
        return array[None]
    if array.shape != (count, length):
        raise ValueError(f"allowed: {form} expected [{length}] or [{count}, {length}], got {list(array.shape)}")
    return array


def _checked_ids(ids: npt.NDArray[Any], words: int, where: str) -> Ints:
    if ids.ndim != 1 or (ids.size and (ids.dtype.kind not in "iu" or ids.dtype in (np.int32, np.uint32))):
        raise TypeError(f"{where}: expected ids, int64 [c], got {ids.dtype} {list(ids.shape)}; int32 stands for bits")
    if ids.size and (int(ids.min()) < 0 or int(ids.max()) >= words):
        raise ValueError(f"{where}: expected ids of 0 to {words - 1}, got {int(ids.min())} to {int(ids.max())}")
    return np.unique(ids).astype(np.int64)


def _mask(ids: Ints, words: int) -> npt.NDArray[np.bool_]:
    mask = np.zeros((1, words), np.bool_)
    mask[0, ids] = True
    return mask


def _ids(row: Bits) -> Ints:
    """Return the ids of one row of bits."""
    return np.flatnonzero(np.unpackbits(row.astype("<u8", copy=False).view(np.uint8), bitorder="little"))


def _packed(mask: npt.NDArray[np.bool_]) -> Bits:
    return _padded(np.packbits(mask, axis=1, bitorder="little"), mask.shape[1])


def _padded(octets: npt.NDArray[np.uint8], words: int) -> Bits:
    """Return bits in bytes ``[n, b]`` as 64-bit words of whole chunks, without any beyond the words."""
    padded = np.zeros((len(octets), -(-words // CHUNK_ROWS) * CHUNK_ROWS // 8), np.uint8)
    whole = -(-words // 8)
    padded[:, :whole] = octets[:, :whole]
    if words % 8:
        padded[:, whole - 1] &= np.uint8((1 << words % 8) - 1)
    return padded.view("<u8").astype(np.uint64, copy=False)


def split_with(hidden: Floats, allowed: Allowed | None, step: int) -> list[tuple[Floats, Allowed | None]]:
    """Return a batch in parts of at most so many states, each with its allowed words."""
    starts = range(0, max(1, len(hidden)), step)
    numbers = np.arange(len(hidden))
    return [
        (hidden[start : start + step], None if allowed is None else allowed.of(numbers[start : start + step]))
        for start in starts
    ]
