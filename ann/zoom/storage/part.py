"""A part of an index: rows that were written together, in list order. Only its marks of removed rows ever change."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier import backend
from memhier.ann.zoom.filters.attributes import Attributes, Schema
from memhier.ann.zoom.filters.bitmaps import BitmapCache, Words, popcount, runs_with, unpack, word_count
from memhier.ann.zoom.filters.blocks import StoredAny
from memhier.ann.zoom.filters.conditions import Expression
from memhier.ann.zoom.ids.stored_texts import StoredTexts
from memhier.ann.zoom.ids.texts import hash_texts
from memhier.ann.zoom.payload.stored import StoredRecords
from memhier.ann.zoom.preview.preview import Preview
from memhier.ann.zoom.preview.scan_arguments import positions_of, split_positions
from memhier.ann.zoom.preview.stored_scan import Parts
from memhier.ann.zoom.storage.arrays import PartArrays
from memhier.ann.zoom.storage.changed_attributes import ChangedAttributes
from memhier.ann.zoom.storage.changes import Changes, column_name, open_changes
from memhier.ann.zoom.storage.fullview import stored_bytes
from memhier.ann.zoom.storage.rows import RowPart, open_fields
from memhier.ann.zoom.storage.stored_arrays import StoredArrays
from memhier.errors import ClosedError, CorruptionError
from memhier.fields import stored_array, stored_segment
from memhier.io.page_file import PAGE_BYTES
from memhier.io.read_arguments import Tallies
from memhier.io.reader import Reader
from memhier.rows.rank_request import PageRows
from memhier.rows.rows import rows_per_page
from memhier.shield import when_gone
from memhier.store.store import Store

__all__ = ["Findable", "IndexPart", "PartFiles", "find_ids", "findable", "gather", "held_bytes", "ids_at", "without"]

Ints: TypeAlias = npt.NDArray[np.int64]
_SOUGHT_ROWS = 1 << 12
_SIEVE_LEAST, _SIEVE_MOST = 12, 16  # bits of an id in the sieve of those sought
_SIEVE_TIMES = 16  # entries of the sieve for each id


@dataclass(frozen=True, slots=True)
class IndexPart:
    """Rows on SSD with their codes and ids.

    Attributes
    ----------
    name
        Prefix of its segments.
    arrays
        Codes, ids and lists.
    file
        The reader's handle of the file of full vectors.
    row_bytes
        Bytes of a vector there.
    alive
        A bit for each row that was not removed; None while all are there.
    alive_name
        Segment that holds `alive`; None until it is written.
    attributes
        The attributes of the rows; None where the index has none.
    lease
        Keeps the file with the reader.
    texts
        The strings that the ids are hashes of; None where ids are integers.
    records
        The documents of the rows; None where no row has any.
    changes
        Values of attributes since the part was written.
    alive_count
        Rows that were not removed.
    per_page
        Rows that a page takes; None where they lie end to end.
    """

    name: str
    arrays: PartArrays | StoredArrays
    file: int
    row_bytes: int
    alive: Words | None = None
    alive_name: str | None = None
    attributes: Attributes | ChangedAttributes | None = None
    lease: object = None
    texts: StoredTexts | None = None
    records: StoredRecords | None = None
    changes: Changes = field(default_factory=dict)
    alive_count: int = field(init=False)
    per_page: int | None = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "alive_count", len(self) if self.alive is None else popcount(self.alive))
        object.__setattr__(self, "per_page", rows_per_page(self.row_bytes))

    def __len__(self) -> int:
        return len(self.arrays)

    def read_by(self, reader: Reader) -> Self:
        """Return the part with codes that another reader reads, where they lie on SSD."""
        return replace(self, arrays=self.arrays.read_by(reader)) if isinstance(self.arrays, StoredArrays) else self

    @property
    def memory_bytes(self) -> int:
        """DRAM held, in bytes."""
        more = (self.attributes, self.texts, self.records)
        held = self.arrays.memory_bytes + (0 if self.alive is None else self.alive.nbytes)
        held += sum(change.memory_bytes for every in self.changes.values() for change in every)
        return held + sum(each.memory_bytes for each in more if each is not None)

    def offsets(self, rows: Ints) -> Ints:
        """Return the byte at which the vector of each row starts, int64 of the shape of `rows`."""
        if (per_page := self.per_page) is None:
            return rows * self.row_bytes
        return rows // per_page * PAGE_BYTES + rows % per_page * self.row_bytes

    def rows_at(self, offsets: Ints) -> Ints:
        """Return the rows whose vectors start at offsets, the inverse of :meth:`offsets`."""
        if (per_page := self.per_page) is None:
            return offsets // self.row_bytes
        return offsets // PAGE_BYTES * per_page + offsets % PAGE_BYTES // self.row_bytes

    def read(self, reader: Reader, rows: Ints) -> npt.NDArray[np.uint8]:
        """Return the vectors of rows as stored, uint8 ``[n, row_bytes]``, in any order; each page is read once."""
        return reader.read(self.file, self.offsets(rows), self.row_bytes)

    def select(self, expression: Expression) -> Words:
        """Return the rows that fulfil a filter and were not removed, a bit for each; read-only."""
        return self._alive_of(self._selected(expression))

    def _selected(self, expression: Expression) -> Words:
        """Return the rows that fulfil a filter, removed or not."""
        if self.attributes is None:
            return np.zeros(word_count(len(self)), np.uint64)
        return self.attributes.bitmap(expression)

    def _alive_of(self, selected: Words) -> Words:
        if self.alive is None:
            return selected
        # A bitmap in the cache belongs to other searches, too.
        return np.bitwise_and(selected, self.alive, out=selected if selected.flags.writeable else None)

    def allowed(
        self, expression: Expression | None, allow: Ints | None, deny: Ints | None, selected: Words | None = None
    ) -> Words | None:
        """Return the rows that fulfil a filter, are among `allow`, not among `deny`, and were not removed.

        A bit for each row, read-only; None where these are all rows. The lists hold rows that were not removed.
        `selected` are the rows that fulfil the filter, where they are known.
        """
        if selected is None and expression is not None:
            selected = self._selected(expression)
        bits = self.alive if selected is None else self._alive_of(selected)
        if allow is None and deny is None:
            return bits
        if allow is not None and bits is not None:
            allow = allow[_are_set(bits, allow)]
        if bits is None or bits is self.alive:
            bits = without(self.alive, len(self), np.empty(0, np.int64))
        elif not bits.flags.writeable:  # a bitmap in the cache belongs to other searches, too
            bits = bits.copy()
        if allow is not None:
            bits.fill(0)
            np.bitwise_or.at(bits, allow >> 6, _masks(allow))
        if deny is not None:
            np.bitwise_and.at(bits, deny >> 6, ~_masks(deny))
        return bits

    def without(self, rows: Ints) -> "IndexPart":
        """Return the part with these rows removed as well."""
        return replace(self, alive=without(self.alive, len(self), rows), alive_name=None)

    def without_selected(self, selected: Words) -> "IndexPart":
        """Return the part without the rows of a bitmap of :meth:`select`; itself where there are none."""
        if not selected.any():
            return self
        bits = without(self.alive, len(self), np.empty(0, np.int64))
        np.bitwise_xor(bits, selected, out=bits)
        return replace(self, alive=bits, alive_name=None)

    def removed_since(self, before: Words | None) -> Ints:
        """Return the rows that an earlier bitmap of the rows alive has, and that were removed since, int64 ``[n]``."""
        if self.alive is None or self.alive is before:
            return np.empty(0, np.int64)
        gone = without(before, len(self), np.empty(0, np.int64))
        gone &= ~self.alive
        words = np.flatnonzero(gone)
        place = np.flatnonzero(unpack(gone[words], 64 * len(words)))
        return words[place // 64] * 64 + place % 64

    def is_alive(self, rows: Ints) -> npt.NDArray[np.bool_]:
        """Return which of the rows were not removed, bool ``[n]``."""
        if self.alive is None:
            return np.ones(len(rows), np.bool_)
        return _are_set(self.alive, rows)

    def strangers(self) -> int:
        """Return the number of rows whose id is not the hash of their string; reads all strings."""
        if self.texts is None:
            return 0
        count = 0
        for rows, texts in self.texts.pieces():
            ids = self.arrays.ids_of(np.arange(rows.start, rows.stop))
            count += int(np.count_nonzero(hash_texts(texts) != ids))
        return count

    def entry(self) -> dict[str, Any]:
        """Return its entry in the catalog."""
        entry = self.arrays.entry(self.name) | {"alive": self.alive_name}
        written = {}
        for name, every in self.changes.items():
            if some := [each.entry() for each in every if each.values is None]:
                written[name] = some
        return entry | {"changes": written} if written else entry


def without(alive: Words | None, count: int, rows: Ints) -> Words:
    """Return a new bitmap of the rows alive of `count` in all, None for all of them, without some rows."""
    if alive is not None:
        bits = alive.copy()
    else:
        bits = np.full(word_count(count), np.uint64(2**64 - 1))
        if count % 64:
            bits[-1] >>= np.uint64(64 - count % 64)
    np.bitwise_and.at(bits, rows >> 6, ~_masks(rows))
    return bits


def _masks(rows: Ints) -> Words:
    """Return for each row the word that has its bit alone."""
    masks: Words = np.uint64(1) << (rows & 63).astype(np.uint64)
    return masks


def _are_set(bits: Words, rows: Ints) -> npt.NDArray[np.bool_]:
    """Return which of the rows are in a bitmap, bool ``[n]``."""
    found: npt.NDArray[np.bool_] = (bits[rows >> 6] & _masks(rows)) > 0
    return found


class _Lease:
    """Held by all that read a file; when the last of them is gone, so is the file."""


class PartFiles:
    """Opens the files of parts, and closes them once no part or snapshot has them.

    The last holder of a file may let go of it anywhere: in a search, or in a garbage collection that interrupts any
    line of Python. So another thread closes it, while it holds no lock.

    Parameters
    ----------
    store, reader
        Of the index.
    cache
        Keeps the bitmaps of filters.
    texts
        Whether ids are strings.
    work_bytes
        DRAM that a running filter may hold.
    wave_bytes
        Of codes on SSD that a scan reads at a time.
    """

    def __init__(
        self, store: Store, reader: Reader, cache: BitmapCache, texts: bool, work_bytes: int, wave_bytes: int
    ) -> None:
        self._store, self._reader, self._cache, self._texts = store, reader, cache, texts
        self._work_bytes, self._wave_bytes = work_bytes, wave_bytes

    def open(
        self,
        name: str,
        arrays: PartArrays | StoredArrays,
        row_bytes: int,
        schema: Schema,
        alive: Words | None = None,
        alive_name: str | None = None,
        entry: dict[str, Any] | None = None,
    ) -> IndexPart:
        """Return a committed part whose arrays are known; its changes are those that `entry` of the catalog names."""
        lease = _Lease()
        if isinstance(arrays, PartArrays) and f"{name}-lists" in self._store.segments():
            lists, code_bytes = len(arrays.starts) - 1, arrays.codes.shape[1]
            arrays = StoredArrays.load(
                self._store, arrays.entry(name), lists, code_bytes, self._reader, self._wave_bytes
            )
        file = self._store.attach(f"{name}-rows", self._reader, held=True)
        self._when_gone(lease, [file])
        texts, records = open_fields(self._store, name, len(arrays), self._reader, texts=self._texts)
        self._when_gone(lease, [each.file for each in (texts, records) if each is not None])
        part = IndexPart(name, arrays, file, row_bytes, alive, alive_name, None, lease, texts, records)
        return self.widened(part, schema, {} if entry is None else self.changes(entry, len(part), schema))

    def changes(self, entry: dict[str, Any], count: int, schema: Schema) -> Changes:
        """Return the changes of a part that its entry in the catalog names."""
        found = open_changes(self._store, entry, count, schema, self._reader)
        for change in (change for every in found.values() for change in every):
            if isinstance(change.column, StoredAny):
                self._when_gone(change, [change.column])
        return found

    def widened(self, part: IndexPart, schema: Schema, changes: Changes) -> IndexPart:
        """Return the part with other changes, and a schema that may have more attributes, null in all its rows."""
        if not schema:
            return part
        whole = {name: every[0].generation for name, every in changes.items() if every and every[0].rows is None}
        segments = {name: column_name(part.name, name, number) for name, number in whole.items() if number is not None}
        attributes = Attributes(
            self._store,
            f"{part.name}-a-",
            schema,
            len(part),
            self._reader,
            self._cache,
            self._work_bytes,
            segments=segments,
        )
        columns = [attributes.column(name) for name in schema]
        self._when_gone(attributes, [column for column in columns if isinstance(column, StoredAny)])
        return self.changed(replace(part, attributes=attributes), schema, changes)

    def changed(self, part: IndexPart, schema: Schema, changes: Changes) -> IndexPart:
        """Return the part with other changes, none of them new and of all rows."""
        written = part.attributes
        written = written.written if isinstance(written, ChangedAttributes) else written
        some = {name: tuple(each for each in every if each.rows is not None) for name, every in changes.items()}
        some = {name: every for name, every in some.items() if every}
        if not some or written is None:
            return replace(part, attributes=written, changes=changes)
        attributes = ChangedAttributes(written, schema, some, self._reader, self._cache, self._work_bytes)
        return replace(part, attributes=attributes, changes=changes)

    def load(
        self, entry: dict[str, Any], preview: Preview, row_bytes: int, schema: Schema,
        known: PartArrays | StoredArrays | None = None,
    ) -> IndexPart:  # fmt: skip
        """Return the part that `entry` of the catalog describes, coded with `preview`; its arrays may be known."""
        name, alive_name = entry["name"], entry["alive"]
        arrays = self._arrays(entry, preview) if known is None else known
        count = len(arrays)
        alive = None if alive_name is None else stored_array(self._store, alive_name, np.uint64, (word_count(count),))
        if alive is not None and count % 64 and int(alive[-1]) >> count % 64:
            raise CorruptionError(f"{self._store.path}: {alive_name} has more rows alive than the {count} there are")
        rows = stored_segment(self._store, f"{name}-rows")
        if rows.length != stored_bytes(count, row_bytes):
            raise CorruptionError(f"{rows.path}: {rows.payload} bytes do not hold {count} rows of {row_bytes}")
        return self.open(name, arrays, row_bytes, schema, alive, alive_name, entry)

    def _arrays(self, entry: dict[str, Any], preview: Preview) -> PartArrays | StoredArrays:
        if not preview.on_ssd:
            return PartArrays.load(self._store, entry, preview)
        return StoredArrays.load(
            self._store, entry, preview.lists, preview.book.code_bytes, self._reader, self._wave_bytes
        )

    def _when_gone(self, holder: object, files: Sequence[int | StoredAny]) -> None:
        when_gone(holder, partial(_close_files, self._reader, files))


def _close_files(reader: Reader, files: Sequence[int | StoredAny]) -> None:
    for file in files:
        with suppress(ClosedError):
            if isinstance(file, int):
                reader.remove(file)
            else:
                file.close()


def held_bytes(parts: Sequence[IndexPart]) -> int:
    """Return the DRAM of parts, in bytes."""
    return sum([part.memory_bytes for part in parts])


class Findable:
    """The rows of parts that a search may find.

    Parameters
    ----------
    parts
        Of the index.
    bitmaps
        A bit for each row of a part that may be found; None for all of a part.
    whole
        The state in which the native core finds all rows; None for these, and where there is no core.
    narrowed
        Whether the rows lie in some lists alone.

    Attributes
    ----------
    compiled
        The state in which the native core finds the rows; None as `whole`.
    total
        Their number.
    held
        The number of the lists that may hold them; None for all.
    """

    def __init__(
        self, parts: Sequence[IndexPart], bitmaps: Sequence[Words | None], whole: Any = None, *, narrowed: bool = False
    ) -> None:
        self._parts, self.bitmaps, self._narrowed = parts, bitmaps, narrowed
        self.compiled: Any = None
        if whole is not None and backend.core is not None:
            self.compiled = backend.core.IndexState(
                whole=whole, bitmaps=[bits for bits in bitmaps if bits is not None], narrowed=narrowed
            )  # fmt: skip
            self.total: int = self.compiled.left
            self.held: int | None = self.compiled.held if narrowed else None
            return
        self.total = sum(
            [len(part) if bits is None else popcount(bits) for part, bits in zip(parts, bitmaps, strict=True)]
        )
        self.held = None if self.lists is None else len(self.lists)

    @cached_property
    def coded(self) -> Parts:
        """The rows as a scan takes them."""
        pairs = zip(self._parts, self.bitmaps, strict=True)
        return [part.arrays.coded(bits) for part, bits in pairs]

    @cached_property
    def page_rows(self) -> list[PageRows]:
        """The rows as a ranking takes them."""
        pairs = zip(self._parts, self.bitmaps, strict=True)
        return [part.arrays.page_rows(part.file, number, bits) for number, (part, bits) in enumerate(pairs)]

    @cached_property
    def lists(self) -> Ints | None:
        """The lists that may hold the rows, int64 ``[m]``, ascending; None for all."""
        if not self._narrowed or not self._parts:
            return None
        held = np.bitwise_or.reduce(
            [runs_with(bits, part.arrays.starts)[0] for part, bits in zip(self._parts, self.bitmaps, strict=True)
             if bits is not None]
        )  # fmt: skip
        return np.flatnonzero(unpack(held, len(self._parts[0].arrays.starts) - 1))


def findable(
    parts: Sequence[IndexPart],
    whole: Any,
    expression: Expression | None = None,
    allow: Ints | None = None,
    deny: Ints | None = None,
    selected: Sequence[Words] | None = None,
) -> Findable:
    """Return the rows that were not removed, that fulfil a filter, and that lists of positions allow.

    There is a filter, or such a list. `selected` are the rows of each part that fulfil the filter, where they are
    known; `whole` is that of :class:`Findable`.
    """
    bitmaps = [
        part.allowed(
            expression, _rows_in(number, allow), _rows_in(number, deny), None if selected is None else selected[number]
        )
        for number, part in enumerate(parts)
    ]
    return Findable(parts, bitmaps, whole, narrowed=expression is not None or allow is not None)


def _rows_in(number: int, positions: Ints | None) -> Ints | None:
    """Return the rows of one part among positions."""
    if positions is None:
        return None
    numbers, rows = split_positions(positions)
    here: Ints = rows[numbers == number]
    return here


def gather(parts: Sequence[IndexPart], positions: Ints) -> tuple[npt.NDArray[np.int32], Ints, Ints]:
    """Return file, offset and name of each position, a part's number and row in one.

    The name is the id, or the position itself where ids stay on SSD.
    """
    if len(parts) == 1:  # its number is 0: positions are rows
        (part,) = parts
        names = part.arrays.ids[positions] if isinstance(part.arrays, PartArrays) else positions
        return np.full(len(positions), part.file, np.int32), part.offsets(positions), names.astype(np.int64, copy=False)
    number, rows = split_positions(positions)
    files = np.empty(len(positions), np.int32)
    offsets, ids = np.empty(len(positions), np.int64), positions.copy()
    for which, part in enumerate(parts):
        here = np.flatnonzero(number == which)
        files[here] = part.file
        offsets[here] = part.offsets(rows[here])
        if isinstance(part.arrays, PartArrays):
            ids[here] = part.arrays.ids[rows[here]]
    return files, offsets, ids


def ids_at(parts: Sequence[IndexPart], positions: Ints, tally: Tallies | None = None) -> Ints:
    """Return the id of each position; `tally` as in a read, where ids stay on SSD."""
    number, rows = split_positions(positions)
    ids = np.empty(len(positions), np.int64)
    for which, part in enumerate(parts):
        here = np.flatnonzero(number == which)
        if len(here):
            ids[here] = part.arrays.ids_of(rows[here], tally)
    return ids


def find_ids(parts: Sequence[RowPart], wanted: Ints) -> Ints:
    """Return the position of each id among the rows alive, int64 ``[n]``, -1 for none; passes over all ids."""
    positions = np.full(len(wanted), -1, np.int64)
    order = np.argsort(wanted, kind="stable")
    ascending = wanted[order]
    # Few ids pass the sieve of the last bits of those wanted; these alone are compared.
    mask = (1 << min(_SIEVE_MOST, max(_SIEVE_LEAST, (_SIEVE_TIMES * len(wanted)).bit_length()))) - 1
    sieve = np.zeros(mask + 1, np.bool_)
    sieve[wanted & mask] = True
    for number, part in enumerate(parts):
        for start in range(0, len(part), _SOUGHT_ROWS):  # so that little is held for it
            ids = part.arrays.ids_of(np.arange(start, min(start + _SOUGHT_ROWS, len(part))))
            rows = np.flatnonzero(sieve[ids & ids.dtype.type(mask)])
            found = ids[rows].astype(np.int64)
            place = np.minimum(np.searchsorted(ascending, found), len(wanted) - 1)
            same = ascending[place] == found
            rows, place = rows[same] + start, place[same]
            alive = part.is_alive(rows)
            positions[order[place[alive]]] = positions_of(number, rows[alive])
    return positions
