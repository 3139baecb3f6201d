"""Compaction: the live records of a part are appended once more, and the part is dropped.

A record is moved by appending it again unchanged, so a part may be rewritten in steps, with changes, commits and
crashes between them: its live records only become fewer until it is dropped.
"""

import os
import threading
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import compress
from typing import Any

import numpy as np

from memhier.errors import CorruptionError
from memhier.log.index import Live
from memhier.log.log import Ints, Log
from memhier.log.parts import DELETED, ENTRY, Part
from memhier.log.replay import Block
from memhier.store.segments import FullError

__all__ = ["Compactor", "rewriting_bytes"]

MOVE_BYTES = 2**20
_ENTRIES_BLOCK = 2**12  # read at a time
_ENTRY_BYTES = ENTRY.itemsize + 24  # with the place of its record
# As many parts of about one size (within a factor of 8) become one, so that there are fewer of each size. Large ones
# are much to move and few in any case: they may be more before files run out.
MERGE_PARTS, MERGE_LARGE_PARTS = 8, 64
_LARGE_PART_BYTES = 2**28
_MERGE_BYTES_MAX = 2**31  # merged parts stay below the limit of a part
_LATER_PARTS = 64  # may wait to be rewritten: each has a file open


@dataclass(frozen=True, slots=True)
class Move:
    """Records that were read from a part to be moved; or keys that it deletes, with nothing else."""

    keys: Ints
    offsets: Ints
    lengths: Ints
    records: Any = None


@dataclass(slots=True)
class _Rewriting:
    """A part that is being rewritten in the background."""

    part: Part
    steps: Generator[Move, None, None]
    waiting: Move | None = None  # read last, until a transaction takes it


class Compactor:
    """Rewrites the parts of a log: when asked to, and in the background if `compact_below` is not 0.

    The background never begins a transaction, so that a log without changes leaves the store to others: a thread works
    while one is open, and the caller's commit publishes the moved records. It reads without a lock, and holds the
    group's lock for one step of `MOVE_BYTES` at a time. So that space stays bounded even if the thread gets no time,
    every change adds to a debt of bytes to move, and a commit pays the rest of it.

    Attributes
    ----------
    debt
        Bytes to move before the next commit.
    due
        Numbers of the parts that were left for later.
    job
        The thread's last work.
    """

    def __init__(self, log: Log, compact_below: float) -> None:
        self._log = log
        self._group = log.group
        self._below = compact_below
        self._stepping = threading.Lock()  # held through a step of the background, on any thread
        self._rewriting: _Rewriting | None = None
        self._unreadable: set[int] = set()  # numbers of parts
        self.debt: float = 0.0
        self._later = False
        self.due: set[int] = set()
        self._thread = ThreadPoolExecutor(1, "compact") if compact_below else None
        self.job: Future[None] | None = None
        self._pid = os.getpid()

    @property
    def _move_bytes(self) -> int:
        return min(MOVE_BYTES, 2 * self._log.block_bytes)

    # In the background.

    @property
    def memory_bytes(self) -> int:
        """DRAM held for a part that is being rewritten: entries, places of their records, and the records of a step."""
        rewriting = self._rewriting
        if rewriting is None:
            return 0
        step = rewriting.waiting  # which a commit may take at any time
        waiting = 0 if step is None else int(step.lengths.sum())
        return min(rewriting.part.entries, _ENTRIES_BLOCK) * _ENTRY_BYTES + max(self._move_bytes, waiting)

    @contextmanager
    def owing(self, added: int) -> Iterator[None]:
        """Turn the records that a change of `added` bytes kills into debt, and set the thread to work.

        A part with a live share s frees 1 - s bytes for every s that are moved: with this debt, moves free as much as
        dies.
        """
        with self._group.lock:
            owes = self._thread is not None and not self._later
            before = self._log.live_by_slot_locked().bytes if owes else 0
            yield
            live = self._log.live_by_slot_locked() if owes else None
            if live is not None:
                self.debt += (before + added - live.bytes) * self._below / (1 - self._below)
            if self._thread is None or not (self.job is None or self.job.done()):
                return
            if self._rewriting or self._parts_to_rewrite_locked(live):
                self.job = self._thread.submit(self.run)

    def run(self) -> None:
        """Take steps while there are any; on the thread."""
        try:
            while not self._log.is_closed and self._step():
                continue
        except FullError:
            return  # the next change tries again
        except BaseException as error:
            # Most have closed the log already; nothing else reports the others.
            with self._group.lock:
                if self._group.failure is None:
                    self._group.fail(error)

    def stop(self) -> None:
        """End the background, after the step that is under way. The log is closed already."""
        if self._thread is None or self._pid != os.getpid():
            return  # a forked child has neither the thread nor, perhaps, its lock
        self._thread.shutdown(wait=True)
        if self._rewriting is not None:
            self._rewriting.steps.close()

    def pay(self) -> None:
        """Take the steps that are owed; before a commit."""
        # If there is no room nothing is moved, and the commit may make some.
        with suppress(FullError):
            while (self.debt > 0 or (self.due and self._is_behind())) and self._step():
                continue
        self.debt = 0.0

    def _is_behind(self) -> bool:
        """Whether too much was left for later: too many parts, or more than half of the log is dead."""
        with self._group.lock:
            if len(self._parts_to_rewrite_locked()) > _LATER_PARTS:
                return True
            size = sum(part.size for part in self._log.all_parts())
            return size > 2 * int(self._log.live_by_slot_locked().sizes.sum())

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
                # A part that cannot be read stays, and keeps nothing from committing.
                self._unreadable.add(rewriting.part.number)
                self._rewriting = None
                return True
            with self._group.lock:
                if not self._group.is_writing or self._log.is_closed:
                    rewriting.waiting = step
                    return False
                rewriting.waiting = None
                if not self._log.has(rewriting.part):
                    self._rewriting = None
                elif step is None:
                    self._log.drop_locked(rewriting.part)
                    self._rewriting = None
                else:
                    try:
                        self.debt -= self.take_locked(rewriting.part, step)
                    except FullError:
                        rewriting.waiting = step
                        raise
            return True

    def _next_rewriting(self) -> _Rewriting | None:
        with self._group.lock:
            if self._group.is_writing:
                for part in self._parts_to_rewrite_locked():
                    try:
                        self._rewriting = _Rewriting(part, self.steps(part))
                        break
                    except (CorruptionError, OSError):
                        self._unreadable.add(part.number)  # not even opened
        return self._rewriting

    def _parts_to_rewrite_locked(self, live: Live | None = None) -> list[Part]:
        """Return the parts that the background has to rewrite, the oldest first; `live` is counted if it is None."""
        if self._later:
            due = self.due - self._unreadable
            return [part for part in self._log.parts.values() if part.number in due]
        return self._sparse_parts_locked(self._below, live)

    # Left for later.

    def compact_later(self) -> None:
        """Let commits rewrite nothing any more, but say which parts to rewrite beside the changes that follow."""
        with self._group.lock:
            self._later = True
            self.plan_locked()

    def plan_locked(self) -> None:
        """Note the parts that are left for later."""
        if self._later:
            parts = [*self._sparse_parts_locked(self._below), *self._crowded_parts_locked()]
            self.due = {part.number for part in parts}

    # At once.

    def merge_locked(self) -> None:
        """Rewrite small parts that have become many; each byte is rewritten once per size, a factor of 8 apart."""
        if not self._later:
            for part in self._crowded_parts_locked():
                self._try_to_rewrite_locked(part)

    def compact(self, live_below: float) -> int:
        """Rewrite the committed parts with a live share below `live_below`; return how many will go."""
        with self._group.lock:
            self._log.begin()
            sparse = self._sparse_parts_locked(live_below)
            for part in sparse:
                self._rewrite_locked(part)
        return len(sparse)

    def reclaim(self) -> int:
        """Rewrite the part of the open transaction with most dead bytes; return the bytes on SSD that are free now."""
        with self._group.lock:
            part, dead = self._most_dead_locked()
            if part is None:
                return 0
            self._rewrite_locked(part)
            return dead

    def rewrite_sparsest(self) -> int:
        """Rewrite the committed part with the smallest live share; return the bytes that the next commit gives back."""
        with self._group.lock:
            self._log.begin()
            records, sizes = self._log.live_by_slot_locked()
            best, least = None, 0.95
            for part in self._log.parts.values():
                live = int(sizes[part.slot]) + int(records[part.slot]) * ENTRY.itemsize
                if part.number not in self._unreadable and live / part.disk_bytes < least:
                    best, least = part, live / part.disk_bytes
            if best is None:
                return 0
            if not self._try_to_rewrite_locked(best):
                self._unreadable.add(best.number)
            return best.disk_bytes - int(least * best.disk_bytes)

    def _try_to_rewrite_locked(self, part: Part) -> bool:
        """Rewrite a part; one that cannot be read stays, and keeps nothing from committing."""
        try:
            self._rewrite_locked(part)
        except (CorruptionError, OSError):
            if self._group.failure is not None:
                raise
            return False
        return True

    def _rewrite_locked(self, part: Part) -> None:
        """Append the live records of a part once more, and drop the part."""
        for step in self.steps(part):
            self.take_locked(part, step)
        self._log.drop_locked(part)

    def _sparse_parts_locked(self, live_below: float, live: Live | None = None) -> list[Part]:
        """Return the committed parts with a live share below `live_below`, the oldest first."""
        records, sizes = live or self._log.live_by_slot_locked()
        sparse: list[Part] = []
        for older, part in enumerate(self._log.parts.values()):
            # A deletion is needed as long as an older part may hold its record.
            needed = part.deletions if len(sparse) < older else 0
            kept = sizes[part.slot] + (records[part.slot] + needed) * ENTRY.itemsize
            readable = part.number not in self._unreadable
            if readable and kept < live_below * (part.size + part.entries * ENTRY.itemsize):
                sparse.append(part)
        return sparse

    def _crowded_parts_locked(self) -> list[Part]:
        """Return the parts of each size that many parts have, the oldest first."""
        sizes: dict[int, list[Part]] = {}
        # If parts are bounded, those near the bound do not become fewer by a merge.
        bound = self._log.part_bytes
        most = _MERGE_BYTES_MAX if bound is None else min(_MERGE_BYTES_MAX, bound // 8)
        for part in self._log.parts.values():
            size = part.bytes
            if size <= most:
                sizes.setdefault(size.bit_length() // 3, []).append(part)
        crowded: list[Part] = []
        for parts in sizes.values():
            large = len(parts) >= MERGE_PARTS and min(part.bytes for part in parts) >= _LARGE_PART_BYTES
            if len(parts) >= (MERGE_LARGE_PARTS if large else MERGE_PARTS):
                crowded += parts
        return sorted(crowded, key=lambda part: part.number)

    def _most_dead_locked(self) -> tuple[Part | None, int]:
        """Return the part of the open transaction, but for the last, with most dead bytes, and how many."""
        records, sizes = self._log.live_by_slot_locked()
        found: tuple[Part | None, int] = (None, 0)
        for opened in self._log.fresh[:-1]:
            part = opened.part
            live = int(sizes[part.slot]) + (int(records[part.slot]) + part.deletions) * ENTRY.itemsize
            # Without padding, which another part would have as well.
            whole = part.size + part.entries * ENTRY.itemsize
            if whole - live > max(found[1], whole // 20):
                found = part, whole - live
        return found

    # The steps of both ways.

    def steps(self, part: Part) -> Generator[Move, None, None]:
        """Return the records and deletions of a part that may have to be kept, a step at a time; needs no lock."""
        log = self._log
        opened = log.opened(part)
        if opened is not None:
            return self._read_steps(part, log.entries.behind(opened.attach_entries(), part, _ENTRIES_BLOCK), False)
        is_oldest = part.slot == next(iter(log.parts))
        return self._read_steps(part, log.entries.committed(part, _ENTRIES_BLOCK), is_oldest)

    def _read_steps(self, part: Part, blocks: Iterator[Block], is_oldest: bool) -> Generator[Move, None, None]:
        for entries, offsets, _ in blocks:
            has_record = entries["length"] != DELETED
            keys = entries["key"].astype(np.int64)
            kept, lengths = keys[has_record], entries["length"][has_record].astype(np.int64)
            with self._log.lock:
                live = self._log.are_alive_locked(part, kept, offsets, lengths)
            kept, offsets, lengths = kept[live], offsets[live], lengths[live]
            ends = np.cumsum(lengths)
            start = 0
            while start < len(kept):
                before = int(ends[start - 1]) if start else 0
                some = slice(start, max(start + 1, int(np.searchsorted(ends, before + self._move_bytes, "right"))))
                records = self._log.fetch_part(part, offsets[some], lengths[some])
                if records is None:
                    return
                yield Move(kept[some], offsets[some], lengths[some], records)
                start = some.stop
            if not is_oldest and not has_record.all():
                none = np.empty(0, np.int64)
                yield Move(keys[~has_record], none, none)

    def take_locked(self, part: Part, step: Move) -> int:
        """Append the live records of a step, or the deletions that still count; return the bytes."""
        log = self._log
        if step.records is None:
            gone = step.keys[~log.contains(step.keys)]
            log.enter_deletions_locked(gone)
            return len(gone) * ENTRY.itemsize
        live = log.are_alive_locked(part, step.keys, step.offsets, step.lengths)
        records = step.records
        if not live.all():
            records = records[live] if isinstance(records, np.ndarray) else list(compress(records, live.tolist()))
        keys, lengths = step.keys[live], step.lengths[live]
        if len(keys):
            log.write_locked(keys, lengths, records)
        return int(lengths.sum()) + len(keys) * ENTRY.itemsize


def rewriting_bytes(record_bytes: int) -> int:
    """Return the DRAM that a log of records of one length takes at most for rewriting in the background."""
    return _ENTRIES_BLOCK * _ENTRY_BYTES + max(MOVE_BYTES, record_bytes)
