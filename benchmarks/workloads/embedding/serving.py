"""A TableReader next to torch's table in memory: processor and wall time of a batch, and private memory.

``python -m memhier.benchmarks.workloads.embedding.serving --dir /path/on/the/device``: batches of 1,024 bags of 10 ids
by Zipf's law, of a million rows of 32 floats that were trained with Adagrad, one thread. The ways take turns over the
same batches, round after round. Memory is the private memory of the process beyond that from before the reader opened,
at most, sampled in the first round, which fills the cache and is not timed.
"""

from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from torch import nn

from memhier.benchmarks.bench.figures import Figure, Record
from memhier.benchmarks.peers.account import Usage, memory_now
from memhier.benchmarks.workloads.embedding.common import power_law
from memhier.benchmarks.workloads.harness import Outcome, workload
from memhier.budget import parse_bytes
from memhier.recsys import Adagrad, EmbeddingBag, TableReader

__all__ = ["main"]

_LENGTH = 10
_WRITTEN = 8192  # rows at a time


@workload
@click.option("--rows", default=1_000_000, show_default=True)
@click.option("--dim", default=32, show_default=True)
@click.option("--batch", default=1024, show_default=True, help="Bags of 10 ids.")
@click.option("--dram", "budgets", multiple=True, default=("64MiB", "512MiB"), show_default=True)
@click.option("--batches", default=50, show_default=True, help="In a round.")
@click.option("--rounds", default=5, show_default=True)
def main(
    scratch: Path, rows: int, dim: int, batch: int, budgets: tuple[str, ...], batches: int, rounds: int
) -> Outcome:
    """Measure a reader of tables."""
    write(scratch / "tables", rows, dim)
    rng = np.random.default_rng(0)
    size = batch * _LENGTH
    count = batches * (rounds + 1)
    stream = [torch.from_numpy(power_law(rng.random(size), rows, 1.05).reshape(batch, -1)) for _ in range(count)]
    beside = nn.EmbeddingBag(rows, dim, mode="sum", _weight=torch.zeros(rows, dim))
    figures = []
    with torch.no_grad():
        for dram in budgets:
            figures += measure(scratch / "tables", dram, beside, stream, batches)
    return Outcome(Record(figures, scale=f"{rows:,} rows of {dim}, {batch} bags of {_LENGTH} ids, one thread"))


def write(folder: Path, rows: int, dim: int) -> None:
    """Make a table whose rows were all written."""
    with EmbeddingBag(rows, dim, mode="sum", optimizer=Adagrad(), dram="256MiB", path=folder) as table:
        for start in range(0, rows, _WRITTEN):
            some = np.arange(start, min(start + _WRITTEN, rows))
            table.tables.write(0, some, table.initial_weights(some).numpy())
        table.checkpoint()


def measure(folder: Path, dram: str, beside: nn.Module, stream: list[torch.Tensor], batches: int) -> list[Figure]:
    """Return the time of a batch, over torch's and in milliseconds, the rows read for it, and memory over budget."""
    before, most = memory_now(), 0
    times: list[float] = []
    spent: dict[str, list[float]] = {"cpu": [], "wall": []}
    with TableReader(folder, dram=dram) as reader:
        served: Any = reader.embedding_bag(mode="sum")
        for start in range(0, len(stream), batches):
            of_ways = []
            for way in (beside, served):
                begun = Usage.now()
                for ids in stream[start : start + batches]:
                    way(ids)
                    if way is served and not start:
                        most = max(most, memory_now() - before)
                of_ways.append(Usage.now() - begun)
            if start:  # the first round fills the cache
                times.append(of_ways[1].cpu_s / of_ways[0].cpu_s)
                spent["cpu"].append(1e3 * of_ways[1].cpu_s / batches)
                spent["wall"].append(1e3 * of_ways[1].wall_s / batches)
        missed = reader.stats()["misses"] / len(stream)
    return [
        Figure.of(f"{dram}: processor time over torch's", times, "times", "less", clock=True),
        Figure.of(f"{dram}: processor time", spent["cpu"], "ms", "less", clock=True),
        Figure.of(f"{dram}: wall time", spent["wall"], "ms", "less", clock=True),
        Figure.of(f"{dram}: rows read", missed, "a batch", "less"),
        Figure.of(f"{dram}: private memory over budget", most / parse_bytes(dram), "times", "less"),
    ]


if __name__ == "__main__":
    main()
