"""Replay in a process of its own; print the peak of its private memory, in bytes, and that which the buffer counts.

``python tests/recsys/replay_within_memory.py FOLDER 1MiB 90 [warm]``: a folder to make buffers in, a budget, and turns,
each of which adds 64 images of 3 KB and swaps half of a batch of 32. Memory is that of the buffer: anonymous and shared
pages beyond those of the process before. The first commits of a process take some 3 MB once, which malloc keeps: lists
of LMDB's, which opens the catalog for each commit. ``warm`` makes and closes a small buffer before.
"""

import re
import sys
from pathlib import Path

import numpy as np

from memhier.recsys.replay import CarouselBuffer, RandomSwap


def private_bytes() -> int:
    """Return the anonymous and shared memory of this process, in bytes."""
    status = Path("/proc/self/status").read_text()
    return 1024 * sum(int(size) for size in re.findall(r"Rss(?:Anon|Shmem):\s+(\d+)", status))


def use(place: Path, memory: str, turns: int) -> tuple[int, int]:
    """Use a buffer; return the most private memory, and the most that it counts."""
    private = counted = 0
    block, labels = {"image": np.zeros((64, 3072), np.uint8)}, np.arange(64) % 10
    schema = {"image": ("uint8", (3072,))}
    with CarouselBuffer(place, memory=memory, storage=2000, schema=schema, swap=RandomSwap(0.5), seed=1) as buffer:
        batch = buffer.empty(32)
        for turn in range(turns):
            buffer.add(block, labels=labels)
            buffer.feedback(buffer.sample(32, batch))
            if turn % 20 == 19:
                buffer.checkpoint()
            private, counted = max(private, private_bytes()), max(counted, buffer.memory_bytes)
    return private, counted


def main() -> None:
    """Print both."""
    folder, memory, turns = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    if sys.argv[4:] == ["warm"]:
        use(folder / "small", "512KiB", 60)
    before = private_bytes()
    private, counted = use(folder / "buffer", memory, turns)
    print(private - before, counted)


if __name__ == "__main__":
    main()
