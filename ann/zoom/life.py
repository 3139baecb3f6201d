"""How an index changes: vectors are added to DRAM, written as parts, joined, and made durable by a commit.

A part is committed to the store as soon as it is written, so that it can be read, but as *pending*: only the index's
own commit makes it one of the index's parts. What is pending when a process dies is dropped by the next writer.
"""

import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.zoom.attributes import as_columns, chain, merge_schema, write_attributes
from memhier.ann.zoom.bitmaps import BitmapCache
from memhier.ann.zoom.calibrate import Calibration
from memhier.ann.zoom.catalog import Description, write_preview
from memhier.ann.zoom.code_scan import PART_SHIFT
from memhier.ann.zoom.fresh import Fresh
from memhier.ann.zoom.fullview import RowWriter, raw_rows
from memhier.ann.zoom.merge import merge_parts, radii_of
from memhier.ann.zoom.part import Part, PartArrays, compact_ids, find_ids, open_part
from memhier.ann.zoom.search import Snapshot
from memhier.ann.zoom.tune import measure
from memhier.budget import format_bytes
from memhier.errors import BudgetError
from memhier.ranking import HotPages
from memhier.reader import Reader
from memhier.store import Store, Transaction

__all__ = ["IndexWriter"]

_FRESH_SHARE = 1 / 32  # of the budget, for vectors that were not yet written
_FRESH_MOST = 8 << 20
_JOIN = 2  # a part is joined with those after it once they are half of it

Floats: TypeAlias = npt.NDArray[np.float32]
Ints: TypeAlias = npt.NDArray[np.int64]


class IndexWriter:
    """Changes one index; for one thread at a time.

    Parameters
    ----------
    store
        Open for writing.
    reader
        Reads what is written.
    about
        The catalog's description of the index.
    cache
        Of the bitmaps of filters.
    memory
        Tells what an index with a given snapshot would hold in DRAM.
    """

    def __init__(
        self, store: Store, reader: Reader, about: Description, cache: BitmapCache, memory: Callable[[Snapshot], int]
    ) -> None:
        self._store, self._reader, self._cache, self._memory = store, reader, cache, memory
        self.about = about
        self.lock = threading.RLock()
        self.dirty = False
        self._drop_pending()

    def add(
        self, state: Snapshot, vectors: npt.NDArray[Any], ids: Ints | None, attributes: Any
    ) -> tuple[Snapshot, Ints]:
        """Return the snapshot with more vectors, and their ids."""
        names = np.arange(len(vectors), dtype=np.int64) + self.about.next_id if ids is None else ids
        if len(names) != len(vectors):
            raise ValueError(f"ids has {len(names)} entries for {len(vectors)} vectors: expected one for each")
        if ids is not None:
            self._refuse_known(state, names)
        schema = self.about.schema
        columns: dict[str, npt.NDArray[Any]] = {}
        if attributes is not None:
            schema = merge_schema(schema, attributes, len(vectors))
            columns = _as_objects(attributes, len(vectors))
        state.space.vectors(vectors[:1])
        self._check_room(state, len(vectors))
        self.about = replace(self.about, schema=schema, next_id=max(self.about.next_id, int(names.max(initial=-1)) + 1))
        self.dirty = True
        most = self._fresh_rows(state)
        for start in range(0, len(vectors), most):
            part = slice(start, start + most)
            more = Fresh(vectors[part], names[part], {name: values[part] for name, values in columns.items()})
            if len(state.fresh) + len(more) > most:
                state = self._join_small(self._spill(state), len(self.about.parts))
            state = replace(state, fresh=state.fresh.joined(more, schema))
        return state, names

    def remove(self, state: Snapshot, ids: Ints) -> Snapshot:
        """Return the snapshot without these ids."""
        positions = find_ids(state.parts, ids)
        missing = ids[(positions < 0) & ~np.isin(ids, state.fresh.ids)]
        if len(missing):
            raise KeyError(f"ids holds {int(missing[0])}, which is not in the index ({len(missing)} such ids)")
        self.dirty = True
        number, rows = positions >> PART_SHIFT, positions & ((1 << PART_SHIFT) - 1)
        parts = tuple(
            part.without(rows[number == which]) if (number == which).any() else part
            for which, part in enumerate(state.parts)
        )
        return replace(state, parts=parts, fresh=state.fresh.without(ids))

    def commit(self, state: Snapshot) -> Snapshot:
        """Make the snapshot durable."""
        if not self.dirty:
            return state
        if len(state.fresh):
            state = self._spill(state)
        with self._store.begin() as tx:
            state = self._write_alive(tx, state)
            self._commit(tx, replace(self.about, parts=[part.about() for part in state.parts], pending=[]))
        self.dirty = False
        return self._join_small(state, 0)

    def compact(self, state: Snapshot, seed: int) -> Snapshot:
        """Rewrite all parts as one, divide long lists, calibrate again, and commit."""
        state = self.commit(state)
        if state.count:
            state = self._join(state, 0, seed)
            state = self.set_calibration(state, measure(state, self._reader, None, seed))
        return state

    def set_calibration(self, state: Snapshot, calibration: Calibration) -> Snapshot:
        """Return the snapshot with another calibration, which is made durable at once."""
        state = replace(state, calibration=calibration)
        self.set_tuning(state)
        return state

    def set_tuning(self, state: Snapshot) -> None:
        """Make calibration and hot pages of a snapshot durable."""
        names = {part.places.file: part.name for part in state.parts}
        hot = [(names[key >> 40], key & ((1 << 40) - 1)) for key in state.hot.keys.tolist()]
        with self._store.begin() as tx:
            self._commit(tx, replace(self.about, calibration=state.calibration, hot=hot))

    def _spill(self, state: Snapshot) -> Snapshot:
        """Write the fresh vectors as a pending part."""
        fresh, preview, about = state.fresh, state.preview, self.about
        turned = preview.turn(state.space.vectors(fresh.vectors))
        lists = preview.assigner().assign(turned)
        order = np.argsort(lists, kind="stable")
        codes, numbers, _ = preview.encode(turned[order], lists[order])
        starts = np.concatenate([[0], np.cumsum(np.bincount(lists, minlength=preview.lists))]).astype(np.int64)
        arrays = PartArrays(starts, codes, numbers, compact_ids(fresh.ids[order]))
        name = f"p{about.next_part}"
        with self._store.begin() as tx:
            writer = RowWriter(tx.segment(f"{name}-rows"), state.row_bytes)
            writer.append(raw_rows(fresh.vectors[order]))
            writer.finish()
            arrays.write(tx, name)
            if fresh.attributes:
                write_attributes(tx, f"{name}-a-", about.schema, fresh.attributes, order)
            entry = _entry(name, arrays)
            self._commit(tx, replace(about, next_part=about.next_part + 1, pending=[*about.pending, entry]))
        parts = (*state.parts, self._open_part(name, arrays, state.row_bytes))
        preview = replace(preview, radii=radii_of([each.arrays for each in parts], preview))
        return replace(state, parts=parts, preview=preview, fresh=Fresh.empty(state.space.dimension, state.dtype))

    def _join_small(self, state: Snapshot, earliest: int) -> Snapshot:
        """Join the last parts while the one before them, from number `earliest` on, is not much larger."""
        first = len(state.parts) - 1
        rows = len(state.parts[first]) if state.parts else 0
        while first > earliest and len(state.parts[first - 1]) <= _JOIN * rows:
            first -= 1
            rows += len(state.parts[first])
        return self._join(state, first, None) if first < len(state.parts) - 1 else state

    def _join(self, state: Snapshot, first: int, seed: int | None) -> Snapshot:
        """Write the parts from number `first` on as one; with a seed, which needs all parts, divide lists as well."""
        about, joined = self.about, state.parts[first:]
        name = f"p{about.next_part}"
        with self._store.begin() as tx:
            writer = RowWriter(tx.segment(f"{name}-rows"), state.row_bytes)
            merged = merge_parts(
                joined,
                range(first, len(state.parts)),
                state.preview,
                state.space,
                state.dtype,
                self._reader,
                writer,
                seed,
            )
            merged.arrays.write(tx, name)
            if about.schema:
                self._write_attributes(tx, name, joined, first, merged.sources)
            about = replace(about, next_part=about.next_part + 1, lists=merged.preview.lists)
            entry = _entry(name, merged.arrays)
            if first < len(about.parts):
                about = replace(about, parts=[*about.parts[:first], entry], pending=[])
            else:
                about = replace(about, pending=[*about.pending[: first - len(about.parts)], entry])
            if seed is not None:
                write_preview(tx, merged.preview)
                about = replace(about, trained_on=len(merged.sources))
            self._commit(tx, about)
        parts = (*state.parts[:first], self._open_part(name, merged.arrays, state.row_bytes))
        preview = replace(merged.preview, radii=radii_of([each.arrays for each in parts], merged.preview))
        return replace(state, parts=parts, preview=preview, hot=HotPages.none())

    def _write_attributes(self, tx: Transaction, name: str, joined: Sequence[Part], first: int, sources: Ints) -> None:
        attributes = [part.attributes for part in joined if part.attributes is not None]
        offsets = np.concatenate([[0], np.cumsum([len(part) for part in joined])])
        order = offsets[(sources >> PART_SHIFT) - first] + (sources & ((1 << PART_SHIFT) - 1))
        write_attributes(tx, f"{name}-a-", self.about.schema, chain(attributes, self.about.schema), order)

    def _write_alive(self, tx: Transaction, state: Snapshot) -> Snapshot:
        """Write which rows were removed, where that changed since the last commit."""
        parts = []
        for part in state.parts:
            if part.alive is not None and part.alive_name is None:
                name = f"{part.name}-alive{self._store.generation + 1}"
                tx.segment(name).append(part.alive)
                part = replace(part, alive_name=name)
            parts.append(part)
        return replace(state, parts=tuple(parts))

    def _commit(self, tx: Transaction, about: Description) -> None:
        """Commit a transaction with a new description, dropping the segments that it does not need."""
        needed = [entry["name"] for entry in (*about.parts, *about.pending)]
        alive = {entry["alive"] for entry in about.parts}
        for name in self._store.segments():
            part, _, rest = name.partition("-")
            stale = part.startswith("p") and part[1:].isdigit() and part not in needed
            if stale or (rest.startswith("alive") and name not in alive):
                tx.drop(name)
        about = replace(about, hot=[(name, page) for name, page in about.hot if name in needed])
        tx.put("index", json.dumps(about.to_json()).encode())
        tx.commit()
        self.about = about

    def _drop_pending(self) -> None:
        if self.about.pending:
            with self._store.begin() as tx:
                self._commit(tx, replace(self.about, pending=[]))

    def _open_part(self, name: str, arrays: PartArrays, row_bytes: int) -> Part:
        return open_part(self._store, self._reader, name, arrays, None, None, row_bytes, self.about.schema, self._cache)

    def _fresh_rows(self, state: Snapshot) -> int:
        """Return how many vectors may wait in DRAM."""
        return max(1, min(_FRESH_MOST, int(_FRESH_SHARE * self.about.dram)) // (state.row_bytes + 8))

    def _check_room(self, state: Snapshot, more: int) -> None:
        arrays = state.preview.book.code_bytes + 6 + 8
        needed = self._memory(state) + more * arrays + 4 * (more * state.row_bytes // 4096)
        if needed > self.about.dram:
            raise BudgetError(
                f"{more:,} more vectors need {format_bytes(needed)} of DRAM in all, "
                f"dram={format_bytes(self.about.dram)} was given at build: commit and compact free what was removed, "
                f"grow_to= at build leaves room"
            )

    def _refuse_known(self, state: Snapshot, ids: Ints) -> None:
        known = (find_ids(state.parts, ids) >= 0) | np.isin(ids, state.fresh.ids)
        if known.any():
            raise ValueError(
                f"ids holds {int(ids[known][0])}, which is in the index already: update() replaces vectors"
            )


def _entry(name: str, arrays: PartArrays) -> dict[str, Any]:
    return {"name": name, "rows": len(arrays.codes), "ids": arrays.ids.dtype.str, "alive": None}


def _as_objects(attributes: Any, count: int) -> dict[str, npt.NDArray[Any]]:
    """Return attributes as columns of Python values, None for null."""
    columns = {}
    for name, column in as_columns(attributes, count).items():
        cells = column.read(np.arange(count))
        values = cells.values.astype(object)
        if column.type == "str":
            words = [word.decode() for word in column.words()]
            values[:] = [words[rank] if rank >= 0 else None for rank in cells.values.tolist()]
        elif column.type == "bool":
            values[:] = cells.values.astype(np.bool_)
        if cells.nulls is not None:
            values[cells.nulls] = None
        columns[name] = values
    return columns
