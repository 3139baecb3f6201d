"""Trains sharded tables with a dense part under DDP, and prints the hash of both from rank 0.

``python train_with_ddp.py FOLDER RANKS RANK``; with one rank, a plain collection and the two halves of each batch one
after the other, their gradients averaged as two ranks would average them.
"""

import hashlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

from memhier.policies import Belady
from memhier.recsys import SGD as Descent
from memhier.recsys import EmbeddingBagCollection, EmbeddingBagConfig, ShardedEmbeddingBagCollection, lookahead

HALVES = 2
CONFIGS = [
    EmbeddingBagConfig(name="a", num_embeddings=300, embedding_dim=4),
    EmbeddingBagConfig(name="b", num_embeddings=41, embedding_dim=4),
]


def train_in_ranks(tables: Any, net: nn.Module, batches: list[Tensor], rank: int) -> None:
    dense = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    mine = [batch.chunk(HALVES)[rank] for batch in batches]
    for batch in lookahead(mine, tables, ids=lambda batch: batch, window=2):
        optimizer.zero_grad()
        dense(tables(batch).values()).square().mean().backward()
        optimizer.step()


def train_alone(tables: Any, net: nn.Module, batches: list[Tensor]) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for batch in batches:
        pooled = tables(batch).values()
        halves = [half.detach().requires_grad_() for half in pooled.chunk(HALVES)]
        losses = [net(half).square().mean() for half in halves]
        found = [
            torch.autograd.grad(loss, [*net.parameters(), half]) for loss, half in zip(losses, halves, strict=True)
        ]
        for number, weight in enumerate(net.parameters()):
            weight.grad = sum((each[number] for each in found), torch.zeros(())) / HALVES
        pooled.backward(torch.cat([each[-1] for each in found]) / HALVES)
        optimizer.step()


def main(folder: Path, ranks: int, rank: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet-{ranks}", rank=rank, world_size=ranks)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 1))
    rng = np.random.default_rng(0)
    batches = [torch.from_numpy((np.array([300, 41]) * rng.random((24, 2)) ** 2).astype(np.int64)) for _ in range(15)]
    kind = EmbeddingBagCollection if ranks == 1 else ShardedEmbeddingBagCollection
    path = folder / f"tables-{ranks}"
    with kind(CONFIGS, optimizer=Descent(lr=0.5), dram="64MiB", path=path, policy=Belady(60)) as tables:
        if ranks == 1:
            train_alone(tables, net, batches)
        else:
            train_in_ranks(tables, net, batches, rank)
        parts = [tables.weights(np.arange(config.num_embeddings), table) for table, config in enumerate(CONFIGS)]
        found = hashlib.sha256(b"".join(part.detach().numpy().tobytes() for part in [*parts, *net.parameters()]))
        if rank == 0:
            print(found.hexdigest(), flush=True)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
