"""Trains on two ranks with room for little more than one batch, and takes checkpoints that fail on one of them.

If its disk is full, they make room and go on; whenever they end, they open the checkpoint that both have.

``python train_in_little_room.py FOLDER 2 RANK``; the first rank prints how many bytes it sent while training went on.
"""

import errno
import os
import shutil
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
    except (OSError, RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def full_disk(*_: Any) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def fill_disks(open_tables: Callable[..., Any], folder: Path, rank: int) -> None:
    """Let checkpoints fail as disks are full, first one rank's, then the other's, then both."""
    write = os.pwrite
    states, full = [], [(0,), (0,), (1,), (0, 1), ()]
    with open_tables(folder / "tables") as tables:
        for number, ranks in enumerate(full):
            states.append(tables.weights(range(400)))
            tables(torch.arange(40)[:, None] + 40 * number).values().sin().sum().backward()
            os.pwrite = full_disk if rank in ranks else write
            if number == 1:
                told = error_of(tables.start_checkpoint({"at": 10 + number}).result)
                assert ("[Errno 28]" in told) == (rank in ranks), told
            else:
                told = error_of(tables.checkpoint, {"at": 10 + number})
                assert ("[Errno 28]" in told) == bool(ranks), told
                assert rank in ranks or not ranks or f"the disk of ranks {[*ranks]} is full: make room" in told
            os.pwrite = write
            name = f"shard-{rank}-of-2-since-0"
            shutil.copytree(folder / "tables" / name, folder / str(number) / name)
        states.append(tables.weights(range(400)))
    for number, ranks in enumerate(full):
        with open_tables(folder / str(number)) as tables:
            assert tables.extra == {"at": 1 if ranks else 10 + number}
            assert torch.equal(tables.weights(range(400)), states[0 if ranks else -1])


def main(folder: Path, rank: int) -> None:
    torch.set_num_threads(1)
    meet, patience = f"file://{folder}/meet", timedelta(minutes=10)
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=2, timeout=patience)
    config = EmbeddingBagConfig(name="a", num_embeddings=400, embedding_dim=4)
    # No two batches need the same row, and each rank asks the other for all of its rows.
    batches = [2 * torch.arange(20)[:, None] + 40 * number + 1 - rank for number in range(6)]
    with ShardedEmbeddingBagCollection(
        [config], optimizer=Descent(lr=0.1), dram="64MiB", path=folder / "tables", policy=Belady(24)
    ) as tables:
        for most in (2, 6):
            epoch = lookahead(batches, tables, ids=lambda batch: batch, window=0)
            for number, batch in enumerate(epoch, 1):
                pooled = tables(batch).values()
                planned = tables.look_ups.planned
                while planned is not None and number < 6 and planned[0].later is None:
                    time.sleep(0.001)  # until the thread has found out
                pooled.sin().sum().backward()
                if number == most:
                    break
        wrong = {"at": TOO_LARGE} if rank == 0 else {}
        assert error_of(tables.checkpoint, {"at": TOO_LARGE}).startswith("ValueError")
        assert error_of(tables.checkpoint, {"at": 1}) == "none"  # it had failed everywhere
        assert "could not be written by ranks [0]" in error_of(tables.checkpoint, wrong)
        assert "could not be written by ranks [0]" in error_of(tables.start_checkpoint)
        sent = tables.stats()["deferred_bytes"]

    def open_tables(path: Path) -> ShardedEmbeddingBagCollection:
        return ShardedEmbeddingBagCollection([config], optimizer=Descent(lr=0.1), dram="64MiB", path=path, resume=True)

    fill_disks(open_tables, folder, rank)
    with open_tables(folder / "tables") as tables:
        assert tables.extra == {"at": 14}
        assert (error_of(tables.start_checkpoint, wrong) == "none") == (rank == 1)
        assert "could not be written by ranks [0]" in error_of(tables.checkpoint)
        if rank == 0:
            print(sent, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[3]))
