"""The resources of a peer, as the kernel counts them: CPU seconds, bytes read, memory, pages in the page cache."""

import ctypes
import mmap
import os
import resource
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self, TypeAlias

import numpy as np

__all__ = ["PageCache", "PeakMemory", "Usage", "cap_memory", "memory_now"]

_SAMPLE_S = 0.02
_MADV_NORMAL, _MADV_RANDOM, _MADV_DONTNEED = 0, 1, 4
_CACHESTAT = 451
_PIECE = 128 * 1024
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_LIBC.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
# Of one map of a file: its address, its offset in the file, its bytes.
_Map: TypeAlias = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Usage:
    """The resources that this process and its children used so far, or between two moments.

    Attributes
    ----------
    cpu_s, wall_s
        Seconds of processor time (user and system, all threads), and of the clock.
    read_bytes
        Bytes fetched from the device: direct reads and page faults count, hits of the page cache do not.
    """

    cpu_s: float
    wall_s: float
    read_bytes: int

    @classmethod
    def now(cls) -> "Usage":
        """Return the totals at this moment."""
        parts = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        cpu = sum(part.ru_utime + part.ru_stime for part in parts)
        return cls(cpu, time.perf_counter(), _field(Path("/proc/self/io"), "read_bytes"))

    def __sub__(self, other: "Usage") -> "Usage":
        return Usage(self.cpu_s - other.cpu_s, self.wall_s - other.wall_s, self.read_bytes - other.read_bytes)

    def __add__(self, other: "Usage") -> "Usage":
        return Usage(self.cpu_s + other.cpu_s, self.wall_s + other.wall_s, self.read_bytes + other.read_bytes)


class PeakMemory:
    """The largest memory of this process while the block runs, sampled.

    Attributes
    ----------
    rss_bytes
        Everything resident, mapped files too.
    private_bytes
        Without mapped files, whose pages the kernel may take back: the memory that a machine must have.
    """

    def __init__(self) -> None:
        self.rss_bytes = self.private_bytes = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        while True:
            status = Path("/proc/self/status")
            self.rss_bytes = max(self.rss_bytes, 1024 * _field(status, "VmRSS"))
            self.private_bytes = max(self.private_bytes, memory_now())
            if self._stop.wait(_SAMPLE_S):
                return


def memory_now() -> int:
    """Return the private and shared memory of this process that is no mapped file, in bytes."""
    status = Path("/proc/self/status")
    return 1024 * (_field(status, "RssAnon") + _field(status, "RssShmem"))


def cap_memory(extra: int) -> None:
    """Limit the allocations of this process to `extra` bytes more than it has: maps of files stay free."""
    limit = 1024 * _field(Path("/proc/self/status"), "VmData") + extra
    resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.getrlimit(resource.RLIMIT_DATA)[1]))


class PageCache:
    """The page cache's share of one folder's files: a mapped or buffered peer's free DRAM unless it is charged."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.resolve()
        self._random = np.random.default_rng(0)

    def resident_bytes(self) -> int:
        """Return the bytes of the files that are in DRAM now."""
        with self._open_files() as files:
            return sum(_resident_pages(descriptor, 0, size) for _, descriptor, size in files) * mmap.PAGESIZE

    def drop(self) -> None:
        """Give all of it back to the kernel, and the pages that this process maps."""
        maps = self._maps()
        with self._open_files() as files:
            for path, descriptor, size in files:
                # Dirty pages stay; a fresh index may still be on its way to the device.
                os.fdatasync(descriptor)
                _give_back(descriptor, maps.get(path, ()), 0, size)

    def shrink(self, allowed: int) -> None:
        """Give back pages at random, a few neighbours at a time, if more than `allowed` bytes are resident.

        A kernel short of memory keeps most of the pages that are used often: with none left, a peer that maps its
        files would read its entry points again for every query. The walk over the files frees a quarter of `allowed`
        more than it must.
        """
        maps, excess = self._maps(), self.resident_bytes() - allowed * 3 // 4
        with self._open_files() as files:
            pieces = [(file, start) for file in files for start in range(0, file[2], _PIECE)]
            for number in self._random.permutation(len(pieces)):
                if excess <= 0:
                    return
                (path, descriptor, size), start = pieces[number]
                length = min(_PIECE, size - start)
                held = _resident_pages(descriptor, start, length)
                if held:
                    _give_back(descriptor, maps.get(path, ()), start, length)
                    excess -= held * mmap.PAGESIZE

    def read_ahead(self, wanted: bool) -> None:
        """Tell the kernel whether a fault in a map of the files reads the pages around it, too.

        It then reads as much as the device is set to, 128 KiB on some, 8 MiB on others; else that page alone.
        """
        for some in self._maps().values():
            for address, _, size in some:
                _LIBC.madvise(address, size, _MADV_NORMAL if wanted else _MADV_RANDOM)

    def _maps(self) -> dict[str, list[_Map]]:
        """Return the maps of each file in this process."""
        maps: dict[str, list[_Map]] = {}
        for line in Path("/proc/self/maps").read_text().splitlines():
            parts = line.split(maxsplit=5)
            # Private pages that were written would be lost: maps of an index are shared or read-only.
            if len(parts) == 6 and parts[5].startswith(f"{self._folder}/") and parts[1] in ("r--s", "rw-s", "r--p"):
                start, end = (int(part, 16) for part in parts[0].split("-"))
                maps.setdefault(parts[5], []).append((start, int(parts[2], 16), end - start))
        return maps

    @contextmanager
    def _open_files(self) -> Iterator[list[tuple[str, int, int]]]:
        """Open every file that holds something; its path, its descriptor, its bytes."""
        with ExitStack() as stack:
            files = []
            for path in sorted(self._folder.rglob("*")):
                if path.is_file() and (size := path.stat().st_size):
                    descriptor = os.open(path, os.O_RDONLY)
                    stack.callback(os.close, descriptor)
                    files.append((str(path), descriptor, size))
            yield files


def _give_back(descriptor: int, maps: Sequence[_Map], start: int, length: int) -> None:
    for address, offset, size in maps:
        low, high = max(start, offset), min(start + length, offset + size)
        if low < high:
            _LIBC.madvise(address + low - offset, high - low, _MADV_DONTNEED)
    os.posix_fadvise(descriptor, start, length, os.POSIX_FADV_DONTNEED)


def _resident_pages(descriptor: int, start: int, length: int) -> int:
    span, counts = (ctypes.c_uint64 * 2)(start, length), (ctypes.c_uint64 * 5)()
    # The first count is that of pages in the cache.
    if _LIBC.syscall(_CACHESTAT, descriptor, span, counts, 0) == 0:
        return int(counts[0])
    return _pages_by_mincore(descriptor, start, length)  # before Linux 6.5, or where a sandbox forbids the call


def _pages_by_mincore(descriptor: int, start: int, length: int) -> int:
    # A writable private map is the one whose address ctypes can take; it is neither read nor written.
    flags, protection = mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE
    with mmap.mmap(descriptor, length, flags=flags, prot=protection, offset=start) as mapped:
        anchor = (ctypes.c_char * 1).from_buffer(mapped)
        try:
            pages = (ctypes.c_ubyte * -(-len(mapped) // mmap.PAGESIZE))()
            if _LIBC.mincore(ctypes.addressof(anchor), len(mapped), pages):
                raise OSError(ctypes.get_errno(), "mincore")
        finally:
            del anchor
    # Only the lowest bit has a meaning.
    return sum(flag & 1 for flag in bytes(pages))


def _field(path: Path, name: str) -> int:
    for line in path.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1])
    raise OSError(f"{path} has no field {name}")
