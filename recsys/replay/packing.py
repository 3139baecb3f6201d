"""Sequences of tokens as a language model takes them: end to end, in rows of one length, and from several sources."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from memhier.arguments import as_ints, check_int, check_number

__all__ = ["PackedRows", "SourceShares", "pack_rows"]

Ints = NDArray[np.int64]


class PackedRows(NamedTuple):
    """Sequences in rows of one length.

    Attributes
    ----------
    tokens
        ``[rows, length]``; `pad` behind the last sequence of a row.
    segments
        int32 ``[rows, length]``: the number of the sequence, from 1 on, in its row; 0 for padding. Attention between
        tokens of different numbers is to be masked.
    positions
        int32 ``[rows, length]``: the place of each token in its sequence.

    Examples
    --------
    >>> import numpy as np
    >>> from memhier.recsys.replay.packing import pack_rows
    >>> pack_rows(np.array([7, 7, 8, 8, 8, 9]), np.array([0, 2, 5, 6]), length=4).positions.tolist()
    [[0, 1, 0, 0], [0, 1, 2, 0]]
    """

    tokens: NDArray[Any]
    segments: NDArray[np.int32]
    positions: NDArray[np.int32]


def pack_rows(tokens: NDArray[Any], offsets: Any, length: int, pad: int = 0) -> PackedRows:
    """Put sequences into as few rows as a first fit finds; those longer than a row are cut into rows and a rest.

    Parameters
    ----------
    tokens, offsets
        The sequences end to end, and where each begins, int64 ``[n + 1]``, as `Batch.packed` returns them.
    length
        Of a row.
    pad
        The token behind the last sequence of a row.

    Raises
    ------
    TypeError, ValueError
        For an unfit argument.

    Examples
    --------
    >>> import numpy as np
    >>> from memhier.recsys.replay.packing import pack_rows
    >>> rows = pack_rows(np.array([7, 7, 8, 8, 8, 9]), np.array([0, 2, 5, 6]), length=4)
    >>> rows.tokens.tolist(), rows.segments.tolist()
    ([[7, 7, 9, 0], [8, 8, 8, 0]], [[1, 1, 2, 0], [1, 1, 1, 0]])
    """
    length, ends = check_int("length", length, 1, 2**30), as_ints("offsets", offsets)
    if ends.ndim != 1 or len(ends) < 1 or ends[0] != 0 or ends[-1] != len(tokens) or (np.diff(ends) < 0).any():
        raise ValueError(f"offsets: expected rising numbers from 0 to the {len(tokens)} tokens, got {ends.tolist()}")
    filled: list[int] = []
    places: list[tuple[int, int, int, int]] = []  # row, begin in the row, begin in tokens, length
    for begin, end in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True):
        for start in range(begin, end, length):
            size = min(length, end - start)
            row = next((row for row, used in enumerate(filled) if used + size <= length), len(filled))
            if row == len(filled):
                filled.append(0)
            places.append((row, filled[row], start, size))
            filled[row] += size
    out = np.full((len(filled), length), pad, tokens.dtype)
    segments, positions = np.zeros((2, len(filled), length), np.int32)
    numbers = [0] * len(filled)
    for row, at, start, size in places:
        numbers[row] += 1
        out[row, at : at + size] = tokens[start : start + size]
        segments[row, at : at + size] = numbers[row]
        positions[row, at : at + size] = np.arange(size)
    return PackedRows(out, segments, positions)


class SourceShares:
    """How many samples of each step come from each source, so that their shares hold over all steps.

    The next sample comes from the source that is furthest behind its share.

    Parameters
    ----------
    shares
        By source, each above 0; they add up to 1.

    Attributes
    ----------
    taken
        How many each source has given; set it to go on from a checkpoint.

    Examples
    --------
    >>> from memhier.recsys.replay.packing import SourceShares
    >>> shares = SourceShares({"new": 0.9, "code": 0.06, "books": 0.04})
    >>> [shares.counts(10) for _ in range(2)]
    [{'new': 9, 'code': 1, 'books': 0}, {'new': 9, 'code': 0, 'books': 1}]
    >>> shares.taken
    {'new': 18, 'code': 1, 'books': 1}
    """

    def __init__(self, shares: Mapping[str, float]) -> None:
        self._shares = {name: check_number(f"shares[{name!r}]", share, 0, 1) for name, share in shares.items()}
        if abs(sum(self._shares.values()) - 1) > 1e-6 or min(self._shares.values(), default=0) <= 0:
            raise ValueError(f"shares={dict(shares)!r}: expected shares above 0 that add up to 1")
        self.taken: dict[str, int] = dict.fromkeys(self._shares, 0)

    def counts(self, n: int) -> dict[str, int]:
        """Return how many of the next n samples come from each source."""
        counts = dict.fromkeys(self._shares, 0)
        total = sum(self.taken.values())
        for number in range(total + 1, total + check_int("n", n, 0, 2**31) + 1):
            behind = {name: share * number - self.taken[name] for name, share in self._shares.items()}
            source = max(behind, key=behind.__getitem__)
            counts[source] += 1
            self.taken[source] += 1
        return counts
