"""Opening a file of vectors by its suffix."""

import os

from memhier.ann.files._flat import BIN_DTYPES, VECS_DTYPES, open_flat
from memhier.ann.files._hdf5 import Hdf5Vectors
from memhier.ann.files._parquet import ParquetVectors
from memhier.ann.files._reader import VectorReader, path_text
from memhier.ann.files._remote import is_local
from memhier.files import Files, RealFiles

__all__ = ["HDF5_SUFFIXES", "open_vectors"]

HDF5_SUFFIXES = (".hdf5", ".h5")
_FLAT = (*VECS_DTYPES, *BIN_DTYPES, ".npy")


def open_vectors(
    path: str | os.PathLike[str], *, key: str | None = None, column: str | None = None, files: Files | None = None
) -> VectorReader:
    """Open a file of vectors, which is read in blocks and never held whole.

    Parameters
    ----------
    path
        A file; its suffix names the format: ``.fvecs``, ``.bvecs``, ``.ivecs``, ``.fbin``, ``.f16bin``, ``.u8bin``,
        ``.i8bin``, ``.ibin``, ``.npy``, ``.hdf5`` or ``.h5`` (with the extra ``hdf5``), ``.parquet`` (with the extra
        ``parquet``). Compressed files are not read. A Parquet file may be a URL that fsspec knows, such as
        ``s3://bucket/x.parquet`` (with the extra ``remote`` and the package of its protocol), and is then read by
        ranges.
    key
        The data set of an HDF5 file; ``"train"`` by default, the vectors to index in files of ann-benchmarks, beside
        ``"test"``, ``"neighbors"`` and ``"distances"``.
    column
        The column of lists of a Parquet file; by default the only one.
    files
        File layer of the formats that need no other package; the operating system's by default.

    Returns
    -------
    VectorReader
        With ``count``, ``dimension``, ``dtype``, ``blocks()``, ``take(rows)`` and ``close()``.

    Raises
    ------
    OSError
        When the file cannot be opened.
    FormatError
        When it is damaged, or not of the format that its suffix names. Damage further on is found when it is read.
    ValueError, TypeError
        When the suffix is unknown, or `key` or `column` is not for this file.
    ImportError
        When a package is missing; the message names the extra.

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np
    >>> from memhier.ann import open_vectors, write_vectors
    >>> path = tempfile.mkdtemp() + "/vectors.fvecs"
    >>> write_vectors(path, np.eye(3, dtype="float32"))
    >>> with open_vectors(path) as vectors:
    ...     vectors.count, vectors.dimension, vectors.take([2])
    (3, 3, array([[0., 0., 1.]], dtype=float32))
    """
    name = path_text(path)
    suffix = os.path.splitext(name if is_local(name) else name.partition("?")[0])[1].lower()
    if key is not None and suffix not in HDF5_SUFFIXES:
        raise ValueError(f"key={key!r}: {name} is no HDF5 file ({', '.join(HDF5_SUFFIXES)}); leave key out")
    if column is not None and suffix != ".parquet":
        raise ValueError(f"column={column!r}: {name} is no Parquet file (.parquet); leave column out")
    if suffix != ".parquet" and not is_local(name):
        raise ValueError(f"path={name!r}: only Parquet files (.parquet) are read from a URL; copy others to a disk")
    if suffix in HDF5_SUFFIXES:
        return Hdf5Vectors(name, "train" if key is None else key)
    if suffix == ".parquet":
        return ParquetVectors(name, column)
    if suffix in _FLAT:
        return open_flat(files or RealFiles(), name)
    known = ", ".join((*_FLAT, *HDF5_SUFFIXES, ".parquet"))
    raise ValueError(f"path={name!r}: the suffix {suffix!r} is not one of {known}; compressed files must be unpacked")
