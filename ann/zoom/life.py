"""How an index changes: vectors are added to DRAM, written as parts, joined, and made durable by a commit.

A part is committed to the store as soon as it is written, so that it can be read, but as *pending*: only the index's
own commit makes it one of the index's parts. What is pending when a process dies is dropped by the next writer.
"""

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from memhier.ann.zoom.attributes import Schema, chain, merge_schema, write_attributes
from memhier.ann.zoom.catalog import Description, write_preview
from memhier.ann.zoom.code_scan import PART_SHIFT
from memhier.ann.zoom.codes import CodeBook
from memhier.ann.zoom.construct import construct
from memhier.ann.zoom.fresh import Fresh, as_objects, fresh_row_bytes
from memhier.ann.zoom.fullview import RowWriter, raw_rows
from memhier.ann.zoom.ids import Ids, Located, locate_all, refuse_known, texts_at
from memhier.ann.zoom.joins import first_to_join, outgrown
from memhier.ann.zoom.layout import Layout, fresh_bytes, lists_anew
from memhier.ann.zoom.merge import Merged, PartsSource, merge_parts, radii_of
from memhier.ann.zoom.part import Part, PartArrays, PartFiles
from memhier.ann.zoom.room import check_range, check_room
from memhier.ann.zoom.search import Snapshot
from memhier.ann.zoom.spill import spilled
from memhier.ann.zoom.stored_texts import in_order, write_texts
from memhier.ann.zoom.texts import Texts
from memhier.errors import BudgetError, ClosedError
from memhier.ranking import HotPages
from memhier.reader import PAGE_BYTES, Reader
from memhier.store import Store, Transaction

__all__ = ["IndexWriter"]

_BUFFER_SHARE, _BUFFER_MOST = 1 / 256, 1 << 20  # of the budget, for what waits to be written of each segment
_WRITTEN_BYTES = 64  # of a row of an attribute that is being written

Ints: TypeAlias = npt.NDArray[np.int64]


class IndexWriter:
    """Changes one index; for one thread at a time, the one that has `lock`.

    Every change takes a snapshot and returns another. Where it fails, the one it took is still what the index is.

    Parameters
    ----------
    store
        Open for writing.
    reader, files
        Read what is written.
    about
        The catalog's description of the index.
    memory
        Tells what an index with a given snapshot comes to hold in DRAM, while it is searched and removed from.
    """

    def __init__(
        self, store: Store, reader: Reader, files: PartFiles, about: Description, memory: Callable[[Snapshot], int]
    ) -> None:
        self._store, self._reader, self._files, self._memory = store, reader, files, memory
        self.about = about
        self.lock = threading.RLock()
        self._durable = about  # as of the last commit
        self._dirty = False
        self._held: frozenset[str] = frozenset()  # parts of the snapshot that a change returns to if it fails
        self._lost = False
        # What a change may hold beside what is counted: vectors that wait are few then, or in their part already.
        self._work_bytes = fresh_bytes(about.dram)
        share = int(_BUFFER_SHARE * about.dram) // PAGE_BYTES * PAGE_BYTES
        self._buffer_bytes = min(max(share, PAGE_BYTES), _BUFFER_MOST)
        if about.pending or self._stale(about):
            with self._begin() as tx:
                self._publish(tx, replace(about, pending=[]), durable=False)

    def add(self, state: Snapshot, vectors: npt.NDArray[Any], ids: Ids | None, attributes: Any) -> tuple[Snapshot, Ids]:
        """Return the snapshot with more vectors, and their ids."""
        with self._all_or_nothing(state):
            return self._add(state, vectors, ids, attributes)

    def update(self, state: Snapshot, ids: Ids, vectors: npt.NDArray[Any], attributes: Any) -> Snapshot:
        """Return the snapshot with other vectors for these ids."""
        with self._all_or_nothing(state):
            return self._add(self._remove(state, ids), vectors, ids, attributes)[0]

    def remove(self, state: Snapshot, ids: Ids) -> Snapshot:
        """Return the snapshot without these ids."""
        with self._all_or_nothing(state):
            return self._remove(state, ids)

    def commit(self, state: Snapshot, compact: bool | None) -> Snapshot:
        """Make the snapshot durable, and join small parts.

        Where `compact`, or None and it no longer fits what it was made for, make all of it anew from its vectors:
        lists, codes and calibration.
        """
        with self._all_or_nothing(state):
            state = self._spill(state)
            if compact or (compact is None and outgrown(state)):
                return self._renew(state) if state.count else self._rewrite(state, 0, durable=True)
            if not self._dirty:
                return state
            return self._rewrite(state, self._first_to_join(state, 0), durable=True)

    def keep_tuning(self, state: Snapshot) -> None:
        """Make calibration and hot pages of a snapshot durable."""
        names = {part.places.file: part.name for part in state.parts}
        hot = [(names[key >> 40], key & ((1 << 40) - 1)) for key in state.hot.keys.tolist()]
        with self._all_or_nothing(state), self._begin() as tx:
            self._publish(tx, replace(self.about, calibration=state.calibration, hot=hot), durable=False)

    @contextmanager
    def _all_or_nothing(self, state: Snapshot) -> Iterator[None]:
        """After an error, be again what goes with `state`; parts it does not know are dropped in time."""
        if self._lost:
            raise ClosedError(f"{self._store.path}: a commit was made, but not read back; open the index again")
        about, dirty = self.about, self._dirty
        self._held = frozenset(part.name for part in state.parts)
        try:
            yield
        except BaseException:
            # The numbers of parts stay used: what was written under them is still in the store.
            self.about, self._dirty = replace(about, next_part=self.about.next_part), dirty
            raise
        finally:
            self._held = frozenset()

    def _add(
        self, state: Snapshot, vectors: npt.NDArray[Any], ids: Ids | None, attributes: Any
    ) -> tuple[Snapshot, Ids]:
        names = self._free_ids(len(vectors)) if ids is None else ids
        if len(names) != len(vectors):
            raise ValueError(f"ids has {len(names)} entries for {len(vectors)} vectors: expected one for each")
        if ids is not None:
            refuse_known(state.parts, state.fresh, names)
        schema = self.about.schema
        columns: dict[str, npt.NDArray[Any]] = {}
        if attributes is not None:
            schema = merge_schema(schema, attributes, len(vectors))
            columns = as_objects(attributes, len(vectors))
        check_range(state.space, vectors)
        state = self._make_room(state, names, schema)
        state = self._count_changes(state, len(vectors))
        if names.texts is None:
            next_id = max(self.about.next_id, int(names.numbers.max(initial=-1)) + 1)
            self.about = replace(self.about, next_id=next_id)
        if schema != self.about.schema:
            self.about = replace(self.about, schema=schema)
            parts = tuple(self._files.widened(part, schema) for part in state.parts)
            state = replace(state, schema=schema, parts=parts)
        self._dirty = True
        most = max(1, fresh_bytes(self.about.dram) // _waiting_bytes(state, names, schema))
        for start in range(0, len(vectors), most):
            part = slice(start, start + most)
            ids = names.part(start, min(start + most, len(names)))
            values = {name: each[part] for name, each in columns.items()}
            more = Fresh(vectors[part], ids.numbers, values, ids.texts)
            if len(state.fresh) + len(more) > most:
                state = self._spill(state)
                state = self._rewrite(state, self._first_to_join(state, len(self.about.parts)), durable=False)
            state = replace(state, fresh=state.fresh.joined(more, schema))
        return state, names

    def _count_changes(self, state: Snapshot, count: int) -> Snapshot:
        calibration = state.calibration.changed(count)
        self.about = replace(self.about, calibration=calibration)
        return replace(state, calibration=calibration)

    def _remove(self, state: Snapshot, ids: Ids) -> Snapshot:
        positions = locate_all(state.parts, state.fresh, ids).positions
        if len(ids):
            state = self._count_changes(state, len(ids))
            self._dirty = True
        known = positions[positions >= 0]
        number, rows = known >> PART_SHIFT, known & ((1 << PART_SHIFT) - 1)
        parts = tuple(
            part.without(rows[number == which]) if (number == which).any() else part
            for which, part in enumerate(state.parts)
        )
        return replace(state, parts=parts, fresh=state.fresh.without(ids.numbers))

    def _spill(self, state: Snapshot) -> Snapshot:
        """Write the fresh vectors, if there are any, as a pending part."""
        fresh, preview, about = state.fresh, state.preview, self.about
        if not len(fresh):
            return state
        arrays, order = spilled(state, self._work_bytes)
        name = f"p{about.next_part}"
        with self._begin() as tx:
            writer = RowWriter(tx.segment(f"{name}-rows"), state.row_bytes)
            step = max(1, self._work_bytes // (4 * state.row_bytes))
            for start in range(0, len(order), step):
                writer.append(raw_rows(fresh.vectors[order[start : start + step]]))
            writer.finish()
            arrays.write(tx, name)
            if fresh.attributes:
                write_attributes(tx, f"{name}-a-", about.schema, fresh.attributes, order, self._written_rows)
            if fresh.texts is not None:
                write_texts(tx, f"{name}-texts", [fresh.texts.take(order)])
            pending = [*about.pending, arrays.about(name)]
            self._publish(tx, replace(about, next_part=about.next_part + 1, pending=pending), durable=False)
        parts = (*state.parts, self._open(name, arrays, state, durable=False))
        preview = replace(preview, radii=radii_of([each.arrays for each in parts], preview))
        return replace(state, parts=parts, preview=preview, fresh=fresh.emptied())

    def _rewrite(self, state: Snapshot, first: int, *, durable: bool) -> Snapshot:
        """Write the parts from number `first` on as one, and where `durable` make the whole snapshot that of the index.

        Otherwise the parts are pending ones.
        """
        about, kept, joined = self.about, state.parts[:first], state.parts[first:]
        if not durable and not joined:
            return state
        merged, name = None, f"p{about.next_part}"
        with self._begin() as tx:
            if any(part.alive_count for part in joined):
                merged = self._merge(tx, name, state, first)
                about = replace(about, next_part=about.next_part + 1)
            made = [] if merged is None else [merged.arrays.about(name)]
            arrays = [part.arrays for part in kept] + ([] if merged is None else [merged.arrays])
            preview = replace(state.preview, radii=radii_of(arrays, state.preview)) if arrays else state.preview
            if durable:
                kept = self._write_alive(tx, kept)
                tx.segment("radii").append(preview.radii)
                about = replace(about, parts=[part.about() for part in kept] + made, pending=[])
            else:
                about = replace(about, pending=about.pending[: first - len(about.parts)] + made)
            self._publish(tx, about, durable=durable)
        if merged is not None:
            kept = (*kept, self._open(name, merged.arrays, state, durable=durable))
        return replace(state, parts=kept, preview=preview, hot=_hot_of(state.hot, kept))

    def _renew(self, state: Snapshot) -> Snapshot:
        """Write all parts as one, with lists and codes that are made for what they hold now."""
        about, scratch, book = self.about, self._store.path / "tmp", state.preview.book
        source = PartsSource(state.parts, state.dtype, state.space.dimension, self._reader)
        spare = about.dram - self._memory(state)
        lists = lists_anew(source.count, state.preview.lists, state.space.padded, about.dram, spare)
        rotate = isinstance(book, CodeBook) and book.rotation.ndim == 2
        layout = Layout(lists, book.code_bytes, state.space.padded, rotate, about.searches, about.dram)
        name = f"p{about.next_part}"
        try:
            with tqdm(disable=True) as bar:
                made = construct(source, source.ids, state.space, layout, "rabitq", about.seed, scratch, bar)
            with self._begin() as tx:
                for _ in made.rows.write(RowWriter(tx.segment(f"{name}-rows"), state.row_bytes)):
                    pass
                made.arrays.write(tx, name)
                write_preview(tx, made.preview)
                self._write_attributes(tx, name, state.parts, source.rows[made.order])
                self._write_texts(tx, name, state, 0, source.rows[made.order])
                about = replace(about, next_part=about.next_part + 1, lists=lists, trained_on=source.count)
                about = replace(about, book_bytes=made.preview.book.code_bytes, calibration=made.calibration)
                about = replace(about, parts=[made.arrays.about(name)], pending=[], hot=[])
                self._publish(tx, about, durable=True)
        finally:
            for leftover in scratch.iterdir():
                leftover.unlink()
        state = replace(state, preview=made.preview, calibration=made.calibration, hot=HotPages.none())
        return replace(state, parts=(self._open(name, made.arrays, state, durable=True),))

    def _open(self, name: str, arrays: PartArrays, state: Snapshot, *, durable: bool) -> Part:
        """Return the part that was just written."""
        self._lost = durable  # what was committed is another state than the last one until it is open
        part = self._files.open(name, arrays, state.row_bytes, state.schema)
        self._lost = False
        return part

    def _merge(self, tx: Transaction, name: str, state: Snapshot, first: int) -> Merged:
        """Write the rows of the parts from number `first` on, with what goes with them."""
        joined = state.parts[first:]
        writer = RowWriter(tx.segment(f"{name}-rows"), state.row_bytes)
        merged = merge_parts(joined, state.preview, self._reader, writer, self._work_bytes, self._moves_rows(state))
        merged.arrays.write(tx, name)
        if merged.rows is not None:
            self._write_attributes(tx, name, joined, merged.rows)
            self._write_texts(tx, name, state, first, merged.rows)
        return merged

    def _moves_rows(self, state: Snapshot) -> bool:
        """Return whether there is more to a row than its vector and its number."""
        return bool(self.about.schema) or state.id_kind == "str"

    def _write_attributes(self, tx: Transaction, name: str, parts: Sequence[Part], rows: npt.NDArray[Any]) -> None:
        """Write the attributes of rows, counted through all parts."""
        schema = self.about.schema
        if schema:
            attributes = [part.attributes for part in parts if part.attributes is not None]
            write_attributes(tx, f"{name}-a-", schema, chain(attributes, schema), rows, self._written_rows)

    @property
    def _written_rows(self) -> int:
        return max(1, self._work_bytes // _WRITTEN_BYTES)

    def _write_texts(self, tx: Transaction, name: str, state: Snapshot, first: int, rows: npt.NDArray[Any]) -> None:
        """Write the strings that are ids of rows, counted through all parts from number `first` on, if they are."""
        offsets = np.cumsum([0, *map(len, state.parts[first:])])

        def take(some: npt.NDArray[Any]) -> Texts:
            part = np.searchsorted(offsets, some, side="right") - 1
            positions = (part + first) << PART_SHIFT | (some.astype(np.int64) - offsets[part])
            return texts_at(state.parts, state.fresh, Located(positions, np.full(len(some), -1)))

        if state.id_kind == "str":
            write_texts(tx, f"{name}-texts", in_order(take, rows))

    def _write_alive(self, tx: Transaction, parts: Sequence[Part]) -> tuple[Part, ...]:
        """Write which rows were removed, where that changed since the last commit."""
        written = []
        for part in parts:
            if part.alive is not None and part.alive_name is None:
                name = f"{part.name}-alive{self._store.generation + 1}"
                tx.segment(name).append(part.alive)
                part = replace(part, alive_name=name)
            written.append(part)
        return tuple(written)

    def _publish(self, tx: Transaction, about: Description, *, durable: bool) -> None:
        """Commit a transaction with a new description, dropping the segments that nobody needs.

        Where the index itself is not committed, the description says nothing of what was added to it.
        """
        if durable:  # nothing but what follows it is returned to
            self._held = frozenset()
        names = {entry["name"] for entry in about.parts}
        about = replace(about, hot=[(name, page) for name, page in about.hot if name in names])
        for name in self._stale(about):
            tx.drop(name)
        known = about if durable else replace(about, schema=self._durable.schema, next_id=self._durable.next_id)
        tx.put("index", json.dumps(known.to_json()).encode())
        generation = self._store.generation
        try:
            tx.commit()
        except BaseException:
            self._lost = self._store.generation != generation  # it failed at what comes after the commit
            raise
        self.about = about
        if durable:
            self._durable, self._dirty = about, False

    def _stale(self, about: Description) -> list[str]:
        """Return the segments of parts and removals that `about` does not name."""
        needed = {entry["name"] for entry in (*about.parts, *about.pending)} | self._held
        alive = {entry["alive"] for entry in about.parts}
        stale = []
        for name in self._store.segments():
            part, _, rest = name.partition("-")
            of_part = part.startswith("p") and part[1:].isdigit()
            if of_part and (part not in needed or (rest.startswith("alive") and name not in alive)):
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

    def _make_room(self, state: Snapshot, ids: Ids, schema: Schema) -> Snapshot:
        """Return the snapshot, without its hot pages where more vectors need their DRAM."""
        dram = self.about.dram
        waiting = min(fresh_bytes(dram), (len(ids) + len(state.fresh)) * _waiting_bytes(state, ids, schema))
        filters = self.about.searches if schema else 0

        def check(state: Snapshot) -> None:
            check_room(state, self._memory(replace(state, schema=schema)), ids, waiting, filters, dram)

        if state.hot.memory_bytes:
            try:
                check(state)
            except BudgetError:
                state = replace(state, hot=HotPages.none())
                self.about = replace(self.about, hot=[])
        check(state)
        return state

    def _first_to_join(self, state: Snapshot, earliest: int) -> int:
        room, strings = self.about.dram - self._memory(state), list(self.about.schema.values()).count("str")
        return first_to_join(state, earliest, room, strings=strings, with_rows=self._moves_rows(state))


def _waiting_bytes(state: Snapshot, more: Ids, schema: Schema) -> int:
    """Return the DRAM of a vector that is not yet written: of those there are, or of those to come."""
    return max(fresh_row_bytes(state.row_bytes, schema, texts) for texts in (state.fresh.texts, more.texts))


def _hot_of(hot: HotPages, parts: Sequence[Part]) -> HotPages:
    """Return the hot pages that lie in the files of these parts."""
    files = [part.places.file for part in parts]
    kept = np.isin(hot.keys >> 40, files)
    return hot if kept.all() else HotPages(hot.keys[kept], hot.pages[kept])
