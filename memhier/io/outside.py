"""Parsing files from outside: an error that damage causes becomes a FormatError that names the file and the place."""

import csv
import lzma
import os
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod
from typing import IO, Any

import numpy as np

from memhier.errors import FormatError, MemhierError

__all__ = ["npy_header", "parse_npy_header", "reading"]

# MemoryError: of an array as large as a header says, which no file is.
_DAMAGE = (
    ArithmeticError, EOFError, LookupError, MemoryError, NotImplementedError, RuntimeError, SyntaxError, TypeError,
    ValueError, csv.Error, lzma.LZMAError, struct.error, tokenize.TokenError, zipfile.BadZipFile, zlib.error,
)  # fmt: skip


@contextmanager
def reading(path: str | os.PathLike[str], where: Callable[[], str] | str = "") -> Iterator[None]:
    """Turn errors in parsing a file into a FormatError; faults of the operating system stay as they are.

    Parameters
    ----------
    path
        Of the file.
    where
        The place reached, such as ``"line 7"``, or a function that returns it.
    """
    try:
        yield
    except MemhierError:
        raise
    except OSError as error:
        if error.errno:
            raise
        # gzip, HDF5 and arrow report damage so.
        raise _damage(path, where, error) from error
    except _DAMAGE as error:
        raise _damage(path, where, error) from error


def npy_header(
    file: IO[bytes], path: str | os.PathLike[str], size: int | None = None
) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Read the header of a .npy file and leave the file behind it.

    Parameters
    ----------
    file
        At its start.
    size
        Bytes that it has: an array is not longer, however large a header says it is. None where the caller compares.

    Returns
    -------
    shape : tuple of int
    by_column : bool
        Whether it is in Fortran order.
    dtype : numpy.dtype

    Raises
    ------
    FormatError
        When it is no such header, or the file has fewer bytes.
    """
    with reading(path, "no header of a .npy file"):
        shape, by_column, dtype = parse_npy_header(file)
    if size is None:
        return shape, by_column, dtype
    expected = file.tell() + prod(shape) * dtype.itemsize
    if size < expected:
        raise FormatError(f"{os.fspath(path)}: {size:,} bytes, expected {expected:,} as its header says: cut short")
    return shape, by_column, dtype


def parse_npy_header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Read a header as :func:`npy_header` does; errors do not name the file."""
    version = np.lib.format.read_magic(file)
    if version == (1, 0):
        shape, by_column, dtype = np.lib.format.read_array_header_1_0(file)
    elif version == (2, 0):
        shape, by_column, dtype = np.lib.format.read_array_header_2_0(file)
    else:
        raise ValueError(f"version {version} of .npy, expected 1.0 or 2.0")
    if min(shape, default=0) < 0 or (dtype.itemsize == 0 and shape):
        raise ValueError(f"an array of {dtype} {shape}")
    return shape, by_column, dtype


def _damage(path: str | os.PathLike[str], where: Callable[[], str] | str, error: Exception) -> FormatError:
    place = where() if callable(where) else where
    said = " ".join(str(error).split()) or type(error).__name__
    return FormatError(": ".join(part for part in (os.fspath(path), place, said) if part))
