"""Trains tables and a dense part under DDP as ranks of torchrun do; prints the hash of the tables from the first rank.

``torchrun ... train_with_torchrun.py FOLDER``: goes on from the last checkpoint of any number of ranks. A rank whose
environment has VICTIM ends at step 6, once, with its torchrun if VICTIM is "node".
"""

import hashlib
import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch import distributed as dist

from memhier.recsys import Adam, EmbeddingBagConfig, ShardedEmbeddingBagCollection, lookahead, split_samples

STEPS, EVERY = 12, 4
CONFIGS = [EmbeddingBagConfig(name="a", num_embeddings=300, embedding_dim=4)]


def loader() -> list[Tensor]:
    random = np.random.default_rng(0)
    return [torch.from_numpy((300 * random.random((9, 1)) ** 2).astype(np.int64)) for _ in range(STEPS)]


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    # torch 2.13 leaves the addresses of ranks that ended in torchrun's store, where gloo would look for them.
    there = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    store = dist.PrefixStore(os.environ["TORCHELASTIC_RESTART_COUNT"], there)
    dist.init_process_group("gloo", store=store, rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    resume = any((folder / "tables").glob("*"))
    dist.barrier()  # all have looked before tables are made
    with ShardedEmbeddingBagCollection(
        CONFIGS, optimizer=Adam(lr=0.01), dram="16MiB", path=folder / "tables", average=False, resume=resume
    ) as tables:
        parts = [split_samples(batch, ranks)[rank] for batch in loader()]
        ahead: Any = lookahead(parts, tables, ids=lambda batch: batch)
        if resume:
            ahead.load_state_dict(tables.extra)
        print("from", ranks, ahead.position, flush=True) if rank == 0 else None
        for batch in ahead:
            pooled = tables(batch).values()
            net(pooled.detach()).sum().backward()
            died = folder / "died"
            if ahead.position == 6 and "VICTIM" in os.environ and rank == ranks - 1 and not died.exists():
                died.touch()
                if os.environ["VICTIM"] == "node":
                    os.kill(os.getppid(), signal.SIGKILL)
                os.kill(os.getpid(), signal.SIGKILL)
            pooled.sin().sum().backward()
            if ahead.position % EVERY == 0:
                tables.checkpoint(ahead.state_dict())
        found = hashlib.sha256(tables.weights(np.arange(300)).numpy().tobytes()).hexdigest()
        if rank == 0:
            print("end", found, flush=True)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
