"""Vectors one after the other in a file: the families of .fvecs and .fbin, and .npy."""

import io
import os
import struct
from typing import Any, NoReturn

import numpy as np

from memhier.ann.files._reader import Block, VectorReader
from memhier.errors import FormatError
from memhier.files import File, Files
from memhier.io.outside import npy_header

__all__ = ["BIN_DTYPES", "VECS_DTYPES", "open_flat", "read_at"]

# TEXMEX, http://corpus-texmex.irisa.fr: each vector is its dimension as int32, then its values.
VECS_DTYPES: dict[str, np.dtype[Any]] = {".fvecs": np.dtype("<f4"), ".bvecs": np.dtype("u1"), ".ivecs": np.dtype("<i4")}
# big-ann-benchmarks, DiskANN, cuVS: the count and the dimension as uint32, then all values.
BIN_DTYPES: dict[str, np.dtype[Any]] = {
    ".fbin": np.dtype("<f4"),
    ".f16bin": np.dtype("<f2"),
    ".u8bin": np.dtype("u1"),
    ".i8bin": np.dtype("i1"),
    ".ibin": np.dtype("<i4"),
}

_NPY_HEADER_MAX = 1 << 16


class FlatVectors(VectorReader):
    """Rows of equal length behind a header; in the .fvecs family each begins with its dimension."""

    def __init__(
        self, file: File, count: int, dimension: int, stored: np.dtype[Any], *, header: int = 0, prefix: int = 0
    ) -> None:
        super().__init__(file.path, count, dimension, stored)
        self._file, self._stored, self._header, self._prefix = file, stored, header, prefix

    def close(self) -> None:
        """Close the file. May be called twice."""
        super().close()
        self._file.close()

    def _read(self, start: int, stop: int) -> Block:
        row_bytes = self._prefix + self.dimension * self._stored.itemsize
        raw = np.empty((stop - start, row_bytes), np.uint8)
        read_at(self._file, raw, self._header + start * row_bytes)
        if self._prefix:
            self._check_prefixes(raw, start)
        block = np.ascontiguousarray(raw[:, self._prefix :]).view(self._stored)
        return block.astype(self.dtype, copy=False)

    def _check_prefixes(self, raw: Block, start: int) -> None:
        found = np.ascontiguousarray(raw[:, : self._prefix]).view("<i4")[:, 0]
        wrong = np.flatnonzero(found != self.dimension)
        if len(wrong):
            row = start + int(wrong[0])
            raise FormatError(
                f"{self.name}: vector {row} at byte {row * raw.shape[1]:,} says dimension {found[wrong[0]]}, "
                f"expected {self.dimension} as in vector 0: the dimension changes, or the file is damaged"
            )


class _ColumnVectors(FlatVectors):
    """A .npy file in Fortran order: one run of values for each dimension."""

    def _read(self, start: int, stop: int) -> Block:
        out = np.empty((stop - start, self.dimension), self.dtype)
        column = np.empty(stop - start, self._stored)
        for number in range(self.dimension):
            read_at(self._file, column, self._header + (number * self.count + start) * self._stored.itemsize)
            out[:, number] = column
        return out


def open_flat(files: Files, path: str) -> VectorReader:
    """Open a file of one of the flat formats; its suffix names the format.

    Raises
    ------
    FormatError
        When the header is not of the format, or the file's size does not agree with it.
    """
    suffix = os.path.splitext(path)[1].lower()
    file = files.open(path, "r")
    try:
        if suffix in VECS_DTYPES:
            return _open_vecs(file, VECS_DTYPES[suffix])
        if suffix in BIN_DTYPES:
            return _open_bin(file, BIN_DTYPES[suffix])
        return _open_npy(file)
    except BaseException:
        file.close()
        raise


def read_at(file: File, array: Block, offset: int) -> None:
    """Fill a C-contiguous, non-empty `array` from `offset`.

    Raises
    ------
    FormatError
        When the file ends before.
    """
    got = file.read_into(array.data, offset)
    if got < array.nbytes:
        raise FormatError(
            f"{file.path}: the file ends at byte {offset + got:,}, expected {offset + array.nbytes:,} or more: "
            f"it was cut short"
        )


def _open_vecs(file: File, stored: np.dtype[Any]) -> VectorReader:
    size = file.size()
    dimension = struct.unpack("<i", _header(file, 4, "the dimension of a first vector"))[0]
    if dimension < 1:
        raise FormatError(f"{file.path}: vector 0 says dimension {dimension}, expected at least 1")
    row_bytes = 4 + dimension * stored.itemsize
    if size % row_bytes:
        raise FormatError(
            f"{file.path}: {size:,} bytes are {size // row_bytes:,} vectors of dimension {dimension} ({row_bytes:,} "
            f"bytes each) and {size % row_bytes:,} bytes more, expected whole vectors: the file was cut short, or "
            f"the dimension changes"
        )
    found = FlatVectors(file, size // row_bytes, dimension, stored, prefix=4)
    # A cheap check before a long build; reading blocks checks every vector.
    found.take([found.count - 1])
    return found


def _open_bin(file: File, stored: np.dtype[Any]) -> VectorReader:
    size = file.size()
    count, dimension = struct.unpack("<II", _header(file, 8, "the count and the dimension as uint32"))
    if dimension < 1:
        raise FormatError(f"{file.path}: the header says dimension {dimension}, expected at least 1")
    _check_size(file.path, size, 8, count, dimension, stored)
    return FlatVectors(file, count, dimension, stored, header=8)


def _open_npy(file: File) -> VectorReader:
    size = file.size()
    raw = bytearray(min(size, _NPY_HEADER_MAX))
    head = io.BytesIO(bytes(raw[: file.read_into(raw, 0)])) if raw else io.BytesIO()
    shape, by_column, stored = npy_header(head, file.path)
    if len(shape) != 2 or shape[0] < 0 or shape[1] < 1:
        raise FormatError(f"{file.path}: holds an array of shape {shape}, expected [n, d] with d of at least 1")
    if stored.kind not in "fiu":
        raise FormatError(f"{file.path}: holds {stored}, expected real numbers")
    _check_size(file.path, size, head.tell(), shape[0], shape[1], stored)
    kind = _ColumnVectors if by_column else FlatVectors
    return kind(file, shape[0], shape[1], stored, header=head.tell())


def _header(file: File, length: int, content: str) -> bytes:
    raw = bytearray(length)
    if file.read_into(raw, 0) < length:
        raise FormatError(f"{file.path}: {file.size()} bytes, expected at least {length}: {content}")
    return bytes(raw)


def _check_size(path: str, size: int, header: int, count: int, dimension: int, stored: np.dtype[Any]) -> None:
    expected = header + count * dimension * stored.itemsize
    if size != expected:
        _refuse_size(path, size, expected, f"{count:,} vectors of dimension {dimension} of {stored.name}")


def _refuse_size(path: str, size: int, expected: int, content: str) -> NoReturn:
    cause = "the file was cut short" if size < expected else "more follows"
    raise FormatError(
        f"{path}: {size:,} bytes, expected {expected:,} as the header says {content}: {cause}, or the header is wrong"
    )
