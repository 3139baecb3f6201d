"""Trains a sharded collection on the ranks of a gloo group, and prints from rank 0 the hash of its tables, how many
bytes it sent to others while the training waited and while it went on, and the values of the checkpoint that it opened.

``python train_in_ranks.py FOLDER RANKS RANK RULE WINDOW FIRST LAST [KIND]``; the batches of the whole from FIRST to
before LAST are divided among the ranks, which go on from a checkpoint unless FIRST is 0. A window below 0 is "auto",
for batches that take next to nothing on the first rank and 2 MiB more on each one after it. KIND "shared" has two
features and more on a table, "twice" looks up twice in a step.
"""

import hashlib
import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributed as dist

from memhier.policies import Belady
from memhier.recsys import SGD as Descent
from memhier.recsys import Adagrad, Adam, EmbeddingBagConfig, ShardedEmbeddingBagCollection, lookahead

CONFIGS = [
    EmbeddingBagConfig(name="a", num_embeddings=300, embedding_dim=4),
    EmbeddingBagConfig(name="b", num_embeddings=41, embedding_dim=6, pooling="mean"),
]
SHARED = [
    EmbeddingBagConfig(name="a", num_embeddings=41, embedding_dim=4, feature_names=("x", "y")),
    EmbeddingBagConfig(name="b", num_embeddings=7, embedding_dim=6, pooling="mean", feature_names=("u", "v", "w")),
]
RULES = {"sgd": Descent(lr=0.1), "adam": Adam(lr=0.01), "adagrad": Adagrad(lr=0.1)}


def main(
    folder: Path, ranks: int, rank: int, rule: str, window: int, first: int, last: int, kind: str = "plain"
) -> None:
    torch.set_num_threads(1)
    meet, patience = f"file://{folder}/meet-{ranks}", timedelta(minutes=10)
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=ranks, timeout=patience)
    rng = np.random.default_rng(0)
    configs = SHARED if kind == "shared" else CONFIGS
    counts = np.array([config.num_embeddings for config in configs for _ in config.feature_names or "f"])
    whole = [torch.from_numpy((counts * rng.random((24, len(counts))) ** 2).astype(np.int64)) for _ in range(20)]
    beside = torch.zeros(rank << 19 if window < 0 else 0)
    mine = [(batch.chunk(ranks)[rank], beside.clone()) for batch in whole[first:last]]
    scale = torch.linspace(-1, 1, 24).exp().chunk(ranks)[rank][:, None]
    with ShardedEmbeddingBagCollection(
        configs, optimizer=RULES[rule], dram="64MiB", path=folder / "tables", policy=Belady(60), average=False,
        resume=first > 0, group=dist.new_group() if window else None,
    ) as tables:  # fmt: skip
        begun = json.dumps(tables.extra, separators=(",", ":"))
        batches: Any = mine
        if window:
            batches = lookahead(mine, tables, ids=lambda batch: batch[0], window=window if window > 0 else "auto")
            for _ in batches:
                break  # an epoch that is left while ranks read
        for number, (batch, _) in enumerate(batches):
            if number == 1:
                with torch.no_grad():
                    tables(mine[0][0] if rank else batch)  # the ids of the step on the first rank alone
            # Each sample counts differently, so that the order in which repeats add up shows.
            loss = (tables(batch).values().sin() * scale).sum()
            if kind == "twice":
                loss = loss + (tables(batch).values().cos() * scale).sum()
            loss.backward()
        tables.checkpoint({"at": last, "rank": rank})
        found = hashlib.sha256()
        for table, config in enumerate(configs):
            rows = np.arange(config.num_embeddings)
            found.update(tables.weights(rows, table).numpy().tobytes())
            found.update(tables.optimizer_state(rows, table).numpy().tobytes())
        if rank == 0:
            counts = tables.stats()
            print(found.hexdigest(), counts["critical_bytes"], counts["deferred_bytes"], begun, flush=True)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], *map(int, sys.argv[5:8]), *sys.argv[8:])
