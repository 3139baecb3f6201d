"""Tables for ids that are not known beforehand, on Criteo's log: AUC next to tables that knew their ids.

``python -m memhier.benchmarks.workloads.embedding.open_vocabulary --dir /path/on/the/device``: a factorization machine
with a perceptron (DeepFM's form) sees the log once, in its order, and predicts the last fifth. Each of the 39 columns
has a table. The ways: tables that knew the ids, with the first weights that the ids have in the other ways; rows for
any ids, as many as there are; with expiry; with admission and expiry; with a tenth as many rows; and, as a peer, a
tenth as many rows by id modulo their number, which share them. Seeds change all first weights.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from memhier.benchmarks.bench.figures import Record
from memhier.benchmarks.datasets import criteo_dac
from memhier.benchmarks.workloads.harness import Measure, Outcome, Row, figures_of, rows_table, workload
from memhier.recsys import (
    Adagrad,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    Hash64,
    Normal,
    initial_weights,
    lookahead,
)

__all__ = ["main"]

DIM, COLUMNS = 8, 39
RATE = 0.02
FIRST = Normal(std=0.01)
FEW = 64  # a table of fewer ids has a row for each


class DeepFM(nn.Module):
    """The dense part of DeepFM (Guo et al., arXiv 1703.04247): products of all pairs, and a perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.deep = nn.Sequential(nn.Linear(COLUMNS * DIM, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, rows: Tensor) -> Tensor:
        """Return logits [n] of rows [n, columns, dim]."""
        pairs = (rows.sum(1).square() - rows.square().sum(1)).sum(1) / 2
        logits: Tensor = self.deep(rows.flatten(1))[:, 0] + pairs
        return logits


@dataclass(frozen=True, slots=True)
class Way:
    """A way to give ids rows: a part of as many as there are; of ids as they are, or any; `shares` takes ids modulo."""

    name: str
    part: float
    space: Hash64 | None = None
    shares: bool = False

    def configs(self, sizes: list[int]) -> list[EmbeddingBagConfig]:
        """Return the tables for so many different ids each."""
        return [
            EmbeddingBagConfig(
                name=f"c{number}", num_embeddings=max(min(size, FEW), int(self.part * size)), embedding_dim=DIM,
                initial=FIRST, id_space=self.space or "rows",
            )
            for number, size in enumerate(sizes)
        ]  # fmt: skip


WAYS = [
    Way("knew their ids", 1),
    Way("any ids", 1, Hash64()),
    Way("any ids, expiring", 1, Hash64(expire_after=150)),
    Way("any ids, admitted after 2, expiring", 1, Hash64(admit_after=2, expire_after=200)),
    Way("any ids, a tenth of the rows, lfu", 0.1, Hash64(admit_after=2, evict="lfu")),
    Way("any ids, a tenth of the rows, lru", 0.1, Hash64(admit_after=2)),
    Way("hashed to a tenth of the rows", 0.1, shares=True),
]


def area_under(labels: NDArray[np.float32], scores: NDArray[np.float32]) -> float:
    """Return the area under the ROC curve; equal scores count half."""
    _, places, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[places]
    ones = int(labels.sum())
    return float((ranks[labels > 0].sum() - ones * (ones + 1) / 2) / (ones * (len(labels) - ones)))


@dataclass(frozen=True, slots=True)
class Log:
    """The samples: rows of each column's ids, numbered as they come; the same ids by name; and labels."""

    known: Tensor
    names: Tensor
    labels: Tensor

    @classmethod
    def of(cls, samples: int) -> "Log":
        """Return the first samples of Criteo's log."""
        ids, clicks, _ = criteo_dac(COLUMNS)
        known = np.empty((samples, COLUMNS), np.int64)
        for column in range(COLUMNS):
            _, first, rows = np.unique(ids[:samples, column], return_index=True, return_inverse=True)
            known[:, column] = np.argsort(np.argsort(first))[rows]
        # Any names stand for the ids.
        names = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, (COLUMNS, known.max() + 1))
        named = names[np.arange(COLUMNS), known]
        return cls(*(torch.from_numpy(part) for part in (known, named, clicks[:samples])))

    @property
    def sizes(self) -> list[int]:
        """The number of different ids of each column."""
        return [int(most) + 1 for most in self.known.max(0).values]


def load_first(tables: EmbeddingBagCollection, log: Log, seed: int) -> None:
    """Give the rows of tables that know their ids the first weights that the names of these have in the other ways."""
    state = {}
    for number, spec in enumerate(tables.specs):
        names = torch.empty(spec.rows, dtype=torch.int64)
        names[log.known[:, number]] = log.names[:, number]
        first = initial_weights(FIRST, seed, number, names.numpy(), DIM, spec.rows)
        state[f"embedding_bags.{spec.name}.weight"] = torch.from_numpy(first)
    tables.load_state_dict(state, strict=False)


def trained(way: Way, folder: Path, log: Log, batch: int, seed: int) -> Row:
    """Train on four fifths of a log in its order; return the figures of the rest."""
    torch.manual_seed(seed)
    net, cut, configs = DeepFM(), len(log.labels) * 4 // 5, way.configs(log.sizes)
    dense = torch.optim.Adagrad(net.parameters(), lr=RATE)
    ids = log.known if way.space is None else log.names
    if way.shares:
        ids = log.names % torch.tensor([config.num_embeddings for config in configs])
    batches = [(ids[at : at + batch], log.labels[at : at + batch]) for at in range(0, cut, batch)]
    with EmbeddingBagCollection(configs, optimizer=Adagrad(lr=RATE), dram="256MiB", path=folder, seed=seed) as tables:
        if way.space is None and not way.shares:
            load_first(tables, log, seed)

        def score(some: Tensor) -> Tensor:
            logits: Tensor = net(tables(some).values().view(-1, COLUMNS, DIM))
            return logits

        started = time.process_time()
        for some, wanted in lookahead(batches, tables, ids=lambda one: one[0]):
            loss = nn.functional.binary_cross_entropy_with_logits(score(some), wanted)
            torch.autograd.backward(loss)
            dense.step()
            dense.zero_grad()
        spent = 1e3 * (time.process_time() - started) / len(batches)
        with torch.no_grad():
            scores = torch.cat([score(ids[at : at + 1024]) for at in range(cut, len(ids), 1024)])
        rows = sum(config.num_embeddings for config in configs)
        held = rows if way.space is None else sum(len(ids) for table in range(COLUMNS) for ids in tables.ids(table))
    auc = area_under(log.labels[cut:].numpy(), scores.numpy())
    return {"way": way.name, "seed": seed, "auc": auc, "rows": rows, "in_use": held, "ms": spent}


def measure(folder: Path, samples: int, batch: int, seeds: int) -> Iterator[Row]:
    """Yield the figures of every way and seed."""
    log = Log.of(samples)
    for seed in range(seeds):
        auc_of_known = 0.0
        for number, way in enumerate(WAYS):
            row = trained(way, folder / f"{seed}-{number}", log, batch, seed)
            auc_of_known = row["auc"] if number == 0 else auc_of_known
            yield row | {"lost": auc_of_known - row["auc"]}


@workload
@click.option("--samples", default=80_000, show_default=True, help="Of the log's 80,000.")
@click.option("--batch", default=256, show_default=True)
@click.option("--seeds", default=3, show_default=True)
def main(scratch: Path, samples: int, batch: int, seeds: int) -> Outcome:
    """Measure the AUC of tables for any ids next to that of tables that knew their ids."""
    rows = [*measure(scratch, samples, batch, seeds)]
    figures = [
        *figures_of(rows, [Measure("auc", "AUC", "", "more")], "{title}: {way}"),
        *figures_of(
            [row for row in rows if row["way"] != WAYS[0].name],
            [Measure("lost", "AUC below tables that knew their ids", "")],
            "{title}: {way}",
        ),
        *figures_of(rows, [Measure("ms", "processor time of a step", "ms", clock=True)], "{title}: {way}"),
    ]
    scale = f"{samples:,} samples of Criteo's log, {rows[0]['rows']:,} ids of {DIM} floats, batches of {batch}"
    return Outcome(Record(figures, scale=scale), [rows_table("Every seed", rows)], {"rows": rows})


if __name__ == "__main__":
    main()
