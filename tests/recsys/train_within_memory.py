"""Trains with a checkpoint after every step, or every so many; prints the most private memory that this added, and the
largest `memory_bytes`, in bytes.

``python train_within_memory.py FOLDER DRAM STEPS KIND [ROWS BAGS EVERY IDS]``; KIND says which call takes the
checkpoints, ROWS how many rows the table has, BAGS how many a step has, EVERY how many steps lie between two of them,
IDS is "rows" or "hash64".
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from memhier.recsys import Adagrad, EmbeddingBag

DIM = 64


def private_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def main(
    folder: Path, dram: str, steps: int, kind: str, rows: int = 300_000, bags: int = 256, every: int = 1, *ids: Any
) -> None:
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    # Modules loaded on first use do not count.
    options: dict[str, Any] = {"mode": "sum", "optimizer": Adagrad(), "id_space": ids[0] if ids else "rows"}
    with EmbeddingBag(100, DIM, dram="32MiB", path=folder / "first", **options) as bag:
        bag(torch.arange(10)[None]).sum().backward()
        bag.start_checkpoint().result()
    before, most, held = private_bytes(), 0, 0
    with EmbeddingBag(rows, DIM, dram=dram, path=folder / "second", **options) as bag:
        for step in range(1, steps + 1):
            bag(torch.from_numpy(rng.integers(0, rows, (bags, 8)))).sum().backward()
            if step % every == 0:
                getattr(bag, kind)()
            most, held = max(most, private_bytes() - before), max(held, bag.memory_bytes)
        assert bag.stats()["evictions"] > min(rows, 8 * bags * steps) // 4
    print(most, held)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4], *map(int, sys.argv[5:8]), *sys.argv[8:])
