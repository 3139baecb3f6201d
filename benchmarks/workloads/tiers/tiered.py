"""The share of the time of its reads that a tier hides behind computing, if it knows the next batches in advance.

``python -m memhier.benchmarks.workloads.tiers.tiered --dir /path/on/the/device`` reads batches of rows that are almost
never resident and computes on them: in numpy, which leaves the interpreter free, and in a Python loop, which keeps it.
Ways take turns over fresh batches: ``gather`` reads a batch when it comes, ``ahead 1`` and ``ahead 2`` prefetch one or
two batches in advance.

The amount of computing follows the reads of the same turn, batch by batch, so both take as long on average, whatever
the device does. It is work, not time: everything that slows it down shows, the tier's own threads too. The hidden share
is the share of the time of reads without a wait. A read that takes longer than the computing beside it cannot be hidden
whole; ``possible`` is the share that one batch ahead could hide.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import click
import numpy as np
from numpy.typing import NDArray

from memhier.benchmarks.bench.figures import Record
from memhier.benchmarks.workloads.harness import Measure, Outcome, Row, by_turns, figures_of, rows_table, workload
from memhier.table.tiered import Tiered

__all__ = ["main"]

Ints = NDArray[np.int64]
Work = Callable[[int], None]

DIM = 128
WAYS = ("gather", "ahead 1", "ahead 2")
# Batches of a turn that only find the amount of computing, and the amount that they begin with.
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


def fill(table: Tiered, rows: int, batch: int) -> None:
    """Write every row, and make all rows durable."""
    for start in range(0, rows, batch):
        keys = np.arange(start, min(start + batch, rows))
        table.scatter(keys, np.repeat(keys[:, None], DIM, axis=1).astype(np.float32))
    table.checkpoint()


def run_turn(table: Tiered, work: Work, draw: Iterator[Ints], batches: int, ahead: int) -> dict[str, float]:
    """Gather batches and compute on each; return seconds per batch, the first batches left out."""
    keys = [next(draw) for _ in range(batches + WARM)]
    counted = table.stats()["read_s"]  # a read ahead is counted when it ends, at any point of the loop
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
        rows = table.gather(batch)
        if ahead and index + ahead < len(keys):
            tickets.append(table.prefetch(keys[index + ahead]))
        computing.append(seconds_of(work, round(units)))
        reads.append(table.stats()["read_s"] - counted)
        counted += reads[-1]
        # The amount for the next batch, from the means so far: both are to take as long.
        units = max(1.0, round(units) * float(np.mean(reads) / computing[-1]))
        if not np.array_equal(rows[:, 0], batch):
            raise AssertionError("rows are not those that were written")
    wall, read = (time.perf_counter() - started) / batches, float(np.mean(reads))
    if not read:
        raise click.ClickException("no batch read a page: all rows are resident; give more --rows or less --dram")
    stall = (table.stats()["stall_s"] - stalled) / batches
    excess = np.maximum(0.0, np.array(reads) - np.array(computing))
    return {
        "read_s": read,
        "compute_s": float(np.mean(computing)),
        "ms": 1e3 * wall,
        "cpu_s": (time.process_time() - cpu) / batches,
        "stall_s": stall,
        "hidden": 1 - stall / read,
        "possible": 1 - float(excess.mean()) / read,
    }


def seconds_of(work: Work, units: int) -> float:
    """Return the seconds of some units of work."""
    started = time.perf_counter()
    work(units)
    return time.perf_counter() - started


@workload
@click.option("--rows", default=300_000, show_default=True, help="Rows in the table.")
@click.option("--batch", default=4096, show_default=True, help="Rows in a batch.")
@click.option("--batches", default=16, show_default=True, help="Batches in a turn.")
@click.option("--rounds", default=7, show_default=True)
@click.option("--dram", default="48MiB", show_default=True)
@click.option("--seed", default=0, show_default=True)
def main(scratch: Path, rows: int, batch: int, batches: int, rounds: int, dram: str, seed: int) -> Outcome:
    """Measure the share of its reads that a tier hides."""
    rng = np.random.default_rng(seed)
    with Tiered(scratch / "table", "rows", np.float32, DIM, rows=rows, dram=dram, batch=batch) as table:
        fill(table, rows, batch)
        draw = (rng.integers(0, rows, batch) for _ in iter(int, 1))

        def turn(kind: str, way: str) -> Row:
            return {"kind": kind, "way": way} | run_turn(table, WORKS[kind](), draw, batches, WAYS.index(way))

        ways = {f"{kind}, {way}": partial(turn, kind, way) for kind in WORKS for way in WAYS}
        turns = [row for rows_ in by_turns(ways, rounds).values() for row in rows_]
        stats = table.stats()
    at = "{kind} beside it, {way}: {title}"
    figures = figures_of(turns, [Measure("ms", "a batch", "ms", clock=True)], at)
    ahead = [row for row in turns if row["way"] != WAYS[0]]
    figures += figures_of(ahead, [Measure("hidden", "hidden", "share of the time of reads", "more", clock=True)], at)
    return Outcome(
        Record(figures), [rows_table("seconds a batch, every turn", turns)], {"turns": turns, "stats": stats}
    )


if __name__ == "__main__":
    main()
