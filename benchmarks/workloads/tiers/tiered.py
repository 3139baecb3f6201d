"""How much of the time of reading rows a tier hides behind computing, when it is told of the next batches in advance.

``python -m memhier.benchmarks.workloads.tiers.tiered --dir /path/on/the/device`` prints a table; ``--json`` writes it.

Batches of rows that are almost never resident are read from SSD and computed upon; by computing that leaves the
interpreter free (numpy), and by computing that keeps it (a Python loop). Ways take turns over fresh batches, again and
again: ``gather`` reads when the batch is there, ``ahead 1`` and ``ahead 2`` prefetch so many batches in advance.

Computing is work, not time: whatever slows it down, the tier's own threads included, shows. Its amount follows the
reads of the same turn, batch by batch, so that both take as long on average whatever the device is doing just now.
What is hidden is the share of the time of reads in which nobody waits for them. A read that takes longer than the
computing beside it cannot be hidden whole, and on a shared device some do: ``possible`` is what is left after that, for
one batch ahead.
"""

import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from memhier.benchmarks.bench.figures import Bar, Bars, Figure, Record
from memhier.benchmarks.workloads.options import folder_option, json_option
from memhier.table.tiered import Tiered

__all__ = ["main", "measure"]

Ints = NDArray[np.int64]
Work = Callable[[int], None]

DIM = 128
WAYS = ("gather", "ahead 1", "ahead 2")
# Batches of a turn that only find out how much computing there has to be, and where they begin to look.
WARM = 4
WARM_UNITS = 100


def free_work() -> Work:
    """Return work in units of some 100 us that leaves the interpreter to other threads."""
    values = np.random.default_rng(0).random(100_000)

    def work(units: int) -> None:
        for _ in range(units):
            np.sqrt(values, out=values)

    return work


def python_work() -> Work:
    """Return work in units of some 100 us that keeps the interpreter."""

    def work(units: int) -> None:
        total = 0
        for number in range(units * 1000):
            total += number * number

    return work


WORKS: dict[str, Callable[[], Work]] = {"numpy": free_work, "python": python_work}


def measure(folder: Path | None, rows: int, batch: int, batches: int, rounds: int, dram: str, seed: int) -> Any:
    """Return, for each kind of computing, what every round gave."""
    rng = np.random.default_rng(seed)
    with (
        tempfile.TemporaryDirectory(dir=folder) as scratch,
        Tiered(Path(scratch) / "table", "rows", np.float32, DIM, rows=rows, dram=dram, batch=batch) as table,
    ):
        fill(table, rows, batch)
        draw = (rng.integers(0, rows, batch) for _ in iter(int, 1))
        results: dict[str, list[dict[str, Any]]] = {kind: [] for kind in WORKS}
        for _ in range(rounds):
            for kind, make in WORKS.items():
                work = make()
                results[kind].append(
                    {way: run_turn(table, work, draw, batches, ahead) for ahead, way in enumerate(WAYS)}
                )
        return results | {"stats": table.stats()}


def fill(table: Tiered, rows: int, batch: int) -> None:
    """Write every row, and make them durable."""
    for start in range(0, rows, batch):
        keys = np.arange(start, min(start + batch, rows))
        table.scatter(keys, np.repeat(keys[:, None], DIM, axis=1).astype(np.float32))
    table.checkpoint()


def run_turn(table: Tiered, work: Work, draw: Iterator[Ints], batches: int, ahead: int) -> dict[str, float]:
    """Gather batches and compute on each; return seconds per batch, the first batches left out."""
    keys = [next(draw) for _ in range(batches + WARM)]
    tickets = deque((table.prefetch(batch) for batch in keys[:ahead]), maxlen=ahead + 1)
    for ticket in tickets:
        ticket.wait()
    units = float(WARM_UNITS)
    reads: list[float] = []
    computing: list[float] = []
    stalled = cpu = started = 0.0
    for index, batch in enumerate(keys):
        if index == WARM:
            reads, computing = reads[-1:], computing[-1:]
            stalled, cpu, started = table.stats()["stall_s"], time.process_time(), time.perf_counter()
        before = table.stats()["read_s"]
        rows = table.gather(batch)
        if ahead and index + ahead < len(keys):
            tickets.append(table.prefetch(keys[index + ahead]))
        computing.append(seconds_of(work, round(units)))
        reads.append(table.stats()["read_s"] - before)
        # The amount for the next batch, from the means so far: both are to take as long.
        units = max(1.0, round(units) * float(np.mean(reads) / computing[-1]))
        if not np.array_equal(rows[:, 0], batch):
            raise AssertionError("rows are not those that were written")
    wall, read = (time.perf_counter() - started) / batches, float(np.mean(reads))
    stall = (table.stats()["stall_s"] - stalled) / batches
    excess = np.maximum(0.0, np.array(reads) - np.array(computing))
    return {
        "read_s": read,
        "compute_s": float(np.mean(computing)),
        "wall_s": wall,
        "cpu_s": (time.process_time() - cpu) / batches,
        "stall_s": stall,
        "hidden": 1 - stall / read,
        "possible": 1 - float(excess.mean()) / read,
    }


def seconds_of(work: Work, units: int) -> float:
    """Return the seconds that so much work takes."""
    started = time.perf_counter()
    work(units)
    return time.perf_counter() - started


def show(results: dict[str, Any], batch: int) -> Table:
    """Lay out medians over the rounds."""
    table = Table(title=f"batches of {batch} rows of {4 * DIM} bytes, medians in ms per batch")
    fields = ("read_s", "compute_s", "wall_s", "cpu_s", "stall_s")
    for column in ("computing", "way", *(field[:-2] for field in fields), "hidden", "possible", "hidden, each round"):
        table.add_column(column, justify="left" if column in ("computing", "way") else "right")
    for kind in WORKS:
        for way in WAYS:
            turns = [turn[way] for turn in results[kind]]
            median = {name: float(np.median([turn[name] for turn in turns])) for name in turns[0]}
            each = " ".join(f"{turn['hidden']:.2f}" for turn in turns)
            shares = (f"{median[name]:.3f}" for name in ("hidden", "possible"))
            table.add_row(kind, way, *(f"{1e3 * median[field]:.1f}" for field in fields), *shares, each)
    return table


def record(results: dict[str, Any]) -> Record:
    """Return what is hidden and what a batch takes as figures, what is hidden as bars."""
    figures, bars = [], []
    for kind in WORKS:
        for way in WAYS:
            turns = [turn[way] for turn in results[kind]]
            walls = [1e3 * turn["wall_s"] for turn in turns]
            figures.append(Figure.of(f"{kind} beside it, {way}: a batch", walls, "ms", "less", clock=True))
            if way != WAYS[0]:
                hidden = [turn["hidden"] for turn in turns]
                name = f"{kind} beside it, {way}: hidden"
                figures.append(Figure.of(name, hidden, "share of the time of reads", "more", clock=True))
                bars.append(Bar.of(f"{kind} beside it, {way}", hidden))
    return Record(figures, bars=[Bars("Reads that nobody waits for", "share of their time", bars)])


@click.command()
@folder_option
@click.option("--rows", default=300_000, show_default=True, help="Rows in the table.")
@click.option("--batch", default=4096, show_default=True, help="Rows in a batch.")
@click.option("--batches", default=16, show_default=True, help="Batches in a turn.")
@click.option("--rounds", default=7, show_default=True)
@click.option("--dram", default="48MiB", show_default=True)
@click.option("--seed", default=0, show_default=True)
@json_option
def main(
    folder: Path | None, rows: int, batch: int, batches: int, rounds: int, dram: str, seed: int, out: Path | None
) -> None:
    """Measure how much of its reads a tier hides."""
    results = measure(folder, rows, batch, batches, rounds, dram, seed)
    Console(width=130).print(show(results, batch))
    if out is not None:
        record(results).write(out, batch=batch, rows=rows, **results)


if __name__ == "__main__":
    main()
