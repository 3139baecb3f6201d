"""Trains a sharded collection on the ranks of a gloo group, one of which may kill itself amid a checkpoint.

``python train_until_a_rank_dies.py FOLDER RANKS RANK HOW RUN VICTIM WHEN``: goes on from the checkpoint in FOLDER where
there is one, and takes one every 4 of 16 steps, HOW "waits" or "beside". In its third checkpoint VICTIM ends WHEN
"before" it commits or "after". At the end rank 0 prints the hash of the tables; every rank prints where it began.
"""

import hashlib
import os
import signal
import sys
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributed as dist

from memhier.log.row_log import RowLog
from memhier.policies import Belady
from memhier.recsys import Adam, EmbeddingBagConfig, ShardedEmbeddingBagCollection

STEPS, EVERY, FATAL = 16, 4, 3
CONFIGS = [
    EmbeddingBagConfig(name="a", num_embeddings=300, embedding_dim=4),
    EmbeddingBagConfig(name="b", num_embeddings=41, embedding_dim=4, pooling="mean"),
]


def make_fatal(tables: Any, when: str) -> None:
    commit = RowLog.commit

    def fatal(log: RowLog, values: Any) -> int:
        if tables.tables.record.checkpoint != FATAL:
            return commit(log, values)
        if when == "after":
            commit(log, values)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    RowLog.commit = fatal  # type: ignore[method-assign, assignment]


def main(folder: Path, ranks: int, rank: int, how: str, run: str, victim: int, when: str) -> None:
    torch.set_num_threads(1)
    meet, patience = f"file://{folder}/meet-{run}", timedelta(minutes=10)
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=ranks, timeout=patience)
    rng = np.random.default_rng(0)
    whole = [torch.from_numpy((np.array([300, 41]) * rng.random((12, 2)) ** 2).astype(np.int64)) for _ in range(STEPS)]
    open_tables = partial(
        ShardedEmbeddingBagCollection, CONFIGS, optimizer=Adam(lr=0.01), dram="64MiB", path=folder / "tables",
        policy=Belady(60),
    )  # fmt: skip
    try:
        opened = open_tables(resume=True)
    except FileNotFoundError:
        opened = open_tables()
    with opened as tables:
        first = tables.extra.get("step", 0)
        print("from", first, tables.steps, flush=True)
        if rank == victim:
            make_fatal(tables, when)
        for step in range(first, STEPS):
            tables(whole[step].chunk(ranks)[rank]).values().sin().sum().backward()
            if step % EVERY == EVERY - 1:
                save = tables.checkpoint if how == "waits" else tables.start_checkpoint
                save({"step": step + 1})
        found = hashlib.sha256()
        for table, config in enumerate(CONFIGS):
            found.update(tables.weights(np.arange(config.num_embeddings), table).numpy().tobytes())
        tables.checkpoint({"step": STEPS})
        if rank == 0:
            print("end", found.hexdigest(), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:4]), *sys.argv[4:6], int(sys.argv[6]), sys.argv[7])  # type: ignore[arg-type]
