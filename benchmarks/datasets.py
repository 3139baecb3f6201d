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

__all__ = [
    "SEARCH_SETS", "Images", "SearchSet", "criteo_dac", "data_folder", "data_set_folder", "gowalla",
    "in_equal_parts", "load_images", "load_search_set", "use_data_folder",
]  # fmt: skip

Matrix: TypeAlias = npt.NDArray[Any]
Ints: TypeAlias = npt.NDArray[np.int64]
Pixels: TypeAlias = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class SearchSet:
    """Vectors to index and held-out queries, both ``[n, d]``, and ids of true neighbours where a file has them."""

    name: str
    base: Matrix
    queries: Matrix
    truth: npt.NDArray[np.int64] | None = None


@dataclass(frozen=True, slots=True)
class Images:
    """Images, uint8 [n, 28, 28] or [n, 32, 32, 3], with their labels, int64 [n]: to learn from, and held out."""

    train: Pixels
    train_labels: Ints
    test: Pixels
    test_labels: Ints


def data_folder() -> Path:
    """Return the folder of data sets; it need not exist."""
    named = os.environ.get("MEMHIER_DATA")
    return Path(named) if named else Path(__file__).resolve().parents[2] / "shared" / "data"


def use_data_folder(folder: Path) -> None:
    """Look for data sets in `folder` from now on, in the processes that this one starts, too."""
    os.environ["MEMHIER_DATA"] = str(folder.resolve())


def data_set_folder(name: str, folder: str = "") -> Path:
    """Return the folder of a data set, `folder` below the data sets if that is not its name.

    Raises
    ------
    FileNotFoundError
        When the folder is missing; the message says where it was looked for.
    """
    place = data_folder() / (folder or name)
    if not place.is_dir():
        raise FileNotFoundError(f"no data set {name!r} at {place}: put it there, or set MEMHIER_DATA")
    return place


def load_search_set(name: str) -> SearchSet:
    """Return one of :data:`SEARCH_SETS`, or of the :data:`~memhier.benchmarks.suites.sets.SUITE_SETS`.

    Raises
    ------
    FileNotFoundError
        When its folder or a file is missing; the message says where it was looked for.
    """
    if name in SUITE_SETS:
        return SearchSet(name, *read_suite_set(name, data_folder()))
    if name not in SEARCH_SETS:
        raise ValueError(f"name={name!r}: expected one of {', '.join((*SEARCH_SETS, *SUITE_SETS))}")
    return SEARCH_SETS[name](name, data_set_folder(name))


def _load_search_images(name: str, folder: Path) -> SearchSet:
    images = load_images(name)
    base, queries = images.train.reshape(len(images.train), -1), images.test.reshape(len(images.test), -1)
    # Some copies are sorted by class: shuffled, so that a build that sees the start of the file sees all of it.
    random = np.random.default_rng(0)
    return SearchSet(name, base[random.permutation(len(base))], queries[random.permutation(len(queries))[:1000]])


def _load_sift(name: str, folder: Path) -> SearchSet:
    return SearchSet(name, _read_npy(folder / "base_u8.npy.xz"), _read_npy(folder / "query_u8.npy.xz"))


def load_images(name: str, samples: int | None = None) -> Images:
    """Return a data set of labelled images.

    Parameters
    ----------
    name
        ``"mnist"``, ``"fashion-mnist"`` or ``"cifar10"``.
    samples
        Of the training images, in equal parts of all classes and drawn with a fixed seed; all when None.

    Raises
    ------
    FileNotFoundError
        When its folder is missing; the message says where it was looked for.
    """
    folder = data_set_folder(name, "cifar10-jpeg" if name == "cifar10" else name)
    read = _read_packed if name == "cifar10" else _read_idx
    images = Images(*read(folder, True), *read(folder, False))
    return images if samples is None else in_equal_parts(images, samples)


def in_equal_parts(images: Images, samples: int) -> Images:
    """Return a data set with as many training images, in equal parts of all classes and drawn with a fixed seed."""
    random, classes = np.random.default_rng(0), np.unique(images.train_labels)
    some = np.concatenate([
        random.permutation(np.flatnonzero(images.train_labels == label))[: samples // len(classes)] for label in classes
    ])  # fmt: skip
    return Images(images.train[some], images.train_labels[some], images.test, images.test_labels)


def _read_idx(folder: Path, train: bool) -> tuple[Pixels, Ints]:
    prefix = "train" if train else "t10k"
    path = folder / f"{prefix}-images-idx3-ubyte.xz"
    raw, labels = _decompress(path), _decompress(folder / f"{prefix}-labels-idx1-ubyte.xz")
    with reading(path, "no IDX file of images"):
        magic, count, rows, columns = np.frombuffer(raw, ">u4", 4).tolist()
        if magic != 0x803:
            raise ValueError(f"magic {magic:#x} is not that of an IDX image file")
        images = np.frombuffer(raw, np.uint8, offset=16).reshape(count, rows, columns)
        return images, np.frombuffer(labels, np.uint8, count, 8).astype(np.int64)


def _read_packed(folder: Path, train: bool) -> tuple[Pixels, Ints]:
    """Read JPEG files packed into one: labels, offsets, then the files end to end."""
    from PIL import Image

    path = folder / f"{'train' if train else 'test'}.pack.xz"
    raw = _decompress(path)
    stream = io.BytesIO(raw)
    with reading(path, "labels and offsets"):
        labels, offsets = (np.load(stream, allow_pickle=False) for _ in range(2))
    start = stream.tell()
    images = np.empty((len(labels), 32, 32, 3), np.uint8)
    for index, (begin, end) in enumerate(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)):
        with reading(path, f"image {index}"), Image.open(io.BytesIO(raw[start + begin : start + end])) as image:
            images[index] = np.asarray(image.convert("RGB"))
    return images, labels.astype(np.int64)


def _decompress(path: Path) -> bytes:
    with reading(path, "it is cut or damaged, copy it again"):
        return lzma.decompress(path.read_bytes())


def _read_npy(path: Path) -> Matrix:
    raw = _decompress(path)
    head = io.BytesIO(raw)
    shape, by_column, dtype = npy_header(head, path, len(raw))
    return np.frombuffer(raw, dtype, prod(shape), head.tell()).reshape(shape, order="F" if by_column else "C")


def criteo_dac(tables: int = 39) -> tuple[Ints, npt.NDArray[np.float32], list[int]]:
    """Return the 80,000 samples of Criteo in the order of the log: ids [n, tables], labels [n], sizes of tables.

    A sample's column that is empty gets row 0 of its table.

    Raises
    ------
    FileNotFoundError
        When the data set is missing.
    """
    path = data_set_folder("criteo-dac80k") / "criteo_dac80k_hashed.npz"
    with reading(path), np.load(path) as files:
        labels, offsets, hashed, field = (files[name] for name in ("label", "offset", "id20", "field"))
    ids = np.zeros((len(labels), tables), np.int64)
    sample = np.repeat(np.arange(len(labels)), np.diff(offsets))
    sizes = []
    for column in range(tables):
        mine = field == column
        values, numbers = np.unique(hashed[mine], return_inverse=True)
        ids[sample[mine], column] = numbers + 1
        sizes.append(len(values) + 1)
    return ids, labels.astype(np.float32), sizes


def gowalla() -> tuple[Ints, int, int]:
    """Return Gowalla as LightGCN splits it: pairs [n, 2] of user and item, and the counts of users and items.

    Raises
    ------
    FileNotFoundError
        When the data set is missing.
    """
    folder = data_set_folder("gowalla")
    users, items = 29858, 40981
    path = folder / "s_adj_mat.npz"
    with reading(path), np.load(path) as files:
        begins, columns = files["indptr"], files["indices"]
    row = np.repeat(np.arange(users), np.diff(begins[: users + 1]))
    pairs = np.stack([row, columns[: begins[users]].astype(np.int64) - users], 1)
    return pairs, users, items


SEARCH_SETS: dict[str, Callable[[str, Path], SearchSet]] = {
    "fashion-mnist": _load_search_images,
    "mnist": _load_search_images,
    "sift-imagenet200k": _load_sift,
}
