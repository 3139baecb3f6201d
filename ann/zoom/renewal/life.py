"""Changes of an index: vectors are added to DRAM, written as parts, joined, and made durable by a commit.

The store commits a part as soon as it is written, so that it can be read, but as *pending*: only the index's own commit
makes it one of the index's parts. The next writer drops the parts that are pending when a process dies.

A commit writes the vectors that wait and joins few rows. Threads join more beside the commits (`beside`), and make the
index anew where it has changed too much; a later commit takes over the files.
"""

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.zoom.calibration.added import some_of_added
from memhier.ann.zoom.construction.begun import begun
from memhier.ann.zoom.filters.attributes import Schema, item_bytes, merged_schema, write_attributes
from memhier.ann.zoom.filters.bitmaps import Words, popcount, unpack
from memhier.ann.zoom.filters.given import as_columns, as_objects
from memhier.ann.zoom.ids.stored_texts import write_texts
from memhier.ann.zoom.payload.stored import write_records
from memhier.ann.zoom.preview.clusters import LONGEST
from memhier.ann.zoom.preview.codes import CodeBook
from memhier.ann.zoom.preview.scan_arguments import positions_of, split_positions
from memhier.ann.zoom.renewal.beside import Renewals
from memhier.ann.zoom.renewal.changes import waiting_bytes, whole_bytes, with_values, write_changes, write_later_changes
from memhier.ann.zoom.renewal.documents import ChangedDocuments
from memhier.ann.zoom.renewal.kept import Kept, rows_lacking, values_kept
from memhier.ann.zoom.renewal.kept_vectors import KeptVectors
from memhier.ann.zoom.renewal.measuring import Measured, Measurements
from memhier.ann.zoom.renewal.merge import (
    WRITTEN_BYTES,
    Merged,
    first_to_join,
    merge_parts,
    merged_bytes,
    radii_after,
    radii_of,
    write_carried,
)
from memhier.ann.zoom.renewal.renewal import Made, Renewed, Task, follow, join, renew, write_recoded
from memhier.ann.zoom.renewal.room import AddedBytes, check_range, check_room, check_values, check_values_room
from memhier.ann.zoom.renewal.spill import write_coded
from memhier.ann.zoom.source import VectorSource
from memhier.ann.zoom.storage.arrays import PartArrays, Spread
from memhier.ann.zoom.storage.catalog import AUDIT_KEY, Description, write_preview
from memhier.ann.zoom.storage.changes import VALUE_BYTES, segments_of
from memhier.ann.zoom.storage.fresh import Fresh, fresh_row_bytes, value_bytes
from memhier.ann.zoom.storage.fullview import RowWriter
from memhier.ann.zoom.storage.ids import Ids, Located, locate, locate_all, refuse_known
from memhier.ann.zoom.storage.layout import PART_BYTES, IndexLayout, fresh_bytes, lists_anew
from memhier.ann.zoom.storage.part import IndexPart, PartFiles
from memhier.ann.zoom.storage.prepared import drop_prepared, note_prepared, publish_prepared
from memhier.ann.zoom.storage.snapshot import Footprint, IndexSnapshot
from memhier.ann.zoom.storage.stored_arrays import StoredArrays
from memhier.arguments import counted
from memhier.errors import BudgetError, ClosedError
from memhier.io.page_file import PAGE_BYTES
from memhier.io.reader import Reader
from memhier.rows.rank_request import HotPages, split_keys
from memhier.store.store import Store, Transaction

__all__ = ["IndexWriter"]

_ROOMS = 8  # times the vectors that wait: the most of one call that are written as a part
_CODED_BYTES = 28  # of a vector on its way to its part, beside its code and a copy of it
_UPDATED_BYTES = 512  # of a vector whose attributes change, while its values are Python's
_UPDATED_LEAST = 32  # of these at a time, as each time passes over all ids
_BUFFER_SHARE, _BUFFER_MOST = 1 / 256, 1 << 20  # of the budget, for the write buffer of each segment
_FEW_ROWS, _ROWS_TIMES = 1024, 2  # that a commit writes anew, or as many times those added since the last one
_ROUNDS = 4  # of coding newer parts for a renewal, before a commit takes ever more of them
_JOIN_BYTES = 256 << 10  # of the reader and the buffers of a join
_FIRST_TRAINED = 256  # vectors, from which on an index that was built without any is made anew
_LONG = 2 * LONGEST  # times the mean: how long a list may grow
_LONG_CHANGES = 0.05  # of the vectors, before a long list is worth a compaction
_GROWN = 2  # times the vectors that lists were made for, or that part of them
_REMOVED = 0.13  # of the rows, before they are worth a join by DRAM on top of the budget
_MARGIN = 1.25  # times the DRAM that the last changes took: the least that a commit leaves for the next
_SCARCE = 4  # times the DRAM that the last changes took: with less left, commits wait longer for a renewal
_BESIDE_BYTES = 2 << 20  # for the work of a thread whose DRAM comes on top of the budget
_MANY = 2  # parts, beyond which all are made one where there is hardly room for another

Ints: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A commit that is written but not published: its mark, and the snapshot and description before it."""

    mark: int
    before: IndexSnapshot
    about: Description


class IndexWriter:
    """Changes one index. For the thread that holds `lock`.

    Every change takes a snapshot and returns another. If it fails, the index stays in the state of the first.

    Parameters
    ----------
    store
        Open for writing.
    reader, files
        Read and open the written parts.
    about
        The catalog's description of the index.
    footprint
        Counts the DRAM of a snapshot.

    Attributes
    ----------
    record
        Gives the record of the audit, for each commit to keep; None without an audit.
    """

    def __init__(
        self, store: Store, reader: Reader, files: PartFiles, about: Description, footprint: Footprint
    ) -> None:
        self._store, self._reader, self._files, self._footprint = store, reader, files, footprint
        self.about: Description = about
        self.lock: threading.RLock = threading.RLock()
        self._durable = about  # as of the last commit
        self._dirty = False
        self._base = self._taken = 0  # DRAM before the changes since the last commit, and on top of it for them
        self._wanted = 0  # DRAM to expect of the next changes
        self._spilled: set[str] = set()  # segments of changes since the last commit
        self._tasked: set[str] = set()  # those that work beside the commits reads
        self._needed: frozenset[str] = frozenset()  # parts of the snapshot that a change returns to if it fails
        self._lost = False
        self._prepared: _Prepared | None = None
        self._renewals: Renewals[Made, Renewed] = Renewals("zoom")
        self._measurements = Measurements(store, self._renewals.caller, self.lock)
        self.record: Callable[[], bytes] | None = None
        # Work of a change takes the place of waiting vectors: they are few then, or in their part already.
        self._work_bytes = fresh_bytes(about.dram)
        share = int(_BUFFER_SHARE * about.dram) // PAGE_BYTES * PAGE_BYTES
        self._buffer_bytes = min(max(share, PAGE_BYTES), _BUFFER_MOST)
        if about.pending or self._stale(about):
            with self._begin() as tx:
                self._publish(tx, replace(about, pending=[]), durable=False)

    def add(
        self, state: IndexSnapshot, vectors: npt.NDArray[Any], ids: Ids | None, attributes: Any, documents: Any
    ) -> tuple[IndexSnapshot, Ids]:
        """Return the snapshot with more vectors, and their ids."""
        with self._all_or_nothing(state):
            records = ChangedDocuments(state, documents, len(vectors), self._work_bytes)
            return self._add(state, vectors, ids, attributes, records)

    def update(
        self, state: IndexSnapshot, ids: Ids, vectors: npt.NDArray[Any] | None, attributes: Any, documents: Any, *,
        insert: bool = False,
    ) -> tuple[IndexSnapshot, int]:  # fmt: skip
        """Return the snapshot with other vectors or fields for these ids, and how many of the ids are new.

        Fields that are not given stay, and vectors where there are none. Without `insert`, a new id is a KeyError.
        """
        with self._all_or_nothing(state):
            if vectors is None and documents is None:
                places = locate_all(state.parts, state.fresh, ids)
                given = {name: ~rows_lacking(name, attributes, len(ids)) for name in as_columns(attributes, len(ids))}
                return self._set(self._widen_for(state, attributes, len(ids)), places, attributes, given), 0
            return self._update(state, ids, vectors, attributes, documents, locate if insert else locate_all)

    def update_selected(
        self,
        state: IndexSnapshot,
        selected: Sequence[Words],
        fresh: npt.NDArray[np.bool_],
        values: Mapping[str, list[Any]],
    ) -> tuple[IndexSnapshot, int]:
        """Return the snapshot with the one value of each attribute for the rows that a filter leaves, and their number.

        `selected` and `fresh` are as in :meth:`remove_selected`.
        """
        count = int(fresh.sum()) + sum(map(popcount, selected))
        if not count:
            return state, 0
        with self._all_or_nothing(state):
            state = self._widen_for(state, values, 1)
            for places in _places_of(selected, fresh, max(_UPDATED_LEAST, self._work_bytes // _UPDATED_BYTES)):
                columns = {name: value * len(places.positions) for name, value in values.items()}
                given = {name: np.ones(len(places.positions), np.bool_) for name in values}
                state = self._set(state, places, columns, given)
        return state, count

    def _widen_for(self, state: IndexSnapshot, attributes: Any, count: int) -> IndexSnapshot:
        """Return the snapshot with the attributes of `count` rows in its schema."""
        schema = merged_schema(self.about.schema, as_columns(attributes, count), count)
        ChangedDocuments(state, None, 0, self._work_bytes).check(schema)
        return self._with_schema(state, schema)

    def _set(
        self, state: IndexSnapshot, places: Located, attributes: Any, given: Mapping[str, npt.NDArray[np.bool_]]
    ) -> IndexSnapshot:
        """Return the snapshot with other values of attributes in places; `given` tells for each name in which."""
        count = len(places.positions)
        columns = as_objects(as_columns(attributes, count), state.schema)
        beyond = value_bytes(columns, count)
        check_values(beyond, self._work_bytes)
        room = fresh_bytes(self.about.dram)
        for part in _runs(beyond + VALUE_BYTES * len(columns), room):
            some = Located(places.positions[part], places.fresh[part])
            size = int(beyond[part].sum()) + VALUE_BYTES * len(columns) * len(some.positions)
            if waiting_bytes(state) + size > room:
                state = self._write_changes(state)
            state = self._make_room(state, partial(self._values_room, size))
            values = {name: column[part] for name, column in columns.items()}
            state = with_values(state, self._files, some, values, {name: each[part] for name, each in given.items()})
        self._dirty = self._dirty or count > 0
        return state

    def _values_room(self, size: int, state: IndexSnapshot) -> int:
        return check_values_room(self._planned(state), size, self.about.dram)

    def _write_changes(self, state: IndexSnapshot) -> IndexSnapshot:
        """Write the values that wait, beside their parts."""
        parts, written = [*state.parts], set[str]()
        for number, part in enumerate(state.parts):
            waiting = [name for name, every in part.changes.items() if every[-1].values is not None]
            if not waiting:
                continue
            assert part.attributes is not None
            planned = self._planned(state)
            room = max(0, min(self.about.dram - planned, whole_bytes(part.attributes, len(part))))
            self._footprint.shrink_pool(planned + room)
            with self._store.begin(PAGE_BYTES) as tx:
                generation = self._store.generation + 1
                entry = write_changes(tx, part, state.schema, generation, self._written_rows, room)
                self._publish(tx, self.about, durable=False)
            written.update(name for column in waiting for name in segments_of(entry, column))
            self._spilled |= written
            parts[number] = self._files.widened(part, state.schema, self._files.changes(entry, len(part), state.schema))
        return replace(state, parts=tuple(parts))

    def _update(
        self, state: IndexSnapshot, ids: Ids, vectors: npt.NDArray[Any] | None, attributes: Any, documents: Any,
        find: Callable[[Sequence[IndexPart], Fresh, Ids], Located],
    ) -> tuple[IndexSnapshot, int]:  # fmt: skip
        if vectors is not None and len(ids) != len(vectors):
            entries = counted(len(ids), "entry")
            raise ValueError(f"ids has {entries} for {counted(len(vectors), 'vector')}: expected one for each")
        places = find(state.parts, state.fresh, ids)
        known = np.flatnonzero(places.known)
        given = KeptVectors(state, places, self._reader) if vectors is None else vectors
        kept = values_kept(state, places, attributes)
        records = ChangedDocuments(state, documents, len(ids), self._work_bytes, places)
        state = self._remove(state, ids.take(known), places.take(known))
        return self._add(state, given, ids, attributes, records, kept)[0], len(ids) - len(known)

    def remove(self, state: IndexSnapshot, ids: Ids) -> IndexSnapshot:
        """Return the snapshot without these ids."""
        with self._all_or_nothing(state):
            return self._remove(state, ids, locate_all(state.parts, state.fresh, ids))

    def remove_selected(
        self, state: IndexSnapshot, selected: Sequence[Words], fresh: npt.NDArray[np.bool_]
    ) -> tuple[IndexSnapshot, int]:
        """Return the snapshot without the rows that a filter leaves, and their number.

        Parameters
        ----------
        selected
            A bitmap for each part, of rows that were not removed.
        fresh
            bool ``[n]`` of the fresh vectors.
        """
        with self._all_or_nothing(state):
            waiting = state.fresh.ids[fresh]
            count = len(waiting) + sum(map(popcount, selected))
            if not count:
                return state, 0
            state = self._count_changes(state, count)
            self._dirty = True
            parts = tuple(part.without_selected(bits) for part, bits in zip(state.parts, selected, strict=True))
            return replace(state, parts=parts, fresh=state.fresh.without(waiting)), count

    def commit(self, state: IndexSnapshot, compact: bool | None) -> IndexSnapshot:
        """Make the snapshot durable, join small parts, and take over the work done beside the commits.

        With `compact`, make lists, codes and calibration anew from all vectors. With None, and where so much has
        changed that they no longer fit, begin to do so beside the commits that follow.
        """
        with self._all_or_nothing(state):
            state = self._spill(state)
            rows = sum(int(entry["rows"]) for entry in self.about.pending)
            self._wanted, self._taken, self._base = max(self._taken, self._wanted // 2), 0, 0
            if compact or (compact is None and not state.count and self._is_outgrown(state)):
                self._renewals.stop()
                return self._renew(state) if state.count else self._rewrite(state, 0)
            following = self._commit_made(state, max(_FEW_ROWS, _ROWS_TIMES * rows), compact)
        try:
            for _ in range(2):  # the second time where a renewal still holds rows removed since it began
                if compact is None and self._lacks_room(following, _MARGIN):
                    following = self._with_room(following)
            self._begin_beside(following, compact)
        except KeyboardInterrupt:  # the commit is made all the same; the caller raises its own (`memhier.shield`)
            return following
        except Exception as error:  # the commit is made all the same
            self._renewals.failed(error, following.calibration.all_changes)
        self._renewals.give_way(scarce=self._room(following) < _SCARCE * self._wanted)
        return following

    def when_measured(self, call: Callable[[Measured], None]) -> None:
        """Let a thread that has measured efforts anew call this, while it holds `lock`."""
        self._measurements.hand_over = call

    def use(self, state: IndexSnapshot, measured: Measured) -> IndexSnapshot:
        """Return the snapshot with efforts measured anew, for the next commit to make durable, if they are of use."""
        calibration = measured.for_later(state.calibration)
        if self._lost or self._prepared is not None or calibration is state.calibration:
            return state
        self.about, self._dirty = replace(self.about, calibration=calibration), True
        return replace(state, calibration=calibration)

    def prepare(self, state: IndexSnapshot, mark: int) -> IndexSnapshot:
        """Write everything that a commit of the snapshot needs, and note it under `mark`, but publish nothing."""
        with self._all_or_nothing(state):
            before = self._spill(state)
            self._prepared = _Prepared(mark, before, self.about)
            try:
                return self._rewrite(before, len(before.parts))
            except BaseException:
                self._prepared = None
                raise

    def publish(self, state: IndexSnapshot) -> IndexSnapshot:
        """Make the prepared commit the last one."""
        prepared = self._check_prepared()
        with self._begin() as tx:
            publish_prepared(tx, prepared.mark, self.about)
            for name in self._stale(self.about, []):
                tx.drop(name)
            tx.commit()
        self._durable, self._dirty, self._prepared, self._spilled = self.about, False, None, set()
        return state

    def withdraw(self, state: IndexSnapshot) -> IndexSnapshot:
        """Return to the snapshot before the prepared commit; its changes wait for another one."""
        prepared = self._check_prepared()
        with self._begin() as tx:
            drop_prepared(tx)
            tx.commit()
        self.about = replace(prepared.about, next_part=self.about.next_part)
        self._dirty, self._prepared = True, None
        return prepared.before

    def _check_prepared(self) -> "_Prepared":
        if self._prepared is None:
            raise ValueError("no commit is prepared: call prepare() first")
        return self._prepared

    def close(self) -> None:
        """End the work beside the commits, after the step that is under way."""
        self._renewals.stop()
        self._measurements.stop()

    def failures(self) -> list[BaseException]:
        """Return the failures of work beside the commits since the last call."""
        return self._renewals.failures()

    def renewal(self, state: IndexSnapshot) -> str:
        """Return the state of the renewal; see `ZoomIndex.stats`."""
        return self._renewals.stats(due=self._is_due(state))

    @property
    def beside_bytes(self) -> int:
        """DRAM of the join beside the commits, in bytes."""
        return self._renewals.planned_bytes

    @property
    def prepared(self) -> bool:
        """Whether a commit is prepared."""
        return self._prepared is not None

    def keep_record(self) -> None:
        """Make the record of the audit durable, unless a commit is under way."""
        if self.record is None or self._lost or self.prepared or self._store.get(AUDIT_KEY) == (raw := self.record()):
            return
        with self._begin() as tx:
            tx.put(AUDIT_KEY, raw)
            tx.commit()

    def keep_tuning(self, state: IndexSnapshot) -> None:
        """Make calibration and hot pages of a snapshot durable."""
        self._renewals.stop()  # it would undo the tuning
        self._measurements.stop()
        names, (files, pages) = {part.file: part.name for part in state.parts}, split_keys(state.hot.keys)
        hot = [(names[file], page) for file, page in zip(files.tolist(), pages.tolist(), strict=True)]
        with self._all_or_nothing(state), self._begin() as tx:
            self._publish(tx, replace(self.about, calibration=state.calibration, hot=hot), durable=False)

    @contextmanager
    def _all_or_nothing(self, state: IndexSnapshot) -> Iterator[None]:
        """After an error, return to the description of `state`; a later commit drops parts that it does not know."""
        if self._lost:
            raise ClosedError(f"{self._store.path}: a commit was made, but not read back; open the index again")
        if self._prepared is not None:
            raise ValueError(f"commit {self._prepared.mark} is prepared: call publish() or withdraw() before changes")
        about, dirty = self.about, self._dirty
        self._needed = frozenset(part.name for part in state.parts)
        try:
            with self._renewals.caller.working():
                yield
        except BaseException:
            # The numbers of parts stay used: their segments are still in the store.
            self.about, self._dirty = replace(about, next_part=self.about.next_part), dirty
            raise
        finally:
            self._needed = frozenset()

    def _add(
        self,
        state: IndexSnapshot,
        vectors: npt.NDArray[Any] | KeptVectors,
        ids: Ids | None,
        attributes: Any,
        documents: ChangedDocuments,
        kept: Mapping[str, Kept] | None = None,
    ) -> tuple[IndexSnapshot, Ids]:
        names = self._free_ids(len(vectors)) if ids is None else ids
        if len(names.numbers) != len(vectors):
            entries = counted(len(names.numbers), "entry")
            raise ValueError(f"ids has {entries} for {counted(len(vectors), 'vector')}: expected one for each")
        if ids is not None:
            refuse_known(state.parts, state.fresh, names)
        schema, items = self.about.schema, 0
        columns: dict[str, npt.NDArray[Any]] = {}
        if attributes is not None:
            given = as_columns(attributes, len(vectors))
            schema, items = merged_schema(schema, given, len(vectors)), item_bytes(given)
            columns = as_objects(given, schema)
        documents.check(schema)
        if kept:
            columns |= {name: each.filled(columns.get(name)) for name, each in kept.items()}
        if not isinstance(vectors, KeptVectors):
            # The first vectors decide on the space of an index that began without any.
            check_range(state.space, vectors, fitted=not self._is_untrained(state))
        each = fresh_row_bytes(state.row_bytes, schema, state.fresh.texts, names.texts, documents=bool(documents.names))
        beyond = value_bytes(columns, len(vectors))
        check_values(beyond, self._work_bytes)
        sizes = AddedBytes(each, int(beyond.sum()), documents.record_bytes, documents.work_bytes, items)
        state = self._make_room(state, self._room_for(names, schema, sizes))
        state = self._count_changes(state, len(vectors))
        if names.texts is None:
            next_id = max(self.about.next_id, int(names.numbers.max(initial=-1)) + 1)
            self.about = replace(self.about, next_id=next_id)
        state = self._with_schema(state, schema)
        self.about = replace(self.about, documents=[*documents.names])
        state = replace(state, documents=documents.names)
        self._dirty = True
        room, taken = fresh_bytes(self.about.dram), each + beyond + documents.sizes
        records, most = documents.records(), room
        plain = not documents and not schema and names.texts is None
        if plain and not isinstance(vectors, KeptVectors):  # the caller holds all that a part is made of
            most *= max(1, min(_ROOMS, each // (state.preview.book.code_bytes + _CODED_BYTES)))
        for part in _runs(taken, most):
            fresh, size = state.fresh, int(taken[part].sum())
            waiting = len(fresh) * each + fresh.record_bytes + fresh.value_bytes
            if len(fresh) and waiting + size > room:
                state = self._join_pending(self._spill(state))
            ids = names.part(part.start, part.stop)
            values = {name: column[part] for name, column in columns.items()}
            more = Fresh(vectors[part], ids.numbers, values, ids.texts, value_bytes=int(beyond[part].sum()))
            if documents:
                more = more.with_records(list(islice(records, len(more))))
            if size > room and len(more) > 1:  # written without a copy
                state = self._join_pending(self._spill(replace(state, fresh=more.widened(schema))))
            else:
                state = replace(state, fresh=state.fresh.joined(more, schema))
        return state, names

    def _with_schema(self, state: IndexSnapshot, schema: Schema) -> IndexSnapshot:
        if schema == self.about.schema:
            return state
        self.about = replace(self.about, schema=schema)
        parts = tuple(self._files.widened(part, schema, part.changes) for part in state.parts)
        return replace(state, schema=schema, parts=parts, fresh=state.fresh.widened(schema))

    def _count_changes(self, state: IndexSnapshot, count: int) -> IndexSnapshot:
        calibration = state.calibration.changed(count)
        self.about = replace(self.about, calibration=calibration)
        return replace(state, calibration=calibration)

    def _remove(self, state: IndexSnapshot, ids: Ids, places: Located) -> IndexSnapshot:
        positions = places.positions
        if len(ids):
            state = self._count_changes(state, len(ids))
            self._dirty = True
        known = positions[positions >= 0]
        number, rows = split_positions(known)
        parts = tuple(
            part.without(rows[number == which]) if (number == which).any() else part
            for which, part in enumerate(state.parts)
        )
        return replace(state, parts=parts, fresh=state.fresh.without(ids.numbers))

    def _spill(self, state: IndexSnapshot) -> IndexSnapshot:
        """Write the values that wait, and the fresh vectors, if there are any, as a pending part."""
        state = self._write_changes(state)
        if not len(state.fresh.ids):
            return state
        if first := self._is_untrained(state):
            state = begun(state, self.about.seed)
        fresh, preview, about = state.fresh, state.preview, self.about
        name, source = f"p{about.next_part}", VectorSource(fresh.vectors)
        with self._begin() as tx:
            arrays, order = write_coded(tx, name, source, fresh.ids, preview, state.space, self._work_bytes)
            if fresh.attributes:
                write_attributes(tx, f"{name}-a-", about.schema, fresh.attributes, order, self._written_rows)
            if fresh.texts is not None:
                write_texts(tx, f"{name}-texts", [fresh.texts.take(order)])
            if fresh.records is not None:
                write_records(tx, f"{name}-docs", [fresh.records[order].tolist()])
            pending = [*about.pending, arrays.entry(name)]
            some = some_of_added(source, preview, state.space, self._work_bytes)
            calibration = state.calibration.written(some, preview, len(fresh.vectors))
            if first:
                write_preview(tx, preview)
                about = replace(about, space=state.space)
            about = replace(about, calibration=calibration)
            self._publish(tx, replace(about, next_part=about.next_part + 1, pending=pending), durable=False)
        preview = replace(preview, radii=radii_after(state.parts, preview, [], [arrays]))
        parts = (*state.parts, self._files.open(name, arrays, state.row_bytes, state.schema))
        return replace(state, parts=parts, preview=preview, fresh=fresh.emptied(), calibration=calibration)

    def _commit_made(self, state: IndexSnapshot, few: int, compact: bool | None) -> IndexSnapshot:
        """Make a snapshot durable; take over finished work where that leaves few rows to write anew now."""
        self._renewals.collect(state.calibration.all_changes)
        state = self._take_measured(state, compact)
        renewed = self._renewals.renewed
        if renewed is not None:
            rest = sum(part.alive_count for part in state.parts[len(renewed.replaced) :])
            if rest <= few << min(max(0, renewed.rounds - _ROUNDS), 40):  # so that it ends, however much is added
                self._renewals.stop_joins()
                self._renewals.take_renewed()
                return self._switch(state, renewed)
        if not self._dirty and self._renewals.made is None:
            return state
        # Where no thread has room for a join, neither is there room for many rows, and they are joined now.
        beside = self.about.dram - self._planned(state) >= _JOIN_BYTES + self._work_bytes
        first = self._first_to_join(state, self._renewals.claimed(state.parts), few if beside else None)
        return self._rewrite(state, first, self._renewals.take_made())

    def _take_measured(self, state: IndexSnapshot, compact: bool | None) -> IndexSnapshot:
        """Return the snapshot with the efforts of a thread that could not hand them over; see :meth:`use`.

        Or with efforts measured now, where that is overdue and may take more DRAM than the budget.
        """
        try:
            measured = self._measurements.take()
            state = state if measured is None else self.use(state, measured)
            # A result of no use, as lists were made anew meanwhile, is followed by a thread.
            if compact is None and measured is None and self._measurements.is_overdue(state):
                state = self.use(state, self._measurements.measure(state))
        except Exception as error:
            self._renewals.failed(error, state.calibration.all_changes)
        return state

    def _begin_beside(self, state: IndexSnapshot, compact: bool | None) -> None:
        """Start the threads that are due, now that all of a snapshot is durable."""
        renewals, about, changes = self._renewals, self.about, state.calibration.all_changes
        if compact is None and renewals.may_start(changes):
            self._measurements.begin(state)
        if renewals.renewed is not None:
            self._follow(state, renewals.renewed)
        elif compact is None and not renewals.renewing and self._is_due(state) and renewals.may_start(changes):
            task, layout = self._task(state, state.parts, _BESIDE_BYTES), self._layout_anew(state)
            renewals.start_renewal(task.parts, partial(renew, task, layout, about.seed, changes))
        elif not renewals.joining and renewals.may_start(changes):
            first = self._first_to_join(state, renewals.claimed(state.parts), None, _JOIN_BYTES + self._work_bytes)
            planned = merged_bytes(state.parts[first:], state.preview, True) + _JOIN_BYTES + self._work_bytes
            least = 0 if self._room(state) < 2 * self._wanted else _REMOVED
            if compact is None and not renewals.renewing and self._waste(state) > least:
                first, planned = 0, 0  # DRAM on top of the budget, as a renewal takes it
            if first < len(state.parts):
                self._footprint.shrink_pool(self._planned(state) + planned)
                task = self._task(state, state.parts[first:], 0 if planned else _BESIDE_BYTES)
                renewals.start_join(task.parts, partial(join, task), planned)

    def _follow(self, state: IndexSnapshot, renewed: Renewed) -> None:
        """Let a thread code newer parts for a renewal."""
        task = self._task(state, state.parts[len(renewed.replaced) :], _BESIDE_BYTES)
        self._renewals.make_up(task.parts, partial(follow, task))

    def _is_due(self, state: IndexSnapshot) -> bool:
        return state.count >= (1 if state.calibration.vectors else _FIRST_TRAINED) and self._is_outgrown(state)

    def _is_outgrown(self, state: IndexSnapshot) -> bool:
        """Return whether the index is worth making anew.

        That is so once much has changed and lists or codes no longer fit, or there are too many vectors or too few for
        the lists; or with codes on SSD parts leave hardly room for another; or once a list has grown too long.
        """
        calibration, made_of = state.calibration, state.calibration.made_of
        if calibration.worn or calibration.tuned or calibration.all_changes <= _LONG_CHANGES * made_of:
            return calibration.worn
        few_or_many = not made_of <= _GROWN * state.count <= _GROWN**2 * made_of
        return few_or_many or state.longest_list > _LONG or (state.preview.on_ssd and self._lacks_room(state, 2))

    def _lacks_room(self, state: IndexSnapshot, times: float) -> bool:
        """Return whether parts leave less DRAM than so many `times` that of the last changes."""
        if self._room(state) >= times * self._wanted:
            return False
        if not state.preview.on_ssd:
            return self._waste(state) > 0
        some = state.calibration.all_changes > _LONG_CHANGES * state.calibration.made_of
        return some and not state.calibration.tuned and len(state.parts) > _MANY

    def _waste(self, state: IndexSnapshot) -> float:
        """Return the share of removed rows, with codes in DRAM, that stay as there is no room to join all parts."""
        rows, room = sum(map(len, state.parts)), self._room(state)
        if state.preview.on_ssd or merged_bytes(state.parts, state.preview, True) <= room:
            return 0.0
        return (rows - state.count) / max(1, rows)

    def _with_room(self, state: IndexSnapshot) -> IndexSnapshot:
        """Return the snapshot with all parts made one, by DRAM on top of the budget, or as a renewal under way ends."""
        changes = state.calibration.all_changes
        self._renewals.finish(changes)
        if (made := self._renewals.renewed) is not None:
            self._follow(state, made)
            self._renewals.finish(changes)
        with self._all_or_nothing(state):
            renewed = self._renewals.take_renewed()
            self._renewals.stop()
            if renewed is not None:
                return self._switch(state, renewed)
            return self._renew(state) if state.preview.on_ssd else self._rewrite(state, 0)

    def _room(self, state: IndexSnapshot) -> int:
        """Return the DRAM that is left where a join under way gives way."""
        return self.about.dram - self._footprint.needed(state)

    def _is_untrained(self, state: IndexSnapshot) -> bool:
        return not self.about.trained_on and not state.parts

    def _task(self, state: IndexSnapshot, parts: tuple[IndexPart, ...], least: int = 0) -> Task:
        """Return the task to write parts anew as one, under a new name; its work has `least` bytes of DRAM or more."""
        name = f"p{self.about.next_part}"
        self.about = replace(self.about, next_part=self.about.next_part + 1)
        if not self._renewals.joining and not self._renewals.renewing:
            self._tasked.clear()
        self._tasked.update(
            segment for part in parts for each in state.schema for segment in segments_of(part.entry(), each)
        )
        return Task(
            self._store, name, parts, state.preview, state.space, state.dtype, self.about.schema,
            max(self._work_bytes, least), self._buffer_bytes,
        )  # fmt: skip

    def _rewrite(self, state: IndexSnapshot, first: int, made: Made | None = None) -> IndexSnapshot:
        """Make a snapshot durable: join its parts from number `first` on, and put `made` in the place of others."""
        about, name = self.about, f"p{self.about.next_part}"
        kept, merged = _in_place(state.parts[:first], made), None
        try:
            with self._begin() as tx:
                entries, parts = self._written(tx, kept, state)
                gone: list[PartArrays | StoredArrays | Spread] = [part.arrays for part in state.parts[first:]]
                come: list[PartArrays | StoredArrays | Spread] = []
                if made is not None:
                    assert made.before is not None
                    gone.append(made.before)
                    come.append(made.spread)
                if any(part.alive_count for part in state.parts[first:]):
                    merged = self._merge(tx, name, state, first)
                    entries.append(merged.arrays.entry(name))
                    come.append(merged.arrays)
                preview = replace(state.preview, radii=radii_after(state.parts, state.preview, gone, come))
                tx.segment("radii").append(preview.radii)
                about = replace(about, next_part=about.next_part + 1, parts=entries, pending=[])
                self._publish(tx, about, durable=True)
        except BaseException:
            if made is not None:
                made.drop()
            raise
        self._lost = True  # until the parts are open, the committed state is not the state in memory
        known = None if made is None else made.arrays
        opened = [part or self._load(entry, state, known) for part, entry in zip(parts, entries, strict=False)]
        if merged is not None:
            opened.append(self._files.open(name, merged.arrays, state.row_bytes, state.schema))
        self._lost = False
        return replace(
            state, parts=tuple(opened), preview=preview, hot=state.hot.within([part.file for part in opened])
        )

    def _join_pending(self, state: IndexSnapshot) -> IndexSnapshot:
        """Join pending parts where their sizes call for it; the new part is pending, too."""
        about, name = self.about, f"p{self.about.next_part}"
        first = self._first_to_join(state, len(about.parts))
        kept, merged = state.parts[:first], None
        if first == len(state.parts):
            return state
        with self._begin() as tx:
            if any(part.alive_count for part in state.parts[first:]):
                merged = self._merge(tx, name, state, first)
            entries = [] if merged is None else [merged.arrays.entry(name)]
            gone, come = [part.arrays for part in state.parts[first:]], [] if merged is None else [merged.arrays]
            preview = replace(state.preview, radii=radii_after(state.parts, state.preview, gone, come))
            pending = about.pending[: first - len(about.parts)] + entries
            self._publish(tx, replace(about, next_part=about.next_part + 1, pending=pending), durable=False)
        if merged is not None:
            kept = (*kept, self._files.open(name, merged.arrays, state.row_bytes, state.schema))
        return replace(state, parts=kept, preview=preview, hot=state.hot.within([part.file for part in kept]))

    def _renew(self, state: IndexSnapshot) -> IndexSnapshot:
        """Write all parts as one, with lists and codes made for their vectors."""
        task, layout = self._task(state, state.parts), self._layout_anew(state)
        changes = state.calibration.all_changes
        return self._switch(state, renew(task, layout, self.about.seed, changes))

    def _switch(self, state: IndexSnapshot, renewed: Renewed) -> IndexSnapshot:
        """Make a snapshot durable in its renewed form, and code newer parts for it."""
        about, preview, calibration = self.about, renewed.book, renewed.calibration
        task = self._task(state, state.parts[len(renewed.replaced) :])
        try:
            with self._begin() as tx:
                entries, _ = self._written(tx, renewed.parts, state)
                pieces: list[PartArrays | StoredArrays | Spread] = [made.spread for made in renewed.parts]
                known = [made.arrays for made in renewed.parts]
                tx.adopt(renewed.staging)
                if any(part.alive_count for part in task.parts):
                    arrays, _, calibration = write_recoded(tx, task, task.parts, renewed, self._reader)
                    entries.append(arrays.entry(task.name))
                    pieces.append(arrays)
                    known.append(arrays)
                preview = replace(preview, radii=radii_of(pieces, preview))
                tx.segment("radii").append(preview.radii)
                calibration = calibration.changed(state.calibration.all_changes - renewed.changes)
                about = replace(self.about, lists=preview.lists, book_bytes=preview.book.code_bytes, hot=[])
                about = replace(about, trained_on=calibration.vectors, calibration=calibration)
                self._publish(tx, replace(about, parts=entries, pending=[]), durable=True)
        except BaseException:
            renewed.drop()
            raise
        state = replace(state, preview=preview, calibration=calibration, hot=HotPages.none())
        self._lost = True  # until the parts are open, the committed state is not the state in memory
        parts = tuple(self._load(entry, state, each) for entry, each in zip(entries, known, strict=True))
        self._lost = False
        return replace(state, parts=parts)

    def _layout_anew(self, state: IndexSnapshot) -> IndexLayout:
        about, book, padded = self.about, state.preview.book, state.space.padded
        # With codes on SSD, lists leave room for parts to come.
        another = PART_BYTES + 16 * (state.preview.lists + 1) + 2 * self._work_bytes
        spare = self._room(state) - 2 * _MANY * another * state.preview.on_ssd
        lists = lists_anew(state.count, state.preview.lists, padded, about.dram, spare)
        rotate = isinstance(book, CodeBook) and book.rotation.ndim == 2
        return IndexLayout(
            lists, "rabitq", book.code_bytes, padded, rotate, about.searches, about.dram, state.preview.on_ssd
        )

    def _written(
        self, tx: Transaction, pieces: Sequence[IndexPart | Made], state: IndexSnapshot
    ) -> tuple[list[dict[str, Any]], list[IndexPart | None]]:
        """Return the catalog's entries of parts, with the open parts; adopt the segments made beside commits.

        The bitmap of rows alive is written if it changed since the last commit; and so are the values of attributes
        that changed in parts while these were made anew beside the commits.
        """
        entries: list[dict[str, Any]] = []
        parts: list[IndexPart | None] = []
        for piece in pieces:
            part, alive = None, None
            if isinstance(piece, IndexPart):
                part, entry = piece, piece.entry()
                alive = part.alive if part.alive_name is None else None
            else:
                tx.adopt(piece.staging)
                replaced = [each for each in state.parts if each.name in piece.replaced]
                entry, alive = piece.entry, piece.alive(replaced)
                later = write_later_changes(
                    tx, piece, replaced, state.schema, self._store.generation + 1, self._written_rows
                )
                entry = entry | {"changes": later} if later else entry
            if alive is not None:
                name = f"{piece.name}-alive{self._store.generation + 1}"
                tx.segment(name).append(alive)
                entry = entry | {"alive": name}
                part = None if part is None else replace(part, alive_name=name)
            entries.append(entry)
            parts.append(part)
        return entries, parts

    def _load(self, entry: dict[str, Any], state: IndexSnapshot, known: PartArrays | None) -> IndexPart:
        """Open a part that a commit has just taken over; its arrays may be known."""
        return self._files.load(entry, state.preview, state.row_bytes, state.schema, known)

    def _merge(self, tx: Transaction, name: str, state: IndexSnapshot, first: int) -> Merged:
        """Write the rows of the parts from number `first` on as one part, with their attributes and strings."""
        joined = state.parts[first:]
        work = merged_bytes(joined, state.preview, self._moves_rows(state))
        self._footprint.shrink_pool(self._planned(state) + work)
        writer = RowWriter(tx.segment(f"{name}-rows"), state.row_bytes)
        merged = merge_parts(joined, state.preview, self._reader, writer, self._work_bytes, self._moves_rows(state))
        merged.arrays.write(tx, name, state.preview)
        if merged.rows is not None:
            write_carried(tx, name, joined, self.about.schema, merged.rows, self._work_bytes)
        return merged

    def _moves_rows(self, state: IndexSnapshot) -> bool:
        """Return whether rows have attributes, documents or strings."""
        return bool(self.about.schema) or bool(state.documents) or state.id_kind == "str"

    @property
    def _written_rows(self) -> int:
        return max(1, self._work_bytes // WRITTEN_BYTES)

    def _publish(self, tx: Transaction, about: Description, *, durable: bool) -> None:
        """Commit a transaction with a new description, dropping the segments that nothing names.

        If `durable` is false, the description leaves out additions to the index.
        """
        if durable:  # a failure no longer returns to the snapshot before
            self._needed = frozenset()
        spilled = self._spilled
        if durable and self._prepared is None:
            self._spilled = set()
        names = {entry["name"] for entry in about.parts}
        about = replace(about, hot=[(name, page) for name, page in about.hot if name in names])
        for name in self._stale(about):
            tx.drop(name)
        last = self._durable
        known = about if durable else replace(about, schema=last.schema, documents=last.documents, next_id=last.next_id)
        if (prepared := self._prepared) is not None:
            note_prepared(tx, prepared.mark, known)
            known = replace(last, next_part=about.next_part, pending=[])
        tx.put("index", json.dumps(known.to_json()).encode())
        if self.record is not None:
            tx.put(AUDIT_KEY, self.record())
        generation = self._store.generation
        try:
            tx.commit()
        except BaseException:
            self._lost = self._store.generation != generation  # it failed after the commit
            self._spilled = spilled
            raise
        self.about = about
        if durable and prepared is None:
            self._durable, self._dirty = about, False

    def _stale(self, about: Description, others: Sequence[dict[str, Any]] | None = None) -> list[str]:
        """Return the segments of parts and removals that neither `about` nor the entries of other parts name.

        By default these are the parts of the last commit where another one is prepared.
        """
        if others is None:
            others = [] if self._prepared is None else self._durable.parts
        kept = [*about.parts, *about.pending, *others]
        entries: dict[str, list[dict[str, Any]]] = {name: [] for name in self._needed}
        for entry in kept:
            entries.setdefault(entry["name"], []).append(entry)
        alive = {entry["alive"] for entry in kept}
        working = self._renewals.joining or self._renewals.renewing
        held = self._spilled | (self._tasked if working else set())

        def is_needed(name: str, part: str, rest: str) -> bool:
            kind, _, column = rest.partition("-")
            if part not in entries:
                return False
            if column and entries[part] and (kind == "a" or (kind[:1] in ("c", "r") and kind[1:].isdigit())):
                attribute = column.partition("-")[0]
                return name in held or any(name in segments_of(entry, attribute) for entry in entries[part])
            return not rest.startswith("alive") or name in alive

        stale = []
        for name in self._store.segments():
            part, _, rest = name.partition("-")
            if part.startswith("p") and part[1:].isdigit() and not is_needed(name, part, rest):
                stale.append(name)
        return stale

    def _free_ids(self, count: int) -> Ids:
        if self.about.id_kind == "str":
            raise ValueError("ids=None: this index has strings as ids, so expected one for each vector")
        first = self.about.next_id
        if first + count > 2**63:
            raise ValueError(f"ids: none are free above {first - 1}, the largest there was; give ids of your own")
        return Ids(np.arange(first, first + count, dtype=np.int64), None)

    def _begin(self) -> Transaction:
        return self._store.begin(self._buffer_bytes)

    def _room_for(self, ids: Ids, schema: Schema, added: AddedBytes) -> Callable[[IndexSnapshot], int]:
        """Return the check for room for more vectors; see `check_room`."""
        dram = self.about.dram

        def check(state: IndexSnapshot) -> int:
            fresh = state.fresh
            waiting = (len(ids.numbers) + len(fresh.ids)) * added.each + fresh.record_bytes + fresh.value_bytes
            waiting = min(fresh_bytes(dram), waiting + added.records + added.values)
            held = self._planned(replace(state, schema=schema))
            return check_room(state, held, ids, waiting, self.about.searches if schema else 0, dram, added)

        return check

    def _make_room(self, state: IndexSnapshot, check: Callable[[IndexSnapshot], int]) -> IndexSnapshot:
        """Return the snapshot, without its hot pages where a change needs their DRAM, which `check` tells or refuses.

        The pool gives way as well, and so does a join.
        """
        if self.beside_bytes:
            try:
                check(state)
            except BudgetError:
                self._renewals.stop_joins()  # a later commit begins one again, with the DRAM that is left then
        if state.hot.memory_bytes:
            try:
                check(state)
            except BudgetError:
                state = replace(state, hot=HotPages.none())
                self.about = replace(self.about, hot=[])
        needed = check(state)
        self._base = self._base or self._footprint.needed(state)
        self._taken = max(self._taken, needed - self.beside_bytes - self._base)
        self._footprint.shrink_pool(needed)
        return state

    def _planned(self, state: IndexSnapshot) -> int:
        """Return the most DRAM, without that of the pages that the reader holds."""
        return self._footprint.needed(state) + self.beside_bytes

    def _first_to_join(self, state: IndexSnapshot, earliest: int, most: int | None = None, reserved: int = 0) -> int:
        return first_to_join(
            state.parts, state.preview, earliest, lambda: self.about.dram - self._planned(state) - reserved,
            with_rows=self._moves_rows(state) or reserved > 0, most=most,
        )  # fmt: skip


def _places_of(selected: Sequence[Words], fresh: npt.NDArray[np.bool_], most: int) -> Iterator[Located]:
    """Yield the places of the rows that a filter leaves, at most `most` at a time, or of a word."""
    step = max(1, most // 64)
    for number, words in enumerate(selected):
        for first in range(0, len(words), step):
            some = words[first : first + step]
            rows = 64 * first + np.flatnonzero(unpack(some, 64 * len(some)))
            if len(rows):
                yield Located(positions_of(number, rows), np.full(len(rows), -1))
    for start in range(0, len(fresh), most):
        rows = start + np.flatnonzero(fresh[start : start + most])
        yield Located(np.full(len(rows), -1), rows)


def _runs(sizes: Ints, most: int) -> Iterator[slice]:
    """Yield runs of vectors of these sizes that take `most` bytes together, or one that takes more."""
    ends, start = np.cumsum(sizes), 0
    while start < len(sizes):
        before = int(ends[start - 1]) if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, before + most, side="right")))
        yield slice(start, stop)
        start = stop


def _in_place(parts: Sequence[IndexPart], made: Made | None) -> list[IndexPart | Made]:
    """Return the parts with `made` in the place of those that it replaces."""
    if made is None:
        return [*parts]
    first = [part.name for part in parts].index(made.replaced[0])
    assert tuple(part.name for part in parts[first : first + len(made.replaced)]) == made.replaced
    return [*parts[:first], made, *parts[first + len(made.replaced) :]]
