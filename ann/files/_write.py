"""Writing vectors to a file, block by block: under another name until it is whole."""

import errno
import io
import os
import struct
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np

from memhier.ann.files._containers import as_array, as_rows
from memhier.ann.files._flat import BIN_DTYPES, VECS_DTYPES
from memhier.ann.files._reader import Block, VectorReader, block_rows, path_text
from memhier.ann.files._sliced import SlicedVectors
from memhier.errors import LockedError
from memhier.files import File, Files, RealFiles

__all__ = ["write_vectors"]

_COUNT_MAX = 2**32 - 1
# None: a file of this kind takes any.
_DTYPES: dict[str, np.dtype[Any] | None] = {**VECS_DTYPES, **BIN_DTYPES, ".npy": None}


def write_vectors(path: str | os.PathLike[str], vectors: object, *, files: Files | None = None) -> None:
    """Write vectors to a new file, which appears under its name once it is whole and on disk.

    Parameters
    ----------
    path
        A path that does not exist yet. Its suffix says the format: ``.fvecs``, ``.bvecs``, ``.ivecs``, ``.fbin``,
        ``.f16bin``, ``.u8bin``, ``.i8bin``, ``.ibin`` or ``.npy``. Until the file is whole, its name ends in
        ``.unfinished``; a file that a killed process left there is overwritten.
    vectors
        A matrix ``[n, d]`` in any container that :meth:`ZoomIndex.build` takes, a :class:`VectorReader`, or an iterable
        of blocks ``[rows, d]``. Floats are rounded to a format of floats; integers must fit into one of integers. A
        .npy file takes the dtype of the first block.
    files
        File layer; the operating system's by default.

    Raises
    ------
    FileExistsError
        When something has this name already.
    LockedError
        When another process is writing to it.
    ValueError, TypeError
        When the suffix is unknown, there is no vector, blocks differ in dimension, or values do not fit, such as
        floats into a format of integers. Nothing is left behind.

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np
    >>> from memhier.ann import open_vectors, write_vectors
    >>> path = tempfile.mkdtemp() + "/vectors.u8bin"
    >>> write_vectors(path, (np.full((2, 4), value) for value in (1, 2)))
    >>> with open_vectors(path) as vectors:
    ...     vectors.count, vectors.dimension, vectors.dtype
    (4, 4, dtype('uint8'))
    """
    name, layer = os.path.abspath(path_text(path)), files or RealFiles()
    suffix = os.path.splitext(name)[1].lower()
    if suffix not in _DTYPES:
        raise ValueError(f"path={name!r}: the suffix {suffix!r} is not one of {', '.join(_DTYPES)}")
    _refuse_existing(layer, name)
    unfinished = f"{name}.unfinished"
    with layer.open(unfinished, "a") as file:
        if not file.lock(exclusive=True):
            raise LockedError(f"{name} is being written by another process: wait for it, or choose another name")
        try:
            # The process that held the lock may just have finished, and this is the finished file.
            _refuse_existing(layer, name)
            file.truncate(0)
            _write(file, suffix, vectors)
            file.fdatasync()
            _refuse_existing(layer, name)
            layer.rename(unfinished, name)
        except BaseException:
            with suppress(OSError):  # the first error matters more
                layer.remove(unfinished)
            raise
        layer.sync_directory(os.path.dirname(name))


def _refuse_existing(files: Files, path: str) -> None:
    if files.exists(path):
        raise FileExistsError(errno.EEXIST, "exists already, and vectors are never written over it", path)


def _write(file: File, suffix: str, vectors: object) -> None:
    count, dimension, dtype = 0, 0, _DTYPES[suffix]
    for given in _blocks(vectors):
        block = _checked(given, count)
        if dimension == 0:
            dimension, dtype = block.shape[1], block.dtype if dtype is None else dtype
            file.append(_header(suffix, dtype, 0, dimension))
        if block.shape[1] != dimension:
            raise ValueError(
                f"the block from row {count} has dimension {block.shape[1]}, expected {dimension} as before"
            )
        assert dtype is not None
        if suffix == ".npy" and block.dtype != dtype:
            raise ValueError(f"the block from row {count} has dtype {block.dtype}, expected {dtype} as before")
        if len(block):
            values = _fitted(block, dtype, count)
            file.append((_prefixed(values) if suffix in VECS_DTYPES else values).data)
        count += len(block)
    if count == 0 or dtype is None:
        raise ValueError("vectors is empty: a file needs at least one vector")
    if suffix in BIN_DTYPES and count > _COUNT_MAX:
        raise ValueError(f"{count:,} vectors: {suffix} counts up to {_COUNT_MAX:,}; write .npy instead")
    file.pwrite(_header(suffix, dtype, count, dimension), 0)


def _blocks(vectors: Any) -> Iterator[Block]:
    """Yield pieces of bounded size, so that converting an array does not take as much memory as the array."""
    if isinstance(vectors, VectorReader):
        yield from (block for _, block in vectors.blocks())
        return
    if (held := as_rows(vectors)) is not None:
        yield from (block for _, block in SlicedVectors(held, "vectors").blocks())
        return
    whole = hasattr(vectors, "__array__") or hasattr(vectors, "__dlpack__")
    if not whole and (isinstance(vectors, str) or not isinstance(vectors, Iterable)):
        raise TypeError(f"vectors={type(vectors).__name__}: expected an array [n, d] or an iterable of such blocks")
    for item in [vectors] if whole else vectors:
        matrix = as_array(item)
        if matrix.ndim != 2 or matrix.shape[1] == 0:
            raise ValueError(f"vectors: a block has shape {matrix.shape}, expected [rows, d] with d of at least 1")
        rows = block_rows(matrix.shape[1], matrix.dtype)
        for start in range(0, max(1, len(matrix)), rows):
            yield matrix[start : start + rows]


def _checked(block: Block, start: int) -> Block:
    if block.dtype.kind not in "fiu":
        raise TypeError(f"vectors: the block from row {start} has dtype {block.dtype}, expected real numbers")
    return block


def _fitted(block: Block, dtype: np.dtype[Any], start: int) -> Block:
    """Return a block as it will lie in the file."""
    if dtype.kind == "f":
        with np.errstate(over="ignore"):  # reported below
            out = np.ascontiguousarray(block, dtype)
        lost = np.isfinite(block) & ~np.isfinite(out)
        if lost.any():
            row = int(np.flatnonzero(lost.any(axis=1))[0])
            raise ValueError(f"vectors row {start + row} holds {block[lost][0]}, which {dtype.name} cannot hold")
        return out
    if block.dtype.kind == "f":
        raise TypeError(
            f"vectors: the block from row {start} has dtype {block.dtype}, expected integers for {dtype.name}"
        )
    limits = np.iinfo(dtype)
    wrong = (block < limits.min) | (block > limits.max)
    if wrong.any():
        row = start + int(np.flatnonzero(wrong.any(axis=1))[0])
        raise ValueError(
            f"vectors row {row} holds {block[wrong][0]}, expected {limits.min} to {limits.max} ({dtype.name})"
        )
    return np.ascontiguousarray(block, dtype)


def _prefixed(values: Block) -> Block:
    raw = np.empty((len(values), 4 + values.shape[1] * values.dtype.itemsize), np.uint8)
    raw[:, :4] = np.frombuffer(struct.pack("<i", values.shape[1]), np.uint8)
    raw[:, 4:] = values.view(np.uint8)
    return raw


def _header(suffix: str, dtype: np.dtype[Any], count: int, dimension: int) -> bytes:
    """Return a header, of the same length for every `count`: the true count is put in at the end."""
    if suffix in VECS_DTYPES:
        return b""
    if suffix in BIN_DTYPES:
        return struct.pack("<II", count, dimension)
    raw = io.BytesIO()
    about = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (count, dimension)}
    np.lib.format.write_array_header_1_0(raw, about)
    return raw.getvalue()
