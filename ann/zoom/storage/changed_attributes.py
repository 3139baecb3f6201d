"""The attributes of a part with changes."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.zoom.filters.attributes import Attributes, Schema, null_values
from memhier.ann.zoom.filters.bitmaps import BitmapCache, Words
from memhier.ann.zoom.filters.columns import AnyColumn
from memhier.ann.zoom.filters.conditions import Expression
from memhier.ann.zoom.filters.where import evaluate
from memhier.ann.zoom.storage.changed_columns import changed_column, last_places
from memhier.ann.zoom.storage.changes import Change, change_rows
from memhier.io.ranges import CountedReads, Reading, read_together, together
from memhier.io.reader import Reader

__all__ = ["ChangedAttributes"]

Ints: TypeAlias = npt.NDArray[np.int64]

_ROW_BYTES = 256  # of a value while a filter looks at it


class ChangedAttributes:
    """The attributes of a part, some of which have changed in some rows. For many threads.

    A filter looks at the part's attributes as written, then at the changed rows; see
    `memhier.ann.zoom.filters.attributes.Attributes`.

    Parameters
    ----------
    written
        The attributes as written for all rows.
    schema
        Types by name.
    changes
        Those of some rows, by attribute.
    reader, cache, work_bytes
        Those of `written`.

    Attributes
    ----------
    written
        As given.
    """

    def __init__(
        self, written: Attributes, schema: Schema, changes: Mapping[str, Sequence[Change]], reader: Reader,
        cache: BitmapCache, work_bytes: int,
    ) -> None:  # fmt: skip
        self.written: Attributes = written
        self._schema, self._changes = schema, changes
        self._reader, self._cache, self._work_bytes = reader, cache, work_bytes
        self._owner = object()  # keys of the cache

    @property
    def memory_bytes(self) -> int:
        """DRAM held, in bytes, but for the changes."""
        return self.written.memory_bytes

    @property
    def joined_bytes(self) -> int:
        """DRAM that a join takes for the columns, and for the rows of the changes, which it reads again."""
        held = [change for every in self._changes.values() for change in every]
        more = sum(change.memory_bytes + self.written.word_bytes * change.word_count for change in held)
        return self.written.joined_bytes + more

    def bitmap(self, expression: Expression) -> Words:
        """Return the rows for which a filter is true; see `Attributes.bitmap`."""
        return self.bitmaps([expression])[0]

    def bitmaps(self, expressions: Sequence[Expression]) -> list[Words]:
        """Return the rows for which each of some filters is true; see `Attributes.bitmaps`."""
        found = {number: self._cache.get((self._owner, each)) for number, each in enumerate(expressions)}
        missing = [number for number, bits in found.items() if bits is None]
        asked = [expressions[number] for number in missing]
        written = [self.written.bitmap(asked[0])] if len(asked) == 1 else self.written.bitmaps(asked)
        for number, bits in zip(missing, written, strict=True):
            found[number] = self._changed(expressions[number], bits)
        return [bits for bits in found.values() if bits is not None]

    def _changed(self, expression: Expression, bits: Words) -> Words:
        names = expression.names
        rows = change_rows([change for name in names for change in self._changes.get(name, ())])
        if not len(rows):
            return bits
        bits = bits if bits.flags.writeable else bits.copy()
        step = max(64, self._work_bytes // (_ROW_BYTES * len(names)))
        for start in range(0, len(rows), step):
            some = rows[start : start + step].astype(np.int64)
            masks = np.uint64(1) << (some & 63).astype(np.uint64)
            kept = evaluate(expression, self.take(some, names))
            np.bitwise_and.at(bits, some >> 6, ~masks)
            np.bitwise_or.at(bits, some[kept] >> 6, masks[kept])
        self._cache.put((self._owner, expression), bits)
        return bits

    def take(self, rows: npt.ArrayLike, names: Sequence[str]) -> dict[str, npt.NDArray[Any]]:
        """Return attributes of rows; see `Attributes.take`."""
        found = read_together(CountedReads(self._reader), self.readings(rows, names))
        return {name: found.get(name, null_values(self._schema[name], np.size(rows))) for name in names}

    def readings(self, rows: npt.ArrayLike, names: Sequence[str]) -> dict[str, Reading[npt.NDArray[Any]]]:
        """Return the reads of :meth:`take` as readings, by attribute; see `Attributes.readings`."""
        places = np.asarray(rows, np.int64)
        found = self.written.readings(places, [name for name in names if name not in self._changes])
        return found | {name: self._reading(name, places) for name in names if name in self._changes}

    def _reading(self, name: str, rows: Ints) -> Reading[npt.NDArray[Any]]:
        kind, changes = self._schema[name], self._changes[name]
        which, places = last_places(changes, rows)
        values = null_values(kind, len(rows))
        asked = dict(zip([-1], self.written.readings(rows[which < 0], [name]).values(), strict=False))
        for number, change in enumerate(changes):
            if (here := places[which == number]).size:
                asked[number] = change.take(kind, here)
        found = yield from together(asked)
        for number, some in found.items():
            values[which == number] = some
        return values

    def misposted(self) -> list[str]:
        """Return the attributes whose postings are wrong; see `Attributes.misposted`."""
        return self.written.misposted()

    def column(self, name: str) -> AnyColumn:
        """Return a column for `chain`."""
        written = self.written.column(name)
        if name not in self._changes:
            return written
        return changed_column(name, self._schema[name], written, self._changes[name])
