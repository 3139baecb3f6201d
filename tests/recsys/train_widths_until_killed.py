"""Trains tables of two widths and takes checkpoints beside the training, until killed or to the end.

``python train_widths_until_killed.py FOLDER STEPS`` goes on from the checkpoint in FOLDER where there is one. Each
table counts its steps in a row, which has to be as old as the checkpoint says. A line tells of each checkpoint, and the
last one has the hash of everything.
"""

import hashlib
import sys
from pathlib import Path

import numpy as np
import torch

from memhier.recsys import Adagrad, EmbeddingBagCollection, EmbeddingBagConfig

ROWS, DIMS = 30_000, (2, 64)


def main(folder: Path, steps: int) -> None:
    torch.set_num_threads(1)
    configs = [
        EmbeddingBagConfig(name=f"t{dim}", num_embeddings=ROWS, embedding_dim=dim, pooling="sum") for dim in DIMS
    ]
    begun = folder.is_dir() and any(folder.iterdir())
    try:
        opened = EmbeddingBagCollection(configs, optimizer=Adagrad(lr=0.1), dram="12MiB", path=folder, resume=begun)
    except FileNotFoundError:
        opened = EmbeddingBagCollection(configs, optimizer=Adagrad(lr=0.1), dram="12MiB", path=folder)
    with opened as tables:
        assert len(tables.tables.groups) == 2
        first = tables.extra.get("step", 0)
        for table in range(2):
            # The first row of each table has had a gradient of 1 in each step, whose squares its state counts.
            assert (tables.optimizer_state([0], table) == first).all(), f"table {table} is not of step {first}"
        saving = None
        for step in range(first, steps):
            ids = (ROWS * np.random.default_rng(step).random((200, 2)) ** 2).astype(np.int64)
            ids[0], ids[1:] = 0, np.maximum(ids[1:], 1)
            tables(torch.from_numpy(ids)).values().sum().backward()
            if saving is not None and step % 3 == 2:
                saving.result()
                print("saved", step, flush=True)
            if step % 3 == 0:
                saving = tables.start_checkpoint({"step": step + 1})
        tables.checkpoint({"step": steps})
        found = hashlib.sha256()
        for table in range(2):
            for tensor in (tables.weights(np.arange(ROWS), table), tables.optimizer_state(np.arange(ROWS), table)):
                found.update(tensor.numpy().tobytes())
        print("end", found.hexdigest(), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
