"""The items of parts, read again from SSD."""

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.multivector.items import BLOCK_BYTES, Block, spans, token_rows
from memhier.ann.multivector.storage.part import ItemPart
from memhier.ann.multivector.storage.snapshot import ItemSnapshot
from memhier.ann.zoom.preview.scan_arguments import split_positions
from memhier.ann.zoom.storage.ids import Ids, Located, ids_of, locate_all
from memhier.io.reader import Reader

__all__ = ["KeptItems", "StoredItems", "item_blocks", "tokens_of"]

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
        self.parts: Sequence[ItemPart] = parts
        self._reader = reader
        self._rows: list[Ints] = [np.flatnonzero(part.alive_flags()) for part in parts]
        bounds = [part.arrays.bounds(rows) for part, rows in zip(parts, self._rows, strict=True)]
        self.lengths: Ints = np.concatenate([highs - lows for lows, highs in bounds])
        self.dimension: int = parts[0].dimension
        self.dtype: np.dtype[Any] = parts[0].dtype

    @property
    def ids(self) -> Ints:
        """Their ids, int64 ``[n]``."""
        pairs = zip(self.parts, self._rows, strict=True)
        return np.concatenate([part.arrays.ids[rows].astype(np.int64) for part, rows in pairs])

    @property
    def order(self) -> Ints:
        """Their numbers among all items of the parts, int64 ``[n]``."""
        bases = np.cumsum([0, *(len(part) for part in self.parts)])
        return np.concatenate([rows + base for rows, base in zip(self._rows, bases, strict=False)])

    def take(self, items: Ints) -> npt.NDArray[Any]:
        """Return the tokens of some items, which ascend, end to end, ``[t, d]``."""
        ends = np.cumsum([len(rows) for rows in self._rows])
        of = np.searchsorted(ends, items, side="right")
        found: list[npt.NDArray[Any]] = []
        for number in np.unique(of).tolist():
            rows = self._rows[number][items[of == number] - (ends[number] - len(self._rows[number]))]
            found.append(self.parts[number].read(self._reader, rows))
        return np.concatenate(found)

    def blocks(self, limit: int = BLOCK_BYTES) -> Iterator[Block]:
        """Yield all items, at most `limit` bytes of tokens or one item at a time."""
        before = 0
        for part, rows in zip(self.parts, self._rows, strict=True):
            lows, highs = part.arrays.bounds(rows)
            starts = np.concatenate([[0], np.cumsum(highs - lows)])
            for first, stop in spans(starts, part.token_bytes, limit):
                some = starts[first : stop + 1] - starts[first]
                yield Block(before + first, some, part.read(self._reader, rows[first:stop]))
            before += len(rows)


class KeptItems:
    """Items in some places of an index, in the order of the places: an `ItemSource`.

    Parameters
    ----------
    state
        The index; its files stay as long as this object.
    places
        Of the items, all of them there.
    reader
        Of the index.
    """

    def __init__(self, state: ItemSnapshot, places: Located, reader: Reader) -> None:
        self._state, self._places, self._reader = state, places, reader
        self.dimension: int = state.book.dimension
        self.dtype: np.dtype[Any] = state.waiting.tokens.dtype
        self.lengths: Ints = np.empty(len(places.positions), np.int64)
        for part, here, rows in self._by_part(places):
            lows, highs = part.arrays.bounds(rows)
            self.lengths[here] = highs - lows
        waiting = np.flatnonzero(places.fresh >= 0)
        self.lengths[waiting] = np.diff(state.waiting.starts)[places.fresh[waiting]]

    def take(self, items: Ints) -> npt.NDArray[Any]:
        """Return the tokens of some items, end to end, ``[t, d]``."""
        places, starts = self._places.take(items), np.concatenate([[0], np.cumsum(self.lengths[items])])
        found = np.empty((starts[-1], self.dimension), self.dtype)
        for part, here, rows in self._by_part(places):
            found[token_rows(starts[here], starts[here + 1])] = part.read(self._reader, rows)
        waiting = np.flatnonzero(places.fresh >= 0)
        rows = token_rows(starts[waiting], starts[waiting + 1])
        found[rows] = self._state.waiting.take(places.fresh[waiting])[0]
        return found

    def blocks(self, limit: int = BLOCK_BYTES) -> Iterator[Block]:
        """Yield all items, at most `limit` bytes of tokens or one item at a time."""
        starts = np.concatenate([[0], np.cumsum(self.lengths)])
        for first, stop in spans(starts, self._state.token_bytes, limit):
            yield Block(first, starts[first : stop + 1] - starts[first], self.take(np.arange(first, stop)))

    def _by_part(self, places: Located) -> Iterator[tuple[ItemPart, Ints, Ints]]:
        """Yield, of each part with some of the places, the part, which of `places` these are, and their rows."""
        numbers, rows = split_positions(places.positions)
        for which, part in enumerate(self._state.parts):
            here = np.flatnonzero((numbers == which) & (places.positions >= 0))
            if len(here):
                yield part, here, rows[here]


def item_blocks(state: ItemSnapshot, reader: Reader) -> Iterator[tuple[npt.NDArray[Any], list[npt.NDArray[Any]]]]:
    """Yield ids and tokens of all items in the order on SSD, some together, then of those that wait."""
    for part in state.parts:
        rows = np.flatnonzero(part.alive_flags())
        for block in StoredItems([part], reader).blocks():
            some = rows[block.first : block.first + len(block.starts) - 1]
            yield ids_of(part, some).values(), np.split(block.tokens, block.starts[1:-1])
    if len(state.fresh):
        waiting = state.waiting
        yield Ids(waiting.ids, waiting.fresh.texts).values(), np.split(waiting.tokens, waiting.starts[1:-1])


def tokens_of(state: ItemSnapshot, ids: Ids, reader: Reader) -> list[npt.NDArray[Any]]:
    """Return the tokens of items, each once, ``[t, d]`` each.

    Raises
    ------
    KeyError
        For an id that is not in the index.
    """
    kept = KeptItems(state, locate_all(state.parts, state.fresh, ids), reader)
    return [matrix for block in kept.blocks() for matrix in np.split(block.tokens, block.starts[1:-1])]
