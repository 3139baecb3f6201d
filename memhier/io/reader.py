"""Batched reads of file pages: every tier's way to the SSD.

A call names many byte ranges of equal length. The reader maps them to 4096-byte pages, reads each page once with many
reads in flight, checks each page as it lands, and copies the ranges into the caller's array.
"""

import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from memhier import backend
from memhier.arguments import as_ints, check_array, check_int
from memhier.closing import Closing
from memhier.errors import ClosedError
from memhier.io.faults import Fault, raise_fault
from memhier.io.page_file import PAGE_BYTES, PageFile
from memhier.io.page_source import PageSource
from memhier.io.python_reader import PythonPageReader
from memhier.io.read_arguments import as_tally, check_checksums, empty_rows
from memhier.shield import shielded

if TYPE_CHECKING:
    from memhier_native._core import PageReader

__all__ = ["PAGE_BYTES", "PendingRead", "Reader"]

ENGINES = ("uring", "aio", "threads", "python")
DEPTH_MAX, CONTEXTS_MAX, RUN_PAGES_MAX = 4096, 64, 256
_LENGTH = "bytes, or None for the whole file"
REPAIRS = 16
"""How often a call begins again since pages of a source were damaged: a small cache may lose them to others."""


class PendingRead:
    """A read that :meth:`Reader.begin_read` began; ends by itself."""

    def __init__(
        self,
        core: "PageReader",
        files: NDArray[np.int32],
        offsets: NDArray[np.int64],
        length: int,
        out: NDArray[np.uint8],
    ) -> None:
        assert backend.core is not None
        self._reader = core
        self._core = backend.core.PendingRead(reader=core, files=files, offsets=offsets, length=length, out=out)
        self.done: Callable[[], bool] = self._core.done

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self._core.seconds

    def exception(self) -> Exception | None:
        """Wait for its end; return the error that `Reader.read` would raise."""
        fault = self._core.wait()
        try:
            if fault is not None:
                raise_fault(fault, self._reader.engine)
        except Exception as error:
            return error
        return None


class Reader(Closing):
    """Reads batches of byte ranges from files, page by page, with checksums.

    Safe to use from many threads at a time, and in a child after a fork. Requests may repeat, overlap and come in any
    order. Pages are merged among the 16,384 requests that are planned together.

    Parameters
    ----------
    engine
        ``"uring"``, ``"aio"``, ``"threads"`` or ``"python"``. None asks the environment variable ``MEMHIER_IO``, and
        without it takes the first of these that this machine allows.
    depth
        Reads in flight for one call, 1 to 4096.
    contexts
        Calls that read at the same time, 1 to 64; others wait for one of them. Each can fill the device's queue alone;
        more only help calls that wait for their own few reads. Calls of ``"python"`` share their threads.
    run_pages
        Neighbouring pages that become one read, at most, 1 to 256; with more, each read in flight takes more DRAM.
    direct
        None reads past the page cache where the file system can, and else through it, with hints that keep it empty;
        True insists (an OSError where it cannot be had); False reads through the page cache.

    Raises
    ------
    ValueError
        For an unknown engine or a depth out of range.
    OSError, RuntimeError
        When the engine asked for cannot be had here; the message says why.

    Examples
    --------
    >>> import tempfile
    >>> from memhier import Reader
    >>> file = tempfile.NamedTemporaryFile()
    >>> _ = file.write(bytes(range(256)) * 64), file.flush()
    >>> with Reader() as reader:
    ...     handle = reader.add(file.name)
    ...     reader.read(handle, [5, 4094], 4).tolist()
    [[5, 6, 7, 8], [254, 255, 0, 1]]
    """

    def __init__(
        self, engine: str | None = None, depth: int = 128, direct: bool | None = None, contexts: int = 4,
        run_pages: int = 16,
    ) -> None:  # fmt: skip
        depth = check_int("depth", depth, 1, DEPTH_MAX, "reads in flight")
        if direct is not None and not isinstance(direct, bool):
            raise TypeError(f"direct={direct!r}: expected True, False or None")
        self._direct = direct
        contexts = check_int("contexts", contexts, 1, CONTEXTS_MAX, "calls at a time")
        run_pages = check_int("run_pages", run_pages, 1, RUN_PAGES_MAX, "pages of a read")
        self._core = _make_core(engine, depth, contexts, run_pages)
        self._files: dict[int, PageFile] = {}
        self._page_sources: WeakKeyDictionary[PageFile, PageSource] = WeakKeyDictionary()
        self._holdable: set[int] = set()
        self._lengths: NDArray[np.int64] = np.full(8, -1, np.int64)  # by handle; -1 where there is no file
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._closed = False

    @property
    def engine(self) -> str:
        """The engine in use: ``"uring"``, ``"aio"``, ``"threads"`` or ``"python"``."""
        return self._core.engine

    @property
    def compiled(self) -> "PageReader | None":
        """The compiled page reader, which also ranks rows; None where the engine is ``"python"``.

        Raises
        ------
        ClosedError
            When the reader is closed.
        """
        self._check_open()
        return None if isinstance(self._core, PythonPageReader) else self._core

    @property
    def memory_bytes(self) -> int:
        """DRAM held by page buffers, plans, rings and threads, and for pages of files, in bytes."""
        return self._core.memory_bytes + int(self._lengths.nbytes)

    @property
    def planned_bytes(self) -> int:
        """DRAM that will be held once calls of one thread at a time have run, in bytes; for budgets made beforehand.

        Each further thread that reads at the same time, up to `contexts` in all, adds as much again.
        :attr:`pool_bytes` comes on top.
        """
        return self._core.planned_bytes + int(self._lengths.nbytes)

    @property
    def pool_bytes(self) -> int:
        """DRAM for pages of files, in bytes; see :meth:`hold_pages`."""
        return self._core.pool_bytes

    @property
    def holdable_pages(self) -> int:
        """Pages of the open files that :meth:`hold_pages` may hold."""
        return sum(-(-int(self._lengths[handle]) // PAGE_BYTES) for handle in [*self._holdable])

    @shielded
    def hold_pages(self, pages: int) -> None:
        """Hold pages that are read in DRAM, so that the next call need not read them.

        Only those of files added with ``held=True``. Pages enter once they are checked. Those leave that are used least
        (S3-FIFO: one pass over many pages does not push out those in use), and those of files that are removed.
        Bytes, order and errors of a call do not depend on them.

        Parameters
        ----------
        pages
            How many at most; 0, as at first, holds none. It may change at any time.

        Raises
        ------
        OSError
            When the system has no room for them.
        """
        self._check_open()
        pages = check_int("pages", pages, 0, 2**31 - 1, "pages")
        with self._guard():
            self._core.hold_pages(pages=pages)

    @shielded
    def add(
        self,
        path: str | os.PathLike[str],
        length: int | None = None,
        checksums: NDArray[np.uint32] | None = None,
        source: PageSource | None = None,
        held: bool = False,
    ) -> int:
        """Open a file for reading.

        Parameters
        ----------
        path
            The file.
        length
            How many of its bytes are committed and may be read; None takes all there are now.
        checksums
            uint32 ``[ceil(length / 4096)]``: the CRC32C of each page, the last one padded with zeros. Pages are checked
            against them as they are read. Kept by reference, not copied. None reads unchecked.
        source
            Brings extents that the file does not hold yet, before they are read. Needs `checksums`.
        held
            Whether :meth:`hold_pages` may hold its pages.

        Returns
        -------
        int
            The handle that :meth:`read` takes. That of a file which was removed may be given again.

        Raises
        ------
        CorruptionError
            When the file is shorter than `length`.
        OSError
            When the file cannot be opened, or cannot be read directly where ``direct=True`` insists on it.
        """
        self._check_open()
        if length is not None:
            length = check_int("length", length, 0, unit=_LENGTH)
        if source is not None and checksums is None:
            raise ValueError("source: needs checksums, which tell the pages that are there")
        file = PageFile(path, self._direct)
        length = file.size() if length is None else length
        file.check_holds(length)
        checksums = check_checksums(checksums, length)
        with self._guard():
            handle = self._core.add(
                fd=file.fd,
                direct=file.direct,
                drops_cache=file.drops_cache,
                length=length,
                checksums=checksums,
                file=file,
                source=source,
                held=held,
            )
            if held:
                self._holdable.add(handle)
            if handle >= len(self._lengths):
                self._lengths = np.concatenate([self._lengths, np.full(len(self._lengths), -1, np.int64)])
            self._files[handle] = file
            if source is not None:
                self._page_sources[file] = source
            self._lengths[handle] = length
        return handle

    @shielded
    def extend(self, file: int, length: int, checksums: NDArray[np.uint32] | None = None) -> None:
        """Make more of a file readable that has grown at its end.

        Parameters
        ----------
        file
            A handle from :meth:`add`.
        length
            Committed bytes now; not fewer than before.
        checksums
            As in :meth:`add`, for the whole file; replaces the former ones. None reads unchecked from now on.
        """
        self._check_open()
        page_file = self._page_file(file)
        length = check_int("length", length, 0, unit=_LENGTH)
        if length < self._lengths[file]:
            raise ValueError(
                f"length={length}: the file already has {int(self._lengths[file])} committed bytes; expected no fewer"
            )
        checksums = check_checksums(checksums, length)
        page_file.check_holds(length)
        page_file.settle()
        with self._guard():
            self._core.extend(
                handle=file,
                direct=page_file.direct,
                drops_cache=page_file.drops_cache,
                length=length,
                checksums=checksums,
            )
            self._lengths[file] = length

    @shielded
    def remove(self, file: int) -> None:
        """Close a file; batches of other threads that still read it finish first.

        The next file may get its handle: use the handle no more.
        """
        self._check_open()
        with self._guard():
            self._page_file(file)
            self._lengths[file] = -1
            self._holdable.discard(file)
            self._core.remove(file)
            del self._files[file]

    def read(
        self,
        file: int | NDArray[np.int32],
        offsets: Any,
        length: int,
        out: NDArray[np.uint8] | None = None,
        latency: NDArray[np.float32] | None = None,
        tally: NDArray[Any] | None = None,
    ) -> NDArray[np.uint8]:
        """Read `length` bytes at each offset.

        Parameters
        ----------
        file
            A handle, or int32 ``[n]``: the handle for each request.
        offsets
            int64 ``[n]``: where each range starts, in bytes. No alignment is needed.
        length
            Bytes per range, at least 1.
        out
            uint8 ``[n, length]``, C-contiguous, to fill instead of allocating. Pages that a row wants whole land
            straight in it, where they would begin at an address that the device can write to (for most of them a
            multiple of 512). On an error its contents are undefined.
        latency
            float32 ``[n]`` to fill with the seconds from submission to completion of the I/O that served each request.
        tally
            int64 ``[3]``, or a record of `memhier.io.read_arguments.READ_TALLY` ``[1]``, to which the I/Os, pages and
            bytes read by this call are added.

        Returns
        -------
        numpy.ndarray
            uint8 ``[n, length]``; `out` where it was given.

        Raises
        ------
        ValueError
            For a range that leaves its file, naming the index, and for arrays of the wrong shape or layout.
        CorruptionError
            When a page does not match its checksum, or the file was cut short.
        OSError
            When the device or the system refuses a read.
        """
        if self._closed:
            raise ClosedError("read from a closed reader")
        length = check_int("length", length, 1, unit="bytes")
        offsets = as_ints("offsets", offsets)
        if offsets.ndim != 1:
            raise ValueError(f"offsets: expected shape [n], got {list(offsets.shape)}")
        count = len(offsets)
        if isinstance(file, np.ndarray) and file.ndim:
            self._check_ranges(file, offsets, length)
        else:
            file = check_int("file", file, -(2**63))
            if file not in self._files:
                self._page_file(file)
            if count and (int(offsets.min()) < 0 or int(offsets.max()) > self._lengths[file] - length):
                wrong = (offsets < 0) | (offsets > self._lengths[file] - length)
                self._refuse(int(np.flatnonzero(wrong)[0]), file, offsets, length)
        if out is None:
            out = empty_rows(count, length)
        else:
            check_array("out", out, np.uint8, (count, length))
        if latency is not None:
            check_array("latency", latency, np.float32, (count,))
        sums = None if tally is None else as_tally(tally)
        if count:
            self.run(
                lambda: self._core.read(
                    files=file, offsets=offsets, length=length, out=out, latency=latency, tally=sums
                )
            )
        return out

    def begin_read(
        self, files: NDArray[np.int32], offsets: NDArray[np.int64], length: int, out: NDArray[np.uint8]
    ) -> "PendingRead | None":
        """Begin to read as :meth:`read` does, on a thread that needs no Python; None where there is none.

        Parameters
        ----------
        files, offsets, length, out
            As of :meth:`read`, at least one range; to be left alone until the read has ended.

        Returns
        -------
        PendingRead
            Its `exception` is the error that :meth:`read` would raise.
        """
        core = self.compiled
        if core is None or self._page_sources:
            return None
        return PendingRead(core, files, offsets, length, out)

    def run(self, call: Callable[[], Fault | None]) -> None:
        """Make a call of the core; make it again where it met a damaged page that its source can bring once more."""
        for repairs in range(REPAIRS + 1):
            fault = call()
            if fault is None:
                return
            kind, file, page, *_ = fault
            source = self._page_sources.get(file) if isinstance(file, PageFile) else None
            if source is None or kind not in ("checksum", "short"):
                raise_fault(fault, self.engine)
            if repairs == REPAIRS:
                raise source.gone()
            source.forget(page if kind == "checksum" else page // PAGE_BYTES)

    def stats(self) -> dict[str, Any]:
        """Return counts of the work so far, as plain numbers.

        ``engine``; ``direct`` (False as soon as one open file is read through the page cache) and ``buffered_files``;
        ``files`` open; ``calls``; ``requests``; ``reads`` (I/Os submitted), ``pages`` and ``bytes`` read from storage;
        ``pool_pages`` held in DRAM now, and ``pool_hits``, pages taken from there.
        """
        files = list(self._files.values())
        buffered = sum(not file.direct for file in files)
        return {
            "engine": self.engine,
            "direct": buffered == 0,
            "buffered_files": buffered,
            "files": len(files),
            **self._core.counters(),
        }

    @shielded
    def close(self) -> None:
        """Wait for batches on their way, close every file and free all memory. Closing twice is harmless."""
        if self._closed:
            return
        self._closed = True
        self._core.close()
        self._files.clear()

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{len(self._files)} files"
        return f"<Reader engine={self.engine!r} {state}>"

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the reader is closed")

    def _guard(self) -> threading.Lock:
        if self._pid != os.getpid():  # a thread that did not survive the fork may have held the lock
            self._lock, self._pid = threading.Lock(), os.getpid()
        return self._lock

    def _page_file(self, handle: int) -> PageFile:
        file = self._files.get(handle)
        if file is None:
            raise ValueError(f"file={handle!r}: expected a handle from add() that was not removed")
        return file

    def _check_ranges(self, files: NDArray[np.int32], offsets: NDArray[np.int64], length: int) -> None:
        """Refuse handles that are none, and ranges that leave their file."""
        check_array("file", files, np.int32, offsets.shape, writable=False)
        if not len(files):
            return
        if int(files.min()) < 0 or int(files.max()) >= len(self._lengths):
            index = int(np.flatnonzero((files < 0) | (files >= len(self._lengths)))[0])
            raise ValueError(f"file[{index}]={int(files[index])}: expected a handle from add()")
        wrong = (offsets < 0) | (offsets > self._lengths[files] - length)
        if wrong.any():
            self._refuse(int(np.flatnonzero(wrong)[0]), files, offsets, length)

    def _refuse(self, index: int, file: int | NDArray[np.int32], offsets: NDArray[np.int64], length: int) -> None:
        handle = file if isinstance(file, int) else int(file[index])
        raise ValueError(
            f"offsets[{index}]={int(offsets[index])} with length={length}: "
            f"expected a range within the {int(self._lengths[handle])} bytes of {self._page_file(handle).path}"
        )


def _make_core(engine: str | None, depth: int, contexts: int, run_pages: int) -> "PageReader | PythonPageReader":
    source = "engine"
    if engine is None:
        engine, source = os.environ.get("MEMHIER_IO") or None, "MEMHIER_IO"
    if engine is not None and engine not in ENGINES:
        raise ValueError(f"{source}={engine!r}: expected one of {', '.join(ENGINES)}")
    if engine == "python" or (engine is None and backend.core is None):
        return PythonPageReader(engine="python", depth=depth, contexts=contexts, run_pages=run_pages)
    if backend.core is None:
        raise RuntimeError(
            f"{source}={engine!r}: needs the compiled core, which is not in use here; expected 'python', or unset"
        )
    return backend.core.PageReader(engine=engine or "auto", depth=depth, contexts=contexts, run_pages=run_pages)
