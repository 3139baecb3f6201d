"""Real data sets, read from a local folder: ``MEMHIER_DATA``, or ``../shared/data`` beside the checkout."""

import io
import lzma
import os
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.benchmarks.suites.sets import SUITE_SETS, read_suite_set
from memhier.io.outside import npy_header, reading

__all__ = ["SEARCH_SETS", "SearchSet", "data_folder", "load_search_set", "use_data_folder"]

Matrix: TypeAlias = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class SearchSet:
    """Vectors to index and held-out queries, both ``[n, d]``, and ids of true neighbours where a file has them."""

    name: str
    base: Matrix
    queries: Matrix
    truth: npt.NDArray[np.int64] | None = None


def data_folder() -> Path:
    """Return where data sets are looked for; it need not exist."""
    named = os.environ.get("MEMHIER_DATA")
    return Path(named) if named else Path(__file__).resolve().parents[2] / "shared" / "data"


def use_data_folder(folder: Path) -> None:
    """Look for data sets in `folder` from now on, in the processes that this one starts, too."""
    os.environ["MEMHIER_DATA"] = str(folder.resolve())


def load_search_set(name: str) -> SearchSet:
    """Return one of :data:`SEARCH_SETS`, or of the :data:`~memhier.benchmarks.suites.sets.SUITE_SETS`.

    Raises
    ------
    FileNotFoundError
        When its folder or a file is missing; the message says what was looked for where.
    """
    if name in SUITE_SETS:
        return SearchSet(name, *read_suite_set(name, data_folder()))
    if name not in SEARCH_SETS:
        raise ValueError(f"name={name!r}: expected one of {', '.join((*SEARCH_SETS, *SUITE_SETS))}")
    folder = data_folder() / name
    if not folder.is_dir():
        raise FileNotFoundError(f"no data set {name!r} at {folder}: put it there, or set MEMHIER_DATA")
    return SEARCH_SETS[name](name, folder)


def _load_images(name: str, folder: Path) -> SearchSet:
    base = _read_idx_images(folder / "train-images-idx3-ubyte.xz")
    queries = _read_idx_images(folder / "t10k-images-idx3-ubyte.xz")
    # Some copies are sorted by class: shuffled, so that a build that sees the start of the file sees all of it.
    random = np.random.default_rng(0)
    return SearchSet(name, base[random.permutation(len(base))], queries[random.permutation(len(queries))[:1000]])


def _load_sift(name: str, folder: Path) -> SearchSet:
    return SearchSet(name, _read_npy(folder / "base_u8.npy.xz"), _read_npy(folder / "query_u8.npy.xz"))


def _read_idx_images(path: Path) -> Matrix:
    raw = _decompress(path)
    with reading(path, "no IDX file of images"):
        magic, count, rows, columns = np.frombuffer(raw, ">u4", 4).tolist()
        if magic != 0x803:
            raise ValueError(f"magic {magic:#x} is not that of an IDX image file")
        return np.frombuffer(raw, np.uint8, offset=16).reshape(count, rows * columns)


def _decompress(path: Path) -> bytes:
    with reading(path, "it is cut or damaged, copy it again"):
        return lzma.decompress(path.read_bytes())


def _read_npy(path: Path) -> Matrix:
    raw = _decompress(path)
    head = io.BytesIO(raw)
    shape, by_column, dtype = npy_header(head, path, len(raw))
    return np.frombuffer(raw, dtype, prod(shape), head.tell()).reshape(shape, order="F" if by_column else "C")


SEARCH_SETS: dict[str, Callable[[str, Path], SearchSet]] = {
    "fashion-mnist": _load_images,
    "mnist": _load_images,
    "sift-imagenet200k": _load_sift,
}
