"""Carousel Memory's own experiment at a scale of choice: methods, sizes of memory, swap ratios and limits of storage.

``python -m memhier.benchmarks.workloads.replay.paper.table --data cifar10 --runs FOLDER`` makes the table. Every option
with commas is a list, and its first value is the base. The grid has each method with each memory and each ratio; limits
of storage and ways of swapping other than the first are tried at the first memory and ratio. Every finished cell is
kept in the folder, and the one under way at every task: with ``--resume`` the program goes on, and more values add to
the table. ``--new 0`` prints the table of the cells that there are.

A stream is learned task by task and never seen again. Cells of a seed have the same classes in the same order. Final
accuracy is over all classes, without being told the task; accuracy on the way is its mean over all tasks. TinyER knows
the task, and makes one pass. A memory of "all" has everything seen in DRAM.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np

from memhier.benchmarks.bench.figures import Figure, Record
from memhier.benchmarks.bench.results import hold_alone
from memhier.benchmarks.datasets import Images, in_equal_parts
from memhier.benchmarks.workloads.harness import (
    Measure,
    Outcome,
    Row,
    bars_of,
    figures_of,
    grouped,
    rows_table,
    workload,
)
from memhier.benchmarks.workloads.replay.paper.cells import SWAPS, Cell, Runs, Setting
from memhier.benchmarks.workloads.replay.paper.models import MODELS
from memhier.benchmarks.workloads.replay.paper.streams import STREAMS
from memhier.recsys.replay.methods import METHODS

__all__ = ["grid", "main"]

PAPER = {
    ("cifar100", "BiC", "memory only"): 48.6, ("cifar100", "BiC", "100 % swapped"): 63.1,
    ("cifar10", "DER++", "memory only"): 72.2, ("cifar10", "DER++", "100 % swapped"): 90.6,
    ("cifar10", "RM", "memory only"): 52.1, ("cifar10", "RM", "100 % swapped"): 67.7,
}  # fmt: skip
"""Final accuracy in the paper, by data, method and way: ResNet-18 and -32, memory of 500 (CIFAR-100: 2,000)."""
PAPER_MEMORY = {"cifar10": 500, "cifar100": 2000}


def listed(kind: Any, nothing: str | None = None) -> Callable[[str], list[Any]]:
    """Return a function from words between commas to values of a kind of click; the word `nothing` is None."""

    def values(text: str) -> list[Any]:
        return [None if word == nothing else kind.convert(word.strip(), None, None) for word in text.split(",")]

    return values


def grid(
    methods: list[str], memories: list[int | None], ratios: list[float], storages: list[float | None],
    swaps: list[str], seeds: int,
) -> list[Cell]:  # fmt: skip
    """Return the cells of a table, all of a seed before those of the next."""
    cells = []
    for seed, method in itertools.product(range(seeds), methods):
        base = Cell(method, memories[0], ratios[0], storages[0], swaps[0], seed)
        for memory, ratio in itertools.product(memories, ratios):
            # Without swaps, nothing depends on storage and on the way of swapping.
            still = ratio == 0 or memory is None
            cells.append(Cell(method, memory, 0, None, SWAPS[0], seed) if still
                         else replace(base, memory=memory, ratio=ratio))  # fmt: skip
        cells += [replace(base, storage=storage) for storage in storages[1:]]
        cells += [replace(base, swaps=way) for way in swaps[1:]]
    return list(dict.fromkeys(cells))


def measure(setting: Setting, cells: list[Cell], images: Images, runs: Runs, new: int | None) -> list[Row]:
    """Return the rows of the cells, and run at most `new` that have none yet."""
    rows = []
    for cell in cells:
        row = runs.finished(setting, cell)
        if row is None:
            if new == 0:
                continue
            new = None if new is None else new - 1
            row = runs.make(setting, cell, images)
            click.echo(f"{_words(cell)}: {100 * row['final']:.1f} % at the end, "
                       f"{100 * row['incremental']:.1f} % on the way, {row['cpu_s']:.0f} CPU s")  # fmt: skip
        rows.append(row)
    return rows


def _words(cell: Cell) -> str:
    return f"{cell.method}, memory {cell.memory or 'all'}, {cell.way}, seed {cell.seed}"


def gains(rows: list[Row], column: str = "final") -> Iterator[tuple[Row, list[float]]]:
    """Yield for each group of seeds with swaps a row of it, and the points over the same memory alone, by seed."""
    groups = grouped(rows, "method", "memory", "way")
    for (method, memory, _), group in groups.items():
        alone = {row["seed"]: row[column] for row in groups.get((method, memory, "memory only"), [])}
        points = [100 * (row[column] - alone[row["seed"]]) for row in group if row["seed"] in alone]
        if group[0]["ratio"] and points:
            yield group[0], points


def lines(rows: list[Row], data: str) -> list[Row]:
    """Return the lines of the table: means over seeds, deviations, differences by seed, and the paper's figures."""
    everything = {(row["method"], row["seed"]): row["final"] for row in rows if row["memory"] is None}
    over = {(row["method"], row["memory"], row["way"]): points for row, points in gains(rows)}
    found = []
    for (method, memory, way), group in grouped(rows, "method", "memory", "way").items():
        ends, means = ([100 * row[column] for row in group] for column in ("final", "incremental"))
        below = [100 * (row["final"] - everything[method, row["seed"]]) for row in group
                 if (method, row["seed"]) in everything]  # fmt: skip
        paper = PAPER.get((data, method, way)) if memory == PAPER_MEMORY.get(data) else None
        found.append({
            "method": method, "memory": str(memory or "all"), "way": way, "seeds": len(group),
            "final": _spread(ends), "on_the_way": _spread(means),
            "over_memory_only": _signed(over.get((method, memory, way), [])),
            "over_all_in_DRAM": _signed(below if memory else []), "paper": "" if paper is None else f"{paper}",
            "CPU_s": f"{np.mean([row['cpu_s'] for row in group]):.0f}",
        })  # fmt: skip
    return found


def _spread(values: list[float]) -> str:
    deviation = f" ± {np.std(values, ddof=1):.1f}" if len(values) > 1 else ""
    return f"{np.mean(values):.1f}{deviation}"


def _signed(points: list[float]) -> str:
    return f"{np.mean(points):+.1f} ({min(points):+.1f} to {max(points):+.1f})" if points else ""


def record(rows: list[Row], setting: Setting) -> Record:
    """Return accuracies and gains as figures."""
    shares: list[Row] = [
        row | {"memory": row["memory"] or "all", "final": 100 * row["final"], "incremental": 100 * row["incremental"]}
        for row in rows
    ]
    measures = [
        Measure("final", "accuracy at the end", "%", "more"), Measure("incremental", "accuracy on the way", "%", "more")
    ]  # fmt: skip
    figures = figures_of(shares, measures, setting.data + ", {memory}: {method}, {way}, {title}")
    for row, points in gains(rows):
        name = f"{setting.data}, {row['memory']}: {row['method']}, {row['way']}, gain at the end"
        figures.append(Figure.of(name, points, "points", "more", paper="CarM"))
    values = {
        f"{method}, {memory}, {way}": [row["final"] for row in group]
        for (method, memory, way), group in grouped(shares, "method", "memory", "way").items()
    }
    samples = "all" if setting.samples is None else f"{setting.samples:,}"
    scale = (
        f"{setting.model} of width {setting.width}, {setting.epochs} epochs, {samples} training images; CarM: "
        "ResNet-18 of width 64 and ResNet-32, 50 to 250 epochs, all images"
    )
    bars = bars_of(f"Accuracy after the last task: {setting.data}", "%", values)
    return Record(figures, bars=[bars], scale=scale)


@workload
@click.option("--data", type=click.Choice(list(STREAMS)), default="cifar10", show_default=True)
@click.option("--path", type=click.Path(exists=True, file_okay=False, path_type=Path), help="The folder of the data.")
@click.option("--model", type=click.Choice(list(MODELS)), help="That of the data by default.")
@click.option("--width", default=16, show_default=True, help="Of the network; ResNet-18 was published with 64.")
@click.option("--half/--full", default=True, show_default=True, help="Compute in bfloat16, or in float32.")
@click.option("--epochs", default=5, show_default=True)
@click.option("--samples", type=int, help="Of the training data, in equal parts of all classes; all by default.")
@click.option(
    "--methods",
    type=listed(click.Choice(list(METHODS))),
    default="DER++,ER,RM,BiC,GDumb,iCaRL,TinyER",
    show_default=True,
)
@click.option(
    "--memories",
    type=listed(click.IntRange(1), "all"),
    default="500,200,1000,all",
    show_default=True,
    help="Samples in DRAM.",
)
@click.option(
    "--ratios",
    type=listed(click.FloatRange(0, 1)),
    default="1,0,.2,.5",
    show_default=True,
    help="Shares that are swapped.",
)
@click.option("--storages", type=listed(click.FloatRange(0, min_open=True), "none"), default="none,1.5,2,5,10",
              show_default=True, help="Limits of storage, as multiples of memory.")  # fmt: skip
@click.option("--swaps", type=listed(click.Choice(SWAPS)), default="random,gate,same class", show_default=True)
@click.option("--seeds", default=2, show_default=True)
@click.option("--runs", "kept", type=click.Path(file_okay=False, path_type=Path),
              help="Keep every cell in this folder; a temporary one by default.")  # fmt: skip
@click.option("--resume", is_flag=True, help="Go on with the cells of the folder.")
@click.option("--new", type=click.IntRange(0), help="Run at most so many cells; all by default.")
def main(
    scratch: Path, data: str, path: Path | None, model: str | None, width: int, half: bool, epochs: int,
    samples: int | None, seeds: int, kept: Path | None, resume: bool, new: int | None, **lists: Any,
) -> Outcome:  # fmt: skip
    """Make the table."""
    folder = kept or scratch / "runs"
    folder.mkdir(parents=True, exist_ok=True)
    with hold_alone(folder / "lock", "--runs:"):
        runs = Runs(folder)
        if len(runs) and not resume:
            raise click.UsageError(f"--runs: {kept} has {len(runs)} finished cells: add --resume, or remove it")
        setting = Setting(data, model or STREAMS[data].model, width, half, epochs, samples)
        images = STREAMS[data].load(path)
        if samples is not None:
            images = in_equal_parts(images, samples)
        rows = measure(setting, grid(**lists, seeds=seeds), images, runs, new)
    if not rows:
        raise click.UsageError("no cell is finished, and --new=0 runs none")
    return Outcome(record(rows, setting), [rows_table(f"Accuracy, %: {data}", lines(rows, data))], {"rows": rows})


if __name__ == "__main__":
    main()
