"""Patterns of ``like``: ``%`` stands for any text, ``_`` for one character; after a backslash they are plain."""

import re
from dataclasses import dataclass

__all__ = ["Pattern"]

_MARKS = re.compile(r"\\(?P<plain>[%_\\])|(?P<fault>\\)|(?P<any>%)|(?P<one>_)|(?P<rest>[^\\%_]+)")
_LAST = chr(0x10FFFF)


@dataclass(frozen=True, slots=True)
class Pattern:
    """A pattern that was taken apart.

    Attributes
    ----------
    pieces
        Regular expressions of a fixed number of characters, one for each run between two ``%``.
    lengths
        These numbers.
    prefix
        The text that every match begins with.
    kind
        Whether the pattern is the prefix alone, the prefix and then any text, or more than that.
    """

    pieces: tuple[re.Pattern[str], ...]
    lengths: tuple[int, ...]
    prefix: str
    kind: str

    @classmethod
    def of(cls, text: str) -> "Pattern":
        r"""Take a pattern apart.

        Raises
        ------
        ValueError
            When a backslash stands before anything but ``%``, ``_`` and itself.

        Examples
        --------
        >>> from memhier.ann.zoom.filters.patterns import Pattern
        >>> pattern = Pattern.of("a%c_")
        >>> [pattern.matches(text) for text in ("abcd", "acc", "ab")], pattern.prefix
        ([True, True, False], 'a')
        """
        pieces, lengths, prefix, plain = [""], [0], "", True
        for mark in _MARKS.finditer(text):
            if mark["fault"]:
                raise ValueError(f"{text!r}: a backslash at character {mark.start()}; expected \\%, \\_ or \\\\")
            if mark["any"]:
                pieces.append("")
                lengths.append(0)
                plain = False
                continue
            letters = mark["plain"] or mark["rest"] or ""
            pieces[-1] += "." if mark["one"] else re.escape(letters)
            lengths[-1] += len(letters) or 1
            plain = plain and not mark["one"]
            prefix += letters if plain else ""
        kind = "more"
        if lengths[0] == len(prefix):
            kind = "text" if len(pieces) == 1 else "prefix" if not any(lengths[1:]) else "more"
        made = tuple(re.compile(piece, re.DOTALL) for piece in pieces)
        return cls(made, tuple(lengths), prefix, kind)

    @property
    def beyond(self) -> str | None:
        """The least text after all that begin with the prefix; None where there is none."""
        kept = self.prefix.rstrip(_LAST)
        return kept[:-1] + chr(ord(kept[-1]) + 1) if kept else None

    def matches(self, text: str) -> bool:
        """Return whether a text is of this pattern, in time that grows with its length times that of the pattern."""
        end = len(text) - self.lengths[-1] * (len(self.pieces) > 1)
        if self.pieces[0].match(text) is None or end < self.lengths[0]:
            return False
        if len(self.pieces) == 1:
            return len(text) == self.lengths[0]
        at = self.lengths[0]
        for piece in self.pieces[1:-1]:  # the first place is as good as any: it leaves the most for those after it
            found = piece.search(text, at, end)
            if found is None:
                return False
            at = found.end()
        return self.pieces[-1].match(text, end) is not None
