"""The interface of a file layer: the few operations that a crash-safe store needs, all of which a test can imitate."""

from types import TracebackType
from typing import Literal, Protocol, Self

from memhier.closing import Closing

__all__ = ["Buffer", "File", "FileBase", "Files", "Mode", "read_file"]

Buffer = bytes | bytearray | memoryview

Mode = Literal["r", "w", "x", "a", "d"]
"""``r`` reads a file; ``w`` empties or creates one, ``x`` creates one, ``a`` creates one or keeps its bytes.

``d`` is ``x`` for writes past the page cache: of whole pages, at page offsets, from memory that begins on a page. It
writes as ``x`` does if the file system has no direct I/O."""


class File(Protocol):
    """An open file. Faults raise `OSError` with ``errno`` and path; writes are complete or raise."""

    @property
    def path(self) -> str:
        """The path it was opened by."""

    def size(self) -> int:
        """Length in bytes."""

    def read_into(self, buffer: bytearray | memoryview, offset: int) -> int:
        """Fill `buffer` from `offset` and return the bytes read: fewer only at the end of the file."""

    def append(self, data: Buffer) -> int:
        """Write `data` at the end and return the offset where it begins."""

    def pwrite(self, data: Buffer, offset: int) -> None:
        """Write `data` at `offset`."""

    def truncate(self, length: int) -> None:
        """Cut or extend (with zeros) to `length` bytes."""

    def fdatasync(self) -> None:
        """Make contents and length survive a power cut. The directory entry needs `Files.sync_directory`."""

    def lock(self, *, exclusive: bool) -> bool:
        """Take the file's lock without waiting; False if another holder has it. Closing gives it back."""

    def close(self) -> None:
        """Close; a second call does nothing."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Files(Protocol):
    """A place to keep files. Paths are text; directory changes are durable only after `sync_directory`."""

    def open(self, path: str, mode: Mode) -> File:
        """Open a file; see `Mode`."""

    def rename(self, old: str, new: str) -> None:
        """Give a file a new name in the same directory, in place of a file of that name."""

    def remove(self, path: str) -> None:
        """Remove a file's name; an open file stays readable."""

    def list(self, path: str) -> list[str]:
        """Return the names in a directory, sorted."""

    def exists(self, path: str) -> bool:
        """Whether a file or directory has this name."""

    def stamp(self, path: str) -> tuple[int, ...]:
        """Return numbers that change once the file is written, or another one takes its place."""

    def make_directory(self, path: str) -> None:
        """Create a directory in an existing one, if it is not there yet."""

    def sync_directory(self, path: str) -> None:
        """Make a directory's names survive a power cut."""

    def clock(self) -> float:
        """Seconds of a clock that never goes back."""


class FileBase(Closing):
    """Context management for the implementations."""

    def close(self) -> None:
        raise NotImplementedError


def read_file(files: Files, path: str) -> bytes:
    """Return a whole file's contents."""
    with files.open(path, "r") as file:
        contents = bytearray(file.size())
        return bytes(memoryview(contents)[: file.read_into(contents, 0)])
