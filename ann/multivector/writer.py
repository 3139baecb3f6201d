"""Changes of an index of items: they wait in DRAM, are written as parts, joined, and made durable by a commit.

A part that is written before its commit is *pending* in the catalog: it can be read, but only a commit makes it one of
the index's parts. The next writer drops the parts that are pending when a process dies.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.multivector.coding.book import Coded
from memhier.ann.multivector.coding.calibration import Calibration
from memhier.ann.multivector.construction import stored_bytes, trained_book, write_items
from memhier.ann.multivector.items import GivenItems, ItemSource, spans
from memhier.ann.multivector.renewal import ItemTask, RenewedItems, RenewedPart, follow_items, renew_items
from memhier.ann.multivector.search import Allowed
from memhier.ann.multivector.storage.catalog import ItemDescription
from memhier.ann.multivector.storage.footprint import ItemFootprint
from memhier.ann.multivector.storage.layout import ItemLayout
from memhier.ann.multivector.storage.part import ItemArrays, ItemPart, PartOpener
from memhier.ann.multivector.storage.snapshot import ItemSnapshot, WaitingItems
from memhier.ann.multivector.storage.stored import KeptItems, StoredItems
from memhier.ann.zoom.filters.attributes import merged_schema, write_attributes
from memhier.ann.zoom.filters.given import as_columns, as_objects
from memhier.ann.zoom.ids.stored_texts import write_texts
from memhier.ann.zoom.payload.stored import write_records
from memhier.ann.zoom.preview.scan_arguments import split_positions
from memhier.ann.zoom.renewal.beside import Renewals
from memhier.ann.zoom.renewal.documents import ChangedDocuments
from memhier.ann.zoom.renewal.kept import Kept, values_kept
from memhier.ann.zoom.renewal.merge import write_carried
from memhier.ann.zoom.storage.catalog import AUDIT_KEY
from memhier.ann.zoom.storage.fresh import Fresh, value_bytes
from memhier.ann.zoom.storage.ids import Ids, Located, locate, locate_all, refuse_known
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
_FEW_TOKENS, _TOKENS_TIMES = 16384, 2  # that a commit codes anew, or as many times those that waited
_ROUNDS = 4  # of coding newer parts beside the commits, before a commit takes ever more of them


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
        self._work_bytes = fresh_bytes(about.dram)
        self._durable = about.parts  # as of the last commit
        self._dirty = False
        self._renewals: Renewals[RenewedPart, RenewedItems] = Renewals("items")
        self._lost = False
        self.record: Callable[[], bytes] | None = None  # of the audit
        if about.pending:
            with self._store.begin() as tx:
                self._publish(tx, replace(about, pending=[]))
                tx.commit()

    def add(
        self, state: ItemSnapshot, items: GivenItems, ids: Ids | None, attributes: Any, documents: Any
    ) -> tuple[ItemSnapshot, Ids]:
        """Return the snapshot with more items, and their ids."""
        with self._all_or_nothing():
            names = self._free_ids(len(items)) if ids is None else ids
            self._check_count(names, len(items))
            records = ChangedDocuments(state, documents, len(items), self._work_bytes)
            return self._add(state, items, names, attributes, records, {}), names

    def update(
        self, state: ItemSnapshot, ids: Ids, items: GivenItems | None, attributes: Any, documents: Any,
        *, insert: bool = False,
    ) -> tuple[ItemSnapshot, int]:  # fmt: skip
        """Return the snapshot with other items or fields for these ids, and how many of the ids are new.

        Fields that are not given stay, and items where there are none. Without `insert`, a new id is a KeyError.
        """
        with self._all_or_nothing():
            if items is not None:
                self._check_count(ids, len(items))
            places = (locate if insert else locate_all)(state.parts, state.fresh, ids)
            known = np.flatnonzero(places.known)
            given = KeptItems(state, places, self._reader) if items is None else items
            kept = values_kept(state, places, attributes)
            records = ChangedDocuments(state, documents, len(ids), self._work_bytes, places)
            state = self._remove(state, ids.take(known), places.take(known))
            return self._add(state, given, ids, attributes, records, kept), len(ids) - len(known)

    def remove(self, state: ItemSnapshot, ids: Ids) -> ItemSnapshot:
        """Return the snapshot without these ids."""
        with self._all_or_nothing():
            return self._remove(state, ids, locate_all(state.parts, state.fresh, ids))

    def remove_where(self, state: ItemSnapshot, where: str) -> tuple[ItemSnapshot, int]:
        """Return the snapshot without the items that fulfil a filter, and their number."""
        with self._all_or_nothing():
            allowed, parts = Allowed.of(state, where), list(state.parts)
            count = allowed.count(state) + int(allowed.waiting.sum())
            for number, flags in enumerate(allowed.parts):
                if flags is not None and flags.any():
                    parts[number] = parts[number].without(np.flatnonzero(flags))
            self._count(count)
            waiting = state.waiting.without(state.fresh.ids[allowed.waiting])
            return replace(state, parts=tuple(parts), waiting=waiting), count

    def commit(self, state: ItemSnapshot, compact: bool | None) -> ItemSnapshot:
        """Make a snapshot durable, join small parts, and take over an index made anew beside the commits.

        With `compact`, make lists, codes and calibration anew from all items. With None, and where much has changed,
        begin to do so beside the commits that follow.
        """
        with self._all_or_nothing():
            before = state.waiting.starts[-1]
            state = self._spill(state)
            if compact:
                return self._made_anew(state)
            following = self._commit_made(state, max(_FEW_TOKENS, _TOKENS_TIMES * int(before)))
        try:
            self._begin_beside(following, compact)
        except Exception as error:  # the commit is made all the same
            self._renewals.failed(error, self.about.changes)
        self._renewals.give_way()
        return following

    def close(self) -> None:
        """End the work beside the commits, after the step that is under way."""
        self._renewals.stop()

    def failures(self) -> list[BaseException]:
        """Return the failures of work beside the commits since the last call."""
        return self._renewals.failures()

    def renewal(self, state: ItemSnapshot) -> str:
        """Return the state of the renewal; see `ZoomIndex.stats`."""
        return self._renewals.stats(due=self._is_due(state))

    def keep_tuning(self, calibration: Calibration) -> None:
        """Make a calibration durable; changes that no commit has made so stay as they are."""
        self._renewals.stop()  # it would undo the tuning
        with self._all_or_nothing():
            about = replace(self.about, calibration=calibration)
            with self._store.begin() as tx:
                replace(about, parts=self._durable).write(tx)
                if self.record is not None:
                    tx.put(AUDIT_KEY, self.record())
                tx.commit()
            self.about = about

    def keep_record(self) -> None:
        """Make the record of the audit durable."""
        if self.record is None or self._lost or self._store.get(AUDIT_KEY) == (raw := self.record()):
            return
        with self._store.begin() as tx:
            tx.put(AUDIT_KEY, raw)
            tx.commit()

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        if self._lost:
            raise ClosedError(f"{self._store.path}: a commit was made, but not read back; open the index again")
        about, dirty = self.about, self._dirty
        try:
            with self._renewals.caller.working():
                yield
        except BaseException:
            # The numbers of parts stay used, and written parts pending: the next commit drops them.
            self.about = replace(about, next_part=self.about.next_part, pending=self.about.pending)
            self._dirty = dirty
            raise

    def _add(
        self, state: ItemSnapshot, items: ItemSource, ids: Ids, attributes: Any, documents: ChangedDocuments,
        kept: dict[str, Kept],
    ) -> ItemSnapshot:  # fmt: skip
        refuse_known(state.parts, state.fresh, ids)
        count, schema = len(ids), self.about.schema
        columns: dict[str, npt.NDArray[np.object_]] = {}
        if attributes is not None:
            given = as_columns(attributes, count)
            schema = merged_schema(schema, given, count)
            columns = as_objects(given, schema)
        documents.check(schema)
        columns |= {name: values.filled(columns.get(name)) for name, values in kept.items()}
        each = self._footprint.check_room(state, items.lengths, ids, columns, documents)
        if schema != self.about.schema:
            self.about = replace(self.about, schema=schema)
            parts = tuple(self._opener.widened(part, schema) for part in state.parts)
            state = replace(state, schema=schema, parts=parts, waiting=state.waiting.widened(schema))
        self._count(count)
        self.about = replace(self.about, documents=[*documents.names])
        if ids.texts is None:
            self.about = replace(self.about, next_id=max(self.about.next_id, int(ids.numbers.max(initial=-1)) + 1))
        state = replace(state, documents=documents.names)
        room, records = fresh_bytes(self.about.dram), documents.records()
        for block in items.blocks(room):
            ends = np.concatenate([[0], np.cumsum(each[block.first : block.first + len(block.starts) - 1])])
            for low, high in spans(ends, 1, room):
                if len(state.waiting) and state.waiting.memory_bytes + int(ends[high] - ends[low]) > room:
                    state = self._spill(state)
                rows, starts = slice(block.first + low, block.first + high), block.starts[low : high + 1]
                some = ids.part(rows.start, rows.stop)
                values = {name: column[rows] for name, column in columns.items()}
                beyond = int(value_bytes(values, len(some)).sum())
                fresh = Fresh(
                    np.empty((len(some), 0), items.dtype), some.numbers, values, some.texts, value_bytes=beyond
                )
                if documents:
                    fresh = fresh.with_records(list(islice(records, len(some))))
                more = WaitingItems(block.tokens[starts[0] : starts[-1]], starts - starts[0], fresh)
                state = replace(state, waiting=state.waiting.joined(more, schema))
        return state

    def _remove(self, state: ItemSnapshot, ids: Ids, places: Located) -> ItemSnapshot:
        self._count(len(ids))
        numbers, rows = split_positions(places.positions)
        stored, parts = places.positions >= 0, list(state.parts)
        for number in np.unique(numbers[stored]).tolist():
            parts[number] = parts[number].without(rows[stored & (numbers == number)])
        return replace(state, parts=tuple(parts), waiting=state.waiting.without(ids.numbers))

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
            fresh = waiting.fresh
            if fresh.attributes:
                write_attributes(tx, f"{name}-a-", about.schema, fresh.attributes, np.arange(len(fresh)))
            if fresh.texts is not None:
                write_texts(tx, f"{name}-texts", [fresh.texts])
            if fresh.records is not None:
                write_records(tx, f"{name}-docs", [fresh.records.tolist()])
            entry = ItemPart.entry_of(name, arrays)
            about = replace(about, next_part=about.next_part + 1, pending=[*about.pending, entry])
            self._publish(tx, replace(about, parts=self._durable), [part.name for part in state.parts])
            tx.commit()
        self.about = about
        part = self._opener.open(name, arrays, state.schema, state.calibration.foreign)
        none = WaitingItems.none(about.dimension, about.token_dtype, about.id_kind)
        return replace(state, parts=(*state.parts, part), waiting=none)

    def _commit_made(self, state: ItemSnapshot, few: int) -> ItemSnapshot:
        """Make a snapshot durable; take over the index made anew where that leaves few tokens to code now."""
        self._renewals.collect(self.about.changes)
        renewed = self._renewals.renewed
        if renewed is not None:
            rest = sum(part.tokens_alive for part in _newer(state, renewed))
            if rest <= few << min(max(0, renewed.rounds - _ROUNDS), 40):  # so that it ends, however much is added
                self._renewals.take_renewed()
                return self._switch(state, renewed)
        return self._joined(state) if self._dirty else state

    def _begin_beside(self, state: ItemSnapshot, compact: bool | None) -> None:
        """Start the thread that is due, now that all of a snapshot is durable."""
        renewals, changes = self._renewals, self.about.changes
        if (renewed := renewals.renewed) is not None:
            task = self._task(state, _newer(state, renewed))
            renewals.make_up(task.parts, partial(follow_items, task))
        elif compact is None and not renewals.renewing and self._is_due(state) and renewals.may_start(changes):
            task = self._task(state, _there(state.parts))
            renewals.start_renewal(task.parts, partial(renew_items, task, self._layout_anew(state, task), changes))

    def _task(self, state: ItemSnapshot, parts: tuple[ItemPart, ...]) -> ItemTask:
        """Return the task to write parts anew as one, under a new name."""
        name = f"p{self.about.next_part}"
        self.about = replace(self.about, next_part=self.about.next_part + 1)
        texts, seed = state.id_kind == "str", self.about.seed
        return ItemTask(self._store, name, parts, state.schema, texts, seed, self._work_bytes)

    def _layout_anew(self, state: ItemSnapshot, task: ItemTask) -> ItemLayout:
        return self._footprint.layout_anew(state, StoredItems(task.parts, self._reader).lengths)

    def _joined(self, state: ItemSnapshot) -> ItemSnapshot:
        """Make a snapshot durable: its last parts, as many as are small beside those that follow, become one.

        Parts that are being made anew stay as they are, also without items.
        """
        claimed = self._renewals.claimed(state.parts)
        parts = (*state.parts[:claimed], *_there(state.parts[claimed:]))
        first = claimed + _first_to_join(parts[claimed:])
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
            alive = np.repeat(part.alive_flags(), part.lengths)
            coded.append(part.arrays.coded.take(alive))
        arrays = ItemArrays.of(source.lengths, source.ids, Coded.joined(coded), state.book.lists)
        arrays.write(tx, name)
        write_carried(tx, name, parts, state.schema, source.order, self._work_bytes)
        return arrays

    def _made_anew(self, state: ItemSnapshot) -> ItemSnapshot:
        """Make lists, codes and calibration anew from all items, and all of them durable."""
        self._renewals.stop()
        parts = _there(state.parts)
        if not parts:
            return self._joined(state)
        task = self._task(state, parts)
        return self._switch(state, renew_items(task, self._layout_anew(state, task), self.about.changes))

    def _switch(self, state: ItemSnapshot, renewed: RenewedItems) -> ItemSnapshot:
        """Make a snapshot durable in its renewed form, and code newer parts for it."""
        book, learnt, rest = renewed.book, renewed.calibration, _newer(state, renewed)
        entries, known = list[dict[str, Any]](), list[ItemArrays]()
        try:
            with self._store.begin() as tx:
                tx.adopt(renewed.staging)
                for made in renewed.parts:
                    tx.adopt(made.staging)
                    entry = ItemPart.entry_of(made.name, made.arrays)
                    if (alive := made.alive(state.parts)) is not None:
                        entry["alive"] = f"{made.name}-alive{self._store.generation + 1}"
                        tx.segment(entry["alive"]).append(alive.astype("<u8").view(np.uint8))
                    entries.append(entry)
                    known.append(made.arrays)
                if rest:
                    task = self._task(state, rest)
                    known.append(task.write(tx, StoredItems(rest, self._reader), book))
                    entries.append(ItemPart.entry_of(task.name, known[-1]))
                about = replace(
                    self.about, scale=book.scale, lists=book.lists, code_bytes=book.book.code_bytes, calibration=learnt,
                    trained_on=len(renewed.parts[0].order), changes=self.about.changes - renewed.changes, parts=entries,
                )  # fmt: skip
                self._commit(tx, about)
        except BaseException:
            renewed.drop()
            raise
        parts = tuple(
            self._opener.open(entry["name"], arrays, state.schema, learnt.foreign, entry["alive"])
            for entry, arrays in zip(entries, known, strict=True)
        )
        self._lost = False
        return replace(state, book=book, parts=parts, calibration=learnt)

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
        if self.record is not None:
            tx.put(AUDIT_KEY, self.record())

    def _is_due(self, state: ItemSnapshot) -> bool:
        """Whether so much has changed that the index is worth making anew."""
        if not self.about.trained_on:
            return state.count >= _FIRST_TRAINED
        return state.count > 0 and self.about.changes > _CHANGED * self.about.trained_on

    def _count(self, count: int) -> None:
        self.about = replace(self.about, changes=self.about.changes + count)
        self._dirty = self._dirty or count > 0

    def _free_ids(self, count: int) -> Ids:
        if self.about.id_kind == "str":
            raise ValueError("ids=None: this index has strings as ids, so expected one for each item")
        first = self.about.next_id
        if first + count > 2**63:
            raise ValueError(f"ids: none are free above {first - 1}, the largest there was; give ids of your own")
        return Ids(np.arange(first, first + count, dtype=np.int64), None)

    @staticmethod
    def _check_count(ids: Ids, count: int) -> None:
        if len(ids) != count:
            raise ValueError(
                f"ids has {counted(len(ids), 'entry')} for {counted(count, 'item')}: expected one for each"
            )


def _there(parts: Sequence[ItemPart]) -> tuple[ItemPart, ...]:
    """Return the parts that have items."""
    return tuple(part for part in parts if part.count)


def _newer(state: ItemSnapshot, renewed: RenewedItems) -> tuple[ItemPart, ...]:
    """Return the parts, with items, that are newer than an index made anew."""
    return tuple(part for part in _there(state.parts) if part.name not in renewed.replaced)


def _first_to_join(parts: Sequence[ItemPart]) -> int:
    """Return the first of the parts that become one: it is at most twice as long as all that follow, or half dead."""
    for number, part in enumerate(parts):
        after = sum(len(each.arrays.coded.lists) for each in parts[number + 1 :])
        if len(part.arrays.coded.lists) <= 2 * after or part.count < _DEAD * len(part):
            return number
    return len(parts)
