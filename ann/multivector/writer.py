"""Changes of an index of items: they wait in DRAM, are written as parts, joined, and made durable by a commit.

A part that is written before its commit is *pending* in the catalog: it can be read, but only a commit makes it one of
the index's parts. The next writer drops the parts that are pending when a process dies.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.multivector.coding.book import Coded
from memhier.ann.multivector.coding.calibration import learn
from memhier.ann.multivector.construction import stored_bytes, trained_book, write_items
from memhier.ann.multivector.items import GivenItems, ItemSource
from memhier.ann.multivector.kept import values_kept
from memhier.ann.multivector.search import Allowed
from memhier.ann.multivector.storage.catalog import ItemDescription
from memhier.ann.multivector.storage.footprint import ItemFootprint
from memhier.ann.multivector.storage.layout import ItemLayout
from memhier.ann.multivector.storage.part import ItemArrays, ItemPart, PartOpener, positions
from memhier.ann.multivector.storage.snapshot import ItemSnapshot, WaitingItems
from memhier.ann.multivector.storage.stored import StoredItems, tokens_of
from memhier.ann.zoom.filters.attributes import chain, merged_schema, write_attributes
from memhier.ann.zoom.filters.given import as_columns, as_objects
from memhier.ann.zoom.storage.layout import fresh_bytes
from memhier.arguments import counted
from memhier.errors import ClosedError
from memhier.io.reader import Reader
from memhier.store.store import Store, Transaction

__all__ = ["ItemWriter"]

Ints: TypeAlias = npt.NDArray[np.int64]

_FIRST_TRAINED = 256  # items, from which on an index that was built without any is made anew
_CHANGED = 0.3  # times the items that lists and codes were made for, before they are made anew
_DEAD = 0.5  # of a part's items, before it is written anew


class ItemWriter:
    """Changes one index. For the thread that holds `lock`.

    Every change takes a snapshot and returns another. If it fails, the index stays in the state of the first.

    Parameters
    ----------
    store
        Open for writing.
    reader, opener
        Read and open the written parts.
    about
        The catalog's description of the index.
    footprint
        Counts the DRAM of a snapshot.
    """

    def __init__(
        self, store: Store, reader: Reader, opener: PartOpener, about: ItemDescription, footprint: ItemFootprint
    ) -> None:
        self._store, self._reader, self._opener, self._footprint = store, reader, opener, footprint
        self.about: ItemDescription = about
        self.lock: threading.RLock = threading.RLock()
        self._durable = about.parts  # as of the last commit
        self._dirty = False
        self._lost = False
        if about.pending:
            with self._store.begin() as tx:
                self._publish(tx, replace(about, pending=[]))
                tx.commit()

    def add(
        self, state: ItemSnapshot, items: GivenItems, ids: Ints | None, attributes: Any
    ) -> tuple[ItemSnapshot, Ints]:
        """Return the snapshot with more items, and their ids."""
        with self._all_or_nothing():
            names = self._free_ids(len(items)) if ids is None else ids
            self._check_count(names, len(items))
            if ids is not None:
                self._refuse_known(state, names)
            return self._add(state, items, names, attributes, {}), names

    def update(self, state: ItemSnapshot, ids: Ints, items: GivenItems | None, attributes: Any) -> ItemSnapshot:
        """Return the snapshot with other items or attributes for these ids; those that are not given stay."""
        with self._all_or_nothing():
            if items is not None:
                self._check_count(ids, len(items))
            kept = values_kept(state, ids, attributes)
            given = items
            if given is None:
                given = GivenItems(
                    tokens_of(state, ids, self._reader), like=(self.about.dimension, self.about.token_dtype)
                )
            return self._add(self._remove(state, ids), given, ids, attributes, kept)

    def remove(self, state: ItemSnapshot, ids: Ints) -> ItemSnapshot:
        """Return the snapshot without these ids."""
        with self._all_or_nothing():
            return self._remove(state, ids)

    def remove_where(self, state: ItemSnapshot, where: str) -> tuple[ItemSnapshot, int]:
        """Return the snapshot without the items that fulfil a filter, and their number."""
        with self._all_or_nothing():
            ids = _ids_of(state, Allowed.of(state, where))
            return self._remove(state, ids), len(ids)

    def commit(self, state: ItemSnapshot, compact: bool | None) -> ItemSnapshot:
        """Make a snapshot durable, and join small parts.

        With `compact`, make lists, codes and calibration anew from all items; with None, where much has changed.
        """
        with self._all_or_nothing():
            state = self._spill(state)
            if state.parts and (compact or (compact is None and self._outgrown(state))):
                return self._made_anew(state)
            return self._joined(state) if self._dirty else state

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        if self._lost:
            raise ClosedError(f"{self._store.path}: a commit was made, but not read back; open the index again")
        about, dirty = self.about, self._dirty
        try:
            yield
        except BaseException:
            # The numbers of parts stay used, and written parts pending: the next commit drops them.
            self.about = replace(about, next_part=self.about.next_part, pending=self.about.pending)
            self._dirty = dirty
            raise

    def _add(
        self, state: ItemSnapshot, items: ItemSource, ids: Ints, attributes: Any, kept: dict[str, Any]
    ) -> ItemSnapshot:
        count, schema = len(ids), self.about.schema
        columns: dict[str, npt.NDArray[np.object_]] = {}
        if attributes is not None:
            given = as_columns(attributes, count)
            schema = merged_schema(schema, given, count)
            columns = as_objects(given, schema)
        columns |= {name: values.filled(columns.get(name)) for name, values in kept.items()}
        self._footprint.check_room(state, items.lengths, ids, columns)
        if schema != self.about.schema:
            self.about = replace(self.about, schema=schema)
            parts = tuple(self._opener.widened(part, schema) for part in state.parts)
            none = WaitingItems.none(state.book.dimension, state.waiting.tokens.dtype)
            state = replace(state, schema=schema, parts=parts, waiting=state.waiting.joined(none, schema))
        self._count(count)
        next_id = max(self.about.next_id, int(ids.max(initial=-1)) + 1)
        self.about = replace(self.about, next_id=next_id)
        room = fresh_bytes(self.about.dram)
        for block in items.blocks(room):
            if len(state.waiting) and state.waiting.memory_bytes + block.tokens.nbytes > room:
                state = self._spill(state)
            rows = slice(block.first, block.first + len(block.starts) - 1)
            values = {name: column[rows] for name, column in columns.items()}
            more = WaitingItems(block.tokens, block.starts, ids[rows], values)
            state = replace(state, waiting=state.waiting.joined(more, schema))
        return state

    def _remove(self, state: ItemSnapshot, ids: Ints) -> ItemSnapshot:
        known = np.isin(ids, state.waiting.ids)
        parts = list(state.parts)
        for number, found, rows in positions(state.parts, ids):
            parts[number] = parts[number].without(rows)
            known[found] = True
        if not known.all():
            raise KeyError(f"id {int(ids[np.argmin(known)])} is not in the index")
        self._count(len(ids))
        stays = np.flatnonzero(~np.isin(state.waiting.ids, ids))
        return replace(state, parts=tuple(parts), waiting=state.waiting.take(stays))

    def _spill(self, state: ItemSnapshot) -> ItemSnapshot:
        """Write the items that wait, if there are any, as a pending part."""
        waiting, about = state.waiting, self.about
        if not len(waiting):
            return state
        source = GivenItems(waiting.tokens, np.diff(waiting.starts), like=(about.dimension, about.token_dtype))
        name, first = f"p{about.next_part}", not about.trained_on and not state.parts
        with self._store.begin() as tx:
            if first:
                layout = ItemLayout(1, about.code_bytes, state.book.book.rotation.ndim == 2, 1, 0)
                state = replace(state, book=trained_book(source, layout, about.seed))
                state.book.write(tx)
                about = replace(about, scale=state.book.scale, lists=1)
            arrays = write_items(tx, name, source, waiting.ids, state.book, about.seed)
            if waiting.attributes:
                write_attributes(tx, f"{name}-a-", about.schema, waiting.attributes, np.arange(len(waiting)))
            entry = ItemPart.entry_of(name, arrays)
            about = replace(about, next_part=about.next_part + 1, pending=[*about.pending, entry])
            self._publish(tx, replace(about, parts=self._durable), [part.name for part in state.parts])
            tx.commit()
        self.about = about
        part = self._opener.open(name, arrays, state.schema, state.calibration.foreign)
        none = WaitingItems.none(about.dimension, about.token_dtype)
        return replace(state, parts=(*state.parts, part), waiting=none)

    def _joined(self, state: ItemSnapshot) -> ItemSnapshot:
        """Make a snapshot durable: its last parts, as many as are small beside those that follow, become one."""
        parts = [part for part in state.parts if part.count]
        first = _first_to_join(parts)
        kept, joined, name = parts[:first], parts[first:], f"p{self.about.next_part}"
        with self._store.begin() as tx:
            written = [self._with_alive(tx, part) for part in kept]
            arrays = self._write_joined(tx, name, joined, state) if joined else None
            entries = [part.entry() for part in written]
            if arrays is not None:
                entries.append(ItemPart.entry_of(name, arrays))
            self._commit(tx, replace(self.about, parts=entries, next_part=self.about.next_part + 1))
        if arrays is not None:
            written.append(self._opener.open(name, arrays, state.schema, state.calibration.foreign))
        self._lost = False
        return replace(state, parts=tuple(written))

    def _write_joined(self, tx: Transaction, name: str, parts: Sequence[ItemPart], state: ItemSnapshot) -> ItemArrays:
        """Write the items of parts as one part, with the codes that they have."""
        source = StoredItems(parts, self._reader)
        tokens = tx.segment(f"{name}-tokens")
        for block in source.blocks():
            tokens.append(stored_bytes(block.tokens))
        coded = []
        for part in parts:
            alive = np.repeat(part.is_alive(), part.lengths)
            coded.append(part.arrays.coded.take(alive))
        arrays = ItemArrays.of(source.lengths, source.ids, Coded.joined(coded), state.book.lists)
        arrays.write(tx, name)
        self._write_attributes(tx, name, parts, state)
        return arrays

    def _write_attributes(self, tx: Transaction, name: str, parts: Sequence[ItemPart], state: ItemSnapshot) -> None:
        if state.schema:
            attributes = [part.attributes for part in parts if part.attributes is not None]
            order = StoredItems(parts, self._reader).order
            write_attributes(tx, f"{name}-a-", state.schema, chain(attributes, state.schema), order)

    def _made_anew(self, state: ItemSnapshot) -> ItemSnapshot:
        """Make lists, codes and calibration anew from all items, and all of them durable."""
        about, parts = self.about, [part for part in state.parts if part.count]
        if not parts:
            return self._joined(state)
        source, name = StoredItems(parts, self._reader), f"p{about.next_part}"
        layout = self._footprint.layout_anew(state, source.lengths)
        with self._store.begin() as tx:
            book = trained_book(source, layout, about.seed)
            book.write(tx)
            arrays = write_items(tx, name, source, source.ids, book, about.seed)
            self._write_attributes(tx, name, parts, state)
            learnt = learn(book, arrays, source, about.seed)
            about = replace(
                about, scale=book.scale, lists=book.lists, code_bytes=book.book.code_bytes, calibration=learnt,
                trained_on=len(arrays), changes=0, next_part=about.next_part + 1,
                parts=[ItemPart.entry_of(name, arrays)],
            )  # fmt: skip
            self._commit(tx, about)
        part = self._opener.open(name, arrays, state.schema, learnt.foreign)
        self._lost = False
        return replace(state, book=book, parts=(part,), calibration=learnt)

    def _with_alive(self, tx: Transaction, part: ItemPart) -> ItemPart:
        """Return a part whose marks of removed items are on SSD."""
        if part.alive is None or part.alive_name is not None:
            return part
        name = f"{part.name}-alive{self._store.generation + 1}"
        tx.segment(name).append(part.alive.astype("<u8").view(np.uint8))
        return replace(part, alive_name=name)

    def _commit(self, tx: Transaction, about: ItemDescription) -> None:
        about = replace(about, pending=[])
        self._publish(tx, about)
        tx.commit()
        self._lost = True  # until the parts are open, the committed state is not the state in memory
        self.about, self._durable, self._dirty = about, about.parts, False

    def _publish(self, tx: Transaction, about: ItemDescription, needed: Sequence[str] = ()) -> None:
        """Write a description, and drop the segments of parts that neither it nor `needed` names."""
        entries = [*about.parts, *about.pending]
        names = {entry["name"] for entry in entries} | {*needed}
        alive = {entry["alive"] for entry in entries}
        for name in self._store.segments():
            part, _, rest = name.partition("-")
            stale = part not in names or (rest.startswith("alive") and name not in alive)
            if part.startswith("p") and part[1:].isdigit() and stale:
                tx.drop(name)
        about.write(tx)

    def _outgrown(self, state: ItemSnapshot) -> bool:
        if not self.about.trained_on:
            return state.count >= _FIRST_TRAINED
        return self.about.changes > _CHANGED * self.about.trained_on

    def _count(self, count: int) -> None:
        self.about = replace(self.about, changes=self.about.changes + count)
        self._dirty = self._dirty or count > 0

    def _free_ids(self, count: int) -> Ints:
        first = self.about.next_id
        if first + count > 2**63:
            raise ValueError(f"ids: none are free above {first - 1}, the largest there was; give ids of your own")
        return np.arange(first, first + count, dtype=np.int64)

    @staticmethod
    def _check_count(ids: Ints, count: int) -> None:
        if len(ids) != count:
            raise ValueError(
                f"ids has {counted(len(ids), 'entry')} for {counted(count, 'item')}: expected one for each"
            )

    @staticmethod
    def _refuse_known(state: ItemSnapshot, ids: Ints) -> None:
        known = ids[np.isin(ids, state.waiting.ids)].tolist()
        known += [int(ids[found[0]]) for _, found, _ in positions(state.parts, ids)]
        if known:
            raise ValueError(f"ids: {known[0]} is in the index already; use update() to replace its item")


def _ids_of(state: ItemSnapshot, allowed: Allowed) -> Ints:
    """Return the ids of items, int64 ``[n]``, those that wait last."""
    some = [part.arrays.ids[rows].astype(np.int64) for part, _, rows in state.by_part(allowed.numbers(state))]
    return np.concatenate([*some, state.waiting.ids[allowed.waiting]])


def _first_to_join(parts: Sequence[ItemPart]) -> int:
    """Return the first of the parts that become one: it is at most twice as long as all that follow, or half dead."""
    for number, part in enumerate(parts):
        after = sum(len(each.arrays.coded.lists) for each in parts[number + 1 :])
        if len(part.arrays.coded.lists) <= 2 * after or part.count < _DEAD * len(part):
            return number
    return len(parts)
