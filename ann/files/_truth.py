"""Ground truth: the true neighbours of a set of queries."""

import os
import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from memhier.ann.files._flat import BIN_DTYPES, VECS_DTYPES, read_at
from memhier.ann.files._open import HDF5_SUFFIXES, open_vectors
from memhier.ann.files._reader import VectorReader, path_text
from memhier.errors import FormatError
from memhier.files import Files, RealFiles

__all__ = ["GroundTruth", "read_ground_truth"]

_NOT_TRUTH = {*VECS_DTYPES, *BIN_DTYPES, ".npy", ".parquet"} - {".ivecs", ".ibin"}
_NO_ID = 2**32 - 1


@dataclass(frozen=True, slots=True)
class GroundTruth:
    """True neighbours, nearest first.

    Attributes
    ----------
    ids
        int64 ``[q, k]``; -1 where the file has none.
    distances
        float32 ``[q, k]`` as the file has them, or None where it has none.

    Examples
    --------
    >>> import numpy as np
    >>> from memhier.ann import GroundTruth
    >>> truth = GroundTruth(np.array([[3, 1], [2, 0]]), None)
    >>> found = np.array([[3, 1], [2, 4]])
    >>> float(np.mean([len(np.intersect1d(*rows)) / 2 for rows in zip(truth.ids, found)]))  # recall
    0.75
    """

    ids: npt.NDArray[np.int64]
    distances: npt.NDArray[np.float32] | None


def read_ground_truth(path: str | os.PathLike[str], *, files: Files | None = None) -> GroundTruth:
    """Read a file of ground truth.

    Parameters
    ----------
    path
        ``.ivecs``; HDF5 of ann-benchmarks (data sets ``neighbors`` and ``distances``); or, with any suffix, the
        form of big-ann-benchmarks: the numbers of queries and neighbours as uint32, the ids as int32 or uint32, and
        the distances as float32, which may be left out.
    files
        File layer; the operating system's by default.

    Raises
    ------
    OSError
        When the file cannot be opened.
    FormatError
        When the file is damaged or of another kind.
    ValueError, TypeError, ImportError
        As :func:`open_vectors`.

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np
    >>> from memhier.ann import read_ground_truth, write_vectors
    >>> path = tempfile.mkdtemp() + "/truth.ivecs"
    >>> write_vectors(path, np.array([[3, 1], [2, 0]], "int32"))
    >>> truth = read_ground_truth(path)
    >>> truth.ids.tolist(), truth.distances
    ([[3, 1], [2, 0]], None)
    """
    name = path_text(path)
    suffix = os.path.splitext(name)[1].lower()
    if suffix in HDF5_SUFFIXES:
        with open_vectors(name, key="neighbors") as ids, open_vectors(name, key="distances") as distances:
            shapes = (ids.count, ids.dimension), (distances.count, distances.dimension)
            if shapes[0] != shapes[1]:
                raise FormatError(
                    f"{name}: neighbors of shape {shapes[0]} and distances of shape {shapes[1]}, expected the same"
                )
            return GroundTruth(_ids(ids), _whole(distances).astype(np.float32))
    if suffix == ".ivecs":
        with open_vectors(name, files=files) as ids:
            return GroundTruth(_ids(ids), None)
    if suffix in _NOT_TRUTH:
        raise ValueError(
            f"path={name!r}: {suffix} holds vectors, expected ground truth: .ivecs, .hdf5, .h5, or a file of "
            f"big-ann-benchmarks such as .ibin or .bin"
        )
    return _read_big_ann(files or RealFiles(), name)


def _read_big_ann(files: Files, path: str) -> GroundTruth:
    with files.open(path, "r") as file:
        size, header = file.size(), bytearray(8)
        if file.read_into(header, 0) < 8:
            raise FormatError(f"{path}: {size} bytes, expected at least 8: the numbers of queries and neighbours")
        queries, neighbours = struct.unpack("<II", header)
        values = 4 * queries * neighbours
        if values == 0 or size not in (8 + values, 8 + 2 * values):
            raise FormatError(
                f"{path}: {size:,} bytes, expected {8 + values:,} (ids) or {8 + 2 * values:,} (ids and distances), as "
                f"the header says {queries:,} queries of {neighbours:,} neighbours: the file was cut short, is no "
                f"ground truth, or the header is wrong"
            )
        ids = np.empty((queries, neighbours), "<u4")
        read_at(file, ids, 8)
        distances = None
        if size > 8 + values:
            distances = np.empty((queries, neighbours), "<f4")
            read_at(file, distances, 8 + values)
    wide = ids.astype(np.int64)
    wide[wide == _NO_ID] = -1  # -1 written as uint32
    return GroundTruth(wide, None if distances is None else distances.astype(np.float32, copy=False))


def _whole(vectors: VectorReader) -> npt.NDArray[np.generic]:
    return vectors.take(np.arange(vectors.count))


def _ids(vectors: VectorReader) -> npt.NDArray[np.int64]:
    if vectors.dtype.kind not in "iu":
        raise FormatError(f"{vectors.name}: holds {vectors.dtype}, expected integer ids")
    return _whole(vectors).astype(np.int64)
