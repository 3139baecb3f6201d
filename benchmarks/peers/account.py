"""What a peer uses, as the kernel counts it: CPU seconds, bytes from the device, memory, pages in the page cache."""

import ctypes
import mmap
import os
import resource
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

__all__ = ["PageCache", "PeakMemory", "Usage", "cap_memory", "memory_now"]

_SAMPLE_S = 0.02
_MADV_DONTNEED = 4
_CACHESTAT = 451
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_LIBC.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)


@dataclass(frozen=True, slots=True)
class Usage:
    """What this process and its children used so far, or between two moments.

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
        Without mapped files, whose pages the kernel may take back: what a machine must have.
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
    """Let this process allocate no more than `extra` bytes beyond what it has: maps of files stay free."""
    limit = 1024 * _field(Path("/proc/self/status"), "VmData") + extra
    resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.getrlimit(resource.RLIMIT_DATA)[1]))


class PageCache:
    """The page cache's share of one folder's files: a mapped or buffered peer's free DRAM unless it is charged."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.resolve()

    def resident_bytes(self) -> int:
        """Return the bytes of the files that are in DRAM now."""
        return sum(_resident_pages(file) for file in self._files()) * mmap.PAGESIZE

    def drop(self) -> None:
        """Give the pages back to the kernel, those that this process maps too."""
        for line in Path("/proc/self/maps").read_text().splitlines():
            parts = line.split(maxsplit=5)
            # Private pages that were written would be lost: maps of an index are shared or read-only.
            if len(parts) == 6 and parts[5].startswith(f"{self._folder}/") and parts[1] in ("r--s", "rw-s", "r--p"):
                start, end = (int(part, 16) for part in parts[0].split("-"))
                _LIBC.madvise(start, end - start, _MADV_DONTNEED)
        for file in self._files():
            descriptor = os.open(file, os.O_RDONLY)
            try:
                # Dirty pages stay; a fresh index may still be on its way to the device.
                os.fdatasync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)

    def _files(self) -> list[Path]:
        return [file for file in sorted(self._folder.rglob("*")) if file.is_file() and file.stat().st_size]


def _resident_pages(file: Path) -> int:
    descriptor = os.open(file, os.O_RDONLY)
    try:
        span, counts = (ctypes.c_uint64 * 2)(0, 0), (ctypes.c_uint64 * 5)()
        # A length of 0 reaches to the end of the file; the first count is that of pages in the cache.
        if _LIBC.syscall(_CACHESTAT, descriptor, span, counts, 0) == 0:
            return int(counts[0])
        return _pages_by_mincore(descriptor, file)  # before Linux 6.5, or where a sandbox forbids the call
    finally:
        os.close(descriptor)


def _pages_by_mincore(descriptor: int, file: Path) -> int:
    # A writable private map is the one whose address ctypes can take; it is neither read nor written.
    with mmap.mmap(descriptor, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE) as mapped:
        anchor = (ctypes.c_char * 1).from_buffer(mapped)
        try:
            flags = (ctypes.c_ubyte * -(-len(mapped) // mmap.PAGESIZE))()
            if _LIBC.mincore(ctypes.addressof(anchor), len(mapped), flags):
                raise OSError(ctypes.get_errno(), "mincore", str(file))
        finally:
            del anchor
    # Only the lowest bit has a meaning.
    return sum(flag & 1 for flag in bytes(flags))


def _field(path: Path, name: str) -> int:
    for line in path.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1])
    raise OSError(f"{path} has no field {name}")
