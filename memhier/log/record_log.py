"""What every log of records has: an index in DRAM, parts on SSD, commits, deletions and compaction.

Records are only ever appended; the newest of a key counts. The index is not stored: it is rebuilt at open from the
entries, newest first, so that it never holds more keys than are alive.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, cast

from memhier.arrays import as_ints
from memhier.errors import BudgetError, CorruptionError, FormatError
from memhier.log.compaction import CompactingLog
from memhier.log.core import Flags, Ints
from memhier.log.parts import LogRecord
from memhier.log.replay import check_parts
from memhier.shield import shielded
from memhier.store.store import Store
from memhier.store.transaction import Transaction, check_key, check_value_size
from memhier.store.way_back import keep_way_back

if TYPE_CHECKING:
    from memhier.io.reader import Reader

__all__ = ["RecordLog", "committed_keys"]

COMPACT_BELOW_MAX = 0.9  # where ten bytes are moved for one that becomes free
_NAME = re.compile(r"[A-Za-z0-9_-]{1,70}")


class RecordLog(CompactingLog):
    """What `RowLog` and `Samples` have in common.

    One thread changes a log at a time; any number read meanwhile.

    Attributes
    ----------
    way_back
        Whether a commit keeps the one before it, so that the store can go back to that until the next one.
    way_back_further
        Whether commits from now on keep the one that the last one kept, and not the last one.
    """

    way_back = False
    way_back_further = False

    def __init__(
        self,
        store: Store,
        name: str,
        reader: "Reader",
        capacity: int,
        record_bytes: int,
        per_page: int | None,
        direct: bool,
        compact_below: float,
        key_space: int | None = None,
        grows: bool = False,
        beside: "RecordLog | None" = None,
    ) -> None:
        if beside is not None and (beside._store is not store or beside._leader is not None):
            raise ValueError(f"beside={beside._name!r}: expected a log of the same store that commits by itself")
        if isinstance(compact_below, bool) or not isinstance(compact_below, int | float):
            raise TypeError(f"compact_below={compact_below!r}: expected a share as a float")
        if not 0 <= compact_below <= COMPACT_BELOW_MAX:
            raise ValueError(f"compact_below={compact_below!r}: expected a share, 0 (never) to {COMPACT_BELOW_MAX}")
        if not isinstance(name, str):
            raise TypeError(f"name={name!r}: expected text")
        if not _NAME.fullmatch(name):
            raise ValueError(f"name={name!r}: expected 1 to 70 letters, digits, '-' or '_'")
        self._value_key = f"log/{name}"
        record = self._read_record(store, name, capacity, record_bytes)
        super().__init__(
            store, name, reader, capacity, record, per_page, direct, float(compact_below), key_space, grows, beside
        )

    @property
    def memory_bytes(self) -> int:
        """DRAM held, in bytes: the index, the tail, and the buffers of a transaction that is open."""
        held = self._index.memory_bytes + self._table.memory_bytes + self._tail.buffer.nbytes + self._background_bytes()
        # The buffers of a shared transaction are those of the log that commits it.
        return held if self._tx is None or self._leader is not None else held + self._tx.memory_bytes

    @property
    def capacity(self) -> int:
        """Most keys at a time."""
        return self._index.capacity

    @property
    def failed(self) -> bool:
        """Whether a write failed, after which the log takes no more calls."""
        return self._failure is not None

    def __len__(self) -> int:
        """How many keys have a record."""
        self._check_open()
        with self._lock:  # a thread that compacts counts a record out, and then in
            return len(self._index)

    @shielded
    def contains(self, keys: Any) -> Flags:
        """Return whether each key has a record.

        Parameters
        ----------
        keys
            Integers, any shape.

        Returns
        -------
        numpy.ndarray
            bool, of the shape of `keys`.
        """
        self._check_open()
        wanted = as_ints("keys", keys)
        with self._lock:
            found: Flags = self._index.places(wanted.reshape(-1)) >= 0
        return found.reshape(wanted.shape)

    def keys(self) -> Iterator[Ints]:
        """Yield all keys, int64 arrays of at most 65,536, in no order that means anything.

        The log must not change meanwhile.
        """
        self._check_open()
        return self._index.keys()

    @shielded
    def delete(self, keys: Any) -> None:
        """Delete records; keys that have none are left out.

        Parameters
        ----------
        keys
            Integers [n].

        Raises
        ------
        OSError
            When the store is open for reading, or a write fails.
        """
        self._check_open()
        wanted = self._as_keys(keys)
        with self._writer:
            self._begin()
            there = wanted[self._index.places(wanted) >= 0]
            with self._owing(0):
                with self._lock:
                    self._index.erase(there)
                self._enter_deletions(there)

    def check_values(self, values: Mapping[str, bytes] | None) -> dict[str, bytes]:
        """Return values for :meth:`commit`, or say what is wrong with them before anything is written."""
        changes = dict(values or {})
        for key, value in changes.items():
            check_key(key)
            if key == self._value_key:
                raise ValueError(f"values: {key!r} is the log's own")
            if not isinstance(value, bytes):
                raise TypeError(f"values[{key!r}]: expected bytes, got {type(value).__name__}")
            check_value_size(key, value)
        return changes

    @shielded
    def commit(self, values: Mapping[str, bytes] | None = None) -> int:
        """Make everything since the last commit durable at once; return the store's new generation.

        With it goes what the logs have that were opened beside this one; they do not commit by themselves.

        Where many small parts have come together, they are merged first, and with `compact_below` what the thread has
        not moved of what is due is moved now; but see :meth:`compact_later`.

        Parameters
        ----------
        values
            Values of the store's catalog to set in the same transaction.

        Raises
        ------
        OSError
            When a write fails. The log is closed for everything then; open store and log again. A patient log whose
            disk is full is not.
        ValueError
            When it was opened beside another log, which commits both.
        """
        self._check_open()
        if self._leader is not None:
            raise ValueError(f"log {self._name!r} was opened beside {self._leader._name!r}: commit that one")
        changes = self.check_values(values)
        logs = cast("list[RecordLog]", self._together())
        for log in logs:
            log._pay()
        with ExitStack() as held:
            for log in logs:
                held.enter_context(log._writer)
                log._begin()
                if not log._later:
                    log._merge()
            if self.patient and not self._direct:
                self._reserve(changes)
            with self._failing() as tx:
                for key, value in changes.items():
                    tx.put(key, value)
                for log in logs:
                    log._put_record(tx)
                if self.way_back:
                    keep_way_back(tx, self._store, self.way_back_further)
                generation = tx.commit()
                for log in logs:
                    log._adopt()
                    log._leave_for_later()
            for log in logs:
                log._tx = None
        return generation

    def _reserve(self, values: Mapping[str, bytes]) -> None:
        """Take the room on disk that a commit needs, or raise FullError while that changes nothing."""
        with self._failing(waits=True) as tx:
            logs = cast("list[RecordLog]", self._together())
            for log in logs:
                if log._fresh:
                    with log._lock:
                        log._fresh[-1].give()
            records = sum(len(log._record().encode()) for log in logs)
            tx.reserve(records + sum(len(key) + len(value) for key, value in values.items()))

    def _put_record(self, tx: Transaction) -> None:
        """Finish what is being written, and describe the log in the catalog."""
        if self._fresh:
            with self._lock:
                self._fresh[-1].seal()
        tx.put(self._value_key, self._record().encode())

    @shielded
    def compact(self, live_below: float = 0.5) -> int:
        """Rewrite what is alive of the parts in which less than a share is; commit to have their space back.

        What was written since the last commit stays as it is.

        Parameters
        ----------
        live_below
            The share of a part's bytes, 0 to 1. With 1 every part that holds anything dead is rewritten.

        Returns
        -------
        int
            How many parts will go.

        Raises
        ------
        OSError
            When the store is open for reading, or a read or write fails.
        """
        self._check_open()
        if not 0 <= live_below <= 1:
            raise ValueError(f"live_below={live_below!r}: expected a share, 0 to 1")
        with self._writer:
            self._begin()
            sparse = self._sparse_parts(live_below)
            for part in sparse:
                self._rewrite(part)
        return len(sparse)

    @shielded
    def stats(self) -> dict[str, int | float]:
        """Return plain numbers.

        ``records`` and ``capacity``; ``parts``; ``live_bytes`` of the newest records and ``dead_bytes`` of others, of
        ``log_bytes`` on SSD;
        ``appended_bytes`` of records handed in and ``written_bytes`` with entries, padding and compaction, since the
        log was opened; ``write_amplification``, the second over the first.
        """
        self._check_open()
        with self._lock:
            parts = [*self._parts.values(), *(opened.part for opened in self._fresh)]
            live = int(self._index.live(len(self._table.handles))[1].sum())
            return {
                "records": len(self._index),
                "capacity": self.capacity,
                "parts": len(parts),
                "live_bytes": live,
                "dead_bytes": sum(part.size for part in parts) - live,
                "log_bytes": sum(part.bytes for part in parts),
                "appended_bytes": self._appended_bytes,
                "written_bytes": self._written_bytes,
                "write_amplification": self._written_bytes / max(1, self._appended_bytes),
            }

    @shielded
    def close(self) -> None:
        """Forget what was not committed and let go of the reader's files. Store and reader stay open.

        Logs of one transaction forget it together, and are to be closed together.
        """
        if self._closed:
            return
        self._closed = True
        self._stop()
        if self._tx is not None:
            self._tx.abort()
        self._let_go()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @staticmethod
    def _as_keys(keys: Any) -> Ints:
        wanted = as_ints("keys", keys)
        if wanted.ndim != 1:
            raise ValueError(f"keys: expected shape [n], got {list(wanted.shape)}")
        return wanted

    def _read_record(self, store: Store, name: str, capacity: int, record_bytes: int) -> LogRecord:
        """Return what the catalog says about the log; a new one where a writer opens one that is not there."""
        what, value = type(self).__name__, store.get(self._value_key)
        if value is None:
            if not store.writable:
                raise FormatError(f"{store.path}: no {what} named {name!r}; its values are {store.keys()}")
            return LogRecord(record_bytes, 0, 0, [])
        record = _decoded(store, name, value)
        if record.record_bytes != record_bytes:
            sizes = [
                "of different lengths" if size == 0 else f"of {size} bytes"
                for size in (record.record_bytes, record_bytes)
            ]
            raise FormatError(f"{store.path}: log {name!r} holds records {sizes[0]}, expected {sizes[1]}")
        if isinstance(capacity, int) and capacity < record.live:
            raise BudgetError(f"capacity={capacity}: log {name!r} holds {record.live} keys; expected at least as many")
        return record


def committed_keys(store: Store, name: str) -> int:
    """Return how many keys the catalog says that a log holds, compared with its files; 0 where there is no log."""
    value = store.get(f"log/{name}")
    return 0 if value is None else _decoded(store, name, value).live


def _decoded(store: Store, name: str, value: bytes) -> LogRecord:
    record = LogRecord.decode(value)
    if record is None:
        raise CorruptionError(f"{store.path}: the record of log {name!r} has {len(value)} bytes")
    check_parts(store, name, record)
    return record
