"""Segments that are written beside transactions, until one takes them over by changing the names of their files.

They lie in ``tmp``, which is no part of the store: the next writer removes those of a process that died.
"""

import itertools
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from memhier.errors import ClosedError
from memhier.files import Files
from memhier.store.contents import SegmentInfo, segment_file_name
from memhier.store.segments import BUFFER_BYTES, SegmentWriter, finish_segments

__all__ = ["Staging"]

_NUMBERS = itertools.count()


class Staging:
    """Segments to come. Made by `Store.stage`; for one thread, which need not be that of the transactions.

    An error in its ``with`` block drops it.

    Parameters
    ----------
    files
        The file layer of the store.
    directory
        The store's scratch directory.
    buffer_bytes
        As in `Store.begin`.
    """

    def __init__(self, files: Files, directory: Path, buffer_bytes: int = BUFFER_BYTES) -> None:
        self._files, self._directory, self._buffer_bytes = files, directory, buffer_bytes
        self._number = next(_NUMBERS)  # no two stagings share a file
        self._writers: dict[str, SegmentWriter] = {}
        self._written: list[SegmentInfo] = []
        self._pid = os.getpid()
        self._open = True

    def segment(self, name: str) -> SegmentWriter:
        """Begin a new segment.

        Raises
        ------
        ClosedError
            When it is finished or dropped.
        ValueError
            When `name` is not 1 to 100 letters, digits, ``-`` or ``_``, or was begun already.
        """
        if not self._open:
            raise ClosedError("the staging is over")
        if name in self._writers:
            raise ValueError(f"name={name!r}: a segment of that name is staged already")
        path = self._directory / f"{segment_file_name(name, self._number)}.staged"
        writer = SegmentWriter(name, 0, path, self._files.open(str(path), "x"), self.drop, self._buffer_bytes)
        self._writers[name] = writer
        return writer

    def finish(self) -> None:
        """Make the segments durable; a transaction can then take them over."""
        self._open = False
        try:
            self._written = finish_segments([*self._writers.values()])
        except BaseException:
            self.drop()
            raise
        self._writers = {}

    @property
    def length(self) -> int:
        """Bytes of the finished segments."""
        return sum(info.length for info in self._written)

    def take(self, move: Callable[[SegmentInfo], None]) -> None:
        """Pass each finished segment to `move`, which gives its file another name. For transactions."""
        while self._written:
            move(self._written[-1])
            self._written.pop()

    def drop(self) -> None:
        """Remove the files that no transaction took over. A second call, or one in a forked child, does nothing."""
        if self._pid != os.getpid():
            return
        self._open = False
        writers, self._writers = self._writers, {}
        for writer in writers.values():
            writer.close()
        paths = {writer.path for writer in writers.values()} | {info.path for info in self._written}
        self._written = []
        for path in sorted(paths):
            with suppress(OSError):  # the next writer removes it
                self._files.remove(str(path))

    def __enter__(self) -> "Staging":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.drop()
