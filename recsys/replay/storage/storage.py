"""The storage tier: logs of samples, of their mutable fields and of the index, in one store with one commit."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from memhier.errors import CorruptionError, FormatError
from memhier.fields import described
from memhier.files import Files
from memhier.io.faults import is_unreadable
from memhier.io.reader import PendingRead, Reader
from memhier.log.row_log import RowLog
from memhier.log.samples import Samples
from memhier.recsys.replay.codecs.encoding import Encoding
from memhier.recsys.replay.division import Buffers
from memhier.recsys.replay.schema import Columns, Schema
from memhier.recsys.replay.storage.described import META, VERSION, check_positions, check_slots, decode_meta
from memhier.recsys.replay.storage.index import INDEX_ROW_BYTES, POSITIONS, POSITIONS_2, SLOTS, Kind, index_keys, joined
from memhier.recsys.replay.storage.records import SampleCodec
from memhier.recsys.replay.storage.room import ENTRY_BYTES, Growth, Room, reclaim
from memhier.recsys.replay.storage.staged import Change, StagedSamples
from memhier.store.store import Finding, Store

__all__ = ["KIND", "META", "Storage"]

KIND = "replay"
_SAMPLES, _SIDE, _INDEX = "samples", "side", "index"
_CAPACITY = 1024
_TOGETHER = 1024  # samples that are moved or checked together, at most

Ints = NDArray[np.int64]


class Storage:
    """Samples by position.

    Parameters
    ----------
    store
        Open.
    schema, codecs
        As in the description of the store.
    bounded
        Whether `keep_within` will set a limit in bytes; else logs grow, and rewrite parts that are half dead.
    buffers
        Their sizes; None for those of no budget.
    """

    def __init__(
        self, store: Store, schema: Schema, codecs: Mapping[str, str], bounded: bool, buffers: Buffers | None = None
    ) -> None:
        self.store = store
        self.buffers: Buffers = buffers or Buffers()
        self.reader: Reader = self.buffers.reader()
        self.schema = schema
        self._fixed = [name for name in schema.fields if not schema.fields[name].mutable]
        # A sample of mutable fields alone still has a record, which marks its position as used.
        self.format: SampleCodec = SampleCodec(schema, self._fixed, codecs)
        self._side_format = SampleCodec(schema, schema.mutable, codecs)
        self._lossless = self.format.lossless and self._side_format.lossless
        value = store.get(META)
        meta: Any = {"size": 0, "slots": 0, "ahead": []} if value is None else decode_meta(store, value)
        capacity = max(meta["size"], self.buffers.stored or _CAPACITY)
        common: Any = {"grows": True, "block_bytes": self.buffers.block}
        options: Any = {"key_space": capacity, **common}
        self.samples: RowLog | Samples
        if self.format.row_bytes is None:
            self.samples = Samples(store, _SAMPLES, self.reader, capacity, **options)
        else:
            width = max(1, self.format.row_bytes)
            self.samples = RowLog(store, _SAMPLES, width, self.reader, capacity, **options)
        beside: Any = {"compact_below": 0 if bounded else 0.5, "beside": self.samples, **common}
        self._side: RowLog | None = None
        if schema.mutable:
            assert self._side_format.row_bytes is not None  # `create` has seen to it
            width = self._side_format.row_bytes
            self._side = RowLog(store, _SIDE, width, self.reader, capacity, key_space=capacity, **beside)
        self._ahead_rows = _rows(sum(meta["ahead"]))
        rows = len(Kind) * (max(capacity, meta["slots"]) // 48 + self._ahead_rows + 1)
        self._index = RowLog(store, _INDEX, INDEX_ROW_BYTES, self.reader, rows, key_space=rows, **beside)
        self._room: Room | None = None
        self._growth: dict[RowLog | Samples, Growth] = {}
        if store.writable:
            self._growth = {log: Growth(log) for log in (self.samples, self._index)}
        self._staged = StagedSamples(schema, self.buffers.staged)

    @classmethod
    def create(
        cls, path: str | os.PathLike[str], schema: Schema, codecs: Mapping[str, str], bounded: bool,
        files: Files | None, buffers: Buffers,
    ) -> Self:  # fmt: skip
        """Make a store. Others see it from the first commit on."""
        for name in schema.mutable:
            if SampleCodec(schema, [name], codecs).row_bytes is None:
                raise ValueError(f"codec[{name!r}]={codecs[name]!r}: a mutable field needs one of fixed width")
        SampleCodec(schema, list(schema.fields), codecs)
        store = Store.create(path, KIND, files=files)
        try:
            return cls(store, schema, codecs, bounded, buffers)
        except BaseException:
            store.close()
            raise

    @staticmethod
    def open_store(path: str | os.PathLike[str], **options: Any) -> tuple[Store, Any]:
        """Return the store at a path and its description; for the options see :meth:`Store.open`."""
        store = Store.open(path, KIND, **options)
        try:
            value = store.get(META)
            if value is None:
                raise FormatError(f"{Path(path)}: the store has no description of a replay buffer")
            return store, decode_meta(store, value)
        except BaseException:
            store.close()
            raise

    @property
    def together(self) -> int:
        """Samples that are moved or checked together."""
        return max(1, min(_TOGETHER, self.buffers.together // (self.schema.sample_bytes + 64)))

    @property
    def path(self) -> Path:
        """Of the store."""
        return self.store.path

    @property
    def logs(self) -> list[RowLog | Samples]:
        """All logs."""
        return [self.samples, self._index, *self._sample_logs[1:]]

    @property
    def _sample_logs(self) -> list[RowLog | Samples]:
        return [self.samples] if self._side is None else [self.samples, self._side]

    @property
    def memory_bytes(self) -> int:
        """DRAM held by logs, reader and catalog."""
        own = self.store.memory_bytes + self.reader.memory_bytes + self._staged.memory_bytes
        return own + sum(log.memory_bytes for log in self.logs)

    @property
    def disk_bytes(self) -> int:
        """Bytes on SSD: of the last checkpoint, of changes since, and of the catalog."""
        held = sum(info.length for info in self.store.segments().values()) + sum(log.fresh_bytes for log in self.logs)
        for name in ("catalog/data.mdb", "catalog.sum"):
            with suppress(OSError):
                held += (self.store.path / name).stat().st_size
        return held

    def keep_within(self, budget: int) -> None:
        """Take no more than `budget` bytes on SSD from now on; `storage_bytes` computes it from a number of samples."""
        self._room = Room(self.store, self.logs, budget)

    def excess(self, rated: int, more: int = 0) -> int:
        """Return by how many samples of mean lengths storage, and `more` bytes, exceed the bytes of `rated` ones."""
        each, longest = self.format.mean + ENTRY_BYTES, self.format.longest + ENTRY_BYTES
        room = max(rated * each, longest) - more
        if self.samples.live_bytes + len(self._staged) * longest > room:
            self.settle()
        return max(0, -((room - self.samples.live_bytes) // each))

    def pieces(self, columns: Columns) -> Iterator[slice]:
        """Yield parts of samples, in order, of at most the bytes of a longest one each."""
        sizes = self.format.most_bytes(columns)
        start = 0
        while start < len(sizes):
            fit = np.searchsorted(np.cumsum(sizes[start : start + _TOGETHER]), self.format.longest, "right")
            yield slice(start, start + max(1, int(fit)))
            start += max(1, int(fit))

    def append(self, positions: Ints, columns: Columns) -> None:
        """Set samples; if a position comes twice, the last one counts.

        A few samples wait for others, to be written with them.
        """
        count = len(positions)
        if not self._staged.takes(count) or not self._staged.has_room(count):
            self.settle()
        if self._staged.takes(count):
            self._staged.put(positions, columns)
        else:
            self._write(positions, columns)

    def append_at_once(self, position: int, columns: Columns) -> list[Change]:
        """Return the changes that set one sample, which waits for others; none where it cannot wait."""
        return self._staged.put_at_once(position, columns)

    def has_staged(self, positions: Ints) -> bool:
        """Whether a sample at one of these positions waits."""
        return self._staged.has_any(positions)

    def settle(self, positions: Ints | None = None) -> None:
        """Write the samples that wait, if there are any at these positions; None for all positions."""
        if len(self._staged) and (positions is None or self._staged.has_any(positions)):
            self._write(self._staged.positions, self._staged.columns)
            self._staged.clear()

    def _write(self, positions: Ints, columns: Columns) -> None:
        if isinstance(self.samples, Samples):
            self._append(self.samples, positions, self.format.records(columns))
        elif self.format.row_bytes:
            self._append(self.samples, positions, self.format.rows(columns))
        else:
            self._append(self.samples, positions, np.zeros((len(positions), 1), np.uint8))
        if self._side is not None:
            self._write_side(self._side, positions, columns)

    def _write_side(self, side: RowLog, positions: Ints, columns: Columns) -> None:
        self._append(side, positions, self._side_format.rows(columns))
        if self._room is None:
            reclaim(side)

    def _append(self, log: RowLog | Samples, keys: Ints, records: Any) -> None:
        """Append records, piece by piece as there is room for them."""
        if self._room is None:
            _put(log, keys, records)
            if log in self._growth:
                self._growth[log].note(sum(map(len, records)))
            return
        if isinstance(log, Samples):
            ends = np.cumsum([len(record) for record in records])
        else:
            ends = log.row_bytes * np.arange(1, len(keys) + 1)
        start = 0
        while start < len(keys):
            before = int(ends[start - 1]) if start else 0
            stop = max(start + 1, int(np.searchsorted(ends, before + self._room.piece_bytes, "right")))
            self._room.make(int(ends[stop - 1]) - before)
            _put(log, keys[start:stop], records[start:stop])
            start = stop

    def append_side(self, positions: Ints, columns: Columns) -> None:
        """Set the mutable fields of samples."""
        if self._side is not None:
            self.settle()
            self._write_side(self._side, positions, columns)

    def read(self, positions: Ints, out: Columns) -> None:
        """Fill columns.

        Raises
        ------
        CorruptionError
            If a sample is damaged.
        """
        self.settle(positions)
        self.read_settled(positions, out)

    def read_whole(self, positions: Ints, encoding: Encoding | None = None) -> tuple[Columns, NDArray[np.bool_]]:
        """Read samples but those that cannot be had; return the columns of the others, and which those are, bool [n].

        Of an encoding they are the columns of its schema, and else as they are stored.
        """
        columns = (self.schema if encoding is None else encoding.schema).empty(len(positions))
        try:
            if encoding is None:
                self.read(positions, columns)
            else:
                encoding.fill(columns, partial(self.read, positions))
        except (CorruptionError, OSError) as error:
            if not is_unreadable(error):
                raise
            if len(positions) <= 1:
                return {name: values[:0] for name, values in columns.items()}, np.zeros(len(positions), np.bool_)
            half = len(positions) // 2
            first, second = (self.read_whole(some, encoding) for some in (positions[:half], positions[half:]))
            joined = {name: np.concatenate([values, second[0][name]]) for name, values in first[0].items()}
            return joined, np.concatenate([first[1], second[1]])
        return columns, np.ones(len(positions), np.bool_)

    def read_settled(self, positions: Ints, out: Columns) -> None:
        """Read samples as `read` does, on any thread, at positions that were settled."""
        if isinstance(self.samples, Samples):
            records = self.samples.get(positions)
            there = [record for record in records if record is not None]
            if len(there) != len(records):
                raise CorruptionError(f"{self.store.path}: no sample at position {positions[records.index(None)]}")
            with self._unpacking():
                self.format.unpack_records(there, out)
        else:
            self._read_rows(self.samples, self.format, positions, out)
        if self._side is not None:
            self._read_rows(self._side, self._side_format, positions, out)

    def begin_read(self, positions: Ints, out: Columns, flushes: bool = True) -> PendingRead | None:
        """Begin to read samples at positions that were settled; None where `read_settled` has to do it.

        `flushes` says whether to write samples that are in no file yet.
        """
        rows = self.format.in_place(out)
        if rows is None or self._side is not None or not isinstance(self.samples, RowLog):
            return None
        return self.samples.begin_read(positions, rows, flushes)

    def _read_rows(self, log: RowLog, format: SampleCodec, positions: Ints, out: Columns) -> None:
        # A row of one plain field needs no room in between.
        rows, found = log.read(positions, format.in_place(out))
        if not found.all():
            raise CorruptionError(f"{self.store.path}: no sample at position {positions[~found][0]}")
        if format.row_bytes and not format.is_plain:
            with self._unpacking():
                format.unpack_rows(rows, out)

    @contextmanager
    def _unpacking(self) -> Iterator[None]:
        """Name the place of malformed records."""
        with described(f"{self.store.path}: a sample"):
            try:
                yield
            except CorruptionError as error:
                raise CorruptionError(f"{self.store.path}: {error}") from error

    def _raw(self, positions: Ints) -> list[Any]:
        """Return samples as they are stored, the records of each log."""
        stored: list[Any] = []
        for log in self._sample_logs:
            if isinstance(log, Samples):
                records: Any = log.get(positions)
                found = np.array([record is not None for record in records], np.bool_)
            else:
                records, found = log.read(positions)
            if not found.all():
                raise CorruptionError(f"{self.store.path}: no sample at position {positions[~found][0]}")
            stored.append(records)
        return stored

    def round_trip(self, columns: Columns) -> Columns:
        """Return samples as they come back from storage."""
        if self._lossless:
            return columns
        return self._side_format.round_trip(self.format.round_trip(columns))

    def round_trip_side(self, columns: Columns) -> Columns:
        """Return mutable fields, some or all, as they come back from storage."""
        return self._side_format.round_trip(columns)

    def check(self, columns: Columns, argument: str = "batch") -> None:
        """Raise ValueError for values, of some fields or all, that a codec cannot hold."""
        if not self._lossless:
            self.format.check(columns, argument)
            self._side_format.check(columns, argument)

    def value(self, name: str) -> bytes | None:
        """Return a value of the last commit, None if there is none."""
        return self.store.get(name)

    def check_values(self, values: Mapping[str, bytes]) -> None:
        """Raise for values that a commit cannot keep."""
        self.samples.check_values(values)

    def check_store(self) -> list[Finding]:
        """Read everything that the last commit holds and return every inconsistency."""
        return self.store.check()

    def delete(self, positions: Ints) -> None:
        """Remove samples."""
        self.settle()
        for log in self._sample_logs:
            log.delete(positions)

    def drop_index_rows(self, keys: Ints) -> None:
        """Remove rows of the index."""
        self._index.delete(keys)

    def commit(
        self, index: Iterable[tuple[Ints, NDArray[np.uint8]]], ahead: Sequence[bytes], values: Mapping[str, bytes]
    ) -> int:
        """Make everything durable.

        Parameters
        ----------
        index
            Keys and contents of changed rows of the index.
        ahead
            Records of the batches drawn ahead.
        values
            Of the catalog.
        """
        self.settle()
        data = b"".join(ahead)
        rows_now = _rows(len(data))
        padded = np.frombuffer(data.ljust(rows_now * INDEX_ROW_BYTES, b"\0"), np.uint8)
        drawn = index_keys(Kind.AHEAD, 0, rows_now), padded.reshape(rows_now, INDEX_ROW_BYTES)
        for keys, rows in joined(chain(index, [drawn] if data else [])):
            self._append(self._index, keys, rows)
        if rows_now < self._ahead_rows:
            self._index.delete(index_keys(Kind.AHEAD, rows_now, self._ahead_rows))
        self._ahead_rows = rows_now
        if self._room is not None:
            self._room.settle()
        return self.samples.commit(values)

    def read_ahead(self, sizes: Sequence[int]) -> list[memoryview]:
        """Return the records of the batches drawn ahead, of these sizes."""
        rows, found = self._index.read(index_keys(Kind.AHEAD, 0, self._ahead_rows))
        if not found.all():
            raise CorruptionError(f"{self.store.path}: the index lacks some of the batches drawn ahead")
        data = memoryview(rows.tobytes())
        ends = np.cumsum([0, *sizes]).tolist()
        return [data[start:stop] for start, stop in pairwise(ends)]

    def read_positions(self, meta: Mapping[str, Any]) -> NDArray[np.void]:
        """Return the entries of all positions, as `POSITIONS` lays them out, or `POSITIONS_2` for that version."""
        size = meta["size"]
        rows, found = self._index.read(POSITIONS.keys(0, POSITIONS.rows(size)))
        if not found.all() or len(self.samples) != size:
            raise CorruptionError(f"{self.store.path}: the index does not describe the {size} samples")
        table = POSITIONS if meta["version"] == VERSION else POSITIONS_2
        entries = table.unpack(rows, size)
        beside = meta.get("admission", {}).get("beside")
        check_positions(entries, meta["by_class"], meta["same_class"] is False, beside, self.store.path)
        return entries

    def read_slots(self, meta: Mapping[str, Any]) -> NDArray[np.void]:
        """Return the entries of all slots, as `SLOTS` lays them out; a slot without a row has not been used."""
        slots = meta["slots"]
        rows, found = self._index.read(SLOTS.keys(0, SLOTS.rows(slots)))
        entries = SLOTS.unpack(rows, slots)
        numbers = np.arange(slots)
        unused = numbers[~np.repeat(found, SLOTS.per_row)[:slots]]
        for name in ("planned", "visible", "swapped"):
            entries[name][unused] = -1
        entries["order"][unused] = unused
        check_slots(entries, meta["size"], meta["count"], self.store.path)
        return entries

    def check_movable(self, positions: Ints, ids: Ints) -> None:
        """Make sure that samples can be read, before anything changes.

        Raises
        ------
        CorruptionError, OSError
            For damaged samples; a note names their ids.
        """
        self.settle()
        failure: CorruptionError | OSError | None = None
        damaged: list[int] = []
        for start in range(0, len(positions), self.together):
            some = positions[start : start + self.together]
            try:
                self._raw(some)
            except (CorruptionError, OSError) as error:
                if not is_unreadable(error):
                    raise
                failure = failure or error
                damaged += [int(position) for position in some if not self._is_readable(position)]
        if failure is not None:
            failure.add_note(f"nothing has changed; the damaged samples of ids {ids[damaged].tolist()} would have to "
                             "move: forget them first")  # fmt: skip
            raise failure

    def _is_readable(self, position: np.int64) -> bool:
        try:
            self._raw(np.array([position]))
        except (CorruptionError, OSError) as error:
            if not is_unreadable(error):
                raise
            return False
        return True

    def move(self, positions: Ints, old: Ints) -> None:
        """Copy the samples at `old` to other positions, whose samples are gone."""
        # As they are stored: a lossy codec must not pack them again.
        self.settle()
        for log, records in zip(self._sample_logs, self._raw(old), strict=True):
            self._append(log, positions, records)

    def verify_erased(self) -> None:
        """Make sure that SSD holds no bytes but those of stored samples."""
        for log in self.logs:
            dead = int(log.stats()["dead_bytes"])
            if dead:
                raise CorruptionError(
                    f"{self.store.path}: {dead} bytes of forgotten or replaced samples could not be removed, because "
                    "samples beside them are damaged; check() names the place"
                )
        named = {info.path.name for info in self.store.segments().values()}
        left = sorted(file.name for file in (self.store.path / "segments").iterdir() if file.name not in named)
        if left:
            raise CorruptionError(f"{self.store.path}: {left[0]} is still there: it could not be removed, or another "
                                  "process reads it")  # fmt: skip

    def compact_fully(self) -> None:
        """Rewrite every part that holds anything dead, to be rid of the bytes."""
        for log in self.logs:
            log.compact(1)
        self.samples.commit()

    def keep_way_back(self, keep: bool) -> None:
        """Let commits keep the one before them, or not."""
        self.samples.way_back = keep

    def close(self) -> None:
        """Close the store; changes since the last commit are lost."""
        for log in self.logs:
            log.close()
        self.reader.close()
        self.store.close()


def _put(log: RowLog | Samples, keys: Ints, records: Any) -> None:
    if isinstance(log, Samples):
        log.put(keys, records)
    else:
        log.append(keys, records)


def _rows(size: int) -> int:
    """Return how many rows of the index `size` bytes take."""
    return -(-size // INDEX_ROW_BYTES)
