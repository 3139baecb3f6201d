"""Trains a sharded collection on the ranks of a gloo group, one of which may kill itself.

``python train_until_a_rank_dies.py FOLDER RANKS RANK HOW RUN VICTIM WHEN NUMBER [DISKS]``: goes on from the
checkpoint in FOLDER where there is one, of any number of ranks, and takes one every 4 of 16 steps, HOW "waits" or
"beside"; or "widths", which waits and stores each width in a log of its own. VICTIM ends WHEN "before" the commit of
this NUMBER in its run, "after" it or amid the "step" of this number. A move of rows to their owners is a commit as
well. DISKS has a letter for each rank: the disk with its shards. At the end rank 0 prints the hash of the tables; every
rank prints where it began.
"""

import hashlib
import itertools
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
from memhier.recsys.embedding.groups import row_groups

STEPS, EVERY = 16, 4
CONFIGS = [
    EmbeddingBagConfig(name="a", num_embeddings=300, embedding_dim=4),
    EmbeddingBagConfig(name="b", num_embeddings=41, embedding_dim=6, pooling="mean"),
]


def make_fatal(when: str, number: int) -> None:
    commit, counted = RowLog.commit, itertools.count(1)

    def fatal(log: RowLog, values: Any) -> int:
        if next(counted) != number:
            return commit(log, values)
        if when == "after":
            commit(log, values)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    RowLog.commit = fatal  # type: ignore[method-assign, assignment]


def main(
    folder: Path, ranks: int, rank: int, how: str, run: str, victim: int, when: str, number: int, disks: str = ""
) -> None:
    torch.set_num_threads(1)
    meet, patience = f"file://{folder}/meet-{run}", timedelta(minutes=10)
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=ranks, timeout=patience)
    rng = np.random.default_rng(0)
    whole = [torch.from_numpy((np.array([300, 41]) * rng.random((12, 2)) ** 2).astype(np.int64)) for _ in range(STEPS)]
    if how == "widths":
        row_groups.TIER_BYTES = 0
    policy = "belady" if how == "widths" else Belady(60)
    open_tables = partial(
        ShardedEmbeddingBagCollection, CONFIGS, optimizer=Adam(lr=0.01), dram="64MiB", policy=policy,
        path=folder / "tables" / disks[rank : rank + 1], average=False,
    )  # fmt: skip
    if rank == victim and when != "step":
        make_fatal(when, number)
    try:
        opened = open_tables(resume=True)
    except FileNotFoundError:
        opened = open_tables()
    with opened as tables:
        assert len(tables.tables.groups) == 1 + (how == "widths")
        first = tables.extra.get("step", 0)
        print("from", first, tables.steps, flush=True)
        for step in range(first, STEPS):
            loss = tables(whole[step].tensor_split(ranks)[rank]).values().sin().sum()
            if rank == victim and (when, number) == ("step", step):
                os.kill(os.getpid(), signal.SIGKILL)
            loss.backward()
            if step % EVERY == EVERY - 1:
                save = tables.start_checkpoint if how == "beside" else tables.checkpoint
                save({"step": step + 1})
        found = hashlib.sha256()
        for table, config in enumerate(CONFIGS):
            found.update(tables.weights(np.arange(config.num_embeddings), table).numpy().tobytes())
        tables.checkpoint({"step": STEPS})
        if rank == 0:
            print("end", found.hexdigest(), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    given = sys.argv[1:]
    main(
        Path(given[0]),
        int(given[1]),
        int(given[2]),
        given[3],
        given[4],
        int(given[5]),
        given[6],
        int(given[7]),
        *given[8:],
    )
