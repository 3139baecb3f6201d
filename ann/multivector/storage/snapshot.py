"""The state of an index at one moment: parts on SSD, items that wait in DRAM, and the effort for each recall."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.multivector.coding.book import TokenBook
from memhier.ann.multivector.coding.calibration import Calibration
from memhier.ann.multivector.items import token_rows
from memhier.ann.multivector.storage.part import ItemPart
from memhier.ann.zoom.filters.attributes import Schema
from memhier.ann.zoom.storage.fresh import Fresh
from memhier.ann.zoom.storage.ids import IdKind
from memhier.io.page_file import PAGE_BYTES

__all__ = ["ItemSnapshot", "WaitingItems"]

Ints: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True)
class WaitingItems:
    """Items just added: they wait in DRAM for the next commit, scored exactly. An addition makes another object.

    Attributes
    ----------
    tokens
        ``[t, d]`` of the index's dtype, end to end.
    starts
        int64 ``[n + 1]``.
    fresh
        Ids, attributes and documents; its vectors have no dimensions.
    """

    tokens: npt.NDArray[Any]
    starts: Ints
    fresh: Fresh

    @classmethod
    def none(cls, dimension: int, dtype: np.dtype[Any], id_kind: IdKind) -> Self:
        """Return no items."""
        fresh = Fresh.empty(0, dtype, id_kind == "str")
        return cls(np.empty((0, dimension), dtype), np.zeros(1, np.int64), fresh)

    def __len__(self) -> int:
        return len(self.fresh)

    @property
    def ids(self) -> Ints:
        """Their ids, int64 ``[n]``: integers, or hashes of strings."""
        return self.fresh.ids

    @property
    def memory_bytes(self) -> int:
        """DRAM held, in bytes."""
        return int(self.tokens.nbytes + self.starts.nbytes) + self.fresh.memory_bytes

    def bounds(self, items: Ints) -> tuple[Ints, Ints]:
        """Return where the tokens of items begin and end, int64 ``[m]`` each."""
        return self.starts[items], self.starts[items + 1]

    def take(self, items: Ints) -> tuple[npt.NDArray[Any], Ints]:
        """Return the tokens of some items, in this order, and where each begins, int64 ``[m + 1]``."""
        lows, highs = self.bounds(items)
        return self.tokens[token_rows(lows, highs)], np.concatenate([[0], np.cumsum(highs - lows)])

    def without(self, ids: Ints) -> "WaitingItems":
        """Return the others than those of some ids."""
        if not np.isin(ids, self.ids).any():
            return self
        return WaitingItems(*self.take(np.flatnonzero(~np.isin(self.ids, ids))), self.fresh.without(ids))

    def joined(self, more: "WaitingItems", schema: Schema) -> "WaitingItems":
        """Return both together, with the attributes of a schema."""
        return WaitingItems(
            np.concatenate([self.tokens, more.tokens]),
            np.concatenate([self.starts, self.starts[-1] + more.starts[1:]]),
            self.fresh.joined(more.fresh, schema),
        )

    def widened(self, schema: Schema) -> "WaitingItems":
        """Return the same items with the attributes of a schema."""
        return replace(self, fresh=self.fresh.widened(schema))


@dataclass(frozen=True)
class ItemSnapshot:
    """The state of an index at one moment. A search keeps the snapshot that it started with.

    Items on SSD are numbered through all parts.

    Attributes
    ----------
    book
        Lists and codes of tokens.
    parts
        Items on SSD.
    waiting
        Items in DRAM.
    schema
        Types of the attributes.
    calibration
        The effort for each recall.
    scan_bytes
        DRAM for tokens, or pages of documents, that are read together.
    documents
        Names of the documents, in the order of their numbers.
    """

    book: TokenBook
    parts: tuple[ItemPart, ...]
    waiting: WaitingItems
    schema: Schema
    calibration: Calibration
    scan_bytes: int
    documents: tuple[str, ...] = ()

    @property
    def fresh(self) -> Fresh:
        """Ids, attributes and documents of the items that wait."""
        return self.waiting.fresh

    @property
    def id_kind(self) -> IdKind:
        """The type of the ids."""
        return "int64" if self.fresh.texts is None else "str"

    @cached_property
    def count(self) -> int:
        """Items that a search can find."""
        return sum(part.count for part in self.parts) + len(self.waiting)

    @cached_property
    def bases(self) -> Ints:
        """The number of the first item of each part, int64 ``[parts + 1]``."""
        return np.concatenate([[0], np.cumsum([len(part) for part in self.parts], dtype=np.int64)]).astype(np.int64)

    @property
    def token_bytes(self) -> int:
        """Bytes of a token as it is stored."""
        return self.book.dimension * self.waiting.tokens.dtype.itemsize

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest item."""
        lengths = [part.longest for part in self.parts] + np.diff(self.waiting.starts).tolist()
        return max(lengths, default=0)

    @cached_property
    def pages(self) -> int:
        """Pages of the tokens on SSD."""
        return sum(-(-int(part.arrays.starts[-1]) * self.token_bytes // PAGE_BYTES) for part in self.parts)

    def token_bounds(self, numbers: Ints) -> tuple[Ints, Ints]:
        """Return where the tokens of items begin and end in their parts, int64 ``[m]`` each."""
        lows, highs = np.empty((2, len(numbers)), np.int64)
        for part, here, rows in self.by_part(numbers):
            lows[here], highs[here] = part.arrays.bounds(rows)
        return lows, highs

    def by_part(self, numbers: Ints) -> Iterator[tuple[ItemPart, Ints, Ints]]:
        """Yield, of each part with some of the items `numbers`, the part, which of `numbers` these are, and their rows.

        `numbers` may come in any order.
        """
        for _, part, here, rows in self.numbered(numbers):
            yield part, here, rows

    def numbered(self, numbers: Ints) -> Iterator[tuple[int, ItemPart, Ints, Ints]]:
        """Yield the number of each part first, then the values of :meth:`by_part`."""
        of = np.searchsorted(self.bases, numbers, side="right") - 1
        for number, part in enumerate(self.parts):
            here = np.flatnonzero(of == number)
            if len(here):
                yield number, part, here, numbers[here] - self.bases[number]

    @property
    def memory_bytes(self) -> int:
        """DRAM held, in bytes."""
        return self.book.memory_bytes + self.waiting.memory_bytes + sum(part.memory_bytes for part in self.parts)
