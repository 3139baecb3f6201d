"""How much processor time a table takes next to torch's: alone, with one linear layer on top, and behind an MLP.

``python -m memhier.benchmarks.workloads.embedding.linear --dir /path/on/the/device``: one table, or with ``--rows 0``
26 of Criteo's sizes, with Criteo's skew, rows of 32 floats, SGD, one thread. What hides behind a DLRM's MLP shows here:
the step of a model that does little besides. The ways take turns over the same batches, round after round. Counted is
the processor time of the process, all threads and the kernel's part included: neighbours disturb it little.
"""

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from rich.console import Console
from torch import Tensor, nn

from memhier.benchmarks.bench.figures import Figure, Record
from memhier.benchmarks.workloads.embedding.common import DLRM, Sample, samples, table_sizes
from memhier.benchmarks.workloads.embedding.speed import DIM, RATE, Memhier, Torch, Way
from memhier.benchmarks.workloads.options import folder_option, json_option
from memhier.policies import Belady

__all__ = ["main", "measure"]

Loss = Callable[[Sample, Tensor], Tensor]


class Top:
    """What is on top of the tables, with its optimizer; an empty one has nothing to train."""

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


def measure(
    folder: Path | None, sizes: list[int], share: float, batch: int, steps: int, rounds: int
) -> dict[str, dict[str, list[float]]]:
    """Return, for what is on top and each way, the seconds of a step in every round but the first."""
    torch.set_num_threads(1)
    torch.sparse.check_sparse_tensor_invariants.disable()  # type: ignore[no-untyped-call]
    stream = [*samples(sizes, batch, steps * (rounds + 1), 0)]
    bases = np.cumsum([0, *sizes])[:-1]
    needed = np.unique(np.concatenate([np.unique(sample.ids.numpy() + bases) for sample in stream]))
    torch.manual_seed(0)
    tops = {
        "the tables alone": Top(None),
        "a linear layer on top": Top(nn.Linear(DIM * len(sizes), 1)),
        "DLRM": Top(DLRM(len(sizes), DIM)),
    }
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        places = [Path(scratch) / str(number) for number in range(2)]
        for place in places:
            place.mkdir()
        slots = int(share * sum(sizes))
        ways: dict[str, Way] = {
            "all in DRAM": Memhier(places[0], sizes, needed, Belady(len(needed)), 8),
            f"{share:.0%} in DRAM": Memhier(places[1], sizes, needed, Belady(slots), 8),
            "torch": Torch(sizes),
        }
        spent: dict[str, dict[str, list[float]]] = {top: {way: [] for way in ways} for top in tops}
        for number in range(rounds + 1):
            some = stream[number * steps : (number + 1) * steps]
            for name, top in tops.items():
                for each, way in ways.items():
                    os.sync()  # what the way before wrote is no burden of this one
                    took = run_round(way, some, top)
                    if number:
                        spent[name][each].append(took)
        for way in ways.values():
            if isinstance(way, Memhier):
                way.tables.close()
    return spent


def record(spent: dict[str, dict[str, list[float]]], scale: str) -> Record:
    """Return medians over rounds: milliseconds of processor time, and times torch's."""
    figures = []
    for top, ways in spent.items():
        for way, seconds in ways.items():
            figures.append(Figure.of(f"{top}: {way}", [1e3 * each for each in seconds], "ms", "less", clock=True))
        for way, seconds in ways.items():
            if way != "torch":
                ratios = [mine / theirs for mine, theirs in zip(seconds, ways["torch"], strict=True)]
                figures.append(Figure.of(f"{top}: {way} over torch", ratios, "times", "less", clock=True))
    return Record(figures, scale=scale)


@click.command()
@folder_option
@click.option("--rows", default=1_000_000, show_default=True, help="Of one table; 0 for 26 tables.")
@click.option("--scale", default=0.1, show_default=True, help="Of the large ones of 26 tables.")
@click.option("--share", default=0.05, show_default=True, help="Of the rows in DRAM.")
@click.option("--batch", default=4096, show_default=True)
@click.option("--steps", default=12, show_default=True, help="In a round.")
@click.option("--rounds", default=5, show_default=True)
@json_option
def main(
    folder: Path | None, rows: int, scale: float, share: float, batch: int, steps: int, rounds: int, out: Path | None
) -> None:
    """Measure the processor time of a step by what is on top of the tables."""
    sizes = [rows] if rows else table_sizes(scale)
    spent: dict[str, Any] = measure(folder, sizes, share, batch, steps, rounds)
    shown = record(spent, f"{sum(sizes):,} rows of {DIM} floats, batches of {batch}, one thread")
    console = Console(width=120)
    for figure in shown.figures:
        spread = f"{figure.least:.4g} to {figure.greatest:.4g}"
        console.print(f"{figure.name:50} {figure.value:9.4g} {figure.unit:6} {spread}", highlight=False)
    if out is not None:
        shown.write(out, spent=spent)


if __name__ == "__main__":
    main()
