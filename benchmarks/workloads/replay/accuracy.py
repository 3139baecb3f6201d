"""The accuracy that the storage tier adds: seven methods of continual learning, each with it and without.

``python -m memhier.benchmarks.workloads.replay.accuracy --data mnist --memory 200`` measures it. With ``--runs FILE``
every run is kept as it ends and is not made again: an interrupted program goes on, and more seeds add to it.

A data set is learned two classes at a time, in an order that the seed draws, and never seen again. Both runs of a
method have the same memory and the same seed. Without the storage tier memory keeps the samples that admission gave it;
with it half of the samples of a step are swapped. "All in DRAM" draws from everything seen. Final accuracy is over all
classes, without being told the task; average incremental accuracy is its mean over all tasks. TinyER knows the task.
"""

import itertools
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from torch import Tensor, nn

from memhier.benchmarks.bench.figures import Figure, Record
from memhier.benchmarks.datasets import Images, load_images
from memhier.benchmarks.workloads.harness import Measure, Outcome, Row, bars_of, figures_of, grouped, workload
from memhier.recsys.replay import CarouselBuffer, GateSwap, RandomSwap, SwapPolicy
from memhier.recsys.replay.methods import METHODS, TinyER
from memhier.recsys.replay.methods.learner import blocks

__all__ = ["main"]

WAYS: dict[str, Callable[[], SwapPolicy | None]] = {
    "memory only": lambda: None,
    "random swaps": lambda: RandomSwap(0.5),
    "gate": lambda: GateSwap(0.5),
    "all in DRAM": lambda: None,
}


class Model(nn.Module):
    """A body and a linear head."""

    def __init__(self, body: nn.Sequential, width: int, classes: int) -> None:
        super().__init__()
        self.body = body
        self.head: torch.nn.Linear = nn.Linear(width, classes)

    def features(self, inputs: Tensor) -> Tensor:
        """Return the inputs of the last layer."""
        found: Tensor = self.body(inputs)
        return found

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits."""
        logits: Tensor = self.head(self.body(inputs))
        return logits


def dense(classes: int) -> Model:
    """Return two hidden layers of 400, for images of 28 x 28."""
    body = nn.Sequential(nn.Flatten(), nn.Linear(784, 400), nn.ReLU(), nn.Linear(400, 400), nn.ReLU())
    return Model(body, 400, classes)


def convolutions(classes: int) -> Model:
    """Return three convolutions of 24, 48 and 96 channels, for images of 32 x 32."""
    layers: list[nn.Module] = []
    for before, after in ((3, 24), (24, 48), (48, 96)):
        layers += [nn.Conv2d(before, after, 3, 1, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU(), nn.MaxPool2d(2)]
    model = Model(nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten()), 384, classes)
    # Images are stored with their channels last; convolutions in that order take half the time.
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch has no overload for it
    return model


def plain(images: Tensor) -> Tensor:
    """Return stored images as input: channels first, 0 to 1 shifted to about -1 to 1."""
    floats = images.float().div_(127.5).sub_(1)
    return floats.permute(0, 3, 1, 2) if images.ndim == 4 else floats[:, None]


def cropped(images: Tensor) -> Tensor:
    """Return the same, each batch moved by up to 4 pixels, and half of the images mirrored."""
    inputs = plain(images)
    down, right = (int(shift) for shift in torch.randint(-4, 5, (2,)))
    inputs = torch.roll(nn.functional.pad(inputs, (4, 4, 4, 4)), (down, right), (2, 3))[:, :, 4:-4, 4:-4]
    mirrored = torch.rand(len(inputs)) < 0.5
    inputs[mirrored] = inputs[mirrored].flip(3)
    return inputs.contiguous(memory_format=torch.channels_last)


def run_one(method: str, way: str, images: Images, memory: int, seed: int, epochs: int, folder: Path) -> Row:
    """Learn a data set with one method; return accuracies after the last task and on the way, time and swaps."""
    torch.manual_seed(seed)
    kind, classes = METHODS[method], 10
    is_colour = images.train.ndim == 4
    slots = len(images.train) if way == "all in DRAM" else memory
    # TinyER is made for batches of ten.
    batch = 10 if kind is TinyER else 32
    with CarouselBuffer(
        folder / "buffer", memory=slots, schema=kind.schema(images.train.shape[1:], classes), admit=kind.admit,
        swap=WAYS[way](), seed=seed, same_class=True,
    ) as buffer:  # fmt: skip
        start = time.perf_counter()
        learner = kind(
            lambda: convolutions(classes) if is_colour else dense(classes), buffer, cropped if is_colour else plain,
            classes=classes, rate=0.05 if batch == 32 else 0.02, batch=batch, epochs=epochs, decays=is_colour,
            seed=seed,
        )  # fmt: skip
        shares = []
        for task in np.random.default_rng(seed).permutation(classes).reshape(5, 2):
            some = np.flatnonzero(np.isin(images.train_labels, task))
            learner.learn_task(torch.from_numpy(images.train[some]), torch.from_numpy(images.train_labels[some]))
            shares.append(_share_right(learner, images))
        stats = buffer.stats()
        return {
            "final": shares[-1], "incremental": float(np.mean(shares)), "seconds": time.perf_counter() - start,
            "swapped": stats["swapped"], "stall_s": stats["stall_s"],
        }  # fmt: skip


def _share_right(learner: Any, images: Images) -> float:
    """Return the share of the test samples of classes seen that a learner gets right."""
    some = np.flatnonzero(np.isin(images.test_labels, learner.seen))
    labels = torch.from_numpy(images.test_labels[some])
    right = 0
    for part in blocks(torch.arange(len(some)), 1000):
        inputs = plain(torch.from_numpy(images.test[some[part.numpy()]]))
        said = learner.predict_in_task(inputs, labels[part]) if isinstance(learner, TinyER) else learner.predict(inputs)
        right += int((said == labels[part]).sum())
    return right / len(some)


@dataclass(frozen=True)
class Setting:
    """The settings that all runs of a table share; `samples` of the training data, all if it is None."""

    data: str
    memory: int
    epochs: int
    samples: int | None


def measure(
    setting: Setting, methods: list[str], ways: list[str], seeds: int, folder: Path, kept: Path | None
) -> list[Row]:
    """Run every method in every way with every seed, but for runs that the file `kept` has."""
    images = load_images(setting.data, setting.samples)
    done = {(row["method"], row["way"], row["seed"]): row for row in kept_rows(kept, setting)}
    rows = []
    for seed, method, way in itertools.product(range(seeds), methods, ways):
        if way == "all in DRAM" and method != "ER":
            continue
        row: Row | None = done.get((method, way, seed))
        if row is None:
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                found = run_one(method, way, images, setting.memory, seed, setting.epochs, Path(scratch))
            row = found | {"method": method, "way": way, "seed": seed}
            if kept is not None:
                with kept.open("a") as file:
                    file.write(json.dumps(vars(setting) | row) + "\n")
        rows.append(row)
        ends, means = (f"{100 * row[name]:.1f} %" for name in ("final", "incremental"))
        click.echo(
            f"{setting.data} {setting.memory}: {method}, {way}, seed {seed}: {ends} at the end, {means} on the way, "
            f"{row['seconds']:.0f} s"
        )
    return rows


def kept_rows(kept: Path | None, setting: Setting) -> list[dict[str, Any]]:
    """Return the runs of a file that were made with these settings."""
    if kept is None or not kept.exists():
        return []
    wanted = vars(setting)
    rows = [json.loads(line) for line in kept.read_text().splitlines()]
    return [
        {name: value for name, value in row.items() if name not in wanted}
        for row in rows
        if all(row[name] == value for name, value in wanted.items())
    ]


def gains(rows: list[Row], base: str, column: str) -> Iterator[tuple[str, str, list[float]]]:
    """Yield methods and ways with storage, and the points by which they are better than `base`, seed by seed."""
    groups = grouped(rows, "method", "way")
    for (method, way), group in groups.items():
        alone = {row["seed"]: row[column] for row in groups.get((method, base), [])}
        if way in ("random swaps", "gate") and alone:
            yield method, way, [100 * (row[column] - alone[row["seed"]]) for row in group if row["seed"] in alone]


def comparisons(rows: list[Row]) -> Iterator[str]:
    """Yield a line for each way with storage: its gain over memory alone, and over everything in DRAM."""
    for base, (column, words) in itertools.product(
        ("memory only", "all in DRAM"), (("final", "at the end"), ("incremental", "on the way"))
    ):
        for method, way, points in gains(rows, base, column):
            spread = f"({min(points):+.1f} to {max(points):+.1f}), {len(points)} seeds"
            yield f"{method}, {way} against {base}: {np.mean(points):+.1f} points {words} {spread}"


def record(rows: list[Row], setting: Setting) -> Record:
    """Return accuracies as figures and bars."""
    where = f"{setting.data}, {setting.memory}"
    columns = ("final", "incremental")
    shares: list[Row] = [row | {column: 100 * float(row[column]) for column in columns} for row in rows]
    ends = Measure("final", "accuracy at the end", "%", "more")
    figures = figures_of(
        shares, [ends, Measure("incremental", "accuracy on the way", "%", "more")], where + ": {method}, {way}, {title}"
    )
    for method, way, points in gains(rows, "memory only", "final"):
        name = f"{where}: {method}, {way}, gain at the end"
        figures.append(Figure.of(name, points, "points", "more", paper="CarM"))
    values = {
        f"{method}, {way}": [row["final"] for row in group]
        for (method, way), group in grouped(shares, "method", "way").items()
    }
    title = f"Accuracy after the last task: {where} in memory"
    scale = "small models on one thread; CarM: ResNet-18 and -32 on a GPU"
    return Record(figures, bars=[bars_of(title, "%", values)], scale=scale)


@workload
@click.option("--data", type=click.Choice(["mnist", "fashion-mnist", "cifar10"]), default="mnist", show_default=True)
@click.option("--memory", default=200, show_default=True, help="Samples in memory.")
@click.option("--methods", default=",".join(METHODS), show_default=True)
@click.option("--ways", default=",".join(WAYS), show_default=True)
@click.option("--seeds", default=5, show_default=True)
@click.option("--epochs", default=1, show_default=True)
@click.option("--samples", type=int, help="Of the training data, in equal parts of all classes; all by default.")
@click.option("--runs", "kept", type=click.Path(path_type=Path), help="Keep every run in this file, and go on from it.")
def main(
    scratch: Path, data: str, memory: int, methods: str, ways: str, seeds: int, epochs: int, samples: int | None,
    kept: Path | None,
) -> Outcome:  # fmt: skip
    """Measure the accuracy that the storage tier adds."""
    setting = Setting(data, memory, epochs, samples)
    rows = measure(setting, methods.split(","), ways.split(","), seeds, scratch, kept)
    return Outcome(record(rows, setting), [*comparisons(rows)], {"rows": rows})


if __name__ == "__main__":
    main()
