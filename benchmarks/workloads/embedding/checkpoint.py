"""The cost of checkpoints of embedding tables to a training that takes one every 50 steps.

``python -m memhier.benchmarks.workloads.embedding.checkpoint --dir /path/on/the/device``: a DLRM with Criteo's table
sizes and 1 % of the rows in DRAM. Stretches of 50 steps take turns, without a checkpoint and with one at the
beginning. The checkpoint ``stops`` the training until it is durable, or ``runs beside`` it and ends before the stretch
does. Its cost is the time by which the stretch is longer than the two stretches beside it.
"""

from pathlib import Path

import click
import torch
from torch import nn

from memhier.benchmarks.bench.figures import Figure, Record
from memhier.benchmarks.workloads.embedding.common import (
    Stretch,
    Stretches,
    checkpoint_costs,
    samples,
    table_configs,
    table_sizes,
)
from memhier.benchmarks.workloads.embedding.models.dlrm import DLRM
from memhier.benchmarks.workloads.harness import Outcome, workload
from memhier.policies import Belady
from memhier.recsys import Adagrad, EmbeddingBagCollection, lookahead

__all__ = ["main"]

DIM = 32
EVERY = 50
WAYS = ("waits", "beside")


def measure(folder: Path, scale: float, share: float, batch: int, rounds: int) -> list[Stretch]:
    """Return the time of stretches of steps, by way; the ways take turns."""
    sizes = table_sizes(scale)
    torch.manual_seed(0)
    net = DLRM(len(sizes), DIM)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    steps = EVERY * (2 + 2 * len(WAYS) * rounds)
    configs, policy = table_configs(sizes, DIM), Belady(int(share * sum(sizes)))
    with EmbeddingBagCollection(
        configs, optimizer=Adagrad(lr=0.01), dram="16GiB", path=folder / "t", policy=policy
    ) as tables:
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


@workload
@click.option("--scale", default=1.0, show_default=True, help="Of the large tables.")
@click.option("--share", default=0.01, show_default=True, help="Of the rows in DRAM.")
@click.option("--batch", default=4096, show_default=True)
@click.option("--rounds", default=3, show_default=True, help="Checkpoints of each kind.")
def main(scratch: Path, scale: float, share: float, batch: int, rounds: int) -> Outcome:
    """Measure the cost of checkpoints."""
    stretches = measure(scratch, scale, share, batch, rounds)
    return Outcome(record(stretches), details={"stretches": [each._asdict() for each in stretches]})


if __name__ == "__main__":
    main()
