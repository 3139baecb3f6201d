"""A training with a loader that reads ahead; `test_replay_loader` runs it, kills it and runs it again.

``python train_with_loader.py PLACE WORKERS CONTEXT UNTIL`` prints a line for each step and then waits for its end.
"""

import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch.utils.data

from memhier.recsys.replay import Batch, CarouselBuffer, Field, RandomSwap
from memhier.recsys.replay.loader import ReplayBatchSampler, ReplayDataset

STEPS, EVERY, AHEAD = 40, 6, 4
SCHEMA = {"image": ("uint8", (4, 4, 3)), "logits": Field("float32", (2,), mutable=True)}


def make(place: Path) -> CarouselBuffer:
    """Return a buffer whose storage is soon full, so that samples drawn ahead lose their places in it."""
    return CarouselBuffer(place, memory=20, storage=40, schema=SCHEMA, swap=RandomSwap(0.6), seed=5)


def told(batch: Batch) -> tuple[Batch, str]:
    """Return a batch with the digest of it; done by the workers."""
    arrays = [batch.slots, batch.ids, batch.labels, *batch.data.values()]
    return batch, hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()


def as_it_is(batch: Any) -> Any:
    """Return what came."""
    return batch


def train(buffer: CarouselBuffer, workers: int, context: str, until: int) -> Iterator[tuple[int, str]]:
    """Train from the buffer's step on; yield the number of each step and what it saw."""
    fill(buffer)
    loader = torch.utils.data.DataLoader(
        ReplayDataset(told), num_workers=workers, multiprocessing_context=context if workers else None,
        batch_sampler=ReplayBatchSampler(buffer, 5, STEPS - buffer.step, ahead=AHEAD), collate_fn=as_it_is,
    )  # fmt: skip
    for batch, digest in loader:
        step = buffer.step
        logits = batch["image"].reshape(len(batch), -1)[:, :2].astype(np.float32) + step
        buffer.feedback(batch, update={"logits": logits})
        fill(buffer)
        if buffer.step % EVERY == 0:
            buffer.checkpoint()
        yield step, digest
        if buffer.step == until:
            return


def fill(buffer: CarouselBuffer) -> None:
    """Add the samples that come before the next step, unless they came before a checkpoint at which it stopped."""
    data = np.random.default_rng(buffer.step)
    if buffer.stats()["arrivals"] <= 12 * buffer.step:
        images = data.integers(0, 256, (12, 4, 4, 3), np.uint8)
        buffer.add({"image": images, "logits": np.zeros((12, 2), np.float32)}, labels=data.integers(0, 3, 12))


if __name__ == "__main__":
    with CarouselBuffer.open(sys.argv[1]) as opened:
        print(json.dumps(opened.step), flush=True)
        for line in train(opened, int(sys.argv[2]), sys.argv[3], int(sys.argv[4])):
            print(json.dumps(line), flush=True)
        sys.stdin.read()
