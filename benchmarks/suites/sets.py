"""The suites' data sets, read from where the suites themselves put them.

``ann-benchmarks`` and ``big-ann`` below the folder of data sets are the ``data`` folders of the two suites: a symbolic
link is enough. Nothing is downloaded: an error names a missing file and the address that the suite has it from.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.files import open_vectors, read_ground_truth
from memhier.errors import FormatError
from memhier.io.outside import reading

__all__ = ["SUITE_SETS", "SuiteSet", "read_suite_set"]

Matrix: TypeAlias = npt.NDArray[Any]
_BIN_DTYPES = {".u8bin": np.uint8, ".i8bin": np.int8, ".fbin": np.float32}


@dataclass(frozen=True, slots=True)
class SuiteSet:
    """The place of a data set.

    Attributes
    ----------
    base, queries, truth
        Paths below the folder of data sets; the same of an HDF5 file, which holds all.
    angular
        Whether vectors are compared by angle: they are given at unit length, where L2 ranks them the same.
    source
        The address that the suite downloads it from.
    """

    base: str
    queries: str
    truth: str
    angular: bool
    source: str


def read_suite_set(name: str, folder: Path) -> tuple[Matrix, Matrix, npt.NDArray[np.int64]]:
    """Return vectors, queries and ids of the true neighbours of one of :data:`SUITE_SETS`.

    Raises
    ------
    FileNotFoundError
        When a file is missing; the message says which to put where.
    FormatError
        When a file is damaged.
    """
    suite_set = SUITE_SETS[name]
    for path in dict.fromkeys((suite_set.base, suite_set.queries, suite_set.truth)):
        if not (folder / path).exists():
            raise FileNotFoundError(
                f"no data set {name!r}: put {Path(path).name} at {folder / path} (from {suite_set.source}), "
                f"or set MEMHIER_DATA"
            )
    if suite_set.base.endswith(".hdf5"):
        base, queries = (_read_hdf5(folder / suite_set.base, key) for key in ("train", "test"))
    else:
        base, queries = _map_bin(folder / suite_set.base), _map_bin(folder / suite_set.queries)
    if suite_set.angular:
        base, queries = _unit(base), _unit(queries)
    return base, queries, read_ground_truth(folder / suite_set.truth).ids


def _read_hdf5(path: Path, key: str) -> Matrix:
    with open_vectors(path, key=key) as vectors:
        return np.concatenate([block for _, block in vectors.blocks()])


def _map_bin(path: Path) -> Matrix:
    """Map a file whose name may end in ``.crop_nb_10000000``, as the suite calls the start of a larger one."""
    suffix = next((suffix for suffix in _BIN_DTYPES if suffix in path.suffixes), None)
    if suffix is None:
        raise FormatError(f"{path}: expected one of {', '.join(_BIN_DTYPES)} in its name")
    with reading(path, "the count and the dimension as uint32"):
        count, dimension = np.fromfile(path, np.uint32, 2).tolist()
    expected = 8 + count * dimension * np.dtype(_BIN_DTYPES[suffix]).itemsize
    if path.stat().st_size != expected:
        raise FormatError(f"{path}: {path.stat().st_size:,} bytes, expected {expected:,} as its header says")
    return np.memmap(path, _BIN_DTYPES[suffix], "r", 8, (count, dimension))


def _unit(vectors: Matrix) -> Matrix:
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    unit: Matrix = np.asarray(vectors / np.where(lengths == 0, 1, lengths), np.float32)
    return unit


def _hdf5(name: str) -> SuiteSet:
    path = f"ann-benchmarks/{name}.hdf5"
    return SuiteSet(path, path, path, name.endswith("-angular"), f"https://ann-benchmarks.com/{name}.hdf5")


def _billion(name: str, folder: str, suffix: str, source: str) -> SuiteSet:
    place = f"big-ann/{folder}"
    base, queries = f"{place}/base.1B{suffix}.crop_nb_10000000", f"{place}/query.public.10K{suffix}"
    return SuiteSet(base, queries, f"{place}/{name}", False, source)


SUITE_SETS: dict[str, SuiteSet] = {
    name: _hdf5(name)
    for name in (
        "sift-128-euclidean", "gist-960-euclidean", "fashion-mnist-784-euclidean", "mnist-784-euclidean",
        "glove-25-angular", "glove-50-angular", "glove-100-angular", "glove-200-angular", "nytimes-256-angular",
        "deep-image-96-angular",
    )
} | {
    "bigann-10M": _billion("bigann-10M", "bigann", ".u8bin", "create_dataset.py --dataset bigann-10M"),
    "deep-10M": _billion("deep-10M", "deep1b", ".fbin", "create_dataset.py --dataset deep-10M"),
}  # fmt: skip
