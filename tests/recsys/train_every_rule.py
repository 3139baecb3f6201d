"""Trains with each optimizer, pooling and kind of bags on the ranks of a gloo group; rank 0 prints a hash for each.

``python train_every_rule.py FOLDER RANKS RANK POOLINGS RULES``, both lists with commas between. Batches have few
samples, so that some ranks have none.
"""

import hashlib
import sys
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch import distributed as dist

from memhier.policies import Belady
from memhier.recsys import SGD as Descent
from memhier.recsys import (
    Adagrad,
    Adam,
    EmbeddingBagConfig,
    RowWiseAdagrad,
    RowWiseAdam,
    ShardedEmbeddingBagCollection,
    lookahead,
)

RULES = {
    "sgd": Descent(lr=0.1), "momentum": Descent(lr=0.1, momentum=0.9), "decay": Descent(lr=0.1, weight_decay=0.01),
    "adagrad": Adagrad(lr=0.1), "row-wise adagrad": RowWiseAdagrad(lr=0.1), "adam": Adam(lr=0.01),
    "row-wise adam": RowWiseAdam(lr=0.01),
}  # fmt: skip
KINDS = ("one id", "bags", "weighted", "steps", "twice", "ahead")
SAMPLES = (11, 3, 1, 7, 2, 16)
ROWS = {"x": 41, "y": 41, "u": 7}


def configs(pooling: str) -> list[EmbeddingBagConfig]:
    """Return tables of two widths, one of which has two features."""
    return [
        EmbeddingBagConfig(name="a", num_embeddings=41, embedding_dim=5, feature_names=("x", "y"), pooling=pooling),
        EmbeddingBagConfig(name="b", num_embeddings=7, embedding_dim=3, feature_names=("u",), pooling=pooling),
    ]


def parts(kind: str, samples: int, ranks: int, rank: int, seed: int) -> tuple[Any, Tensor]:
    """Return a rank's samples of a batch, and their numbers in it."""
    rng = np.random.default_rng(seed)
    mine = np.array_split(np.arange(samples), ranks)[rank]
    features: dict[str, Any] = {}
    for name, rows in ROWS.items():
        lengths = rng.integers(0, 4, samples) if kind in ("bags", "weighted") else np.ones(samples, int)
        ends = np.concatenate(([0], np.cumsum(lengths)))
        ids, weights = (rows * rng.random(ends[-1]) ** 2).astype(np.int64), rng.standard_normal(ends[-1])
        own = slice(ends[mine[0]], ends[mine[-1] + 1]) if len(mine) else slice(0, 0)
        begins = torch.from_numpy(ends[mine] - ends[mine[0]]) if len(mine) else torch.empty(0, dtype=torch.int64)
        features[name] = (torch.from_numpy(ids[own]), begins)
        if kind == "weighted":
            features[name] += (torch.from_numpy(weights[own].astype(np.float32)),)
    return features, torch.from_numpy(mine)


def train(path: Path, ranks: int, rank: int, rule: str, pooling: str, kind: str) -> str:
    """Train, and return the hash of weights and state."""
    passes = 3 if kind == "steps" else 1
    batches = [parts(kind, samples, ranks, rank, seed) for seed, samples in enumerate(SAMPLES)]
    with ShardedEmbeddingBagCollection(
        configs(pooling), optimizer=RULES[rule], dram="16MiB", path=path, policy=Belady(40), average=False,
        update="step" if passes > 1 else "backward",
    ) as tables:  # fmt: skip
        ahead = lookahead(batches, tables, ids=lambda batch: batch[0], window=2) if kind == "ahead" else batches
        for number, (features, samples) in enumerate(ahead):
            # Each sample counts differently, so that the order in which repeats add up shows.
            counts = samples[:, None].sub(5.0).exp()
            loss = (tables(features).values().sin() * counts).sum()
            if kind in ("twice", "ahead"):
                loss = loss + (tables(features).values().cos() * counts).sum()
            loss.backward()
            if passes > 1 and number % passes == passes - 1:
                tables.optimizer.step()
        found = hashlib.sha256()
        for table, rows in enumerate((41, 7)):
            found.update(tables.weights(np.arange(rows), table).numpy().tobytes())
            found.update(tables.optimizer_state(np.arange(rows), table).numpy().tobytes())
    return found.hexdigest()[:12]


def main(folder: Path, ranks: int, rank: int, poolings: str, rules: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet-{ranks}", rank=rank, world_size=ranks)
    for number, (rule, pooling, kind) in enumerate(product(rules.split(","), poolings.split(","), KINDS)):
        if kind == "weighted" and pooling == "mean":
            continue  # no mean of weighted bags is defined
        found = train(folder / f"tables-{ranks}-{number}", ranks, rank, rule, pooling, kind)
        if rank == 0:
            print(f"{rule}, {pooling}, {kind}: {found}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:6])
