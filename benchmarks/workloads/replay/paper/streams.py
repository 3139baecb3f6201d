"""The streams of the paper's table, and streams of many classes: images with labels, and the classes of each task."""

import io
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.benchmarks.datasets import Images, data_set_folder, load_images
from memhier.benchmarks.workloads.replay.paper.models import cropped, plain, shifted
from memhier.io.outside import reading
from memhier.recsys.replay.methods.learner import Prepare

__all__ = ["STREAMS", "Stream"]

Pixels: TypeAlias = npt.NDArray[np.uint8]
Ints: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Stream:
    """One data set as a stream of tasks.

    Attributes
    ----------
    load
        Returns its images; takes a folder, or None for the folder of data sets.
    tasks
        How many, with as many classes each.
    model, prepare
        The network, one of `MODELS`, and the way to its input while training.
    whole
        Whether the classes of a task belong together, as the digits under one permutation do; else the seed draws them.
    """

    load: Callable[[Path | None], Images]
    tasks: int
    model: str
    prepare: Prepare
    whole: bool = False

    def order(self, classes: int, seed: int) -> Ints:
        """Return the classes of each task, ``[tasks, classes a task]``, as the seed draws them."""
        random = np.random.default_rng(seed)
        if self.whole:
            return random.permutation(np.arange(classes).reshape(self.tasks, -1))
        return random.permutation(classes).reshape(self.tasks, -1)


def _named(name: str, folder: str = "") -> Callable[[Path | None], Images]:
    return lambda _: load_images(name)


def cifar100(path: Path | None) -> Images:
    """Read CIFAR-100 in its binary form: ``train.bin`` and ``test.bin``, records of 2 labels and 3,072 bytes."""
    folder = path or data_set_folder("cifar100", "cifar-100-binary")

    def part(name: str) -> tuple[Pixels, Ints]:
        with reading(folder / name, "records of CIFAR-100, 3,074 bytes each"):
            records = np.fromfile(folder / name, np.uint8).reshape(-1, 3074)
        images = records[:, 2:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
        return np.ascontiguousarray(images), records[:, 1].astype(np.int64)

    return Images(*part("train.bin"), *part("test.bin"))


def tiny_imagenet(path: Path | None) -> Images:
    """Read a set of 64-pixel images in Tiny-ImageNet's form.

    ``train/CLASS/images/*.JPEG``, ``val/images/*.JPEG`` and ``val/val_annotations.txt``, whose lines begin with a file
    and its class. Any number of classes.
    """
    folder = path or data_set_folder("tiny-imagenet", "tiny-imagenet-200")
    names = sorted(place.name for place in (folder / "train").iterdir())
    files = [
        (file, label) for label, name in enumerate(names) for file in sorted((folder / "train" / name).rglob("*.JPEG"))
    ]
    annotations = folder / "val" / "val_annotations.txt"
    with reading(annotations, "lines of a file and its class"):
        held_out = [line.split("\t")[:2] for line in annotations.read_text().splitlines()]
        tests = [(folder / "val" / "images" / file, names.index(name)) for file, name in held_out if name in names]
    return Images(*_decoded(files, 64), *_decoded(tests, 64))


def _decoded(files: list[tuple[Path, int]], side: int) -> tuple[Pixels, Ints]:
    from PIL import Image

    images = np.empty((len(files), side, side, 3), np.uint8)
    for number, (file, _) in enumerate(files):
        with reading(file, f"an image of {side} x {side}"), Image.open(file) as image:
            images[number] = np.asarray(image.convert("RGB"))
    return images, np.array([label for _, label in files], np.int64)


def omniglot(path: Path | None) -> Images:
    """Read Omniglot's small background set: 136 characters at 28 x 28, 15 drawings to learn from and 5 held out."""
    from PIL import Image

    archive = (path or data_set_folder("omniglot", "omniglot-small1")) / "images_background_small1.zip"
    with reading(archive, "a zip of PNG files by alphabet and character"), zipfile.ZipFile(archive) as files:
        names = sorted(name for name in files.namelist() if name.endswith(".png"))
        drawings = [
            np.asarray(Image.open(io.BytesIO(files.read(name))).convert("L").resize((28, 28), Image.Resampling.BOX))
            for name in names
        ]
    characters = {place: label for label, place in enumerate(sorted({name.rpartition("/")[0] for name in names}))}
    labels = np.array([characters[name.rpartition("/")[0]] for name in names], np.int64)
    # Black on white, and digits are white on black.
    images, held_out = 255 - np.stack(drawings), np.array([int(name[-6:-4]) > 15 for name in names])
    return Images(images[~held_out], labels[~held_out], images[held_out], labels[held_out])


def permuted(path: Path | None) -> Images:
    """Return MNIST with its pixels in 10 orders: 100 classes."""
    random = np.random.default_rng(0)
    orders = [random.permutation(784) for _ in range(10)]
    return _views(lambda images, view: images.reshape(-1, 784)[:, orders[view]].reshape(-1, 28, 28))


def rotated(path: Path | None) -> Images:
    """Return MNIST at 10 angles, 18 degrees apart: 100 classes."""
    from PIL import Image

    def turn(images: Pixels, view: int) -> Pixels:
        bilinear = Image.Resampling.BILINEAR
        return np.stack([np.asarray(Image.fromarray(image).rotate(18 * view, bilinear)) for image in images])

    return _views(turn)


def _views(change: Callable[[Pixels, int], Pixels]) -> Images:
    """Return 1,000 images of each digit to learn from and 100 held out, in 10 views; a digit in a view is a class."""
    digits = load_images("mnist", 10_000)
    parts: dict[str, list[Any]] = {"train": [], "train_labels": [], "test": [], "test_labels": []}
    for view in range(10):
        parts["train"].append(change(digits.train, view))
        parts["test"].append(change(digits.test[:1000], view))
        parts["train_labels"].append(digits.train_labels + 10 * view)
        parts["test_labels"].append(digits.test_labels[:1000] + 10 * view)
    return Images(**{name: np.concatenate(part) for name, part in parts.items()})


STREAMS = {
    "mnist": Stream(_named("mnist"), 5, "dense", plain),
    "fashion-mnist": Stream(_named("fashion-mnist"), 5, "dense", plain),
    "cifar10": Stream(_named("cifar10"), 5, "resnet", cropped),
    "cifar100": Stream(cifar100, 10, "resnet", cropped),
    "tiny-imagenet": Stream(tiny_imagenet, 10, "resnet", cropped),
    "omniglot": Stream(omniglot, 17, "convolutions", shifted),
    "permuted-mnist": Stream(permuted, 10, "dense", plain, whole=True),
    "rotated-mnist": Stream(rotated, 10, "convolutions", plain, whole=True),
}
"""By name."""
