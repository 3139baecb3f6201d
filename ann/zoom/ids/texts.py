"""String ids, end to end as UTF-8 in one array: a few bytes each beside their letters."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from typing import Any, Self, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["TEXT_MOST", "Texts", "as_texts", "hash_texts", "is_text"]

TEXT_MOST = 1024  # bytes
_BLOCK = 1 << 14  # strings that are Python objects at a time

Ints: TypeAlias = npt.NDArray[np.int64]
Bytes: TypeAlias = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Texts:
    """Immutable strings in a fixed order.

    Attributes
    ----------
    letters
        uint8: their UTF-8, end to end.
    bounds
        int64 ``[n + 1]``: string ``i`` has the letters from ``bounds[i]`` to ``bounds[i + 1]``.
    """

    letters: Bytes
    bounds: Ints

    @classmethod
    def none(cls) -> Self:
        """Return no strings."""
        return cls(np.empty(0, np.uint8), np.zeros(1, np.int64))

    @classmethod
    def encoded(cls, words: Sequence[bytes]) -> Self:
        """Return strings from their UTF-8."""
        lengths = np.fromiter(map(len, words), np.int64, len(words))
        return cls(np.frombuffer(b"".join(words), np.uint8), _bounds(lengths))

    @classmethod
    def cut(cls, letters: Bytes, starts: Ints, lengths: Ints) -> Self:
        """Return the strings that lie in `letters` at `starts`, in any order."""
        bounds = _bounds(lengths)
        places = np.arange(bounds[-1]) + np.repeat(starts - bounds[:-1], lengths)
        return cls(letters[places], bounds)

    @classmethod
    def joined(cls, pieces: Sequence["Texts"]) -> Self:
        """Return the strings of all pieces, one piece after the other."""
        lengths = [piece.lengths for piece in pieces]
        letters = [piece.letters[piece.bounds[0] : piece.bounds[-1]] for piece in pieces]
        return cls(
            np.concatenate([np.empty(0, np.uint8), *letters]),
            _bounds(np.concatenate([np.empty(0, np.int64), *lengths])),
        )

    def __len__(self) -> int:
        return len(self.bounds) - 1

    @property
    def lengths(self) -> Ints:
        """Bytes of each, int64 ``[n]``."""
        return np.diff(self.bounds)

    @property
    def longest(self) -> int:
        """Bytes of the longest, 0 without strings."""
        return int(self.lengths.max(initial=0))

    @property
    def memory_bytes(self) -> int:
        """DRAM held, in bytes."""
        return self.letters.nbytes + self.bounds.nbytes

    def take(self, rows: Ints | npt.NDArray[np.bool_]) -> "Texts":
        """Return the strings of these rows, int64 or bool."""
        return Texts.cut(self.letters, self.bounds[:-1][rows], self.lengths[rows])

    def part(self, start: int, stop: int) -> "Texts":
        """Return neighbouring strings; their letters are shared."""
        return Texts(self.letters, self.bounds[start : max(start, stop) + 1])

    def words(self) -> list[bytes]:
        """Return the UTF-8 of each."""
        first = int(self.bounds[0])
        raw = self.letters[first : self.bounds[-1]].tobytes()
        edges = (self.bounds - first).tolist()
        return [raw[low:high] for low, high in pairwise(edges)]

    def objects(self) -> npt.NDArray[np.object_]:
        """Return them as Python strings, object ``[n]``."""
        made = np.empty(len(self), np.object_)
        made[:] = [word.decode(errors="replace") for word in self.words()]
        return made

    def __getitem__(self, row: int) -> str:
        return self.letters[self.bounds[row] : self.bounds[row + 1]].tobytes().decode(errors="replace")

    def equal(self, other: "Texts") -> npt.NDArray[np.bool_]:
        """Return whether each string equals that of `other`, bool ``[n]``."""
        pairs = zip(self.words(), other.words(), strict=True)
        return np.fromiter((mine == theirs for mine, theirs in pairs), np.bool_, len(self))


def hash_texts(texts: Texts) -> Ints:
    """Return 63 bits of each string's BLAKE2b, int64 ``[n]``, never negative; DRAM holds these in its place."""
    numbers = np.empty(len(texts), np.int64)
    for start in range(0, len(texts), _BLOCK):
        words = texts.part(start, min(start + _BLOCK, len(texts))).words()
        digests = b"".join([blake2b(word, digest_size=8).digest() for word in words])
        numbers[start : start + len(words)] = (np.frombuffer(digests, "<u8") >> np.uint64(1)).astype(np.int64)
    return numbers


def is_text(ids: object) -> bool:
    """Whether ids are strings, by the dtype of an array or by the first of a sequence."""
    if isinstance(ids, str):
        return True
    if not isinstance(ids, list | tuple):
        ids = np.asarray(ids)
        if ids.dtype.kind != "O":
            return ids.dtype.kind in "UT"
        ids = ids.ravel()
    return len(ids) > 0 and isinstance(ids[0], str)


def as_texts(ids: Any, name: str = "ids") -> Texts:
    """Return strings from a list, or an array of NumPy's strings or of objects; `ids` is one or ``[n]``.

    Raises
    ------
    TypeError
        When one of them is no string.
    ValueError
        For an empty string, one of more than 1,024 bytes, and one that UTF-8 cannot hold.
    """
    values = [ids] if isinstance(ids, str) else ids
    if not isinstance(values, list | tuple):
        values = np.atleast_1d(np.asarray(values))
        if values.ndim != 1:
            raise TypeError(f"{name} has shape {values.shape}: expected strings of shape [n]")
    return Texts.joined(list(_encoded_blocks(values, name)))


def _encoded_blocks(values: Any, name: str) -> Iterator[Texts]:
    for start in range(0, len(values), _BLOCK):
        block = values[start : start + _BLOCK]
        words = []
        for row, text in enumerate(block.tolist() if isinstance(block, np.ndarray) else block, start):
            if not isinstance(text, str):
                raise TypeError(f"{name}[{row}]={text!r}: expected a string, as the others are")
            words.append(_encode(text, f"{name}[{row}]"))
        yield Texts.encoded(words)


def _encode(text: str, name: str) -> bytes:
    try:
        word = text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name}={text!r}: UTF-8 cannot hold it ({error.reason}); expected valid Unicode") from None
    if not 0 < len(word) <= TEXT_MOST:
        shown = text if len(text) <= 40 else text[:40] + "..."
        raise ValueError(f"{name}={shown!r} has {len(word)} bytes of UTF-8: expected 1 to {TEXT_MOST:,}")
    return word


def _bounds(lengths: Ints) -> Ints:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)]).astype(np.int64, copy=False)
