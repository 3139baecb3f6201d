"""The state of an index at one moment: parts on SSD, items that wait in DRAM, and the effort for each recall."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.multivector.coding.book import TokenBook
from memhier.ann.multivector.coding.calibration import Calibration
from memhier.ann.multivector.storage.part import ItemPart
from memhier.ann.zoom.filters.attributes import Schema
from memhier.ann.zoom.storage.fresh import value_bytes

__all__ = ["VALUE_BYTES", "ItemSnapshot", "WaitingItems"]

Ints: TypeAlias = npt.NDArray[np.int64]
VALUE_BYTES = 64  # of an attribute, as a Python object


@dataclass(frozen=True)
class WaitingItems:
    """Items just added: they wait in DRAM for the next commit, scored exactly. An addition makes another object.

    Attributes
    ----------
    tokens
        ``[t, d]`` of the index's dtype, end to end.
    starts
        int64 ``[n + 1]``.
    ids
        int64 ``[n]``.
    attributes
        Values by name, object ``[n]``, None for null.
    """

    tokens: npt.NDArray[Any]
    starts: Ints
    ids: Ints
    attributes: Mapping[str, npt.NDArray[np.object_]] = field(default_factory=dict)

    @classmethod
    def none(cls, dimension: int, dtype: np.dtype[Any]) -> Self:
        """Return no items."""
        return cls(np.empty((0, dimension), dtype), np.zeros(1, np.int64), np.empty(0, np.int64))

    def __len__(self) -> int:
        return len(self.ids)

    @cached_property
    def memory_bytes(self) -> int:
        """DRAM held, in bytes."""
        values = VALUE_BYTES * len(self) * len(self.attributes) + int(
            value_bytes(dict(self.attributes), len(self)).sum()
        )
        return int(self.tokens.nbytes + self.starts.nbytes + self.ids.nbytes) + values

    def take(self, items: Ints) -> "WaitingItems":
        """Return some of the items, in this order."""
        starts, lengths = self.starts, np.diff(self.starts)[items]
        ends = np.concatenate([[0], np.cumsum(lengths)])
        rows = np.arange(ends[-1]) + np.repeat(starts[items] - ends[:-1], lengths)
        attributes = {name: values[items] for name, values in self.attributes.items()}
        return WaitingItems(self.tokens[rows], ends, self.ids[items], attributes)

    def joined(self, more: "WaitingItems", schema: Schema) -> "WaitingItems":
        """Return both together, with the attributes of a schema."""
        columns = {
            name: np.concatenate([each.attributes.get(name, np.full(len(each), None, object)) for each in (self, more)])
            for name in schema
        }
        return WaitingItems(
            np.concatenate([self.tokens, more.tokens]),
            np.concatenate([self.starts, self.starts[-1] + more.starts[1:]]),
            np.concatenate([self.ids, more.ids]),
            columns,
        )


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
    """

    book: TokenBook
    parts: tuple[ItemPart, ...]
    waiting: WaitingItems
    schema: Schema
    calibration: Calibration

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

    def by_part(self, numbers: Ints) -> Iterator[tuple[ItemPart, Ints, Ints]]:
        """Yield, of each part with some of the items `numbers`, the part, which of `numbers` these are, and their rows.

        `numbers` may come in any order.
        """
        of = np.searchsorted(self.bases, numbers, side="right") - 1
        for number, part in enumerate(self.parts):
            here = np.flatnonzero(of == number)
            if len(here):
                yield part, here, numbers[here] - self.bases[number]

    @property
    def memory_bytes(self) -> int:
        """DRAM held, in bytes."""
        return self.book.memory_bytes + self.waiting.memory_bytes + sum(part.memory_bytes for part in self.parts)
