"""The processor time of a table next to torch's: alone, with one linear layer on top, and behind an MLP.

``python -m memhier.benchmarks.workloads.embedding.linear --dir /path/on/the/device``: one table, or with ``--rows 0``
26 of Criteo's sizes, with Criteo's skew, rows of 32 floats, SGD, one thread. A model that does little besides shows the
costs that hide behind a DLRM's MLP. The ways take turns over the same batches, round after round. The figures are the
processor time of the process, with all threads and the kernel's part: neighbours disturb it little.
"""

import os
import time
from pathlib import Path

import click
import torch
from torch import Tensor, nn

from memhier.benchmarks.bench.figures import Record
from memhier.benchmarks.workloads.embedding.common import Sample, stream_of, table_sizes
from memhier.benchmarks.workloads.embedding.models.dlrm import DLRM
from memhier.benchmarks.workloads.embedding.speed import DIM, RATE, Memhier, Torch, Way
from memhier.benchmarks.workloads.harness import Measure, Outcome, Row, figures_of, workload
from memhier.policies import Belady

__all__ = ["main"]


class Top:
    """The model on top of the tables, with its optimizer; None has nothing to train."""

    def __init__(self, net: nn.Module | None) -> None:
        self._net = net
        self._optimizer = None if net is None else torch.optim.SGD(net.parameters(), lr=RATE)

    def loss(self, batch: Sample, rows: Tensor) -> Tensor:
        """Return the loss of a batch."""
        if self._net is None:
            return rows.sum()
        logits = self._net(batch.dense, rows) if isinstance(self._net, DLRM) else self._net(rows)[:, 0]
        return nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)

    def step(self) -> None:
        """Update it."""
        if self._optimizer is not None:
            self._optimizer.step()
            self._optimizer.zero_grad()


def run_round(way: Way, some: list[Sample], top: Top) -> float:
    """Train on batches; return the process's seconds of processor time for a step."""
    started = time.process_time()
    for batch in way.batches(some):
        torch.autograd.backward(top.loss(batch, way.look(batch.ids)))
        way.step()
        top.step()
    return (time.process_time() - started) / len(some)


def measure(folder: Path, sizes: list[int], share: float, batch: int, steps: int, rounds: int) -> list[Row]:
    """Return the seconds of a step for every model, way and round but the first."""
    stream, needed = stream_of(sizes, batch, steps * (rounds + 1))
    torch.manual_seed(0)
    tops = {
        "the tables alone": Top(None),
        "a linear layer on top": Top(nn.Linear(DIM * len(sizes), 1)),
        "DLRM": Top(DLRM(len(sizes), DIM)),
    }
    slots = int(share * sum(sizes))
    ways: dict[str, Way] = {
        "all in DRAM": Memhier(folder / "all", sizes, needed, Belady(len(needed)), 8),
        f"{share:.0%} in DRAM": Memhier(folder / "some", sizes, needed, Belady(slots), 8),
        "torch": Torch(sizes),
    }
    rows: list[Row] = []
    for number in range(rounds + 1):
        some = stream[number * steps : (number + 1) * steps]
        for name, top in tops.items():
            seconds = {}
            for each, way in ways.items():
                os.sync()  # no way pays for the writes of the way before
                seconds[each] = run_round(way, some, top)
            if number:
                rows += [
                    {"top": name, "way": each, "ms": 1e3 * took, "times": took / seconds["torch"]}
                    for each, took in seconds.items()
                ]
    for way in ways.values():
        way.close()
    return rows


@workload
@click.option("--rows", default=1_000_000, show_default=True, help="Of one table; 0 for 26 tables.")
@click.option("--scale", default=0.1, show_default=True, help="Of the large ones of 26 tables.")
@click.option("--share", default=0.05, show_default=True, help="Of the rows in DRAM.")
@click.option("--batch", default=4096, show_default=True)
@click.option("--steps", default=12, show_default=True, help="In a round.")
@click.option("--rounds", default=5, show_default=True)
def main(scratch: Path, rows: int, scale: float, share: float, batch: int, steps: int, rounds: int) -> Outcome:
    """Measure the processor time of a step for each model on top of the tables."""
    sizes = [rows] if rows else table_sizes(scale)
    spent = measure(scratch, sizes, share, batch, steps, rounds)
    ours = [row for row in spent if row["way"] != "torch"]
    figures = [
        *figures_of(spent, [Measure("ms", "", "ms", clock=True)], "{top}: {way}"),
        *figures_of(ours, [Measure("times", "", "times", clock=True)], "{top}: {way} over torch"),
    ]
    scale_words = f"{sum(sizes):,} rows of {DIM} floats, batches of {batch}, one thread"
    return Outcome(Record(figures, scale=scale_words), details={"spent": spent})


if __name__ == "__main__":
    main()
