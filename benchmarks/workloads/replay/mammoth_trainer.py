"""Mammoth's own trainer, with :class:`MammothBuffer` in the place of its buffer.

``python -m memhier.benchmarks.workloads.replay.mammoth_trainer FOLDER`` runs ``main.py`` of FOLDER, a checkout of
``github.com/aimagelab/mammoth``: DER++ on its Split-MNIST, seed by seed with its own buffer, with memhier's, and with
memhier's whose samples are swapped. ``constraints-plugins.txt`` has the packages that Mammoth imports, but for
``open_clip``, which gets a stand-in: one of Mammoth's data sets, not ours, downloads its weights on import.
"""

import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import click
import numpy as np
import torch
from numpy.typing import NDArray

from memhier.benchmarks.datasets import load_images
from memhier.recsys.replay import CarouselBuffer, Field, RandomSwap
from memhier.recsys.replay.adapters.mammoth import MammothBuffer

__all__ = ["main"]

OPTIONS = [
    "--model", "derpp", "--alpha", ".5", "--beta", "1", "--dataset", "seq-mnist", "--lr", ".03", "--num_workers", "0",
    "--non_verbose", "1",
]  # fmt: skip
TESTED = 2000
SCHEMA = {"examples": ("float32", (1, 28, 28)), "logits": Field("float32", (10,), mutable=True)}


def write_digits(folder: Path, images: int) -> None:
    """Write digits as the files that torchvision looks for, under the names of both of Mammoth's classes."""
    digits = load_images("mnist", images)
    parts = {
        "train": (digits.train, digits.train_labels),
        "t10k": (digits.test[:TESTED], digits.test_labels[:TESTED]),
    }
    for name in ("MyMNIST", "MNIST"):
        place = folder / "MNIST" / name / "raw"
        place.mkdir(parents=True)
        for part, (pixels, labels) in parts.items():
            write_idx(place / f"{part}-images-idx3-ubyte", pixels)
            write_idx(place / f"{part}-labels-idx1-ubyte", labels.astype(np.uint8))


def write_idx(path: Path, values: NDArray[Any]) -> None:
    """Write bytes as an IDX file."""
    path.write_bytes(np.array([0x800 + values.ndim, *values.shape], ">u4").tobytes() + values.tobytes())


def load(folder: Path) -> tuple[Any, Any]:
    """Return Mammoth's modules of its command and of its buffer."""
    try:
        import_module("torchvision")
    except RuntimeError:  # its operators are those of another torch
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor a, Tensor b, float c) -> Tensor")
    sys.path.insert(0, str(folder))
    sys.modules["open_clip"] = mock.MagicMock()
    return import_module("main"), import_module("utils.buffer")


def accuracy(command: Any, words: list[str]) -> float:
    """Run Mammoth's command; return the mean over tasks of the accuracy at the end, without the task being told."""
    with mock.patch.object(sys, "argv", ["main.py", *words]):
        model, dataset, options = command.initialize()
    import_module("utils.training").train(model, dataset, options)
    return float(np.mean(dataset.evaluate(model, dataset)[0]))


def ours(folder: Path, swap: RandomSwap | None, held: ExitStack) -> Callable[..., Any]:
    """Return a function that makes a buffer, as Mammoth's class does."""

    def made(size: int, *_: Any, **__: Any) -> MammothBuffer:
        return MammothBuffer(held.enter_context(CarouselBuffer(folder, memory=size, schema=SCHEMA, swap=swap)))

    return made


@click.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--images", default=10_000, show_default=True, type=click.IntRange(10), help="To learn from.")
@click.option("--memory", default=200, show_default=True, type=click.IntRange(1), help="Images in DRAM.")
@click.option("--epochs", default=1, show_default=True, type=click.IntRange(1))
@click.option("--seeds", default=3, show_default=True, type=click.IntRange(1))
def main(folder: Path, images: int, memory: int, epochs: int, seeds: int) -> None:
    """Train by Mammoth's command, of the checkout FOLDER, with its buffer and with memhier's."""
    folder = folder.resolve()
    if not (folder / "main.py").is_file():
        raise click.UsageError(f"FOLDER={folder}: expected a checkout of Mammoth, with its main.py")
    os.environ.setdefault("LOG_LEVEL", "WARNING")
    found: dict[str, list[float]] = {"Mammoth's": [], "memhier's": [], "memhier's, all swapped": []}
    with ExitStack() as held:
        place = Path(held.enter_context(tempfile.TemporaryDirectory()))
        write_digits(place, images)
        words = [*OPTIONS, "--buffer_size", f"{memory}", "--n_epochs", f"{epochs}"]
        for name in ("base", "checkpoint"):
            words += [f"--{name}_path", f"{place}/"]
        command, buffers = load(folder)
        own = buffers.Buffer
        for seed in range(seeds):
            for number, (name, swap) in enumerate(zip(found, (None, None, RandomSwap(1.0)), strict=True)):
                made = ours(place / f"{seed}-{number}", swap, held) if number else own
                with mock.patch.object(import_module("models.derpp"), "Buffer", made):
                    found[name].append(accuracy(command, [*words, "--seed", f"{seed}"]))
                click.echo(f"{name}, seed {seed}: {found[name][-1]:.1f} %")
    for name, shares in found.items():
        click.echo(f"{name}: {np.mean(shares):.1f} % of {seeds} seeds")


if __name__ == "__main__":
    main()
