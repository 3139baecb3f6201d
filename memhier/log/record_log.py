"""The calls that logs of rows and of samples share: they check arguments, and keep interrupts out."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from memhier.arguments import as_ints
from memhier.closing import Closing
from memhier.log.compaction import Compactor
from memhier.log.group import TransactionGroup
from memhier.log.log import Flags, Ints, Log, LogOptions, RecordFormat
from memhier.log.replay import committed_record
from memhier.shield import shielded
from memhier.store.store import Store
from memhier.store.transaction import check_key, check_value_size

if TYPE_CHECKING:
    from memhier.io.reader import Reader

__all__ = ["RecordLog", "committed_keys"]


class RecordLog(Closing):
    """Holds a log and its compactor. One thread changes a log at a time; any number read meanwhile.

    Attributes
    ----------
    log, compactor
        Do the work. Not for users.
    leader
        Name of the log that commits this one; None if it commits itself.
    way_back
        Whether a commit keeps the one before it, so that the store can go back to that until the next one.
    way_back_further
        Whether commits from now on keep the one that the last one kept, and not the last one.
    """

    log: Log
    compactor: Compactor
    leader: str | None
    way_back = False
    way_back_further = False

    def __init__(
        self,
        store: Store,
        name: str,
        reader: "Reader",
        record_format: RecordFormat,
        options: LogOptions,
        beside: "RecordLog | None",
    ) -> None:
        if beside is not None and (beside.log.store is not store or beside.leader is not None):
            raise ValueError(f"beside={beside.log.name!r}: expected a log of the same store that commits by itself")
        self.leader = None if beside is None else beside.log.name
        group = TransactionGroup(store, 2 * options.block_bytes) if beside is None else beside.log.group
        self.log = Log(store, name, reader, record_format, options, group)
        self.compactor = Compactor(self.log, float(options.compact_below))
        group.join(self.log, self.compactor)

    @property
    def patient(self) -> bool:
        """Whether a call that finds the disk full raises `OSError` and may be made again; False by default."""
        return self.log.patient

    @patient.setter
    def patient(self, patient: bool) -> None:
        self.log.patient = patient

    @property
    def part_bytes(self) -> int | None:
        """Bytes of records in a part, about; None for the most that there may be."""
        return self.log.part_bytes

    @part_bytes.setter
    def part_bytes(self, part_bytes: int | None) -> None:
        self.log.part_bytes = part_bytes

    @property
    def memory_bytes(self) -> int:
        """DRAM held, in bytes: the index, the tail, and the buffers of a transaction that is open."""
        held = self.log.memory_bytes + self.compactor.memory_bytes
        # The buffers of a shared transaction are those of the log that commits it.
        return held + self.log.group.memory_bytes if self.leader is None else held

    @property
    def capacity(self) -> int:
        """Most keys at a time."""
        return self.log.index.capacity

    @property
    def failed(self) -> bool:
        """Whether a write failed, after which the log takes no more calls."""
        return self.log.group.failure is not None

    def __len__(self) -> int:
        """How many keys have a record."""
        self.log.check_open()
        with self.log.lock:  # a thread that compacts counts a record out, and then in
            return len(self.log.index)

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
        self.log.check_open()
        wanted = as_ints("keys", keys)
        return self.log.contains(wanted.reshape(-1)).reshape(wanted.shape)

    def keys(self) -> Iterator[Ints]:
        """Yield all keys, int64 arrays of at most 65,536, in no particular order.

        The log must not change meanwhile.
        """
        self.log.check_open()
        return self.log.index.keys()

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
        wanted = self.log.checked_keys(keys)
        with self.compactor.owing(0):
            self.log.delete(wanted)

    def check_values(self, values: Mapping[str, bytes] | None) -> dict[str, bytes]:
        """Return values for :meth:`commit`, or raise before anything is written."""
        changes = dict(values or {})
        for key, value in changes.items():
            check_key(key)
            if key == self.log.value_key:
                raise ValueError(f"values: {key!r} is the log's own")
            if not isinstance(value, bytes):
                raise TypeError(f"values[{key!r}]: expected bytes, got {type(value).__name__}")
            check_value_size(key, value)
        return changes

    @shielded
    def commit(self, values: Mapping[str, bytes] | None = None) -> int:
        """Make everything since the last commit durable at once; return the store's new generation.

        Logs that were opened beside this one are committed with it; they do not commit by themselves.

        Many small parts are merged first, and with `compact_below` the commit moves the records that are due and that
        the thread has not moved; but see :meth:`compact_later`.

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
        self.log.check_open()
        if self.leader is not None:
            raise ValueError(f"log {self.log.name!r} was opened beside {self.leader!r}: commit that one")
        changes = self.check_values(values)
        return self.log.group.commit(changes, self.log.patient, self.way_back, self.way_back_further)

    @shielded
    def compact(self, live_below: float = 0.5) -> int:
        """Rewrite the parts with a live share below `live_below`; commit to have their space back.

        Records written since the last commit stay as they are.

        Parameters
        ----------
        live_below
            Share of a part's bytes, 0 to 1. With 1 every part that holds a dead byte is rewritten.

        Returns
        -------
        int
            How many parts will go.

        Raises
        ------
        OSError
            When the store is open for reading, or a read or write fails.
        """
        self.log.check_open()
        if not 0 <= live_below <= 1:
            raise ValueError(f"live_below={live_below!r}: expected a share, 0 to 1")
        return self.compactor.compact(live_below)

    def compact_later(self) -> None:
        """Let commits rewrite nothing any more, but say which parts to rewrite beside the changes that follow.

        Parts that are due at open are left so as well. A commit waits for them only while more than half of the log is
        dead or more than 64 parts are left. For callers that wait for commits, or that hold a lock for them.
        """
        self.compactor.compact_later()

    @shielded
    def stats(self) -> dict[str, int | float]:
        """Return plain numbers.

        ``records`` and ``capacity``; ``parts``; ``live_bytes`` of the newest records and ``dead_bytes`` of others, of
        ``log_bytes`` on SSD;
        ``appended_bytes`` of records handed in and ``written_bytes`` with entries, padding and compaction, since the
        log was opened; ``write_amplification``, the second over the first.
        """
        self.log.check_open()
        return self.log.stats()

    # For callers that keep several logs within a bound of space: see `part_bytes`.

    @property
    def fresh_bytes(self) -> int:
        """Bytes on SSD that the open transaction has written, in whole pages."""
        with self.log.lock:
            return sum(opened.part.disk_bytes for opened in self.log.fresh)

    @property
    def disk_bytes(self) -> int:
        """Bytes on SSD of all parts as the next commit would leave them, in whole pages."""
        with self.log.lock:
            return sum(part.disk_bytes for part in self.log.all_parts())

    @property
    def live_bytes(self) -> int:
        """Bytes of the newest records of all keys, with their entries."""
        with self.log.lock:
            return self.log.live_by_slot_locked().bytes

    def bytes_above(self, share: float) -> int:
        """Return by how much the next commit would hold more than the live bytes over a share, and one part."""
        held = sum(part.disk_bytes for part in self.log.all_parts())
        return int(held - self.live_bytes / share - self.log.most_bytes())

    def reclaim(self) -> int:
        """Give space back without a commit: rewrite the part of the open transaction with most dead bytes.

        Nothing that was committed changes, so a crash finds the last commit as before.

        Returns
        -------
        int
            Bytes on SSD that are free now; 0 if no part has a twentieth that is dead.
        """
        return self.compactor.reclaim()

    def rewrite_sparsest(self) -> int:
        """Rewrite the committed part with the smallest live share; return the bytes that the next commit gives back."""
        return self.compactor.rewrite_sparsest()

    @shielded
    def close(self) -> None:
        """Forget the changes since the last commit, and let go of the reader's files. Store and reader stay open.

        Logs of one transaction forget it together, and are to be closed together.
        """
        if not self.log.is_closed:
            self.log.close()
            self.compactor.stop()
            self.log.release()


def committed_keys(store: Store, name: str) -> int:
    """Return how many keys the catalog says that a log holds, compared with its files; 0 if there is no log."""
    record = committed_record(store, name)
    return 0 if record is None else record.live
