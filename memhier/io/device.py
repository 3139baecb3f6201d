"""Measures the device under a path: queue depth against reads per second, bandwidth and latency.

The rows of the profile are measured by the same :class:`~memhier.io.reader.Reader` that serves the rows later, so the
figures include the price of this library and of the engine that this machine permits.
"""

import mmap
import os
import platform
import stat
import time
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

import numpy as np
import numpy.typing as npt

from memhier.arguments import check_int, check_number
from memhier.budget import format_bytes, parse_bytes
from memhier.io.device_profile import DepthProfile, DeviceProfile
from memhier.io.mounts import IN_MEMORY, mount_of
from memhier.io.page_file import PAGE_BYTES
from memhier.io.python_reader import THREADS_MAX
from memhier.io.random_file import random_file
from memhier.io.reader import Reader

__all__ = ["DepthProfile", "DeviceProfile", "probe"]

# Every second page, so that a reader that merges neighbours still sends each read to the device on its own.
_STRIDE = 2
# One call's reads share one buffer (32 MiB): long enough that filling and draining the queue costs little.
_CALL_READS = 8192
# Enough different pages that none is read twice in a slice of time, in 8 MiB however large the file.
_OFFSETS_MAX = 1 << 20
_STREAM_BLOCK = 1 << 20
_STREAM_DEPTH = 128
_ROUNDS = 5
_DEPTH_MAX = 1024


def probe(
    path: str | os.PathLike[str],
    *,
    size: int | str = "1GiB",
    seconds: float = 8.0,
    depths: Sequence[int] = (1, 2, 4, 8, 16, 32, 64, 128),
    seed: int = 0,
) -> DeviceProfile:
    """Measure random page reads at several queue depths, and sequential bandwidth, on the device under a path.

    The depths take turns over several rounds and the medians are reported, so that a neighbour's burst of I/O
    spoils one round of every depth rather than every round of one. Reads are cold: they use direct I/O, or,
    where the file system refuses it, the page cache is dropped first and the profile says so.

    Parameters
    ----------
    path
        A directory, in which a file of random bytes is made and removed again; or a file, which is only read.
    size
        Bytes over which reads are scattered: the size of the temporary file, or how much of an existing one to use.
    seconds
        Time to spend reading, in all. Writing the temporary file comes on top.
    depths
        Numbers of reads to keep in flight, each from 1 to 1024.
    seed
        Seed of the temporary file's bytes and of the order of reads.

    Returns
    -------
    DeviceProfile
        With the figures of each queue depth in ``depths``.

    Raises
    ------
    ValueError, TypeError
        An argument is out of range, or the file is too small for the deepest queue.
    OSError
        The path is missing or may not be read or written, or the temporary file does not fit (``ENOSPC``).

    Examples
    --------
    >>> import tempfile
    >>> from memhier import probe
    >>> profile = probe(tempfile.mkdtemp(), size="8MiB", seconds=0.1, depths=(1, 4))  # by default: 1 GiB, 8 seconds
    >>> [row.depth for row in profile.depths], all(row.iops > 0 for row in profile.depths)
    ([1, 4], True)
    """
    depths = _check_depths(depths)
    check_number("seconds", seconds, 0, 86_400, above=True)
    seed = check_int("seed", seed)
    target = Path(path).absolute()
    mode = target.stat().st_mode
    if not (stat.S_ISDIR(mode) or stat.S_ISREG(mode)):
        raise ValueError(f"path={str(target)!r}: expected a directory or a regular file")
    span = parse_bytes(size, "size")
    if stat.S_ISREG(mode):
        span = min(span, target.stat().st_size)
    span = span // _STREAM_BLOCK * _STREAM_BLOCK
    smallest = max(max(depths) * PAGE_BYTES * _STRIDE, 8 * _STREAM_BLOCK)
    if span < smallest:
        name = "size" if stat.S_ISDIR(mode) else f"path={str(target)!r} and size"
        raise ValueError(
            f"{name}: {format_bytes(span)} in whole MiB is too little for depths up to {max(depths)}; "
            f"expected at least {format_bytes(smallest)}"
        )
    if stat.S_ISREG(mode):
        return _measure(target, target, span, seconds, depths, seed)
    with random_file(target, span, seed) as scratch:
        return _measure(target, scratch, span, seconds, depths, seed)


def _check_depths(depths: Sequence[int]) -> tuple[int, ...]:
    depths = tuple(check_int("depths", depth, 1, _DEPTH_MAX) for depth in depths)
    if not depths or len(set(depths)) < len(depths):
        raise ValueError(f"depths={depths!r}: expected one or more different integers from 1 to {_DEPTH_MAX}")
    return tuple(sorted(depths))


class _Stream:
    """Offsets taken in turn: none comes twice in a call, and none again before all others came."""

    def __init__(self, offsets: npt.NDArray[np.int64]) -> None:
        self._offsets = offsets
        self._next = 0

    def take(self, count: int) -> npt.NDArray[np.int64]:
        turn = np.arange(self._next, self._next + min(count, len(self._offsets)))
        self._next = (self._next + len(turn)) % len(self._offsets)
        return self._offsets.take(turn, mode="wrap")


class _Cell:
    """One row of the profile in the making: a reader of one depth, and the figures of its rounds."""

    def __init__(self, file: Path, span: int, depth: int, length: int, stream: _Stream) -> None:
        self.reader = Reader(depth=depth)
        self.file = self.reader.add(str(file), length=span)
        self.depth = depth
        self.length = length
        self.stream = stream
        self.rate = 0.0
        self.rates: list[float] = []
        self.p50: list[float] = []
        self.p99: list[float] = []
        self.reads = 0

    def warm(self, buffer: npt.NDArray[np.uint8]) -> None:
        """Find out how many reads fill a slice of time; a first call also pays for set-up that later ones do not."""
        self._read(buffer, 2 * self.depth)

    def run(self, buffer: npt.NDArray[np.uint8], seconds: float) -> None:
        elapsed, reads, latencies = 0.0, 0, []
        while elapsed < 0.9 * seconds:
            latency, took = self._read(buffer, int(self.rate * (seconds - elapsed)))
            elapsed += took
            reads += len(latency)
            latencies.append(latency)
        self.rates.append(reads / elapsed)
        p50, p99 = np.percentile(np.concatenate(latencies), (50, 99))
        self.p50.append(float(p50) * 1e6)
        self.p99.append(float(p99) * 1e6)
        self.reads += reads

    def _read(self, buffer: npt.NDArray[np.uint8], count: int) -> tuple[npt.NDArray[np.float32], float]:
        room = len(buffer) // self.length
        offsets = self.stream.take(min(max(count, 2 * self.depth), room))
        out = buffer[: len(offsets) * self.length].reshape(len(offsets), self.length)
        latency = np.empty(len(offsets), np.float32)
        start = time.perf_counter()
        self.reader.read(self.file, offsets, self.length, out=out, latency=latency)
        took = time.perf_counter() - start
        self.rate = len(offsets) / took
        return latency, took

    def row(self) -> DepthProfile:
        iops = median(self.rates)
        return DepthProfile(self.depth, iops, iops * self.length / 1e6, median(self.p50), median(self.p99), self.reads)


def _measure(target: Path, file: Path, span: int, seconds: float, depths: tuple[int, ...], seed: int) -> DeviceProfile:
    places = span // (PAGE_BYTES * _STRIDE)
    chosen = np.random.default_rng(seed).choice(places, min(places, _OFFSETS_MAX), replace=False)
    scattered = _Stream(chosen.astype(np.int64) * (PAGE_BYTES * _STRIDE))
    blocks = _Stream(np.arange(0, min(span, _OFFSETS_MAX * _STREAM_BLOCK), _STREAM_BLOCK, dtype=np.int64))
    # On a page boundary, so that the device writes straight into it; touched once before, as that takes time, too.
    buffer = np.frombuffer(mmap.mmap(-1, _CALL_READS * PAGE_BYTES), np.uint8)
    buffer.fill(0)
    with ExitStack() as stack:
        cells = [_Cell(file, span, depth, PAGE_BYTES, scattered) for depth in depths]
        cells.append(_Cell(file, span, _STREAM_DEPTH, _STREAM_BLOCK, blocks))
        for cell in cells:
            stack.callback(cell.reader.close)
        for cell in cells:
            _drop_cache(file)
            cell.warm(buffer)
        for _ in range(_ROUNDS):
            for cell in cells:
                _drop_cache(file)
                cell.run(buffer, seconds / (_ROUNDS * len(cells)))
        *rows, sequential = [cell.row() for cell in cells]
        file_system, device = mount_of(target)
        return DeviceProfile(
            path=str(target),
            file_system=file_system,
            device=device,
            kernel=f"{platform.system()} {platform.release()}",
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            engine=cells[0].reader.engine,
            direct=bool(cells[0].reader.stats()["direct"]),
            page_bytes=PAGE_BYTES,
            span_bytes=span,
            seed=seed,
            sequential_mb_per_s=sequential.mb_per_s,
            depths=tuple(rows),
            notes=_notes(cells[0].reader, file, file_system, depths),
        )


def _drop_cache(file: Path) -> None:
    if hasattr(os, "posix_fadvise"):
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def _notes(reader: Reader, file: Path, file_system: str, depths: tuple[int, ...]) -> tuple[str, ...]:
    notes = []
    if reader.engine == "python" and max(depths) > THREADS_MAX:
        notes.append(f"the Python engine keeps at most {THREADS_MAX} reads in flight: deeper rows measure the same")
    if file_system in IN_MEMORY:
        notes.append(f"{file_system} lives in memory: these are not the figures of a device")
    elif not reader.stats()["direct"]:
        notes.append("buffered: direct I/O was refused; the page cache was dropped before each measurement")
    status = file.stat()
    if getattr(status, "st_blocks", status.st_size) * 512 < status.st_size:  # Windows does not tell
        notes.append("the file has holes or is compressed: some reads are answered without the device")
    return tuple(notes)
