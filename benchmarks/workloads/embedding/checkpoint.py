"""What checkpoints of embedding tables cost a training that takes one every 50 steps.

``python -m memhier.benchmarks.workloads.embedding.checkpoint --dir /path/on/the/device``: a DLRM with Criteo's table
sizes and 1 % of the rows in DRAM. Stretches of 50 steps take turns, without a checkpoint and with one at the
beginning, which ``stops`` the training until it is durable, or ``runs beside`` it and is waited for at the end. Its
cost is by how much the stretch is longer than the two beside it.
"""

import tempfile
from pathlib import Path

import click
import torch
from rich.console import Console
from torch import nn

from memhier.benchmarks.bench.figures import Figure, Record
from memhier.benchmarks.workloads.embedding.common import (
    DLRM,
    Stretch,
    Stretches,
    checkpoint_costs,
    samples,
    table_sizes,
)
from memhier.benchmarks.workloads.options import folder_option, json_option
from memhier.policies import Belady
from memhier.recsys import Adagrad, EmbeddingBagCollection, EmbeddingBagConfig, Uniform, lookahead

__all__ = ["main", "measure"]

DIM = 32
EVERY = 50
WAYS = ("waits", "beside")


def measure(folder: Path | None, scale: float, share: float, batch: int, rounds: int) -> list[Stretch]:
    """Return the time of stretches of steps, by way; they take turns."""
    torch.set_num_threads(1)
    sizes = table_sizes(scale)
    torch.manual_seed(0)
    net = DLRM(len(sizes), DIM)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    configs = [
        EmbeddingBagConfig(name=f"t{table}", num_embeddings=rows, embedding_dim=DIM, initial=Uniform())
        for table, rows in enumerate(sizes)
    ]
    steps = EVERY * (2 + 2 * len(WAYS) * rounds)
    with (
        tempfile.TemporaryDirectory(dir=folder) as scratch,
        EmbeddingBagCollection(
            configs, optimizer=Adagrad(lr=0.01), dram="16GiB", path=Path(scratch) / "t",
            policy=Belady(int(share * sum(sizes))),
        ) as tables,
    ):  # fmt: skip
        stretches = Stretches(dict(zip(WAYS, (tables.checkpoint, tables.start_checkpoint), strict=True)))
        stream = samples(sizes, batch, steps, 0)
        batches = lookahead(stream, tables, ids=lambda sample: sample.ids, window=8)
        for number, sample in enumerate(batches, 1):
            logits = net(sample.dense, tables(sample.ids).values())
            optimizer.zero_grad()
            torch.autograd.backward(nn.functional.binary_cross_entropy_with_logits(logits, sample.labels))
            optimizer.step()
            if number == EVERY:
                tables.checkpoint()  # the first finds a table of which nothing was saved, and is not counted
            if number % EVERY == 0:
                stretches.next()
    return stretches.done


def record(stretches: list[Stretch]) -> Record:
    """Return the costs."""
    figures = []
    for way, words in zip(WAYS, ("stops", "runs beside"), strict=True):
        name = f"checkpoint every {EVERY} steps that {words} the training"
        clock, busy = checkpoint_costs(stretches, way)
        figures.append(Figure.of(name, clock, "share of step time", "less", clock=True))
        figures.append(Figure.of(f"{name}, processor time", busy, "share of the process's", "less"))
    return Record(figures)


@click.command()
@folder_option
@click.option("--scale", default=1.0, show_default=True, help="Of the large tables.")
@click.option("--share", default=0.01, show_default=True, help="Of the rows in DRAM.")
@click.option("--batch", default=4096, show_default=True)
@click.option("--rounds", default=3, show_default=True, help="Checkpoints of each kind.")
@json_option
def main(folder: Path | None, scale: float, share: float, batch: int, rounds: int, out: Path | None) -> None:
    """Measure what checkpoints cost."""
    stretches = measure(folder, scale, share, batch, rounds)
    shown = record(stretches)
    for figure in shown.figures:
        spread = f"{figure.least:.3f} to {figure.greatest:.3f}"
        Console(width=120).print(f"{figure.name:75} {figure.value:.3f} {figure.unit}, {spread}", highlight=False)
    if out is not None:
        shown.write(out, stretches=[each._asdict() for each in stretches])


if __name__ == "__main__":
    main()
