"""The cost model beside the clock: what it predicts from a fresh probe, and what three workloads then take.

``python -m memhier.benchmarks.workloads.tiers.cost_model --dir /path/on/the/device`` prints a table; ``--json`` writes
it.

- ``100 pages``: calls of the reader for 100 scattered pages each;
- ``10,000 pages``: the same for 10,000;
- ``tiered``: a skewed trace (Zipf) gathered through a tier that starts empty. Here the reads have to be predicted as
  well: :func:`memhier.simulate` is given the trace, the capacity and the probe, and nothing of the run.

A shared device changes from minute to minute, so a round probes before each workload and after the last, and each
prediction is made from the probes on either side of it. A probe reports medians, so that bursts of a neighbour's I/O
do not count; the clock does so, too: the median call, and for the tier the median over its batches of what it waits
for a read.
"""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from memhier.benchmarks.bench.figures import Bar, Bars, Figure, Record
from memhier.benchmarks.workloads.options import folder_option, json_option
from memhier.io.device import probe
from memhier.io.reader import PAGE_BYTES, Reader
from memhier.planning.cost import CostModel
from memhier.planning.simulation import simulate
from memhier.policies import LRU
from memhier.table.tiered import Tiered

__all__ = ["main", "measure"]

DIM = 256
ROW_BYTES = 4 * DIM
CAPACITY = 30_000
BATCH = 4096
BATCHES = 24
EXPONENT = 0.9
DRAM = "128MiB"


def measure(folder: Path | None, rows: int, rounds: int, seconds: float, seed: int) -> list[dict[str, Any]]:
    """Return, for every round, what each workload was predicted to take and took, in seconds."""
    rng = np.random.default_rng(seed)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        place = Path(scratch) / "table"
        fill(place, rows, rng)
        file = max(place.glob("segments/*.seg"), key=lambda path: path.stat().st_size)
        return [run_round(place, file, rows, seconds, rng) for _ in range(rounds)]


def fill(place: Path, rows: int, rng: np.random.Generator) -> None:
    """Write a table of random rows in the order of their keys."""
    with open_table(place, rows) as table:
        for start in range(0, rows, BATCH):
            keys = np.arange(start, min(start + BATCH, rows))
            table.scatter(keys, rng.random((len(keys), DIM), np.float32))
        table.checkpoint()


def open_table(place: Path, rows: int) -> Tiered:
    """Open the table with nothing in DRAM."""
    return Tiered(place, "rows", np.float32, DIM, rows=rows, dram=DRAM, policy=LRU(CAPACITY), batch=BATCH)


def run_round(place: Path, file: Path, rows: int, seconds: float, rng: np.random.Generator) -> dict[str, Any]:
    """Probe and run by turns."""
    rank = np.arange(1, rows + 1, dtype=np.float64) ** -EXPONENT
    trace = rng.permutation(rows)[rng.choice(rows, BATCH * BATCHES, p=rank / rank.sum())]

    def simulated(model: CostModel) -> float:
        dram = CAPACITY * ROW_BYTES
        result = simulate(trace, dram=dram, row_bytes=ROW_BYTES, policy="lru", batch=BATCH, device=model)
        assert result.forecast is not None
        return result.forecast.stall_s

    workloads: dict[str, tuple[Callable[[CostModel], float], Callable[[], float]]] = {
        "100 pages": (lambda model: float(model.batch_s(100)), lambda: read_pages(file, 100, seconds, rng)),
        "10,000 pages": (lambda model: float(model.batch_s(10_000)), lambda: read_pages(file, 10_000, seconds, rng)),
        "tiered": (simulated, lambda: gather_all(place, rows, trace)),
    }
    before = CostModel.of(probe(file, seconds=seconds))
    results = {}
    for name, (predict, run) in workloads.items():
        took = run()
        after = CostModel.of(probe(file, seconds=seconds))
        predicted = [predict(before), predict(after)]
        mean = sum(predicted) / 2
        results[name] = {"took_s": took, "predicted_s": mean, "each_s": predicted, "ratio": mean / took}
        before = after
    return results


def read_pages(file: Path, count: int, seconds: float, rng: np.random.Generator) -> float:
    """Return the median seconds of a call for `count` scattered pages."""
    pages = file.stat().st_size // PAGE_BYTES
    out = np.empty((count, PAGE_BYTES), np.uint8)
    took: list[float] = []
    with Reader() as reader:
        handle = reader.add(file)
        while sum(took) < seconds:
            offsets = rng.choice(pages, count, replace=False) * PAGE_BYTES
            started = time.perf_counter()
            reader.read(handle, offsets, PAGE_BYTES, out)
            took.append(time.perf_counter() - started)
    return float(np.median(took))


def gather_all(place: Path, rows: int, trace: NDArray[np.int64]) -> float:
    """Return the seconds that a tier waits for reads in gathering a trace, at the median pace of its batches."""
    out = np.empty((BATCH, DIM), np.float32)
    stalls, reads = [], []
    with open_table(place, rows) as table:
        for batch in trace.reshape(-1, BATCH):
            before = table.stats()
            table.gather(batch, out)
            after = table.stats()
            stalls.append(after["stall_s"] - before["stall_s"])
            reads.append(after["reads"] - before["reads"])
    return float(np.median(np.array(stalls) / np.array(reads)) * sum(reads))


def show(rounds: list[dict[str, Any]]) -> Table:
    """Lay out medians over the rounds, and every round's ratio."""
    table = Table(title="predicted from a probe, and measured; medians over the rounds")
    for column in ("workload", "predicted ms", "measured ms", "ratio", "of each round", "probe after / before"):
        table.add_column(column, justify="left" if column == "workload" else "right")
    for name in rounds[0]:
        runs = [turn[name] for turn in rounds]
        predicted, took, ratio = (
            float(np.median([run[field] for run in runs])) for field in ("predicted_s", "took_s", "ratio")
        )
        each = " ".join(f"{run['ratio']:.2f}" for run in runs)
        drift = " ".join(f"{run['each_s'][1] / run['each_s'][0]:.2f}" for run in runs)
        table.add_row(name, f"{1e3 * predicted:.2f}", f"{1e3 * took:.2f}", f"{ratio:.2f}", each, drift)
    return table


def record(results: list[dict[str, Any]]) -> Record:
    """Return how far each prediction was off, and the ratios as bars."""
    figures, bars = [], []
    for name in results[0]:
        ratios = [each[name]["ratio"] for each in results]
        off = [max(ratio, 1 / ratio) - 1 for ratio in ratios]
        figures.append(Figure.of(f"{name}: prediction off by", off, "share of the time taken", "less", clock=True))
        bars.append(Bar.of(name, ratios))
    return Record(figures, bars=[Bars("Predicted over taken", "times: 1 is right", bars)])


@click.command()
@folder_option
@click.option("--rows", default=400_000, show_default=True, help="Rows of 1 KiB in the table.")
@click.option("--rounds", default=5, show_default=True)
@click.option("--seconds", default=2.0, show_default=True, help="For each probe, and each run of the reader.")
@click.option("--seed", default=0, show_default=True)
@json_option
def main(folder: Path | None, rows: int, rounds: int, seconds: float, seed: int, out: Path | None) -> None:
    """Compare the cost model's predictions with what is measured."""
    results = measure(folder, rows, rounds, seconds, seed)
    Console(width=130).print(show(results))
    if out is not None:
        record(results).write(out, rows=rows, rounds=results)


if __name__ == "__main__":
    main()
