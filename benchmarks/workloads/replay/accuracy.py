"""What the storage tier does for accuracy: seven methods of continual learning, each with it and without.

``python -m memhier.benchmarks.workloads.replay.accuracy --data mnist --memory 200`` prints a table, ``--json`` writes
it. With ``--runs FILE`` every run is kept as it ends, and those that are there are not made again: what was stopped
goes on, and more seeds add to it.

A data set is learned two classes at a time, in an order drawn by the seed, and never seen again. Both runs of a method
have the same memory and the same seed; without the storage tier memory keeps what admission gave it, with it half of
what a step used is swapped. "All in DRAM" draws from everything seen. Final accuracy is over all classes, without being
told the task; average incremental accuracy is the mean of that after every task. TinyER knows the task.
"""

import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from memhier.benchmarks.bench.figures import Bar, Bars, Figure, Record
from memhier.benchmarks.workloads.options import folder_option, json_option
from memhier.benchmarks.workloads.replay.data import Images, load_images
from memhier.recsys.replay import CarouselBuffer, GateSwap, RandomSwap, SwapPolicy
from memhier.recsys.replay.methods import METHODS, TinyER
from memhier.recsys.replay.methods.learner import blocks

__all__ = ["main", "run_one"]

WAYS: dict[str, Callable[[], SwapPolicy | None]] = {
    "memory only": lambda: None,
    "random swaps": lambda: RandomSwap(0.5),
    "gate": lambda: GateSwap(0.5),
    "all in DRAM": lambda: None,
}


class Dense(nn.Module):
    """Two hidden layers of 400, for images of 28 x 28."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(784, 400), nn.ReLU(), nn.Linear(400, 400), nn.ReLU())
        self.head = nn.Linear(400, classes)

    def features(self, inputs: Tensor) -> Tensor:
        """Return what the last layer sees."""
        found: Tensor = self.body(inputs)
        return found

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits."""
        logits: Tensor = self.head(self.body(inputs))
        return logits


class Convolutions(nn.Module):
    """Three convolutions of 24, 48 and 96 channels, for images of 32 x 32."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, after in ((3, 24), (24, 48), (48, 96)):
            layers += [nn.Conv2d(before, after, 3, 1, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU(), nn.MaxPool2d(2)]
        self.body = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten())
        self.head = nn.Linear(384, classes)
        # Images are stored with their channels last; convolutions in that order take half the time.
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch has no overload for it

    def features(self, inputs: Tensor) -> Tensor:
        """Return what the last layer sees."""
        found: Tensor = self.body(inputs)
        return found

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits."""
        logits: Tensor = self.head(self.body(inputs))
        return logits


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


@dataclass(frozen=True)
class Outcome:
    """What a run gave.

    Attributes
    ----------
    final, incremental
        Shares of the test samples that were right after the last task, and the mean over all tasks.
    """

    final: float
    incremental: float
    seconds: float
    swapped: int
    stall_s: float


def run_one(method: str, way: str, images: Images, memory: int, seed: int, epochs: int, folder: Path) -> Outcome:
    """Learn a data set with one method."""
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
            lambda: Convolutions(classes) if is_colour else Dense(classes), buffer, cropped if is_colour else plain,
            classes=classes, rate=0.05 if batch == 32 else 0.02, batch=batch, epochs=epochs, decays=is_colour,
            seed=seed,
        )  # fmt: skip
        shares = []
        for task in np.random.default_rng(seed).permutation(classes).reshape(5, 2):
            some = np.flatnonzero(np.isin(images.train_labels, task))
            learner.learn_task(torch.from_numpy(images.train[some]), torch.from_numpy(images.train_labels[some]))
            shares.append(_share_right(learner, images))
        stats = buffer.stats()
        return Outcome(
            shares[-1], float(np.mean(shares)), time.perf_counter() - start, stats["swapped"], stats["stall_s"]
        )  # fmt: skip


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
    """What the runs of a table have in common; `samples` of the training data, all where it is None."""

    data: str
    memory: int
    epochs: int
    samples: int | None


def measure(
    setting: Setting, methods: list[str], ways: list[str], seeds: int, folder: Path | None, kept: Path | None,
    console: Console,
) -> list[dict[str, Any]]:  # fmt: skip
    """Run every method in every way with every seed, but for runs that the file `kept` has."""
    torch.set_num_threads(1)
    images = load_images(setting.data, setting.samples)
    done = {(row["method"], row["way"], row["seed"]): row for row in kept_rows(kept, setting)}
    rows = []
    for seed in range(seeds):
        for method in methods:
            for way in ways:
                if way == "all in DRAM" and method != "ER":
                    continue
                row = done.get((method, way, seed))
                if row is None:
                    with tempfile.TemporaryDirectory(dir=folder) as scratch:
                        outcome = run_one(method, way, images, setting.memory, seed, setting.epochs, Path(scratch))
                    row = {"method": method, "way": way, "seed": seed, **vars(outcome)}
                    if kept is not None:
                        with kept.open("a") as file:
                            file.write(json.dumps(vars(setting) | row) + "\n")
                rows.append(row)
                console.print(
                    f"{setting.data} {setting.memory}: {method}, {way}, seed {seed}: {100 * row['final']:.1f} % at the "
                    f"end, {100 * row['incremental']:.1f} % on the way, {row['seconds']:.0f} s"
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


def show(rows: list[dict[str, Any]], data: str, memory: int) -> Table:
    """Lay out means and standard deviations over the seeds."""
    seeds = len({row["seed"] for row in rows})
    table = Table(title=f"{data}, {memory} samples in memory, {seeds} seeds: accuracy in %, mean ± deviation")
    for column in ("method", "way", "at the end", "on the way", "seconds", "stalled, s"):
        table.add_column(column, justify="left" if column in ("method", "way") else "right")
    for (method, way), group in grouped(rows).items():
        shown = [
            f"{100 * np.mean(values):.1f} ± {100 * np.std(values):.1f}"
            for values in ([row[name] for row in group] for name in ("final", "incremental"))
        ]
        seconds, stalled = (float(np.mean([row[name] for row in group])) for name in ("seconds", "stall_s"))
        table.add_row(method, way, *shown, f"{seconds:.1f}", f"{stalled:.2f}")
    return table


def grouped(rows: list[dict[str, Any]]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Return the rows of each method and way, in their order."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault((row["method"], row["way"]), []).append(row)
    return found


def gains(rows: list[dict[str, Any]], base: str, name: str) -> dict[tuple[str, str], list[float]]:
    """Return by how many points ways with storage are better than `base`, seed by seed."""
    groups, found = grouped(rows), {}
    for (method, way), group in groups.items():
        alone = {row["seed"]: row[name] for row in groups.get((method, base), [])}
        if way in ("random swaps", "gate") and alone:
            found[method, way] = [100 * (row[name] - alone[row["seed"]]) for row in group if row["seed"] in alone]
    return found


def comparisons(rows: list[dict[str, Any]]) -> list[str]:
    """Return a line for each way with storage: the same seeds with it and without, and beside everything in DRAM."""
    lines = []
    for base in ("memory only", "all in DRAM"):
        ends, ways = gains(rows, base, "final"), gains(rows, base, "incremental")
        for method, way in ends:
            end, on_the_way = ends[method, way], ways[method, way]
            lines.append(
                f"{method}, {way} against {base}: {np.mean(end):+.1f} points at the end ({min(end):+.1f} to "
                f"{max(end):+.1f}), {np.mean(on_the_way):+.1f} on the way, {len(end)} seeds"
            )
    return lines


def record(rows: list[dict[str, Any]], data: str, memory: int) -> Record:
    """Return accuracies as figures and bars."""
    figures: list[Figure] = []
    bars: list[Bar] = []
    for (method, way), group in grouped(rows).items():
        for name, what in (("final", "accuracy at the end"), ("incremental", "accuracy on the way")):
            values = [100 * row[name] for row in group]
            figures.append(Figure.of(f"{data}, {memory}: {method}, {way}, {what}", values, "%", "more"))
        bars.append(Bar.of(f"{method}, {way}", [100 * row["final"] for row in group]))
    for (method, way), values in gains(rows, "memory only", "final").items():
        name = f"{data}, {memory}: {method}, {way}, gain at the end"
        figures.append(Figure.of(name, values, "points", "more", paper="CarM"))
    return Record(
        figures, bars=[Bars(f"Accuracy after the last task: {data}, {memory} in memory", "%", bars)],
        scale="small models on one thread; CarM: ResNet-18 and -32 on a GPU",
    )  # fmt: skip


@click.command()
@folder_option
@click.option("--data", type=click.Choice(["mnist", "fashion-mnist", "cifar10"]), default="mnist", show_default=True)
@click.option("--memory", default=200, show_default=True, help="Samples in memory.")
@click.option("--methods", default=",".join(METHODS), show_default=True)
@click.option("--ways", default="memory only,random swaps,gate,all in DRAM", show_default=True)
@click.option("--seeds", default=5, show_default=True)
@click.option("--epochs", default=1, show_default=True)
@click.option("--samples", type=int, help="Of the training data, in equal parts of all classes; else all.")
@click.option("--runs", "kept", type=click.Path(path_type=Path), help="Keep every run in this file, and go on from it.")
@json_option
def main(
    folder: Path | None, data: str, memory: int, methods: str, ways: str, seeds: int, epochs: int, samples: int | None,
    kept: Path | None, out: Path | None,
) -> None:  # fmt: skip
    """Measure what the storage tier does for accuracy."""
    console = Console(width=110)
    setting = Setting(data, memory, epochs, samples)
    rows = measure(setting, methods.split(","), ways.split(","), seeds, folder, kept, console)
    console.print(show(rows, data, memory))
    for line in comparisons(rows):
        console.print(line)
    if out is not None:
        record(rows, data, memory).write(out, rows=rows)


if __name__ == "__main__":
    main()
