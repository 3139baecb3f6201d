"""Trains and takes checkpoints until killed, or to the end, and then prints the hash of everything.

``python train_until_killed.py FOLDER STEPS DRAM_SLOTS RULE``; goes on from the checkpoint in FOLDER where there is one.
"""

import hashlib
import io
import sys
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from memhier.policies import Belady
from memhier.recsys import SGD, Adam, EmbeddingBag, lookahead

ROWS, DIM, SAVE_EVERY = 2000, 6, 7


def main(folder: Path, steps: int, slots: int, rule: str) -> None:
    torch.set_num_threads(1)
    ids = torch.from_numpy((ROWS * np.random.default_rng(0).random((16 * steps, 2)) ** 2).astype(np.int64))
    loader = DataLoader(TensorDataset(ids), 16, shuffle=True, generator=torch.Generator().manual_seed(1))
    optimizer = SGD(lr=0.1, momentum=0.5) if rule == "sgd" else Adam(lr=0.01)
    torch.manual_seed(2)
    dense = nn.Linear(DIM, 1)
    dense_optimizer = torch.optim.SGD(dense.parameters(), lr=0.01)
    open_bag = partial(
        EmbeddingBag, ROWS, DIM, mode="sum", optimizer=optimizer, dram="64MiB", path=folder, policy=Belady(slots)
    )
    try:
        opened = open_bag(resume=True)
    except FileNotFoundError:
        opened = open_bag()
    with opened as bag:
        schedule = torch.optim.lr_scheduler.StepLR(bag.optimizer, 10, 0.9)
        ahead = lookahead(loader, bag, ids=lambda batch: batch[0])
        if bag.extra:
            saved = torch.load(io.BytesIO(bytes.fromhex(bag.extra["dense"])))
            dense.load_state_dict(saved["dense"])
            schedule.load_state_dict(saved["schedule"])
            ahead.load_state_dict(bag.extra["loader"])
        for (batch,) in ahead:
            loss = torch.sigmoid(dense(bag(batch))).square().sum()
            dense_optimizer.zero_grad()
            loss.backward()
            dense_optimizer.step()
            schedule.step()
            if ahead.position % SAVE_EVERY == 0:
                buffer = io.BytesIO()
                torch.save({"dense": dense.state_dict(), "schedule": schedule.state_dict()}, buffer)
                bag.checkpoint({"loader": ahead.state_dict(), "dense": buffer.getvalue().hex()})
                print("saved", ahead.position, flush=True)
        found = hashlib.sha256()
        rows = np.arange(ROWS)
        for tensor in (bag.weights(rows), bag.optimizer_state(rows), dense.weight.detach(), dense.bias.detach()):
            found.update(tensor.numpy().tobytes())
        print("end", found.hexdigest(), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
