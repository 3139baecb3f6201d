"""New values of one column of a part, of some rows or of all: those that wait in DRAM, and those that are written.

The values of a part are written once. An update of attributes adds values that stand before those written earlier.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.zoom.filters.attributes import Schema, null_values
from memhier.ann.zoom.filters.blocks import StoredAny
from memhier.ann.zoom.filters.columns import AnyColumn, NullColumn
from memhier.ann.zoom.filters.conditions import AttributeType, is_list, item_type
from memhier.ann.zoom.filters.given import array_column
from memhier.ann.zoom.filters.postings import POSTINGS
from memhier.ann.zoom.filters.stored_column import StoredColumn
from memhier.ann.zoom.filters.stored_lists import ITEMS, StoredListColumn
from memhier.errors import CorruptionError
from memhier.fields import stored_array
from memhier.io.ranges import Reading
from memhier.io.reader import Reader
from memhier.store.store import Store

__all__ = [
    "VALUE_BYTES", "Change", "Changes", "change_rows", "column_name", "open_changes", "row_dtype",
    "rows_name", "segments_of",
]  # fmt: skip

VALUE_BYTES = 72  # of a value that waits, with its row, beside its own bytes
_HEAD_BYTES = 512

Ints: TypeAlias = npt.NDArray[np.int64]
Objects: TypeAlias = npt.NDArray[np.object_]


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class Change:
    """Values that stand before those written earlier.

    Attributes
    ----------
    rows
        uint32 or int64 ``[m]``, ascending: of the part; None for all of them, which the part's attributes then read.
    generation
        Of the store, in the names of its segments; None while it waits.
    column
        As written; None while it waits, and of all rows.
    values
        Objects ``[m]`` while it waits.
    beyond
        Their bytes beyond 64 for each; see `memhier.ann.zoom.storage.fresh.value_bytes`.
    """

    rows: npt.NDArray[Any] | None
    generation: int | None = None
    column: StoredAny | NullColumn | None = None
    values: Objects | None = None
    beyond: int = 0

    @property
    def memory_bytes(self) -> int:
        """DRAM held, in bytes."""
        if self.values is not None:
            return VALUE_BYTES * len(self.values) + self.beyond
        return _HEAD_BYTES + (0 if self.rows is None else self.rows.nbytes)

    @property
    def word_count(self) -> int:
        """Distinct words of text."""
        return self.column.word_count if isinstance(self.column, StoredAny) else 0

    def entry(self) -> list[int | None]:
        """Return its entry in the catalog."""
        return [self.generation, None if self.rows is None else len(self.rows)]

    def source(self, name: str) -> AnyColumn:
        """Return the values as a column, that of the attribute `name`."""
        if self.values is not None:
            return array_column(name, self.values, len(self.values))
        assert self.column is not None
        return self.column

    def take(self, kind: AttributeType, places: Ints) -> Reading[npt.NDArray[Any]]:
        """Read the values at places among its rows, as `Attributes.take` has them."""
        if isinstance(self.column, StoredAny):
            return (yield from self.column.take(places))
        found = null_values(kind, len(places))
        if self.values is not None:
            for at, value in enumerate(self.values[places]):
                if value is not None:
                    found[at] = list(value) if is_list(kind) else value
        return found

    def joined(self, later: "Change") -> "Change":
        """Return both together while they wait; the later values stand."""
        assert self.rows is not None
        assert later.rows is not None
        rows = np.union1d(self.rows, later.rows)
        values = np.empty(len(rows), object)
        values[np.searchsorted(rows, self.rows)] = self.values
        values[np.searchsorted(rows, later.rows)] = later.values
        return Change(rows, values=values, beyond=self.beyond + later.beyond)


Changes: TypeAlias = Mapping[str, tuple[Change, ...]]
"""Of a part, by attribute: in the order in which they were made; the first one may be of all rows."""


def row_dtype(count: int) -> np.dtype[Any]:
    """Return the type of the rows of a part with `count` rows."""
    return np.dtype("<u4" if count <= 2**32 else "<i8")


def change_rows(every: Sequence[Change]) -> npt.NDArray[Any]:
    """Return the rows of changes, each once, ascending; none of them is of all rows."""
    rows = [each.rows for each in every if each.rows is not None]
    return np.unique(np.concatenate(rows)) if rows else np.empty(0, np.int64)


def column_name(part: str, name: str, generation: int) -> str:
    """Return the segment that holds the values of a change of the attribute `name`."""
    return f"{part}-c{generation}-{name}"


def rows_name(part: str, name: str, generation: int) -> str:
    """Return the segment that holds the rows of such a change."""
    return f"{part}-r{generation}-{name}"


def segments_of(entry: Mapping[str, Any], name: str) -> list[str]:
    """Return the names that segments of an attribute may have in a part, whose entry in the catalog is given.

    They are those of the changes, and those written with the part where no change is of all its rows.
    """
    part, rows = entry["name"], []
    columns = [f"{part}-a-{name}"]
    for generation, count in entry.get("changes", {}).get(name, []):
        columns = [] if count is None else columns
        columns.append(column_name(part, name, generation))
        rows.append(rows_name(part, name, generation))
    suffixes = ("", "-words", ITEMS, f"{ITEMS}-words", POSTINGS)
    return [*rows, *(column + suffix for column in columns for suffix in suffixes)]


def open_changes(
    store: Store, entry: Mapping[str, Any], count: int, schema: Schema, reader: Reader
) -> dict[str, tuple[Change, ...]]:
    """Return the changes that the entry of a part with `count` rows names."""
    part, found = entry["name"], dict[str, tuple[Change, ...]]()
    segments = store.segments()
    for name, every in entry.get("changes", {}).items():
        if name not in schema:
            raise CorruptionError(f"{store.path}: part {part} changes the attribute {name!r}, which there is not")
        if any(number is None for _, number in every[1:]):
            raise CorruptionError(f"{store.path}: part {part} changes all rows of {name!r} after some of them")
        changes: list[Change] = []
        for generation, number in every:
            if number is None:
                changes.append(Change(None, generation))
                continue
            rows = stored_array(store, rows_name(part, name, generation), row_dtype(count), (number,))
            if number and (int(rows[-1]) >= count or int(rows[0]) < 0 or (rows[1:] <= rows[:-1]).any()):
                raise CorruptionError(f"{store.path}: the changed rows of {name!r} in part {part} are out of order")
            kind, segment = item_type(schema[name]), column_name(part, name, generation)
            assert kind is not None
            column: StoredAny | NullColumn = NullColumn(number)
            if segment in segments:
                stored = StoredListColumn if is_list(schema[name]) else StoredColumn
                column = stored(store, segment, kind, number, reader)
            changes.append(Change(rows, generation, column))
        found[name] = tuple(changes)
    return found
