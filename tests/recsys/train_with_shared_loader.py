"""Trains on ranks that read a loader each for itself, or of which the last reads for all.

``python train_with_shared_loader.py FOLDER RANKS RANK HOW RUN [FATAL]``: HOW is "own" or "shared". Training goes on
from the checkpoint in FOLDER where there is one; it takes one every 4 steps. Two epochs, the first of which is left
early; the loader notes each batch that it reads in FOLDER. In run "raises" it fails at the batch FATAL; in run "dies"
it kills its process. The first rank prints the hash of the tables; all print an error of theirs.
"""

import hashlib
import os
import signal
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.utils.data import DataLoader

from memhier.policies import Belady
from memhier.recsys import (
    Adagrad,
    EmbeddingBagConfig,
    ShardedEmbeddingBagCollection,
    SharedLoader,
    lookahead,
    split_samples,
)

CONFIGS = [
    EmbeddingBagConfig(name="a", num_embeddings=300, embedding_dim=4, feature_names=("x", "y")),
    EmbeddingBagConfig(name="b", num_embeddings=41, embedding_dim=6, pooling="mean"),
]
EPOCHS, LEFT, EVERY = 2, 9, 4


class Loader:
    """Batches of odd sizes in an order that is drawn anew in each epoch."""

    def __init__(self, folder: Path, run: str, fatal: int) -> None:
        ids = torch.rand(107, 3, generator=torch.Generator().manual_seed(3)) ** 2 * torch.tensor([300, 300, 41])
        self.generator = torch.Generator().manual_seed(7)
        samples: Any = list(zip(ids.long(), torch.arange(107.0), strict=True))
        self._loader: Any = DataLoader(samples, 7, shuffle=True, generator=self.generator)
        self._noted, self._run, self._fatal = folder / "read", run, fatal

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for number, batch in enumerate(self._loader):
            if number == self._fatal and self._run == "raises":
                raise OSError("the file is gone")
            if number == self._fatal and self._run == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            with self._noted.open("a") as file:
                print(number, file=file)
            yield batch


def train(tables: Any, ahead: Any) -> None:
    """Train both epochs, from the state of the last checkpoint on."""
    epoch = tables.extra.get("epoch", 0)
    if "loader" in tables.extra:
        ahead.load_state_dict(tables.extra["loader"])
    for number in range(epoch, EPOCHS):
        for ids, labels in ahead:
            (tables(ids).values().sin() * labels[:, None].sub(50).div(20).exp()).sum().backward()
            if ahead.position % EVERY == 0:
                tables.checkpoint({"epoch": number, "loader": ahead.state_dict()})
            if number == 0 and ahead.position == LEFT:
                break
        ahead.close()


def main(folder: Path, ranks: int, rank: int, how: str, run: str, fatal: int = -1) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet-{run}", rank=rank, world_size=ranks)
    loader = Loader(folder, run, fatal)
    open_tables = partial(
        ShardedEmbeddingBagCollection, CONFIGS, optimizer=Adagrad(lr=0.1), dram="64MiB", path=folder / "tables",
        policy=Belady(80), average=False, resume=(folder / "tables").exists(),
    )  # fmt: skip
    try:
        if how == "own":
            with open_tables() as tables:
                parts = _Own(loader, ranks, rank)
                train(tables, lookahead(parts, tables, ids=lambda batch: batch[0], window=3))
                finish(tables, rank)
        else:
            with SharedLoader(reader=ranks - 1) as shared:
                if shared.is_reader:
                    spent = shared.serve(loader, CONFIGS, ids=lambda batch: batch[0])
                    print("served", int(spent["batches"]), flush=True)
                else:
                    with open_tables(group=shared.trainers) as tables:
                        train(tables, lookahead(shared, tables, ids=shared.plan, window=3))
                        finish(tables, rank)
    except RuntimeError as error:
        print(f"RuntimeError: {error}", flush=True)
    dist.destroy_process_group()


class _Own:
    def __init__(self, loader: Loader, ranks: int, rank: int) -> None:
        self._loader, self._ranks, self._rank, self.generator = loader, ranks, rank, loader.generator

    def __iter__(self) -> Iterator[Any]:
        return (split_samples(batch, self._ranks)[self._rank] for batch in self._loader)


def finish(tables: Any, rank: int) -> None:
    """Print the hash of the tables, and the bytes that were exchanged ahead."""
    found = hashlib.sha256()
    for table, config in enumerate(CONFIGS):
        found.update(tables.weights(range(config.num_embeddings), table).numpy().tobytes())
        found.update(tables.optimizer_state(range(config.num_embeddings), table).numpy().tobytes())
    if rank == 0:
        counts = tables.stats()
        print(found.hexdigest(), counts["ahead_bytes"], counts["deferred_bytes"], flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:6], *map(int, sys.argv[6:]))
