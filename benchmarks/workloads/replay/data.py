"""Labelled images for the workloads of replay: MNIST, Fashion-MNIST, CIFAR-10, from the folder of real data sets."""

import io
import lzma
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from memhier.benchmarks.datasets import data_set_folder
from memhier.io.outside import reading

__all__ = ["Images", "load_images"]

Pixels = NDArray[np.uint8]
Labels = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Images:
    """Images, uint8 [n, 28, 28] or [n, 32, 32, 3], with their labels, int64 [n]: to learn from, and held out."""

    train: Pixels
    train_labels: Labels
    test: Pixels
    test_labels: Labels


def load_images(name: str, samples: int | None = None) -> Images:
    """Read a data set.

    Parameters
    ----------
    name
        ``"mnist"``, ``"fashion-mnist"`` or ``"cifar10"``.
    samples
        Of the training images, in equal parts of all classes and drawn with a fixed seed; all when None.

    Raises
    ------
    FileNotFoundError
        When its folder is missing; the message says what was looked for where.
    """
    folder = data_set_folder(name, "cifar10-jpeg" if name == "cifar10" else name)
    read = _read_packed if name == "cifar10" else _read_idx
    images = Images(*read(folder, True), *read(folder, False))
    if samples is None:
        return images
    random, classes = np.random.default_rng(0), np.unique(images.train_labels)
    some = np.concatenate([
        random.permutation(np.flatnonzero(images.train_labels == label))[: samples // len(classes)] for label in classes
    ])  # fmt: skip
    return Images(images.train[some], images.train_labels[some], images.test, images.test_labels)


def _read_idx(folder: Path, train: bool) -> tuple[Pixels, Labels]:
    prefix = "train" if train else "t10k"
    images = _unpacked(folder / f"{prefix}-images-idx3-ubyte.xz")
    labels = _unpacked(folder / f"{prefix}-labels-idx1-ubyte.xz")
    with reading(folder / prefix):
        return images[16:].reshape(-1, 28, 28), labels[8:].astype(np.int64)


def _unpacked(path: Path) -> NDArray[np.uint8]:
    with reading(path):
        return np.frombuffer(lzma.decompress(path.read_bytes()), np.uint8)


def _read_packed(folder: Path, train: bool) -> tuple[Pixels, Labels]:
    """Read JPEG files packed into one: labels, offsets, then the files end to end."""
    from PIL import Image

    path = folder / f"{'train' if train else 'test'}.pack.xz"
    raw = _unpacked(path).tobytes()
    stream = io.BytesIO(raw)
    with reading(path, "labels and offsets"):
        labels, offsets = (np.load(stream, allow_pickle=False) for _ in range(2))
    start = stream.tell()
    images = np.empty((len(labels), 32, 32, 3), np.uint8)
    for index, (begin, end) in enumerate(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)):
        with reading(path, f"image {index}"), Image.open(io.BytesIO(raw[start + begin : start + end])) as image:
            images[index] = np.asarray(image.convert("RGB"))
    return images, labels.astype(np.int64)
