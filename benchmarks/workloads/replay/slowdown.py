"""Does swapping slow training down? Steps of one training, in turns with and without swaps.

``python -m memhier.benchmarks.workloads.replay.slowdown --dir /path/on/the/device`` prints a table, ``--json`` writes
it.

A small convolutional network learns from a batch of the stream and one of memory. Ways take turns in blocks of a few
steps, in an order drawn anew for every round, so that whatever else the machine does hits all of them; each block
begins with steps that are not counted. What is shown is how much more a way takes than no swaps, the median over the
rounds: of the median step by the clock; of the processor time of the training thread; and of that of the whole process,
to which the thread that reads belongs. Neighbours disturb the last two less: where the machine is not idle, a verdict
goes by them. "Waiting" swaps read while training waits; "a file per sample" reads files as CarM's code does, waiting.
"""

import os
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from memhier.benchmarks.bench.figures import Bar, Bars, Figure, Record
from memhier.benchmarks.workloads.options import folder_option, json_option
from memhier.recsys.replay import Batch, CarouselBuffer, RandomSwap

__all__ = ["main", "measure"]

BATCH = 32
WARM = 2
BASE = "no swaps"
# What is promised, in % of a step without swaps.
BARS = {"20 % swapped": 3.0, "100 % swapped": 5.0}
MEASURES = {"clock": "by the clock", "thread": "training thread", "process": "whole process"}


class Trainer:
    """A training step: half a batch of the stream, half of memory."""

    def __init__(self, side: int) -> None:
        torch.manual_seed(0)
        layers: list[nn.Module] = []
        channels = 3
        for width in (24, 48, 96):
            stride = 1 if side < 64 else 2
            layers += [nn.Conv2d(channels, width, 3, stride, 1), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2)]
            channels = width
        self.model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(96, 10))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        random = np.random.default_rng(1)
        self.stream = torch.from_numpy(random.integers(0, 256, (BATCH, side, side, 3), np.uint8))
        self.stream_labels = torch.from_numpy(random.integers(0, 10, BATCH))

    def step(self, batch: Batch) -> None:
        """Learn from the stream's batch and one of memory."""
        images = torch.cat([self.stream, torch.from_numpy(batch["image"])]).permute(0, 3, 1, 2).float().div_(255)
        labels = torch.cat([self.stream_labels, torch.from_numpy(batch.labels)])
        self.optimizer.zero_grad(set_to_none=True)
        loss = nn.functional.cross_entropy(self.model(images), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()


def make_ways(
    folder: Path, side: int, stored: int, memory: int, held: ExitStack
) -> tuple[dict[str, Callable[[], None]], dict[str, CarouselBuffer]]:
    """Return a training step for each way, and the buffers of those that have one."""
    trainer = Trainer(side)
    buffers = {
        BASE: _buffer(folder, 0, side, stored, memory, None, 1, held),
        "20 % swapped": _buffer(folder, 1, side, stored, memory, 0.2, 1, held),
        "100 % swapped": _buffer(folder, 2, side, stored, memory, 1.0, 1, held),
        "100 %, waiting": _buffer(folder, 3, side, stored, memory, 1.0, 0, held),
    }
    ways = {name: _way(trainer, buffer) for name, buffer in buffers.items()}
    ways["100 %, a file per sample"] = _file_way(folder, trainer, side, memory)
    return ways, buffers


def _buffer(
    folder: Path, number: int, side: int, stored: int, memory: int, ratio: float | None, delay: int, held: ExitStack
) -> CarouselBuffer:
    random = np.random.default_rng(0)
    swap = None if ratio is None else RandomSwap(ratio)
    schema = {"image": ("uint8", (side, side, 3))}
    buffer = CarouselBuffer(folder / f"{number}", memory=memory, schema=schema, swap=swap, delay=delay)
    held.callback(buffer.close)
    for start in range(0, stored, 500):
        count = min(500, stored - start)
        buffer.add(
            {"image": random.integers(0, 256, (count, side, side, 3), np.uint8)}, labels=random.integers(0, 10, count)
        )
    buffer.checkpoint()
    return buffer


def _way(trainer: Trainer, buffer: CarouselBuffer) -> Callable[[], None]:
    batch = buffer.empty(BATCH)

    def step() -> None:
        buffer.sample(BATCH, batch)
        trainer.step(batch)
        buffer.feedback(batch)

    return step


def _file_way(folder: Path, trainer: Trainer, side: int, memory: int) -> Callable[[], None]:
    """One file per sample, read past the page cache as far as the system can be asked to."""
    random = np.random.default_rng(2)
    files = folder / "files"
    files.mkdir()
    count, size = 1000, side * side * 3
    for index in range(count):
        random.integers(0, 256, size, np.uint8).tofile(files / f"{index}")
    rows = random.integers(0, 256, (memory, side, side, 3), np.uint8)
    labels = random.integers(0, 10, memory)

    def step() -> None:
        slots = random.choice(memory, BATCH, replace=False)
        trainer.step(Batch({"image": rows[slots]}, labels[slots], labels[slots], slots))
        for slot, index in zip(slots.tolist(), random.integers(0, count, BATCH).tolist(), strict=True):
            handle = os.open(files / f"{index}", os.O_RDONLY)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            rows[slot] = np.frombuffer(os.read(handle, size), np.uint8).reshape(rows.shape[1:])
            os.close(handle)

    return step


def measure(folder: Path | None, side: int, stored: int, memory: int, rounds: int, steps: int) -> dict[str, Any]:
    """Return for each way the seconds of a step in every round, by measure, and what its buffer says of waiting."""
    torch.set_num_threads(1)
    order = np.random.default_rng(3)
    with tempfile.TemporaryDirectory(dir=folder) as scratch, ExitStack() as held:
        ways, buffers = make_ways(Path(scratch), side, stored, memory, held)
        times: dict[str, dict[str, list[float]]] = {name: {kind: [] for kind in MEASURES} for name in ways}
        for _ in range(rounds):
            for name in order.permutation(list(ways)).tolist():
                for kind, seconds in _timed(ways[name], steps).items():
                    times[name][kind].append(seconds)
        waits = {
            name: {key: buffer.stats()[key] for key in ("step", "swapped", "stalls", "stall_s", "read_s")}
            for name, buffer in buffers.items()
        }
    return {"times": times, "waits": waits}


def _timed(step: Callable[[], None], steps: int) -> dict[str, float]:
    """Return the seconds of a step: the median by the clock, and the mean processor time of thread and process."""
    for _ in range(WARM):
        step()
    clock = []
    thread, process = time.thread_time(), time.process_time()
    for _ in range(steps):
        start = time.perf_counter()
        step()
        clock.append(time.perf_counter() - start)
    return {
        "clock": float(np.median(clock)),
        "thread": (time.thread_time() - thread) / steps,
        "process": (time.process_time() - process) / steps,
    }


def longer(times: dict[str, dict[str, list[float]]], name: str, kind: str) -> list[float]:
    """Return by how many % a step of a way takes more than without swaps, for every round."""
    return [100 * (way / base - 1) for way, base in zip(times[name][kind], times[BASE][kind], strict=True)]


def stalled(result: dict[str, Any], name: str) -> float:
    """Return the share of the time that steps of a way waited for swaps, in %."""
    wait = result["waits"].get(name)
    if wait is None:
        return 0.0
    step = float(np.mean(result["times"][name]["clock"]))
    return 100 * float(wait["stall_s"]) / max(1, int(wait["step"])) / step


def show(found: dict[int, Any]) -> Table:
    """Lay out medians over the rounds."""
    table = Table(title=f"training steps of {BATCH} + {BATCH} samples: % more than without swaps; medians over rounds")
    for column in ("image", "way", "step, ms", *MEASURES.values(), "stalled, %", "swapped"):
        table.add_column(column, justify="left" if column in ("image", "way") else "right")
    for side, result in found.items():
        for name, kinds in result["times"].items():
            more = [f"{np.median(longer(result['times'], name, kind)):+.1f}" for kind in MEASURES]
            swapped = result["waits"].get(name, {"swapped": 0})["swapped"]
            step = 1e3 * float(np.median(kinds["clock"]))
            table.add_row(f"{side} px", name, f"{step:.2f}", *more, f"{stalled(result, name):.2f}", f"{swapped:,}")
    return table


def verdicts(found: dict[int, Any]) -> list[str]:
    """Return a line for each promise: what was promised, what was measured, and whether it holds."""
    lines = []
    for side, result in found.items():
        for name, most in BARS.items():
            more = {kind: float(np.median(longer(result["times"], name, kind))) for kind in MEASURES}
            measured = ", ".join(f"{more[kind]:+.1f} % {label}" for kind, label in MEASURES.items())
            words = {True: "holds", False: "fails"}
            lines.append(
                f"{side} px, {name}: at most {most:.0f} % more: {words[more['clock'] <= most]} by the clock, "
                f"{words[more['process'] <= most]} by processor time ({measured})"
            )
    return lines


def record(found: dict[int, Any]) -> Record:
    """Return how much longer steps take as figures and bars."""
    figures, bars = [], []
    for side, result in found.items():
        times = result["times"]
        names = [name for name in times if name != BASE]
        for name in names:
            title = f"{side} px, {name}: a step is longer by"
            figures.append(Figure.of(title, longer(times, name, "clock"), "%", "less", clock=True, paper="CarM"))
            title = f"{side} px, {name}: the training thread computes longer by"
            figures.append(Figure.of(title, longer(times, name, "thread"), "%", "less", clock=True))
            title = f"{side} px, {name}: the process computes longer by"
            figures.append(Figure.of(title, longer(times, name, "process"), "%", "less", clock=True))
            title = f"{side} px, {name}: share of the time that steps waited for swaps"
            figures.append(Figure.of(title, stalled(result, name), "%", "less", clock=True))
        steps = [1e3 * seconds for seconds in times[BASE]["clock"]]
        figures.append(Figure.of(f"{side} px, {BASE}: a step", steps, "ms", "less", clock=True))
        every = [Bar.of(name, longer(times, name, "clock")) for name in names]
        bars.append(Bars(f"How much longer a step takes with swaps, images of {side} x {side}", "%", every))
    return Record(figures, bars=bars, scale="a small network on one CPU thread; CarM: ResNets on a GPU")


@click.command()
@folder_option
@click.option("--sides", default="32,224", show_default=True, help="Of the images.")
@click.option("--stored", default=8000, show_default=True, help="Samples in storage; a quarter of them at 224.")
@click.option("--memory", default=500, show_default=True)
@click.option("--rounds", default=11, show_default=True)
@click.option("--steps", default=6, show_default=True, help="In a block.")
@json_option
def main(folder: Path | None, sides: str, stored: int, memory: int, rounds: int, steps: int, out: Path | None) -> None:
    """Measure how much longer training steps take with swaps."""
    found = {
        side: measure(folder, side, stored if side < 100 else stored // 4, memory, rounds, steps)
        for side in map(int, sides.split(","))
    }
    console = Console(width=120)
    console.print(show(found))
    for line in verdicts(found):
        console.print(line)
    if out is not None:
        record(found).write(out, results={str(side): result for side, result in found.items()})


if __name__ == "__main__":
    main()
