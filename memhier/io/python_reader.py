"""The page reader's engine in Python: ``os.preadv`` from a few threads.

It reads the same pages, with the same merges, checks and faults as the compiled core.
"""

import itertools
import mmap
import os
import queue
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from memhier.files import read_at
from memhier.io.buffer_pool import BufferPool
from memhier.io.faults import Fault
from memhier.io.kernels import crc32c_pages
from memhier.io.page_file import PAGE_BYTES, PageFile
from memhier.io.page_source import PageSource
from memhier.io.read_arguments import Tallies
from memhier.shield import check_interrupt, shielded

__all__ = ["THREADS_MAX", "PythonPageReader"]

WINDOW_REQUESTS = 16384  # requests planned at a time, so that a plan does not grow with the batch
THREADS_MAX = 16  # more threads only wait for the interpreter lock
_ARENA_PAGES = 256  # of all threads: the longest read


@dataclass(frozen=True)
class _Source:
    file: PageFile
    length: int
    checksums: NDArray[np.uint32] | None
    pages: PageSource | None = None
    held_as: int = -1  # its number in the pool of pages held in DRAM; -1: they are not


@dataclass(frozen=True)
class _Run:
    """Neighbouring pages of one file, and which of the sorted requests touch them."""

    handle: int
    page: int
    pages: int
    first: int
    stop: int


@dataclass
class _Batch:
    """A window of requests sorted by file and offset, the place of their bytes, and the first fault or error."""

    sources: dict[int, _Source]
    order: NDArray[np.int64]
    files: NDArray[np.int32]
    offsets: NDArray[np.int64]
    length: int
    out: NDArray[np.uint8]
    latency: NDArray[np.float32] | None
    tally: Tallies | None
    pool: BufferPool | None = None
    fault: Fault | None = None
    error: BaseException | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def stopped(self) -> bool:
        return self.fault is not None or self.error is not None


class PythonPageReader:
    """The core behind :class:`memhier.io.reader.Reader` when its engine is ``"python"``."""

    def __init__(self, *, engine: str, depth: int, contexts: int, run_pages: int) -> None:
        del contexts  # of the compiled core: here all calls share the threads
        self.engine, self._run_pages = engine, run_pages
        self._threads = min(depth, THREADS_MAX, _ARENA_PAGES // run_pages)
        self._sources: dict[int, _Source] = {}
        self._counts = dict.fromkeys(("calls", "requests", "reads", "pages", "bytes"), 0)
        self._pool: BufferPool | None = None  # None: no page is held
        self._pages_held = self._hits_before = self._files_held = 0
        self._closed = False
        self._start()

    def _start(self) -> None:
        """Make the threads and buffers of this process; a fork leaves the parent's threads behind."""
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._workers = ThreadPoolExecutor(self._threads, "memhier-read")
        self._lanes: queue.SimpleQueue[NDArray[np.uint8]] = queue.SimpleQueue()
        self._arena = np.frombuffer(mmap.mmap(-1, self._threads * self._run_pages * PAGE_BYTES), np.uint8)
        for lane in self._arena.reshape(self._threads, -1):
            self._lanes.put(lane)
        self._make_pool()

    @property
    def memory_bytes(self) -> int:
        """DRAM held, in bytes."""
        return int(self._arena.nbytes) + self.pool_bytes

    @property
    def planned_bytes(self) -> int:
        """The same once calls have run, with a window's plan: order, offsets and pages of each request; no pool."""
        return int(self._arena.nbytes) + WINDOW_REQUESTS * 64

    @property
    def pool_bytes(self) -> int:
        """DRAM of the pages held, in bytes."""
        return 0 if self._pool is None else self._pool.memory_bytes

    def hold_pages(self, pages: int) -> None:
        """Hold up to so many pages in DRAM of the files that were added for it; another number lets all go."""
        if self._pid != os.getpid():
            self._start()
        if pages == self._pages_held:
            return
        self._hits_before += 0 if self._pool is None else self._pool.hits
        self._pages_held, self._pool = pages, None
        self._make_pool()

    def _make_pool(self) -> None:
        self._pool = BufferPool(self._pages_held) if self._pages_held else None
        for source in self._sources.values():
            if self._pool is not None and source.held_as >= 0:
                self._pool.add_file(source.held_as)

    def add(
        self,
        *,
        fd: int,
        direct: bool,
        drops_cache: bool,
        length: int,
        checksums: NDArray[np.uint32] | None,
        file: PageFile,
        source: PageSource | None = None,
        held: bool = False,
    ) -> int:
        """Take a file in and return its handle: the least that no file has."""
        handle = next(each for each in itertools.count() if each not in self._sources)
        made = _Source(file, length, checksums, source, self._number() if held else -1)
        self._sources = {**self._sources, handle: made}
        return handle

    def _number(self) -> int:
        """Return a number for the pages of a file, which no other file has had."""
        self._files_held += 1
        if self._pool is not None:
            self._pool.add_file(self._files_held)
        return self._files_held

    def _let_go(self, source: _Source) -> None:
        if self._pool is not None and source.held_as >= 0:
            self._pool.drop_file(source.held_as)

    def extend(
        self, *, handle: int, direct: bool, drops_cache: bool, length: int, checksums: NDArray[np.uint32] | None
    ) -> None:
        """Make `length` bytes of a file readable."""
        old = self._sources[handle]
        number = old.held_as if old.held_as < 0 else self._number()
        self._sources = {**self._sources, handle: replace(old, length=length, checksums=checksums, held_as=number)}
        self._let_go(old)

    def remove(self, handle: int) -> None:
        """Forget a file; batches on their way keep it."""
        old = self._sources[handle]
        self._sources = {key: source for key, source in self._sources.items() if key != handle}
        self._let_go(old)

    def counters(self) -> dict[str, int]:
        """Return counts so far: calls, requests, reads, pages, bytes, and pages taken from DRAM; and the pages held."""
        pool = self._pool
        held, hits = (0, 0) if pool is None else (len(pool), pool.hits)
        return {**self._counts, "pool_pages": held, "pool_hits": self._hits_before + hits}

    def close(self) -> None:
        """Wait for batches on their way and end the threads."""
        self._closed = True
        if self._pid == os.getpid():
            self._workers.shutdown(wait=True)
        self._sources, self._pool = {}, None

    @shielded
    def read(
        self,
        *,
        files: int | NDArray[np.int32],
        offsets: NDArray[np.int64],
        length: int,
        out: NDArray[np.uint8],
        latency: NDArray[np.float32] | None = None,
        tally: Tallies | None = None,
    ) -> Fault | None:
        """Fill ``out[i]`` with `length` bytes at ``offsets[i]``, or return the fault that prevented it."""
        if self._pid != os.getpid():
            self._start()
        if latency is not None:
            latency[:] = 0
        sources = self._sources
        for start in range(0, len(offsets), WINDOW_REQUESTS):
            check_interrupt()
            window = slice(start, start + WINDOW_REQUESTS)
            part = np.full(len(offsets[window]), files, np.int32) if isinstance(files, int) else files[window]
            order = np.lexsort((offsets[window], part))
            batch = _Batch(
                sources, order + start, part[order], offsets[window][order], length, out, latency, tally, self._pool
            )
            self._run_window(batch)
            if batch.error is not None:
                raise batch.error
            if batch.fault is not None:
                return batch.fault
        with self._lock:
            self._counts["calls"] += 1
            self._counts["requests"] += len(offsets)
        return None

    def _run_window(self, batch: _Batch) -> None:
        lost = [index for index, handle in enumerate(batch.files) if int(handle) not in batch.sources]
        if lost:
            batch.fault = ("range", None, int(batch.order[lost[0]]), 0, 0)
            return
        _bring_absent(batch)
        _take_held(batch)
        if not len(batch.files):
            return
        runs = list(plan_runs(batch.files, batch.offsets, batch.length, self._run_pages))
        if len(runs) < 3:  # waking threads would cost more than it gains
            self._work(batch, iter(runs))
            return
        shared = iter(runs)
        workers: list[Future[None]] = []
        try:
            for _ in range(min(self._threads, len(runs))):
                try:
                    workers.append(self._workers.submit(self._work, batch, shared))
                except RuntimeError:
                    if self._closed:
                        batch.fault = ("closed", None, 0, 0, 0)
                    else:  # no further thread can be started: this one and those there are do the same work
                        self._work(batch, shared)
                    break
            wait(workers)
        except BaseException as error:
            # A signal. No thread may write into the caller's array after this call.
            batch.error = error
            wait(workers)

    def _work(self, batch: _Batch, runs: Iterator[_Run]) -> None:
        lane = self._lanes.get()
        reads = pages = count = 0
        try:
            while not batch.stopped():
                with batch.lock:
                    run = next(runs, None)
                if run is None:
                    break
                started = time.perf_counter()
                wanted = _fetch(batch, run, lane)
                if wanted and not batch.stopped():
                    _deliver(batch, run, lane, time.perf_counter() - started)
                    _hold(batch, run, lane)
                reads, pages, count = reads + 1, pages + run.pages, count + wanted
        except BaseException as error:
            batch.error = error
        finally:
            self._lanes.put(lane)
        with self._lock:
            for name, more in (("reads", reads), ("pages", pages), ("bytes", count)):
                self._counts[name] += more
                if batch.tally is not None:
                    batch.tally[name] += more


def plan_runs(files: NDArray[np.int32], offsets: NDArray[np.int64], length: int, most: int) -> Iterator[_Run]:
    """Yield reads of `most` pages that serve requests sorted by file and offset: each page once, with neighbours."""
    first = offsets // PAGE_BYTES
    last = (offsets + (length - 1)) // PAGE_BYTES
    apart = (files[1:] != files[:-1]) | (first[1:] > last[:-1] + 1)
    bounds = [0, *(np.flatnonzero(apart) + 1).tolist(), len(offsets)]
    for start, stop in itertools.pairwise(bounds):
        page, end = int(first[start]), int(last[stop - 1]) + 1
        lower = start
        while page < end:
            pages = min(most, end - page)
            lower += int(np.searchsorted(last[lower:stop], page))
            upper = lower + int(np.searchsorted(first[lower:stop], page + pages))
            yield _Run(int(files[start]), page, pages, lower, upper)
            page += pages


def _bring_absent(batch: _Batch) -> None:
    """Have the extents brought that the requests need and their files lack; mark the others as used."""
    wanted: list[tuple[PageSource, int]] = []
    for handle in np.unique(batch.files).tolist():
        if (source := batch.sources[handle].pages) is not None:
            first = batch.offsets[batch.files == handle]
            spans = zip(first // source.extent_bytes, (first + batch.length - 1) // source.extent_bytes, strict=True)
            needed = np.unique(np.concatenate([np.arange(start, stop + 1) for start, stop in spans]))
            wanted += [(source, extent) for extent in needed[source.marks[needed] == 0].tolist()]
            source.marks[needed[source.marks[needed] == 1]] = 2
    if wanted:
        wanted[0][0].fetch(wanted)


def _take_held(batch: _Batch) -> None:
    """Fill the rows of requests whose pages are all held in DRAM, and leave the others."""
    if (pool := batch.pool) is None:
        return
    left = np.ones(len(batch.files), np.bool_)
    for place, (handle, offset) in enumerate(zip(batch.files.tolist(), batch.offsets.tolist(), strict=True)):
        if (number := batch.sources[handle].held_as) < 0:
            continue
        first, last = offset // PAGE_BYTES, (offset + batch.length - 1) // PAGE_BYTES
        if (pages := pool.take(number, first, last - first + 1)) is not None:
            low = offset % PAGE_BYTES
            batch.out[int(batch.order[place])] = pages.reshape(-1)[low : low + batch.length]
            left[place] = False
    batch.order, batch.files, batch.offsets = batch.order[left], batch.files[left], batch.offsets[left]


def _hold(batch: _Batch, run: _Run, lane: NDArray[np.uint8]) -> None:
    """Take the pages of a run into the pool."""
    number = batch.sources[run.handle].held_as
    if batch.pool is not None and number >= 0:
        for index, page in enumerate(lane[: run.pages * PAGE_BYTES].reshape(-1, PAGE_BYTES)):
            batch.pool.put(number, run.page + index, page)


def _fetch(batch: _Batch, run: _Run, lane: NDArray[np.uint8]) -> int:
    """Read one run into `lane` and check it; returns the bytes wanted from the file, 0 when the batch has a fault."""
    source = batch.sources[run.handle]
    start = run.page * PAGE_BYTES
    whole = run.pages * PAGE_BYTES
    wanted = min(whole, source.length - start)
    done = 0
    while done < wanted:
        at = done // 512 * 512 if source.file.direct else done  # direct reads resume on a block boundary
        try:
            got = read_at(source.file.fd, lane[at:whole].data, start + at)
        except OSError as error:
            batch.fault = batch.fault or ("errno", source.file, error.errno or 0, 0, 0)
            return 0
        if at + got <= done:
            batch.fault = batch.fault or ("short", source.file, start + done, source.length, 0)
            return 0
        done = at + got
    if source.file.drops_cache:
        os.posix_fadvise(source.file.fd, start, whole, os.POSIX_FADV_DONTNEED)
    if source.checksums is not None:
        lane[wanted:whole] = 0
        found = crc32c_pages(lane[:whole])
        committed = source.checksums[run.page : run.page + run.pages]
        wrong = np.flatnonzero(found != committed)
        if len(wrong):
            index = int(wrong[0])
            fault = ("checksum", source.file, run.page + index, int(committed[index]), int(found[index]))
            batch.fault = batch.fault or fault
            return 0
    return wanted


def _deliver(batch: _Batch, run: _Run, lane: NDArray[np.uint8], seconds: float) -> None:
    """Copy the bytes of one run into the rows of the requests that want them."""
    start = run.page * PAGE_BYTES
    stop = start + run.pages * PAGE_BYTES
    for index in range(run.first, run.stop):
        row, offset = int(batch.order[index]), int(batch.offsets[index])
        low, high = max(offset, start), min(offset + batch.length, stop)
        batch.out[row, low - offset : high - offset] = lane[low - start : high - start]
        if batch.latency is not None:
            with batch.lock:
                batch.latency[row] = max(float(batch.latency[row]), seconds)
