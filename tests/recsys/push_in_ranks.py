"""``python push_in_ranks.py FOLDER RANKS RANK WAY`` trains sharded tables on the ranks of a gloo group.

WAY ``first`` trains, pushes to ``far`` in FOLDER after each of two checkpoints, and goes on; ``pulled`` pulls the first
of them and goes on as it went on. Rank 0 prints the hash of the tables after each checkpoint.
"""

import hashlib
import sys
from pathlib import Path

import numpy as np
import torch
from torch import distributed as dist

from memhier.recsys import Adagrad, EmbeddingBagConfig, ShardedEmbeddingBagCollection

CONFIGS = [EmbeddingBagConfig(name="a", num_embeddings=300, embedding_dim=4)]


def train(tables: ShardedEmbeddingBagCollection, ranks: int, rank: int, first: int, last: int) -> None:
    for step in range(first, last):
        ids = torch.from_numpy(np.random.default_rng(step).integers(0, 300, (12 * ranks, 1)))
        tables(ids.chunk(ranks)[rank]).values().sin().sum().backward()
    tables.checkpoint({"step": last})
    if (weights := tables.weights(np.arange(300))) is not None and rank == 0:
        print(hashlib.sha256(weights.numpy().tobytes()).hexdigest(), flush=True)


def main(folder: Path, ranks: int, rank: int, way: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet-{way}", rank=rank, world_size=ranks)
    url, path = f"file://{folder}/far/", folder / f"tables-{way}"
    if way == "pulled":
        path.mkdir(exist_ok=True)
        name = f"shard-{rank}-of-{ranks}-since-0"
        ShardedEmbeddingBagCollection.pull(f"{url}{name}", path / name, generation=1)
    with ShardedEmbeddingBagCollection(
        CONFIGS, optimizer=Adagrad(lr=0.1), dram="64MiB", path=path, resume=way == "pulled"
    ) as tables:
        if way == "first":
            train(tables, ranks, rank, 0, 4)
            moved = tables.push(url)
            assert (moved.generation, moved.moved_bytes > 0) == (1, True)
        assert tables.extra["step"] == 4
        train(tables, ranks, rank, 4, 8)
        if way == "first":
            assert tables.push(url).generation > 1
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
