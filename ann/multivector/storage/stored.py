"""The items of parts, read again from SSD."""

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.multivector.items import BLOCK_BYTES, Block, spans
from memhier.ann.multivector.storage.part import ItemPart, positions
from memhier.ann.multivector.storage.snapshot import ItemSnapshot
from memhier.io.reader import Reader

__all__ = ["StoredItems", "tokens_of"]

Ints: TypeAlias = npt.NDArray[np.int64]


class StoredItems:
    """The items of parts that were not removed, in order: an `ItemSource`.

    Parameters
    ----------
    parts
        At least one.
    reader
        Reads them.
    """

    def __init__(self, parts: Sequence[ItemPart], reader: Reader) -> None:
        self._parts, self._reader = parts, reader
        self._rows: list[Ints] = [np.flatnonzero(part.is_alive()) for part in parts]
        bounds = [part.arrays.bounds(rows) for part, rows in zip(parts, self._rows, strict=True)]
        self.lengths: Ints = np.concatenate([highs - lows for lows, highs in bounds])
        self.dimension: int = parts[0].dimension
        self.dtype: np.dtype[Any] = parts[0].dtype

    @property
    def ids(self) -> Ints:
        """Their ids, int64 ``[n]``."""
        pairs = zip(self._parts, self._rows, strict=True)
        return np.concatenate([part.arrays.ids[rows].astype(np.int64) for part, rows in pairs])

    @property
    def order(self) -> Ints:
        """Their numbers among all items of the parts, int64 ``[n]``."""
        bases = np.cumsum([0, *(len(part) for part in self._parts)])
        return np.concatenate([rows + base for rows, base in zip(self._rows, bases, strict=False)])

    def take(self, items: Ints) -> npt.NDArray[Any]:
        """Return the tokens of some items, which ascend, end to end, ``[t, d]``."""
        ends = np.cumsum([len(rows) for rows in self._rows])
        of = np.searchsorted(ends, items, side="right")
        found: list[npt.NDArray[Any]] = []
        for number in np.unique(of).tolist():
            rows = self._rows[number][items[of == number] - (ends[number] - len(self._rows[number]))]
            found.append(self._parts[number].read(self._reader, rows))
        return np.concatenate(found)

    def blocks(self, limit: int = BLOCK_BYTES) -> Iterator[Block]:
        """Yield all items, at most `limit` bytes of tokens or one item at a time."""
        before = 0
        for part, rows in zip(self._parts, self._rows, strict=True):
            lows, highs = part.arrays.bounds(rows)
            starts = np.concatenate([[0], np.cumsum(highs - lows)])
            for first, stop in spans(starts, part.token_bytes, limit):
                some = starts[first : stop + 1] - starts[first]
                yield Block(before + first, some, part.read(self._reader, rows[first:stop]))
            before += len(rows)


def tokens_of(state: ItemSnapshot, ids: Ints, reader: Reader) -> list[npt.NDArray[Any]]:
    """Return the tokens of items, each once, ``[t, d]`` each.

    Raises
    ------
    KeyError
        For an id that is not in the index.
    """
    found: dict[int, npt.NDArray[Any]] = {}
    for number, places, rows in positions(state.parts, ids):
        part = state.parts[number]
        lows, highs = part.arrays.bounds(rows)
        matrices = np.split(part.read(reader, rows), np.cumsum(highs - lows)[:-1])
        found |= zip(places.tolist(), matrices, strict=True)
    waiting = state.waiting
    names = {name: row for row, name in enumerate(waiting.ids.tolist())}
    for place, name in enumerate(ids.tolist()):
        if name in names:
            low, high = waiting.starts[names[name] : names[name] + 2].tolist()
            found[place] = waiting.tokens[low:high]
        elif place not in found:
            raise KeyError(f"id {name} is not in the index")
    return [found[place] for place in range(len(ids))]
