"""Ids of 64 bits: the options of a table for any ids, and the hash that makes such ids of words."""

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from memhier import backend
from memhier.arguments import check_int

__all__ = ["CELLS_BLOCK", "Evict", "Hash64", "IdSpace", "as_id_space", "hash64"]

Evict = Literal["lru", "lfu"]

CELLS_BLOCK = 256
_STEPS_MAX = 2**32 - 2
_MASK = 2**64 - 1
_P1, _P2, _P3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
_P4, _P5 = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5


@dataclass(frozen=True, kw_only=True)
class Hash64:
    """Any ids of 64 bits, each with a row of its own; ``id_space="hash64"`` has these options by default.

    A step is a look-up in training here. Everything depends on the ids of the look-ups and their order alone.

    Attributes
    ----------
    admit_after
        An id gets its row once it was seen so often, 1 to 255. A sketch counts the ids below that; as different ids may
        share its counts, it may admit one early, and as it halves the counts slowly, it forgets rare ones.
    expire_after
        An id without use for more than so many steps is forgotten; None for never.
    evict
        When all rows are in use, a 64th of them is taken from the ids used least recently (``"lru"``) or least often
        (``"lfu"``). None keeps them: ids that come later stay without a row until others expire.
    sketch
        Counts of the sketch, one byte each: a multiple of 256. By default 8 for each row, if `admit_after` is above 1,
        and at a resume as many as there are. Each sighting halves eight of them, so all are halved once in as many
        sightings as an eighth of the sketch.
    pending
        The most look-ups whose gradients may wait at once. Ids of so many last look-ups keep their rows.

    Examples
    --------
    >>> import tempfile
    >>> import torch
    >>> from memhier.recsys import EmbeddingBag, Hash64
    >>> space = Hash64(admit_after=2, evict="lfu")
    >>> with EmbeddingBag(1000, 4, id_space=space, dram="64MiB", path=tempfile.mkdtemp()) as bag:
    ...     for ids in ([-5, 2**62], [-5, 8]):
    ...         bag(torch.tensor([ids])).sum().backward()
    ...     bag.contains([-5, 8]).tolist()
    [True, False]
    """

    admit_after: int = 1
    expire_after: int | None = None
    evict: Evict | None = "lru"
    sketch: int | None = None
    pending: int = 4

    def __post_init__(self) -> None:
        check_int("admit_after", self.admit_after, 1, 255, "sightings")
        check_int("pending", self.pending, 1, 2**16, "look-ups")
        if self.expire_after is not None:
            check_int("expire_after", self.expire_after, self.pending, _STEPS_MAX, "steps, at least `pending`")
        if self.evict is not None and self.evict not in get_args(Evict):
            raise ValueError(f"evict={self.evict!r}: expected 'lru', 'lfu' or None")
        if self.sketch is not None:
            check_int("sketch", self.sketch, CELLS_BLOCK, 2**34, "counts")
            if self.sketch % CELLS_BLOCK:
                raise ValueError(f"sketch={self.sketch}: expected a multiple of {CELLS_BLOCK}")

    def cells(self, capacity: int) -> int:
        """Return the counts of the sketch of so many rows."""
        if self.admit_after == 1:
            return 0
        return -(-8 * capacity // CELLS_BLOCK) * CELLS_BLOCK if self.sketch is None else int(self.sketch)


IdSpace = Literal["rows", "hash64"] | Hash64
"""The ids of a table: numbers of its rows, or any."""


def as_id_space(given: Any) -> Hash64 | None:
    """Return the options of a table for any ids; None for one whose ids are its rows."""
    if given == "rows":
        return None
    if given == "hash64":
        return Hash64()
    if isinstance(given, Hash64):
        return given
    raise ValueError(f"id_space={given!r}: expected 'rows', 'hash64' or Hash64(...)")


def hash64(words: Iterable[str | bytes]) -> Tensor:
    """Return an id for each word, int64 [n]: XXH64 of its UTF-8 bytes with seed 0, as a signed number.

    The chance that any two of n different words get one id is about n * n / 2**65: 3 in 10^8 for a million, 3 % for a
    billion. Loaders may call this in their workers.

    Parameters
    ----------
    words
        Text, or bytes.

    Examples
    --------
    >>> from memhier.recsys import hash64
    >>> hash64(["", "68fd1e64"]).tolist()
    [-1205034819632174695, 6718470718629228516]
    """
    encoded = [word.encode() if isinstance(word, str) else bytes(word) for word in words]
    found = np.empty(len(encoded), np.int64)
    if backend.core is None:
        found[:] = np.array([_xxh64(word) for word in encoded], np.uint64).view(np.int64)
    else:
        ends = np.cumsum([len(word) for word in encoded], dtype=np.int64)
        backend.core.hash_words(words=np.frombuffer(b"".join(encoded), np.uint8), ends=ends, hashes=found)
    return torch.from_numpy(found)


def _turned(value: int, bits: int) -> int:
    value &= _MASK
    return (value << bits | value >> (64 - bits)) & _MASK


def _round(held: int, word: int) -> int:
    return _turned(held + word * _P2, 31) * _P1 & _MASK


def _xxh64(data: bytes) -> int:
    """Return XXH64, as Yann Collet's specification says."""
    at, length = 0, len(data)
    if length >= 32:
        lanes = [(_P1 + _P2) & _MASK, _P2, 0, -_P1 & _MASK]
        for at in range(32, length + 1, 32):
            words: Sequence[int] = struct.unpack_from("<4Q", data, at - 32)
            lanes = [_round(lane, word) for lane, word in zip(lanes, words, strict=True)]
        held = sum(_turned(lane, bits) for lane, bits in zip(lanes, (1, 7, 12, 18), strict=True))
        for lane in lanes:
            held = ((held ^ _round(0, lane)) * _P1 + _P4) & _MASK
    else:
        held = _P5
    held += length
    while length - at >= 8:
        held = _turned(held ^ _round(0, int.from_bytes(data[at : at + 8], "little")), 27) * _P1 + _P4
        at += 8
    if length - at >= 4:
        held = _turned(held ^ (int.from_bytes(data[at : at + 4], "little") * _P1 & _MASK), 23) * _P2 + _P3
        at += 4
    for byte in data[at:]:
        held = _turned(held ^ (byte * _P5 & _MASK), 11) * _P1
    held &= _MASK
    held = (held ^ held >> 33) * _P2 & _MASK
    held = (held ^ held >> 29) * _P3 & _MASK
    return held ^ held >> 32
