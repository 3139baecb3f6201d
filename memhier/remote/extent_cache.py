"""The cache of one URL on the local SSD: it brings extents of segments from objects, and keeps within a limit."""

import errno
import fcntl
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from weakref import ref

import numpy as np

from memhier.closing import Closing
from memhier.errors import CorruptionError
from memhier.remote.manifest import Manifest, digest, object_path
from memhier.remote.place import Place
from memhier.remote.segment_cache import EXTENT_BYTES, SegmentCache, remove_unheld, suppress_full
from memhier.shield import check_interrupt
from memhier.store.contents import PAGE_BYTES, Contents

__all__ = ["ExtentCache"]

_REQUESTS = 32  # under way at a time
_RUN_EXTENTS = 16  # brought by one request
_RUN_BYTES = _RUN_EXTENTS * EXTENT_BYTES
_LOOK_S = 0.05

Wanted = Sequence[tuple[SegmentCache, int]]


class ExtentCache(Closing):
    """Extents of the segments of one generation.

    Many threads and processes may use a folder at a time. A process that dies leaves a valid cache. The limit holds for
    the extents of the open generation; those that calls under way need may exceed it for a moment. Extents that were
    not used since the last pass go first (CLOCK). On a full disk the cache is as large as the disk allows.

    Parameters
    ----------
    place
        Has the objects.
    folder
        For the caches of all URLs; made if it is not there.
    limit
        Bytes of segments that stay on SSD.
    manifest, contents
        The generation.

    Attributes
    ----------
    contents
        The same, with the files of the cache.
    segments
        By the paths of these files; empty once `close` was called.
    """

    def __init__(self, place: Place, folder: Path, limit: int, manifest: Manifest, contents: Contents) -> None:
        self._place = place
        self._limit = max(1, limit // EXTENT_BYTES)
        self.folder: Path = folder / digest(place.url.encode())[:16]
        self.folder.mkdir(parents=True, exist_ok=True)
        # Named by their contents: generations share segments.
        objects = {name: manifest.segments[name].objects for name in contents.segments}
        paths = {name: self.folder / f"{digest(' '.join(objects[name]).encode())}.seg" for name in objects}
        infos = {name: replace(info, path=paths[name]) for name, info in contents.segments.items()}
        self.contents: Contents = replace(contents, segments=infos)
        with _alone(self.folder):
            self.segments: dict[str, SegmentCache] = {
                str(paths[name]): SegmentCache(self, paths[name], info, objects[name], manifest.chunk_bytes)
                for name, info in infos.items()
            }
            remove_unheld(self.folder, paths.values())
        # Weak: each segment knows the cache, and its file is closed once no store and no reader has it.
        self._order = [ref(segment) for segment in self.segments.values()]
        self._hand = 0
        self._begin()
        with self._lock:
            for _ in range(2):  # the limit may be smaller than the last time
                self._make_room(0)

    def _begin(self) -> None:
        """Make lock and threads of this process; a fork leaves the parent's behind."""
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._coming: dict[tuple[str, int], Future[None]] = {}
        self._pool = ThreadPoolExecutor(_REQUESTS, "memhier-extents")

    def close(self) -> None:
        """Let go of the segments and end the threads; readers that have a segment keep it."""
        self.segments.clear()
        if self._pid == os.getpid():
            with self._lock:
                self._pool.shutdown(wait=False)
                self._pool = ThreadPoolExecutor(_REQUESTS, "memhier-extents")  # for them, without threads so far

    def fetch(self, wanted: Wanted) -> None:
        """Bring extents that are absent, and wait for those that another thread brings.

        Raises
        ------
        CorruptionError
            When an object is missing, or its bytes do not match the checksums of the pages.
        OSError
            When the place cannot be read, or the cache not written, as its disk has no room for the pages of a call.
        """
        if self._pid != os.getpid():
            self._begin()
        with self._lock:
            coming = {
                self._coming[key] for key in ((segment.path, at) for segment, at in wanted) if key in self._coming
            }
            absent = [
                (segment, at)
                for segment, at in wanted
                if not segment.marks[at] and (segment.path, at) not in self._coming
            ]
            self._make_room(len(absent))
            for segment, first, count in _runs(absent):
                future = self._pool.submit(self._bring, segment, first, count)
                coming.add(future)
                for at in range(first, first + count):
                    self._coming[segment.path, at] = future
        errors: list[BaseException] = []
        while coming:  # all of them, so that a later call joins none that is bound to fail
            done, coming = wait(coming, timeout=_LOOK_S)
            errors += [error for future in done if (error := future.exception()) is not None]
            check_interrupt()
        if errors:
            raise errors[0]

    def _bring(self, segment: SegmentCache, first: int, count: int) -> None:
        start = first * EXTENT_BYTES
        try:
            self._keep(segment, first, self._get(segment, start, min(start + count * EXTENT_BYTES, segment.size())))
        finally:
            with self._lock:
                for at in range(first, first + count):
                    self._coming.pop((segment.path, at), None)

    def read_past(self, segment: SegmentCache, view: memoryview, offset: int) -> None:
        """Fill `view` with whole pages from `offset`, which leave nothing on SSD; for errors see `fetch`."""
        start, end = offset, offset + len(view)
        while start < end:
            stop = min(end, *(start - start % size + size for size in (_RUN_BYTES, segment.chunk_bytes)))
            view[start - offset : stop - offset] = self._get(segment, start, stop)
            check_interrupt()
            start = stop

    def _get(self, segment: SegmentCache, start: int, stop: int) -> bytes:
        """Return pages, which lie in one object."""
        number, within = divmod(start, segment.chunk_bytes)
        path = object_path(segment.objects[number])

        def check(contents: bytes) -> None:
            wrong = segment.wrong_pages(np.frombuffer(contents, np.uint8), start // PAGE_BYTES)
            if len(wrong):
                raise CorruptionError(
                    f"{self._place.address(path)}: {len(wrong)} pages of bytes {within} to {within + stop - start} "
                    "do not match their checksums"
                )

        try:
            return self._place.get(path, check, within, within + stop - start)
        except FileNotFoundError:
            raise CorruptionError(
                f"{self._place.address(path)}: missing; was the generation pruned? Open the newest one"
            ) from None

    def _keep(self, segment: SegmentCache, first: int, contents: bytes) -> None:
        """Write extents; on a full disk, into the room of others."""
        count = -(-len(contents) // EXTENT_BYTES)
        with suppress_full():
            segment.keep(first, contents)
            return
        with self._lock:
            taken = 1
            while taken:
                # Further passes take those in use: a call that they are taken from begins again. The first pass may
                # begin behind them, and the second one finds them in use.
                taken = self._take(count) or self._take(count) or self._take(count)
                with suppress_full():
                    segment.keep(first, contents)
                    return
        said = "the disk of the cache has no room for the pages of a call; make room, or pass another folder as cache"
        raise OSError(errno.ENOSPC, said, str(self.folder))

    def _make_room(self, count: int) -> None:
        """Take away extents until `count` more fit, by one pass at most."""
        present = sum(segment.present for each in self._order if (segment := each()) is not None)
        self._take(present + len(self._coming) + count - self._limit)

    def _take(self, most: int) -> int:
        """Take away up to `most` extents by one pass at most, and return how many.

        A pass leaves those that were used since the last one: those of the call that asks are among them.
        """
        order = [segment for each in self._order if (segment := each()) is not None]
        taken = ends = 0
        while taken < most and ends < len(order):
            count, finished = order[self._hand % len(order)].sweep(most - taken)
            taken += count
            self._hand += finished
            ends += finished
        return taken


def _runs(absent: Wanted) -> Iterator[tuple[SegmentCache, int, int]]:
    """Yield extents that one request brings: neighbours in one object, up to a mebibyte."""
    segment, first, count = None, 0, 0
    for each, at in sorted(absent, key=lambda item: (item[0].path, item[1])):
        same_object = at * EXTENT_BYTES % each.chunk_bytes != 0
        if each is segment and at == first + count and same_object and count < _RUN_EXTENTS:
            count += 1
            continue
        if segment is not None:
            yield segment, first, count
        segment, first, count = each, at, 1
    if segment is not None:
        yield segment, first, count


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold the folder's lock: no other process opens or removes segments there meanwhile."""
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
