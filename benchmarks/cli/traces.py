"""Traces of key accesses, read block by block: plain numbers, ``.npy``, and the formats of published traces."""

import gzip
import io
import lzma
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import numpy as np
import numpy.typing as npt

from memhier.errors import FormatError
from memhier.io.outside import parse_npy_header, reading

__all__ = ["TRACE_FORMATS", "guess_format", "read_blocks", "read_trace"]

Keys = npt.NDArray[np.int64]
File = IO[bytes] | gzip.GzipFile

_BLOCK = 1 << 22
# A line of its own in the traces of the LIRS paper, between parts; not an access.
_MARK = b"*"


def read_trace(path: str | os.PathLike[str], trace_format: str | None = None) -> Keys:
    """Return a whole trace, int64 [n]; arguments and errors as in :func:`read_blocks`."""
    blocks = list(read_blocks(path, trace_format))
    return np.concatenate(blocks) if blocks else np.empty(0, np.int64)


def read_blocks(path: str | os.PathLike[str], trace_format: str | None = None) -> Iterator[Keys]:
    """Yield a trace in blocks of int64 keys, holding a few MiB of the file at a time.

    Parameters
    ----------
    path
        A file, as it is or compressed (``.xz``, ``.gz``).
    trace_format
        One of :data:`TRACE_FORMATS`; by default :func:`guess_format` decides.

    Raises
    ------
    FormatError
        When the content does not have that format, or no format can be guessed.
    OSError
        When the file cannot be read.
    """
    chosen = guess_format(path) if trace_format is None else trace_format
    if chosen not in TRACE_FORMATS:
        raise ValueError(f"trace_format={chosen!r}: expected one of {', '.join(TRACE_FORMATS)}")
    count = 0
    with (
        reading(path, lambda: f"not a trace in the format {chosen!r} after {count:,} keys"),
        _open(Path(path)) as file,
    ):
        for block in TRACE_FORMATS[chosen](file):
            yield block
            count += len(block)


def guess_format(path: str | os.PathLike[str]) -> str:
    """Return the format of a trace by its publisher's file names, or by its first bytes."""
    name = Path(path).name.lower()
    for part, known in _NAMES.items():
        if part in name:
            return known
    with reading(path, "the file cannot be decompressed"), _open(Path(path)) as file:
        start = file.read(4096)
    if start.startswith(b"\x93NUMPY"):
        return "npy"
    if not start or set(start) <= set(b"0123456789- \t\r\n" + _MARK):
        columns = len(start.split(b"\n", 1)[0].split())
        if columns <= 1:
            return "text"
        if columns == 3:
            return "adapt-size"
    raise FormatError(f"{path}: no format recognised; name it (--format), one of {', '.join(TRACE_FORMATS)}")


# Parts of the file names of the public collections.
_NAMES = {
    "scarab": "int64-be",
    "cache2k": "int32-be",
    "cloud_physics": "uint32-le",
    "oraclegeneral": "oracle-general",
}


def _open(path: Path) -> File:
    if path.suffix == ".xz":
        return lzma.open(path, "rb")
    if path.suffix == ".gz":
        return gzip.open(path, "rb")
    return path.open("rb")


def _records(dtype: npt.DTypeLike, field: str | None = None) -> Callable[[File], Iterator[Keys]]:
    """Return a reader of packed records, whose field `field` is the key."""
    layout = np.dtype(dtype)

    def read(file: File) -> Iterator[Keys]:
        size = _BLOCK // layout.itemsize * layout.itemsize
        while raw := file.read(size):
            # A decompressor may return less than was asked for before the end.
            while len(raw) % layout.itemsize and (more := file.read(layout.itemsize - len(raw) % layout.itemsize)):
                raw += more
            if len(raw) % layout.itemsize:
                raise ValueError(f"{len(raw) % layout.itemsize} bytes are left over after records of {layout.itemsize}")
            records = np.frombuffer(raw, layout)
            yield (records if field is None else records[field]).astype(np.int64)

    return read


def _columns(column: int, columns: int) -> Callable[[File], Iterator[Keys]]:
    """Return a reader of lines of integers, of which `column` is the key; blank lines and marks are passed over."""

    def read(file: File) -> Iterator[Keys]:
        while lines := file.readlines(_BLOCK):
            lines = [line for line in lines if line.strip() not in (b"", _MARK)]
            numbers = np.array(b"".join(lines).split(), np.int64)
            if len(numbers) != columns * len(lines):
                raise ValueError(f"expected lines of {columns} integers")
            if len(numbers):
                yield numbers[column::columns].copy()

    return read


def _npy(file: File) -> Iterator[Keys]:
    contents = file.read()
    head = io.BytesIO(contents)
    shape, _, dtype = parse_npy_header(head)
    if len(shape) != 1 or dtype.kind not in "iu":
        raise ValueError(f"an array of {dtype} {shape}; expected integers [n]")
    yield np.frombuffer(contents, dtype, shape[0], head.tell()).astype(np.int64)


TRACE_FORMATS: dict[str, Callable[[File], Iterator[Keys]]] = {
    "text": _columns(0, 1),
    "npy": _npy,
    "int32-be": _records(">i4"),
    "int64-be": _records(">i8"),
    # Little-endian, though its collection says big-endian: read like this the highest block is 1,197,769, and two
    # accesses in five go on to one of the next eight blocks; read the other way not one does.
    "uint32-le": _records("<u4"),
    "adapt-size": _columns(1, 3),
    "oracle-general": _records([("time", "<u4"), ("key", "<u8"), ("size", "<u4"), ("next", "<i8")], "key"),
}
"""Names of formats, each with its reader of an open file.

``text``: one key a line; ``adapt-size``: lines of time, key and size; ``oracle-general``: libCacheSim's records. Sizes
are passed over: the simulator's rows have one size.
"""
