"""A simulated object store: an fsspec file system with latency, bandwidth, counts and injected faults."""

import mmap
import threading
import time
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import fsspec
from fsspec.spec import AbstractFileSystem

__all__ = ["FAULTS", "Bucket", "FileObjects", "Killed", "SimulatedStore", "simulated"]

FAULTS = ("error", "lost answer", "cut short", "flipped byte", "kill")


class Killed(BaseException):
    """The process that made the request is dead. Not an `Exception`, so that nothing brings it back to life."""


class FileObjects(MutableMapping[str, Any]):
    """Objects in the files of a folder, for more than DRAM holds."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir()

    def __getitem__(self, name: str) -> Any:
        try:
            with self._path(name).open("rb") as file:
                return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            raise KeyError(name) from None
        except ValueError:  # empty
            return b""

    def __setitem__(self, name: str, contents: bytes) -> None:
        self._path(name).write_bytes(contents)

    def __delitem__(self, name: str) -> None:
        self._path(name).unlink()

    def __iter__(self) -> Iterator[str]:
        return (unquote(path.name) for path in self._folder.iterdir())

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _path(self, name: str) -> Path:
        return self._folder / quote(name, safe="")


def _no_fault(number: int) -> str | None:
    return None


@dataclass
class Bucket:
    """The objects and the conduct of a simulated store. Requests are counted from 1.

    Attributes
    ----------
    latency_s, bytes_per_s
        Time that each request takes, and that its bytes take beside.
    fault
        Returns one of `FAULTS` for the number of a request, or None. ``"error"`` does nothing and raises; ``"lost
        answer"`` does the work and raises; ``"cut short"`` gives, or stores, half of the bytes, and an upload raises;
        ``"flipped byte"`` changes one on its way; ``"kill"`` raises `Killed`, at this request and every later one.
    requests, received, sent
        Requests so far, and the bytes of uploads and of downloads.
    """

    latency_s: float = 0.0
    bytes_per_s: float = float("inf")
    fault: Callable[[int], str | None] = field(default_factory=lambda: _no_fault)
    objects: MutableMapping[str, Any] = field(default_factory=dict)
    requests: int = 0
    received: int = 0
    sent: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    dead: bool = False

    def begin(self, nbytes: int) -> str | None:
        """Count a request, let it take its time, and return its fault."""
        with self.lock:
            self.requests += 1
            fault = self.fault(self.requests)
            self.dead |= fault == "kill"
        if self.dead:
            raise Killed
        self.wait(self.latency_s + nbytes / self.bytes_per_s)
        if fault == "error":
            raise OSError(5, "injected")
        return fault

    def wait(self, seconds: float) -> None:
        """Let time pass."""
        if seconds > 0:
            time.sleep(seconds)


_buckets: dict[str, Bucket] = {}


class SimulatedStore(AbstractFileSystem):  # type: ignore[misc]
    """Paths are ``<bucket>/<name>``; writes are whole objects, and seen at once by all."""

    protocol = "simulated"
    cachable = False

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        bucket, name = self._find(path)
        fault = bucket.begin(0)
        with bucket.lock:
            if name not in bucket.objects:
                raise FileNotFoundError(2, "no such object", path)
            found = bucket.objects[name][start:end]
            bucket.sent += len(found)
        bucket.wait(len(found) / bucket.bytes_per_s)
        if fault == "lost answer":
            raise OSError(110, "injected")
        return _damaged(found, fault)

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        bucket, name = self._find(path)
        fault = bucket.begin(len(value))
        with bucket.lock:
            if mode == "create" and name in bucket.objects:
                raise FileExistsError(17, "there is such an object", path)
            bucket.objects[name] = _damaged(bytes(value), fault)
            bucket.received += len(value)
        if fault in ("lost answer", "cut short"):
            raise OSError(110, "injected")

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        bucket, folder = self._find(path)
        fault = bucket.begin(0)
        with bucket.lock:
            names = [name for name in bucket.objects if name.startswith(f"{folder}/")]
            sizes = [len(bucket.objects[name]) for name in names]
        if fault == "lost answer":
            raise OSError(110, "injected")
        if not names:
            raise FileNotFoundError(2, "no such folder", path)
        head = str(self._strip_protocol(path)).partition("/")[0]
        paths = [f"{head}/{name}" for name in names]
        details = [{"name": path, "size": size, "type": "file"} for path, size in zip(paths, sizes, strict=True)]
        return details if detail else paths

    def rm_file(self, path: str) -> None:
        bucket, name = self._find(path)
        fault = bucket.begin(0)
        with bucket.lock:
            if bucket.objects.pop(name, None) is None:
                raise FileNotFoundError(2, "no such object", path)
        if fault == "lost answer":
            raise OSError(110, "injected")

    def _find(self, path: str) -> tuple[Bucket, str]:
        bucket, _, name = str(self._strip_protocol(path)).partition("/")
        return _buckets[bucket], name


def _damaged(contents: bytes, fault: str | None) -> bytes:
    if fault == "cut short":
        return contents[: len(contents) // 2]
    if fault == "flipped byte" and contents:
        middle = len(contents) // 2
        return contents[:middle] + bytes([contents[middle] ^ 0x10]) + contents[middle + 1 :]
    return contents


@contextmanager
def simulated(name: str, **conduct: Any) -> Iterator[Bucket]:
    """Have a bucket at ``simulated://<name>`` inside the block.

    Examples
    --------
    >>> with simulated("bucket") as bucket:
    ...     files = fsspec.filesystem("simulated")
    ...     files.pipe_file("bucket/folder/object", b"bytes")
    ...     files.cat_file("bucket/folder/object", 1, 3), bucket.requests
    (b'yt', 2)
    """
    fsspec.register_implementation("simulated", SimulatedStore, clobber=True)
    _buckets[name] = Bucket(**conduct)
    try:
        yield _buckets[name]
    finally:
        del _buckets[name]
