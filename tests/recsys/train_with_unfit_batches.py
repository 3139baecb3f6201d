"""Trains on the ranks of a gloo group, of which one has no batch now and then; prints the error of each such step.

``python train_with_unfit_batches.py FOLDER RANKS RANK``. The group is as patient as can be: a rank that gets no
message waits for longer than any test.
"""

import hashlib
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch import distributed as dist

from memhier.recsys import EmbeddingBagConfig, ShardedEmbeddingBagCollection, lookahead

CONFIGS = [EmbeddingBagConfig(name=name, num_embeddings=40, embedding_dim=4) for name in "ab"]


def batch(seed: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 40, (6, 2)))


def unfit(fault: str, rank: int) -> Iterator[Tensor]:
    """Yield four batches to train on, then one that is unfit on the last rank."""
    yield from map(batch, range(4))
    if rank == 0:
        yield from map(batch, range(4, 12))
    elif fault == "range":
        yield batch(4) + 40
    elif fault == "shape":
        yield batch(4)[:, :1]
    elif fault == "large":
        yield torch.arange(0, 40, 2)[:, None].expand(-1, 2)  # whose rows are all the first rank's
    elif fault == "raises":
        raise OSError("the file is gone")


def main(folder: Path, ranks: int, rank: int) -> None:
    torch.set_num_threads(1)
    meet, patience = f"file://{folder}/meet", timedelta(hours=1)
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=ranks, timeout=patience)
    found = hashlib.sha256()
    with ShardedEmbeddingBagCollection(CONFIGS, dram="64MiB", path=folder / "tables", step_rows=30) as tables:
        for ahead in (False, True):
            for fault in ("range", "shape", "large", "raises", "ends") if ahead else ("range", "shape", "large"):
                batches = unfit(fault, rank)
                taken = 0
                try:
                    for some in lookahead(batches, tables, ids=lambda ids: ids, window=2) if ahead else batches:
                        tables(some).values().sin().sum().backward()
                        taken += 1
                except (IndexError, OSError, RuntimeError, ValueError) as error:
                    print(f"{fault} after {taken}: {type(error).__name__}: {error}", flush=True)
                else:
                    print(f"{fault} after {taken}", flush=True)
                # All go on together.
                tables(batch(99)).values().sum().backward()
        found.update(tables.weights(np.arange(40)).numpy().tobytes())
        print(tables.steps, found.hexdigest(), flush=True)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
