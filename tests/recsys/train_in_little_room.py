"""Trains on two ranks with room for little more than one batch, and takes checkpoints that fail on one of them.

``python train_in_little_room.py FOLDER 2 RANK``; the first rank prints how many bytes it sent while training went on.
"""

import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from memhier.policies import Belady
from memhier.recsys import SGD as Descent
from memhier.recsys import EmbeddingBagConfig, ShardedEmbeddingBagCollection, lookahead

TOO_LARGE = "x" * 17_000_000


def error_of(call: Callable[..., Any], *arguments: Any) -> str:
    try:
        call(*arguments)
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def main(folder: Path, rank: int) -> None:
    torch.set_num_threads(1)
    meet, patience = f"file://{folder}/meet", timedelta(minutes=10)
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=2, timeout=patience)
    config = EmbeddingBagConfig(name="a", num_embeddings=400, embedding_dim=4)
    # What one batch needs no other does, and each rank asks the other for all of it.
    batches = [2 * torch.arange(20)[:, None] + 40 * number + 1 - rank for number in range(6)]
    with ShardedEmbeddingBagCollection(
        [config], optimizer=Descent(lr=0.1), dram="64MiB", path=folder / "tables", policy=Belady(24)
    ) as tables:
        for most in (2, 6):
            epoch = lookahead(batches, tables, ids=lambda batch: batch, window=0)
            for number, batch in enumerate(epoch, 1):
                pooled = tables(batch).values()
                asked: Any = tables._planned
                while number < 6 and asked[0].exchange.later is None:
                    time.sleep(0.001)  # the thread finds out meanwhile
                pooled.sin().sum().backward()
                if number == most:
                    break
        wrong = {"at": TOO_LARGE} if rank == 0 else {}
        assert error_of(tables.checkpoint, {"at": TOO_LARGE}).startswith("ValueError")
        assert error_of(tables.checkpoint, {"at": 1}) == "none"  # it had failed everywhere
        assert "could not be written by ranks [0]" in error_of(tables.checkpoint, wrong)
        assert "could not be written by ranks [0]" in error_of(tables.start_checkpoint)
        sent = tables.stats()["deferred_bytes"]
    with ShardedEmbeddingBagCollection(
        [config], optimizer=Descent(lr=0.1), dram="64MiB", path=folder / "tables", resume=True
    ) as tables:
        assert tables.extra == {"at": 1}
        assert (error_of(tables.start_checkpoint, wrong) == "none") == (rank == 1)
        assert "could not be written by ranks [0]" in error_of(tables.checkpoint)
        if rank == 0:
            print(sent, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[3]))
