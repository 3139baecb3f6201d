"""Transactions: changes of a store that are made all or not at all."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from memhier.errors import ClosedError
from memhier.files import File, Files
from memhier.shield import shielded
from memhier.store.catalog import Catalog
from memhier.store.contents import PAGE_BYTES, Contents, SegmentInfo, segment_file_name
from memhier.store.segments import (
    BUFFER_BYTES,
    FullError,
    PatientSegmentWriter,
    SegmentWriter,
    finish_segments,
    is_full,
    said_as_full,
)
from memhier.store.staging import Staging

__all__ = ["Transaction", "check_key", "check_value_size"]

_KEY_BYTES_MAX = 400  # LMDB takes 511, our prefix included.
_VALUE_BYTES_MAX = 16 * 2**20
_CATALOG_BYTES = 2**18  # more than a commit of few values adds to the catalog


def check_key(key: str) -> None:
    """Raise unless the catalog can hold a key."""
    if not isinstance(key, str):
        raise TypeError(f"key={key!r}: expected text")
    if not 1 <= len(key.encode()) <= _KEY_BYTES_MAX:
        raise ValueError(f"key={key!r}: expected 1 to {_KEY_BYTES_MAX} bytes of UTF-8")


def check_value_size(key: str, value: bytes) -> None:
    """Raise if a value is too large for the catalog."""
    if len(value) > _VALUE_BYTES_MAX:
        raise ValueError(
            f"value of {key!r}: {len(value):,} bytes, expected at most {_VALUE_BYTES_MAX:,}; write a segment instead"
        )


class Transaction:
    """Changes that become visible together at `commit`, or not at all. Made by `Store.begin`; for one thread.

    Leaving its ``with`` block without `commit` aborts it and removes the files that it wrote.

    Parameters
    ----------
    directory
        The store's segments.
    catalog
        Takes the changes at the commit.
    contents
        Those of the last commit.
    ended
        Called once, at the end: with the contents after the commit, or None, and with the error after which the disk
        may hold either generation, or None.
    """

    def __init__(
        self, files: Files, directory: Path, catalog: Catalog, contents: Contents,
        ended: Callable[[Contents | None, BaseException | None], None], buffer_bytes: int = BUFFER_BYTES,
    ) -> None:  # fmt: skip
        self._files = files
        self._directory = directory
        self._catalog = catalog
        self._contents = contents
        self._ended = ended
        self._generation = contents.generation + 1
        self._buffer_bytes = buffer_bytes
        self._writers: dict[str, SegmentWriter] = {}
        self._adopted: dict[str, SegmentInfo] = {}
        self._dropped: set[str] = set()
        self._values: dict[str, bytes | None] = {}
        self._room = 0  # bytes that the disk had for the catalog
        self._pid = os.getpid()
        self._open = True

    @property
    def memory_bytes(self) -> int:
        """DRAM held by write buffers, checksums and values, in bytes; any thread may read it."""
        values = sum(len(key) + len(value or b"") for key, value in list(self._values.items()))
        return values + sum(writer.memory_bytes for writer in list(self._writers.values()))

    def check_open(self) -> None:
        """Raise ClosedError when it is over, or in a forked child."""
        if not self._open:
            raise ClosedError("the transaction is over")
        if self._pid != os.getpid():
            raise ClosedError(f"the transaction belongs to process {self._pid}, which forked this one")

    @shielded
    def segment(self, name: str, *, patient: bool = False) -> SegmentWriter:
        """Begin a new segment; an older one of this name is replaced at commit.

        Parameters
        ----------
        name
            Its name in the catalog.
        patient
            A full disk does not end the transaction: see `PatientSegmentWriter`.

        Raises
        ------
        ValueError
            When `name` is not 1 to 100 letters, digits, ``-`` or ``_``, or was begun in this transaction already.
        """
        return self._begin([name], patient)[0]

    @shielded
    def segments(self, names: Sequence[str], *, patient: bool = False) -> list[SegmentWriter]:
        """Begin several new segments, all or none; see `segment`."""
        return self._begin(names, patient)

    def _begin(self, names: Sequence[str], patient: bool) -> list[SegmentWriter]:
        self.check_open()
        for name in names:
            self._check_unwritten(name)
        paths = [self._directory / segment_file_name(name, self._generation) for name in names]
        files: list[File] = []
        try:
            with said_as_full() if patient else nullcontext():
                for path in paths:
                    file = self._files.open(str(path), "x")
                    files.append(file)
        except BaseException as error:
            for file in files:
                file.close()
                with suppress(OSError):
                    self._files.remove(file.path)
            if not isinstance(error, FullError):
                self.abort()
            raise
        kind = PatientSegmentWriter if patient else SegmentWriter
        made = [
            kind(name, self._generation, path, file, self.abort, self._buffer_bytes)
            for name, path, file in zip(names, paths, files, strict=True)
        ]
        self._writers.update(zip(names, made, strict=True))
        return made

    def reserve(self, values_bytes: int) -> None:
        """Take the room on disk that `commit` needs, `values_bytes` of values included, as far as it can be known.

        Raises
        ------
        FullError
            When there is too little; nothing has changed then.
        """
        self.check_open()
        pages = 0
        for writer in self._writers.values():
            if isinstance(writer, PatientSegmentWriter):
                writer.reserve()
            pages += writer.length // PAGE_BYTES
        with said_as_full():
            self._take_room(_CATALOG_BYTES + 2 * (values_bytes + 4 * pages))

    def _take_room(self, size: int) -> None:
        """Raise unless the disk has room for so many bytes of the catalog: it writes pages anew, then checksums."""
        if size <= self._room:
            return
        room = str(self._directory.parent / "tmp" / "room")
        try:
            with self._files.open(room, "w") as file:
                for offset in range(0, size, PAGE_BYTES):  # a byte takes a page of the disk
                    file.pwrite(b"0", offset)
        finally:
            with suppress(OSError):
                self._files.remove(room)
        self._room = size

    @shielded
    def adopt(self, staging: Staging) -> None:
        """Take over the finished segments of a staging: only the names of their files change.

        Raises
        ------
        ValueError
            When this transaction writes a segment of such a name.
        OSError
            When a file cannot be renamed; the transaction is then aborted.
        """
        self.check_open()

        def move(info: SegmentInfo) -> None:
            self._check_unwritten(info.name)
            path = self._directory / segment_file_name(info.name, self._generation)
            self._files.rename(str(info.path), str(path))
            self._adopted[info.name] = replace(info, path=path, generation=self._generation)

        try:
            staging.take(move)
        except BaseException:
            self.abort()
            raise

    def _check_unwritten(self, name: str) -> None:
        if name in self._writers or name in self._adopted:
            raise ValueError(f"name={name!r}: this transaction already writes a segment of that name")

    @shielded
    def drop(self, name: str) -> None:
        """Remove a committed segment. Readers that have it open keep it.

        Raises
        ------
        KeyError
            When there is no such segment.
        """
        self.check_open()
        if name not in self._contents.segments or name in self._dropped:
            raise KeyError(f"name={name!r}: no such segment; there are {sorted(self._contents.segments)}")
        self._dropped.add(name)

    def discard(self, name: str) -> None:
        """Take back a segment that this transaction writes, and remove its file.

        Raises
        ------
        KeyError
            When it writes none of that name.
        """
        self.check_open()
        if name not in self._writers:
            raise KeyError(f"name={name!r}: this transaction writes {self.written}")
        writer = self._writers.pop(name)
        writer.close()
        # A file that stays is part of nothing: the commit removes it.
        with suppress(OSError):
            self._files.remove(str(writer.path))

    @property
    def changed(self) -> list[str]:
        """Keys of the values that it sets or removes."""
        return [*self._values]

    @property
    def written(self) -> list[str]:
        """Names of the segments that it writes."""
        return [*self._adopted, *self._writers]

    def swap_dropped(self, names: list[str]) -> list[str]:
        """Drop these committed segments in place of those dropped so far, which are returned."""
        kept, self._dropped = sorted(self._dropped), set(names)
        return kept

    @shielded
    def put(self, key: str, value: Any) -> None:
        """Set a value of the catalog.

        Parameters
        ----------
        key
            1 to 400 bytes of UTF-8.
        value
            A C-contiguous buffer of at most 16 MiB: every open store holds it in DRAM. Larger things belong in a
            segment.
        """
        self._put([(key, value)])

    @shielded
    def put_all(self, values: Mapping[str, Any]) -> None:
        """Set values of the catalog, all or none; keys and values as in `put`."""
        self._put(values.items())

    def _put(self, values: Iterable[tuple[str, Any]]) -> None:
        self.check_open()
        changes = {}
        for key, value in values:
            check_key(key)
            changes[key] = bytes(value) if isinstance(value, bytes | bytearray) else memoryview(value).tobytes()
            check_value_size(key, changes[key])
        self._values.update(changes)

    @shielded
    def delete(self, key: str) -> None:
        """Remove a value of the catalog.

        Raises
        ------
        KeyError
            When there is none.
        """
        self.check_open()
        check_key(key)
        if self._values.get(key, self._contents.values.get(key)) is None:
            raise KeyError(f"key={key!r}: no such value")
        self._values[key] = None

    @shielded
    def commit(self) -> int:
        """Make all changes durable and visible; return the new generation.

        Raises
        ------
        OSError
            When a write fails, or the disk is full: the transaction is then aborted, and the store stays open. When a
            sync or a write of the catalog fails, it is closed for writing. It can be opened again, at the last commit
            or, if only the last step failed, at this one.
        """
        self.check_open()
        try:
            written = [*self._adopted.values(), *finish_segments([*self._writers.values()])]
            if written:
                self._files.sync_directory(str(self._directory))
        except BaseException as error:
            if self._open:  # a failed write has aborted it
                self._forget(None if is_full(error) else error)
            raise
        following, changes = self._contents.changed(self._values, written, self._dropped)
        try:
            self._take_room(self._catalog.room(changes))
        except BaseException:
            self.abort()
            raise
        self._open = False
        self._writers = {}  # they know this transaction: their buffers would stay until Python looks for cycles
        try:
            self._catalog.commit(changes)
            self._catalog.publish()
        except BaseException as error:
            # The disk may hold either generation now, so the new files stay until the next writer has looked.
            self._ended(None, error)
            raise
        self._ended(following, None)
        return self._generation

    @shielded
    def abort(self) -> None:
        """Forget everything and remove the files that were written. A second call does nothing."""
        if self._open and self._pid == os.getpid():
            self._forget(None)

    def _forget(self, error: BaseException | None) -> None:
        self._open = False
        self._ended(None, error)
        writers, self._writers = self._writers, {}
        adopted, self._adopted = self._adopted, {}
        for writer in writers.values():
            writer.close()
        for path in [*(writer.path for writer in writers.values()), *(info.path for info in adopted.values())]:
            # A file that stays is part of nothing; the next writer removes it.
            with suppress(OSError):
                self._files.remove(str(path))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._open:
            self.abort()
