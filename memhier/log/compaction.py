"""How a log gets space back: what is alive in a part is appended once more, and the part is dropped.

To move a record is to append it again as it is, so a part may be rewritten in steps, with changes, commits and crashes
between them: until it is dropped it only holds ever less that is alive.
"""

import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import compress
from typing import TYPE_CHECKING, Any

import numpy as np

from memhier.errors import CorruptionError
from memhier.log.core import Flags, Ints, LogCore
from memhier.log.parts import DELETED, ENTRY, LogRecord, Part, place
from memhier.log.replay import Block, read_blocks, read_entries
from memhier.log.tail import OpenPart
from memhier.store.segments import FullError
from memhier.store.store import Store

if TYPE_CHECKING:
    from memhier.io.reader import Reader

__all__ = ["CompactingLog", "rewriting_bytes"]

_MOVE_BYTES = 2**20
_ENTRIES_BLOCK = 2**12  # read at a time
_ENTRY_BYTES = ENTRY.itemsize + 24  # with where its record is
# So many parts of about one size (within a factor of 8) become one, so that there are fewer of each size. Large ones
# are much to move and few in any case: they may be more before files run out.
_MERGE_PARTS, _MERGE_LARGE_PARTS = 8, 64
_LARGE_PART_BYTES = 2**28
_MERGE_BYTES_MAX = 2**31  # what they become is not larger than a part may be
_LATER_PARTS = 64  # may wait to be rewritten: each has a file open


@dataclass(frozen=True, slots=True)
class _Step:
    """Records that were read from a part to be moved; or keys that it deletes, with nothing else."""

    keys: Ints
    offsets: Ints
    lengths: Ints
    records: Any = None


@dataclass(slots=True)
class _Rewriting:
    """A part that is being rewritten in the background.

    Attributes
    ----------
    waiting
        The step that was read last, until a transaction takes it.
    """

    part: Part
    steps: Iterator[_Step]
    waiting: _Step | None = None


class CompactingLog(LogCore):
    """A log that rewrites its parts: when asked to, and in the background where `compact_below` is not 0.

    The background never begins a transaction, so that a log without changes leaves the store to others: a thread works
    while one is open, and what it moved is published by the caller's commit. It reads without a lock, and holds
    `_writer` for one step of `_MOVE_BYTES` at a time. So that space stays bounded however little time it gets, every
    change adds to a debt of bytes to move, and a commit pays what the thread has not.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        reader: "Reader",
        capacity: int,
        record: LogRecord,
        per_page: int | None,
        direct: bool,
        compact_below: float,
        key_space: int | None = None,
        grows: bool = False,
        beside: LogCore | None = None,
    ) -> None:
        self._compact_below = compact_below
        self._stepping = threading.Lock()  # held through a step of the background, by whoever takes it
        self._rewriting: _Rewriting | None = None
        self._unreadable: set[int] = set()  # numbers of parts
        self._debt = 0.0
        self._later = False
        self._due: set[int] = set()  # numbers of parts that were left to be rewritten
        self._thread = ThreadPoolExecutor(1, "compact") if compact_below else None
        self._job: Future[None] | None = None
        self._pid = os.getpid()
        super().__init__(store, name, reader, capacity, record, per_page, direct, key_space, grows, beside)

    # In the background.

    def _append(self, keys: Ints, lengths: Ints, records: Any) -> None:
        with self._writer, self._owing(int(lengths.sum()) + lengths.size * ENTRY.itemsize):
            super()._append(keys, lengths, records)

    @contextmanager
    def _owing(self, added: int) -> Iterator[None]:
        """Turn what dies by a change, of so many bytes, into debt, and set the thread to work; with `_writer` held.

        A part of which a share s is alive frees 1 - s for every s that is moved: with this debt, what is moved frees as
        much as dies.
        """
        owes = self._thread is not None and not self._later
        before = self._live_bytes() if owes else 0
        yield
        if owes:
            died = before + added - self._live_bytes()
            self._debt += died * self._compact_below / (1 - self._compact_below)
        if self._thread is None or not (self._job is None or self._job.done()):
            return
        if self._rewriting or self._parts_to_rewrite():
            self._job = self._thread.submit(self._compact_in_background)

    def _live_bytes(self) -> int:
        records, sizes = self._index.live(len(self._table.handles))
        return int(sizes.sum() + records.sum() * ENTRY.itemsize)

    def _compact_in_background(self) -> None:
        try:
            while not self._closed and self._step():
                continue
        except FullError:
            return  # the next change tries again
        except BaseException as error:
            # Most have closed the log already; those that have not are nobody else's to see.
            with self._writer:
                if self._failure is None:
                    self._fail(error)

    def _pay(self) -> None:
        """Take the steps that are owed; before a commit."""
        # Without room nothing is moved, and the commit makes some perhaps.
        with suppress(FullError):
            while (self._debt > 0 or (self._due and self._is_behind())) and self._step():
                continue
        self._debt = 0.0

    def _is_behind(self) -> bool:
        """Whether what was left for later is too much: too many parts, or more than half of the log is dead."""
        with self._writer:
            if len(self._parts_to_rewrite()) > _LATER_PARTS:
                return True
            parts = [*self._parts.values(), *(opened.part for opened in self._fresh)]
            return sum(part.size for part in parts) > 2 * int(self._index.live(len(self._table.handles))[1].sum())

    def _step(self) -> bool:
        """Take the background a step further, unless there is no transaction; return whether there was one to take."""
        with self._stepping:
            rewriting = self._rewriting or self._next_rewriting()
            if rewriting is None:
                return False
            step = rewriting.waiting
            try:
                step = step or next(rewriting.steps, None)
            except (CorruptionError, OSError):
                # What cannot be read stays where it is, and keeps no one from committing.
                self._unreadable.add(rewriting.part.number)
                self._rewriting = None
                return True
            with self._writer:
                if self._tx is None or self._failure is not None or self._closed:
                    rewriting.waiting = step
                    return False
                rewriting.waiting = None
                if not self._has(rewriting.part):
                    self._rewriting = None
                elif step is None:
                    self._drop(rewriting.part)
                    self._rewriting = None
                else:
                    try:
                        self._debt -= self._take(rewriting.part, step)
                    except FullError:
                        rewriting.waiting = step
                        raise
            return True

    def _next_rewriting(self) -> _Rewriting | None:
        with self._writer:
            if self._tx is not None:
                for part in self._parts_to_rewrite():
                    try:
                        self._rewriting = _Rewriting(part, self._steps(part))
                        break
                    except (CorruptionError, OSError):
                        self._unreadable.add(part.number)  # not even opened
        return self._rewriting

    def _background_bytes(self) -> int:
        """DRAM held by a part that is being rewritten: entries and where their records are, and those of a step."""
        rewriting = self._rewriting
        if rewriting is None:
            return 0
        step = rewriting.waiting  # which a commit may take at any time
        waiting = 0 if step is None else int(step.lengths.sum())
        return min(rewriting.part.entries, _ENTRIES_BLOCK) * _ENTRY_BYTES + max(_MOVE_BYTES, waiting)

    def _stop(self) -> None:
        """End the background, after the step that is under way. The log is closed already."""
        if self._thread is None or self._pid != os.getpid():
            return  # a forked child has neither the thread nor, perhaps, its lock
        self._thread.shutdown(wait=True)
        if self._rewriting is not None:
            self._rewriting.steps.close()  # type: ignore[attr-defined]

    # At once, with `_writer` held.

    def _merge(self) -> None:
        """Rewrite small parts that have become many; each byte is rewritten once per size, a factor of 8 apart."""
        for part in self._crowded_parts():
            try:
                self._rewrite(part)
            except (CorruptionError, OSError):
                # What cannot be read stays where it is, and keeps no one from committing.
                if self._failure is not None:
                    raise

    def _crowded_parts(self) -> list[Part]:
        """Return the parts of sizes of which there are many, the oldest first."""
        sizes: dict[int, list[Part]] = {}
        # Where parts are bounded, those near that do not become fewer by a merge.
        most = _MERGE_BYTES_MAX if self.part_bytes is None else min(_MERGE_BYTES_MAX, self.part_bytes // 8)
        for part in self._parts.values():
            if part.bytes <= most:
                sizes.setdefault(part.bytes.bit_length() // 3, []).append(part)
        crowded: list[Part] = []
        for parts in sizes.values():
            large = min(part.bytes for part in parts) >= _LARGE_PART_BYTES
            if len(parts) >= (_MERGE_LARGE_PARTS if large else _MERGE_PARTS):
                crowded += parts
        return sorted(crowded, key=lambda part: part.number)

    def _rewrite(self, part: Part) -> None:
        """Append what is alive in a committed part once more, and drop the part."""
        for step in self._steps(part):
            self._take(part, step)
        self._drop(part)

    # What both do.

    def _parts_to_rewrite(self) -> list[Part]:
        """Return what the background has to do, the oldest first."""
        if self._later:
            due = self._due - self._unreadable
            return [part for part in self._parts.values() if part.number in due]
        return self._sparse_parts(self._compact_below)

    def compact_later(self) -> None:
        """Let commits rewrite nothing any more, but say what is to be rewritten beside the changes that follow.

        What is found at open is left so as well. A commit waits for that only while more than half of the log is dead
        or more than `_LATER_PARTS` parts are left. For those who wait for commits, or for whom they hold something up.
        """
        self._later = True
        self._leave_for_later()

    def _leave_for_later(self) -> None:
        if self._later:
            parts = [*self._sparse_parts(self._compact_below), *self._crowded_parts()]
            self._due = {part.number for part in parts}

    def _sparse_parts(self, live_below: float) -> list[Part]:
        """Return the parts of which less than a share is alive, the oldest first."""
        records, sizes = self._index.live(len(self._table.handles))
        sparse: list[Part] = []
        for older, part in enumerate(self._parts.values()):
            # A deletion is needed as long as an older part may hold what it deletes.
            needed = part.deletions if len(sparse) < older else 0
            live = sizes[part.slot] + (records[part.slot] + needed) * ENTRY.itemsize
            readable = part.number not in self._unreadable
            if readable and live < live_below * (part.size + part.entries * ENTRY.itemsize):
                sparse.append(part)
        return sparse

    def _steps(self, part: Part) -> Iterator[_Step]:
        """Return what a part holds that may have to be kept, read a step at a time; no lock need be held."""
        opened = self._opened(part)
        if opened is not None:
            blocks = read_blocks(
                self._store.path, opened.attach_entries(), self._reader, part, self._per_page, _ENTRIES_BLOCK
            )
            return self._read_steps(part, blocks, False)
        is_oldest = part.slot == next(iter(self._parts))
        return self._read_steps(
            part,
            read_entries(self._store, self._name, self._reader, part, self._per_page, _ENTRIES_BLOCK),
            is_oldest,
        )

    def _read_steps(self, part: Part, blocks: Iterator[Block], is_oldest: bool) -> Iterator[_Step]:
        for entries, offsets, _ in blocks:
            has_record = entries["length"] != DELETED
            keys = entries["key"].astype(np.int64)
            kept, lengths = keys[has_record], entries["length"][has_record].astype(np.int64)
            with self._lock:
                live = self._are_alive(part, kept, offsets, lengths)
            kept, offsets, lengths = kept[live], offsets[live], lengths[live]
            ends = np.cumsum(lengths)
            start = 0
            while start < len(kept):
                before = int(ends[start - 1]) if start else 0
                some = slice(start, max(start + 1, int(np.searchsorted(ends, before + _MOVE_BYTES, "right"))))
                with self._reading():
                    with self._lock:
                        if not self._has(part):
                            return
                        handles = np.full(len(kept[some]), self._table.handles[part.slot])
                    records = self._fetch(handles, offsets[some], lengths[some])
                yield _Step(kept[some], offsets[some], lengths[some], records)
                start = some.stop
            if not is_oldest and not has_record.all():
                none = np.empty(0, np.int64)
                yield _Step(keys[~has_record], none, none)

    def _take(self, part: Part, step: _Step) -> int:
        """Append what is still alive of a step, or deletions that still count; return the bytes."""
        if step.records is None:
            gone = step.keys[self._index.places(step.keys) < 0]
            self._enter_deletions(gone)
            return len(gone) * ENTRY.itemsize
        live = self._are_alive(part, step.keys, step.offsets, step.lengths)
        records = step.records
        if not live.all():
            records = records[live] if isinstance(records, np.ndarray) else list(compress(records, live.tolist()))
        keys, lengths = step.keys[live], step.lengths[live]
        if len(keys):
            self._write(keys, self._index.reserve(keys), lengths, self._block_of(records))
        return int(lengths.sum()) + len(keys) * ENTRY.itemsize

    def _are_alive(self, part: Part, keys: Ints, offsets: Ints, lengths: Ints) -> Flags:
        # The length as well: what follows an empty record begins where it does.
        alive: Flags = self._index.places(keys) == place(part.slot, offsets)
        alive &= self._index.lengths(keys) == lengths
        return alive

    def _has(self, part: Part) -> bool:
        """Whether a part is still there: its slot may be another's by now."""
        return self._parts.get(part.slot) is part or self._opened(part) is not None

    def _opened(self, part: Part) -> OpenPart | None:
        """Return a part as the open transaction writes it; None for any other."""
        return next((opened for opened in self._fresh if opened.part is part), None)

    def _drop(self, part: Part) -> None:
        with self._reading(), self._failing() as tx, self._lock:
            opened = self._opened(part)
            for segment in part.segments(self._name):
                if opened is None:
                    tx.drop(segment)
                else:
                    tx.discard(segment)
            if opened is None:
                del self._parts[part.slot]
            else:
                self._fresh.remove(opened)
            self._retired.append(self._table.give_back(part.slot))

    # Within a bound, for those who keep the space of several logs: see `part_bytes`.

    @property
    def fresh_bytes(self) -> int:
        """Bytes on SSD of what the open transaction has written, in whole pages."""
        with self._lock:
            return sum(opened.part.disk_bytes for opened in self._fresh)

    @property
    def live_bytes(self) -> int:
        """Bytes of the newest records of all keys, with their entries."""
        with self._lock:
            return self._live_bytes()

    def reclaim(self) -> int:
        """Give space back without a commit: rewrite the part that the open transaction wrote and that has most dead.

        Nothing that was committed changes, so a crash finds the last commit as before.

        Returns
        -------
        int
            Bytes on SSD that are free now; 0 where no part has a twentieth that is dead.
        """
        with self._writer:
            part, dead = self._most_dead()
            if part is None:
                return 0
            self._rewrite(part)
            return dead

    def _most_dead(self) -> tuple[Part | None, int]:
        """Return the part of the open transaction, but for the last, with most dead bytes, and how many."""
        records, sizes = self._index.live(len(self._table.handles))
        found: tuple[Part | None, int] = (None, 0)
        for opened in self._fresh[:-1]:
            part = opened.part
            live = int(sizes[part.slot]) + (int(records[part.slot]) + part.deletions) * ENTRY.itemsize
            # Without padding, which another part would have as well.
            whole = part.size + part.entries * ENTRY.itemsize
            if whole - live > max(found[1], whole // 20):
                found = part, whole - live
        return found

    def bytes_above(self, share: float) -> int:
        """Return by how much the next commit would hold more than what is alive over a share, and one part."""
        parts = [*self._parts.values(), *(opened.part for opened in self._fresh)]
        return int(sum(part.disk_bytes for part in parts) - self.live_bytes / share - self._most_bytes())

    def rewrite_sparsest(self) -> int:
        """Rewrite the committed part of which least is alive; return the bytes that the next commit gives back."""
        with self._writer:
            self._begin()
            records, sizes = self._index.live(len(self._table.handles))
            best, least = None, 0.95
            for part in self._parts.values():
                live = int(sizes[part.slot]) + int(records[part.slot]) * ENTRY.itemsize
                if part.number not in self._unreadable and live / part.disk_bytes < least:
                    best, least = part, live / part.disk_bytes
            if best is None:
                return 0
            try:
                self._rewrite(best)
            except (CorruptionError, OSError):
                # What cannot be read stays where it is, and keeps no one from committing.
                if self._failure is not None:
                    raise
                self._unreadable.add(best.number)
            return best.disk_bytes - int(least * best.disk_bytes)


def rewriting_bytes(record_bytes: int) -> int:
    """Return the DRAM that a log of records of one length takes at most for rewriting in the background."""
    return _ENTRIES_BLOCK * _ENTRY_BYTES + max(_MOVE_BYTES, record_bytes)
