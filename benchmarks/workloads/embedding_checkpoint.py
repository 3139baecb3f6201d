"""What checkpoints of embedding tables cost a training that takes one every 50 steps.

``python -m memhier.benchmarks.workloads.embedding_checkpoint --dir /path/on/the/device``: a DLRM with Criteo's table
sizes and 1 % of the rows in DRAM. A checkpoint costs the time that the call takes, and what the ten steps after
it take beyond the median of all others, over 50 such medians: ``waits`` until it is durable, or ``beside`` the steps.
"""

import tempfile
import time
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from torch import nn

from memhier.benchmarks.bench.figures import Figure, Record
from memhier.benchmarks.workloads.embedding_common import DLRM, checkpoint_costs, samples, table_sizes
from memhier.benchmarks.workloads.options import folder_option, json_option
from memhier.policies import Belady
from memhier.recsys import Adagrad, EmbeddingBagCollection, EmbeddingBagConfig, Uniform, lookahead

__all__ = ["main", "measure"]

DIM = 32
EVERY = 50
WAYS = ("waits", "beside")


def measure(folder: Path | None, scale: float, share: float, batch: int, rounds: int) -> dict[str, list[float]]:
    """Return the cost of each checkpoint as a share of the steps between two, by way; they take turns."""
    torch.set_num_threads(1)
    sizes = table_sizes(scale)
    torch.manual_seed(0)
    net = DLRM(len(sizes), DIM)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    configs = [
        EmbeddingBagConfig(name=f"t{table}", num_embeddings=rows, embedding_dim=DIM, initial=Uniform())
        for table, rows in enumerate(sizes)
    ]
    costs: dict[str, list[float]] = {way: [] for way in WAYS}
    steps = EVERY * (1 + len(WAYS) * rounds) + EVERY
    spent: list[float] = []
    calls: dict[int, tuple[str, float]] = {}
    with (
        tempfile.TemporaryDirectory(dir=folder) as scratch,
        EmbeddingBagCollection(
            configs, optimizer=Adagrad(lr=0.01), dram="16GiB", path=Path(scratch) / "t",
            policy=Belady(int(share * sum(sizes))),
        ) as tables,
    ):  # fmt: skip
        stream = samples(sizes, batch, steps, 0)
        started = time.perf_counter()
        for sample in lookahead(stream, tables, ids=lambda sample: sample.ids, window=8):
            logits = net(sample.dense, tables(sample.ids).values())
            optimizer.zero_grad()
            torch.autograd.backward(nn.functional.binary_cross_entropy_with_logits(logits, sample.labels))
            optimizer.step()
            spent.append(time.perf_counter() - started)
            started = time.perf_counter()
            if len(spent) % EVERY == 0:
                way = WAYS[len(spent) // EVERY % len(WAYS)]
                if way == "waits":
                    tables.checkpoint()
                else:
                    tables.start_checkpoint()
                calls[len(spent)] = way, time.perf_counter() - started
                started = time.perf_counter()
    found = checkpoint_costs(spent, {at: seconds for at, (_, seconds) in calls.items()}, EVERY)
    # The first one finds a table of which nothing was saved.
    for at, (way, _) in [*calls.items()][1:]:
        if at in found:
            costs[way].append(found[at])
    return costs


def record(costs: dict[str, list[float]]) -> Record:
    """Return the costs."""
    name = "checkpoint every {} steps that {} the training"
    words = {"waits": "stops", "beside": "runs beside"}
    return Record(
        [
            Figure.of(name.format(EVERY, words[way]), each, "share of step time", "less", clock=True)
            for way, each in costs.items()
        ]
    )


@click.command()
@folder_option
@click.option("--scale", default=1.0, show_default=True, help="Of the large tables.")
@click.option("--share", default=0.01, show_default=True, help="Of the rows in DRAM.")
@click.option("--batch", default=4096, show_default=True)
@click.option("--rounds", default=3, show_default=True, help="Checkpoints of each kind.")
@json_option
def main(folder: Path | None, scale: float, share: float, batch: int, rounds: int, out: Path | None) -> None:
    """Measure what checkpoints cost."""
    costs: dict[str, Any] = measure(folder, scale, share, batch, rounds)
    shown = record(costs)
    for figure in shown.figures:
        spread = f"{figure.least:.3f} to {figure.greatest:.3f}"
        Console(width=120).print(f"{figure.name:60} {figure.value:.3f} {figure.unit}, {spread}", highlight=False)
    if out is not None:
        shown.write(out, costs=costs)


if __name__ == "__main__":
    main()
