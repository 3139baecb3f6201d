"""A thread of low priority that searches some queries again, exactly, and tunes the index where they found too little.

It serves every kind of index; `audited` says how it searches and tunes one.

A query waits in a queue with the distances that its search found, and with a weak reference to its snapshot. If the
index has changed by its turn, it is dropped: a vector added or removed since would count as missed. The exact search
takes a turn as every search does, once one is free or after a while; then the thread rests as long as it worked.

The audited queries themselves are kept, not their neighbours: to tune takes 100 neighbours of each, which cost more
DRAM than most queries and are out of date after a change. So tuning passes over all vectors, as `ZoomIndex.tune` does.
"""

import os
import threading
import time
import warnings
import weakref
from _thread import allocate_lock
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.threads import one_thread
from memhier.ann.zoom.arguments import SearchOptions
from memhier.ann.zoom.audit.audited import AuditedIndex
from memhier.ann.zoom.audit.record import AuditRecord
from memhier.ann.zoom.calibration.calibration import TARGET
from memhier.ann.zoom.pauses import pausing
from memhier.budget import format_bytes
from memhier.callers import user_stacklevel
from memhier.ending import before_exit
from memhier.errors import BudgetError

__all__ = ["Auditor", "audit_bytes"]

_KEPT, _LEAST = 1000, 128  # queries to tune for: the most, and the fewest
_LOOK = 50  # audited queries from one look at the recall to the next
_TIMES = 4  # the queries of a tuning, from which on it is worth doing again
_DRAWN = 4096  # queries drawn for at a time
_ARRAY_BYTES = 128  # of a query that is kept, beside its numbers
_ENTRY_BYTES = 512  # of a query that waits, beside its numbers
_PATIENCE = 1.0  # seconds to wait for a free turn
_POLL = 0.005
_GOLDEN, _MIX, _MIX_AGAIN = (np.uint64(each) for each in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))

Floats: TypeAlias = npt.NDArray[np.float32]


class _StoppedError(Exception):
    """The audit is no longer wanted."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """A query that waits: its snapshot, numbers and options, the distances found ``[k]``, and its bytes."""

    state: "weakref.ref[Any]"
    query: Floats
    k: int
    declared: float
    where: str | None
    found: Floats
    size: int


def audit_bytes(short: int, long: int, spare: int) -> int:
    """Return the DRAM of an audit: half of the `spare` bytes at most.

    Parameters
    ----------
    short, long
        Numbers of a query: as many as there has to be room for, and as there is room for where DRAM allows it.
    spare
        Bytes that the index leaves.

    Raises
    ------
    BudgetError
        When that is too little.
    """
    least, most = (
        count * (4 * numbers + _ARRAY_BYTES) * 4 // 3 + 16 * _ENTRY_BYTES
        for count, numbers in ((_LEAST, short), (_KEPT, long))
    )
    if spare // 2 < least:
        raise BudgetError(
            f"audit: its queries take at least {format_bytes(least)} of DRAM, and may take half of the "
            f"{format_bytes(max(0, spare))} that the index leaves of its dram=; build with more dram"
        )
    return min(most, spare // 2)


class Auditor:
    """Checks a share of the searches of an open index.

    Parameters
    ----------
    share, seed
        The share, and the seed by which queries are drawn.
    index
        Its searches.
    room
        Bytes of DRAM, by :func:`audit_bytes`.
    counts
        The record to go on with.
    """

    def __init__(
        self, share: float, seed: int, index: AuditedIndex[Any, Any], *, room: int, counts: AuditRecord
    ) -> None:
        self._share, self._seed, self._index, self.counts = share, seed, index, counts
        self._kept, self._kept_bytes, self._kept_most = deque[Floats](), 0, 3 * room // 4
        self._full = False  # whether the last queries have taken the place of others
        self._seen = 0  # unfiltered queries audited since open; the last of them are kept
        self._learned = 0  # queries of the last tuning
        self._limit, self._bytes = room - self._kept_most, 0
        self._waiting = 0  # queries, with the one under way and the tuning that may follow it
        self._failure = ""
        self._warned = False
        self._drawn, self._ahead = counts.searched, deque[int]()  # queries drawn for, and those of them to be chosen
        self._pid, self._lock = os.getpid(), allocate_lock()
        self._queue: SimpleQueue[_Entry | None] = SimpleQueue()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memhier-audit", daemon=True)
        self._taken_back = before_exit(self.end)
        index.tell(self.take)
        self._thread.start()

    def take(self, state: Any, queries: Sequence[Floats] | Floats, options: SearchOptions, distances: Floats) -> None:
        """Draw queries of a search that has ended, and let those chosen wait with their distances ``[q, k]``."""
        if not _is_audited(options) or self._pid != os.getpid():  # a forked child does not have the thread
            return
        if chosen := self._draw(len(queries)):
            self._put(state, queries, options, distances, chosen)
        if self._failure and not self._warned:
            self._warned = True
            warnings.warn(
                f"the audit of this index failed, and searches go on without that check: {self._failure}; "
                f"stats()['audit'] counts further failures",
                stacklevel=user_stacklevel(),
            )

    def _draw(self, count: int) -> list[int]:
        """Return the rows of the next `count` queries that are chosen."""
        with self._lock:
            first = self.counts.searched
            last = self.counts.searched = first + count
            while self._drawn < last:  # for many at a time, as to draw for one takes as long
                chosen = np.flatnonzero(_numbers(self._seed, self._drawn, _DRAWN) < self._share) + self._drawn
                self._ahead.extend(chosen.tolist())
                self._drawn += _DRAWN
            rows = []
            while self._ahead and self._ahead[0] < last:
                rows.append(self._ahead.popleft() - first)
            self.counts.chosen += len(rows)
            return rows

    def _put(
        self,
        state: Any,
        queries: Sequence[Floats] | Floats,
        options: SearchOptions,
        distances: Floats,
        rows: Sequence[int],
    ) -> None:
        """Let rows of a search wait, as far as there is room."""
        other = 4 * options.k + _ENTRY_BYTES + 4 * len(options.where or "")
        declared = TARGET if options.recall is None else float(options.recall)
        for number in rows:
            size = queries[number].nbytes + other
            with self._lock:
                fits = self._bytes + size <= self._limit and not self._stopped.is_set()
                self._bytes += size * fits
                self._waiting += fits
                self.counts.dropped += not fits
            if fits:
                found, query = distances[number].copy(), queries[number].copy()
                where = options.where
                self._queue.put(_Entry(weakref.ref(state), query, int(options.k), declared, where, found, size))

    def end(self) -> bool:
        """Stop, and wait for the step under way; return whether the thread is one of this process."""
        here = self._pid == os.getpid()
        if here:
            self.stop()
            if self._thread is not threading.current_thread():
                self._thread.join()
        return here

    def stop(self) -> None:
        """Stop without waiting."""
        self._stopped.set()
        self._queue.put(None)

    def stats(self) -> dict[str, Any]:
        """Return plain values; see `ZoomIndex.stats`."""
        return {"share": self._share, "waiting": self._waiting, "failure": self._failure, **self.counts.stats()}

    def _run(self) -> None:
        if hasattr(os, "setpriority"):
            with suppress(OSError):  # of this thread alone, on Linux
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        try:
            with one_thread(), pausing(self._pause):
                while (entry := self._queue.get()) is not None and not self._stopped.is_set():
                    started = time.monotonic()
                    self._step(entry)
                    with self._lock:
                        self._bytes -= entry.size
                        self._waiting -= 1
                    self._stopped.wait(time.monotonic() - started)
        except _StoppedError:
            pass
        finally:
            self._index.tell(None)
            self._taken_back()

    def _pause(self) -> None:
        if self._stopped.is_set():
            raise _StoppedError

    def _step(self, entry: _Entry) -> None:
        try:
            self._check(entry)
        except Exception as error:
            if isinstance(error, _StoppedError) or self._stopped.is_set():
                raise _StoppedError from None
            self._failure = repr(error)
            with self._lock:
                self.counts.failed += 1
            return
        try:
            if entry.where is None and self._seen % _LOOK == 0 and self._is_due():
                self._tune()
        except _StoppedError:
            raise
        except Exception as error:
            self._failure = f"tuning: {error!r}"

    def _check(self, entry: _Entry) -> None:
        """Compare the distances found with those of the exact search."""
        waited = time.monotonic() + _PATIENCE
        while self._index.busy and time.monotonic() < waited and not self._stopped.is_set():
            self._stopped.wait(_POLL)
        self._pause()
        state = entry.state()
        if state is None or state is not self._index.state:
            with self._lock:
                self.counts.dropped += 1
            return
        exact = self._index.nearest_exactly(state, entry.query, entry.k, entry.where)
        exact = exact[np.isfinite(exact)]
        recall = float((entry.found <= exact[-1]).sum() / len(exact)) if len(exact) else 1.0
        self.counts.follow(self._index.efforts(state))
        self.counts.note(entry.declared, entry.k, min(recall, 1.0), filtered=entry.where is not None)
        if entry.where is None:
            self._keep(entry.query)

    def _is_due(self) -> bool:
        have, most = len(self._kept), len(self._kept) if self._full else _KEPT
        if have < _LEAST:
            return False
        more = 0 < self._learned < most and have >= min(most, _TIMES * self._learned)
        return more or self.counts.short or (not self._learned and self.counts.ample)

    def _tune(self) -> None:
        """Calibrate for the queries kept, and give the index that calibration unless it has another one by then."""
        have = len(self._kept)

        def note(efforts: Any) -> None:
            self._learned = have
            self.counts.retuned += 1
            self.counts.follow(efforts)

        self._index.tune(self._index.state, list(self._kept), note, self._stopped.is_set)

    def _keep(self, query: Floats) -> None:
        """Keep a query to tune for, in the place of the oldest ones where there is no room."""
        self._kept.append(query)
        self._kept_bytes += query.nbytes + _ARRAY_BYTES
        while self._kept_bytes > self._kept_most or len(self._kept) > _KEPT:
            self._kept_bytes -= self._kept.popleft().nbytes + _ARRAY_BYTES
            self._full = True
        self._seen += 1


def _is_audited(options: SearchOptions) -> bool:
    """Whether a search has a recall to keep, by itself, and less than all."""
    limits = options.candidates, options.nprobe, options.max_reads, options.deadline_ms, options.radius
    return options.recall != 1 and all(each is None for each in (*limits, options.allow, options.deny))


def _numbers(seed: int, first: int, count: int) -> npt.NDArray[np.float64]:
    """Return numbers in [0, 1) for queries by their own number: SplitMix64 (Steele et al., OOPSLA 2014)."""
    mixed = (np.arange(first, first + count, dtype=np.uint64) + np.uint64(1)) * _GOLDEN
    mixed ^= np.uint64(seed * int(_MIX) % 2**64)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _MIX
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _MIX_AGAIN
    mixed ^= mixed >> np.uint64(31)
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53
