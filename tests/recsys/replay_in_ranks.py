"""Uses a replay buffer on the ranks of a gloo group; each rank prints a line of JSON.

``python replay_in_ranks.py SCENARIO FOLDER RANKS RANK [ARGUMENT]``
"""

import hashlib
import json
import os
import signal
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributed as dist

from memhier.recsys import CarouselBuffer, ShardedBuffer, SharedBuffer
from memhier.recsys.replay import Batch, Field

SCHEMA: dict[str, Any] = {
    "x": ("float32", 3),
    "text": Field("uint8", (None,), longest=9),
    "logits": Field("float32", 4, mutable=True),
}
ROUNDS = 12
SWAPS = "random", "gate", "loss", "deck"
OPTIONS: dict[str, Any] = {"memory": 20, "storage": 90, "schema": SCHEMA, "seed": 5}


def samples(start: int, count: int) -> dict[str, Any]:
    """Return samples that follow from their numbers."""
    numbers = np.arange(start, start + count, dtype=np.float32)
    return {
        "x": np.stack([numbers, -numbers, numbers % 7], 1),
        "text": [b"abcdefghi"[: int(number) % 10] for number in numbers],
        "logits": np.zeros((count, 4), np.float32),
    }


def bounds(count: int, ranks: int, turn: int) -> list[int]:
    """Return where the parts of ranks end: uneven, and some empty."""
    return [*np.sort(np.random.default_rng([turn, count]).integers(0, count + 1, ranks - 1)).tolist(), count]


def part(batch: dict[str, Any], start: int, stop: int) -> dict[str, Any]:
    """Return some of a batch."""
    return {name: values[start:stop] for name, values in batch.items()}


def trained(buffer: Any, ranks: int, rank: int, gather: Callable[[Any], list[Any]], swap: str) -> str:
    """Add, draw and end steps; return a hash of all batches, in the order of ranks."""
    found = hashlib.sha256()
    arrived = 0
    for turn in range(ROUNDS):
        count = (0, 1, 7, 30)[turn % 4]
        ends = [0, *bounds(count, ranks, turn)]
        mine = slice(ends[rank], ends[rank + 1])
        labels = np.arange(arrived, arrived + count) % 4
        slots = buffer.add(part(samples(arrived, count), mine.start, mine.stop), labels=labels[mine])
        arrived += count
        wanted = [0, *bounds(12, ranks, turn + 100)]
        batch: Batch = buffer.sample(wanted[rank + 1] - wanted[rank])
        logits = np.repeat(batch["x"][:, :1], 4, 1) * np.arange(4, dtype=np.float32) + turn
        scores = {"gate": torch.from_numpy(logits), "loss": logits[:, 1]}.get(swap)
        buffer.feedback(batch, scores, {"logits": logits} if turn % 3 else None)
        told = slots.tolist(), batch.ids.tolist(), batch.slots.tolist(), [one.tolist() for one in batch.data.values()]
        every = gather(told)
        joined = [[one for rank_told in every for one in rank_told[number]] for number in range(3)]
        columns = [[one for rank_told in every for one in rank_told[3][number]] for number in range(len(batch.data))]
        found.update(json.dumps([joined, columns]).encode())
    return found.hexdigest()


def shared(folder: Path, ranks: int, rank: int, _: str) -> Any:
    """Share a buffer, and go on from its checkpoint with another rank as the owner."""
    told = []
    for swap in SWAPS:
        path = folder / swap
        with SharedBuffer(CarouselBuffer(path, **OPTIONS, swap=swap) if rank == ranks - 1 else None) as buffer:
            first = trained(buffer, ranks, rank, gathered, swap)
            buffer.checkpoint({"owner": b"1"})
        dist.barrier()
        with SharedBuffer(CarouselBuffer.open(path) if rank == 0 else None) as buffer:
            value = buffer.value("owner")
            told.append([first, trained(buffer, ranks, rank, gathered, swap), len(buffer), value == b"1"])
    return told


def gathered(value: Any) -> list[Any]:
    """Return the value of every rank."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def plain(folder: Path, ranks: int, rank: int, _: str) -> Any:
    """Do as `shared` does with a buffer of one trainer."""
    told = []
    for swap in SWAPS:
        path = folder / f"plain-{swap}"
        with CarouselBuffer(path, **OPTIONS, swap=swap) as buffer:
            first = trained(buffer, 1, 0, lambda value: [value], swap)
            buffer.checkpoint()
        with CarouselBuffer.open(path) as buffer:
            told.append([first, trained(buffer, 1, 0, lambda value: [value], swap), len(buffer), True])
    return told


def refused(folder: Path, ranks: int, rank: int, _: str) -> Any:
    """Make calls that one rank, or the owner, refuses; go on after each."""
    told = []
    with SharedBuffer(CarouselBuffer(folder / "b", memory=8, schema={"x": "int64"}) if rank == 0 else None) as buffer:
        good = {"x": np.arange(6)}
        buffer.add(good, labels=np.zeros(6, int))
        calls: list[Callable[[], Any]] = [
            lambda: buffer.add({"x": np.arange(6.0)} if rank == 1 else good, labels=np.zeros(6, int)),
            lambda: buffer.add(good, labels=None if rank == 1 else np.zeros(6, int)),
            lambda: buffer.add(good),
            lambda: buffer.sample(-1 if rank == ranks - 1 else 2),
            lambda: buffer.feedback([99] if rank == 1 else [0]),
            lambda: buffer.resize(memory="1"),
        ]
        for call in calls:
            try:
                call()
                told.append("")
            except Exception as error:
                told.append(f"{type(error).__name__}: {error}")
        buffer.feedback(buffer.sample(2))
        return [told, buffer.stats()["arrivals"], len(buffer)]


def dealt(folder: Path, ranks: int, rank: int, _: str) -> Any:
    """Return ids in storage and memory of this shard, for many seeds; the ranks see unequal streams."""
    found = []
    for seed in range(60):
        path = folder / f"b-{seed}"
        with ShardedBuffer(path, memory=6, storage=15, schema={"x": "int64"}, seed=seed) as buffer:
            for turn in range(4):
                count = (30, 8, 0)[rank] if turn % 2 else (5, 0, 1)[rank]
                buffer.add({"x": np.full(count, rank)})
            for _ in range(2):
                buffer.feedback(buffer.sample(3))
            arrivals = buffer.arrivals
            memory = np.unique(buffer.sample(6).ids).tolist()
            found.append([buffer.shard.stored_ids().tolist(), memory])
    return [arrivals, found]


def resumed(folder: Path, ranks: int, rank: int, argument: str) -> Any:
    """Train with a checkpoint every other step, from the last one on; perhaps die in the third.

    The argument is "before" or "after": rank 1 dies there, before or after its shard's commit; "straight" or "open" go
    to the end.
    """
    if argument in ("before", "after") and rank == 1:
        _die_at(3, argument)
    path = folder / "b"
    options: Any = {"memory": 10, "storage": 40, "schema": SCHEMA, "swap": "random", "seed": 3}
    buffer = ShardedBuffer.open(path) if argument == "open" else ShardedBuffer(path, **options)
    with buffer:
        value = buffer.value("step")
        begin = 0 if value is None else int(value)
        found = hashlib.sha256()
        for turn in range(begin, 8):
            count = 3 + 2 * rank
            buffer.add(samples(100 * turn + 10 * rank, count), labels=np.full(count, rank))
            batch = buffer.sample(4)
            buffer.feedback(batch)
            if turn >= 6:
                found.update(batch["x"].tobytes() + batch.ids.tobytes())
            if turn % 2:
                buffer.checkpoint({"step": str(turn + 1).encode()})
        forgotten = buffer.forget({"label": [1]})
        left = buffer.shard.stored_ids().tolist()
        return [begin, found.hexdigest(), buffer.arrivals, forgotten, left, len(buffer.shard.check())]


def _die_at(checkpoint: int, moment: str) -> None:
    plain_checkpoint, seen = CarouselBuffer.checkpoint, [0]

    def dying(self: CarouselBuffer, values: Any = None) -> int:
        seen[0] += 1
        if seen[0] == checkpoint and moment == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        result = plain_checkpoint(self, values)
        if seen[0] == checkpoint:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    CarouselBuffer.checkpoint = dying  # type: ignore[method-assign]


def at_odds(folder: Path, ranks: int, rank: int, _: str) -> Any:
    """Open and make sharded buffers that do not fit."""
    told = []
    path = folder / "b"
    calls: list[Callable[[], ShardedBuffer]] = [
        lambda: ShardedBuffer.open(path),
        lambda: ShardedBuffer(path, memory=4 + rank, schema={"x": "int64"}),
        lambda: ShardedBuffer(path, memory=4 if rank else -1, schema={"x": "int64"}),
        lambda: ShardedBuffer(path, memory=4, schema={"x": "int64"}, seed=-1),
        lambda: ShardedBuffer(path, memory=4, schema={"x": "int64"}),
        lambda: ShardedBuffer(path, memory=4, schema={"x": "int64"}),
    ]
    for call in calls:
        try:
            with call():
                told.append("")
        except Exception as error:
            told.append(f"{type(error).__name__}: {error}")
    return told


def refused_shards(folder: Path, ranks: int, rank: int, _: str) -> Any:
    """Make calls that all ranks refuse, which change nothing; then one that a single rank refuses."""
    told = []
    with ShardedBuffer(folder / "b", memory=4, storage=20, schema=SCHEMA) as buffer:
        buffer.add(samples(10 * rank, 6))
        calls: list[Callable[[], Any]] = [
            lambda: buffer.resize(memory=-1),
            lambda: buffer.resize(memory=[1]),  # type: ignore[arg-type]
            lambda: buffer.forget({"nothing": [1]}),
            lambda: buffer.checkpoint({"step": "text"}),  # type: ignore[dict-item]
            lambda: buffer.checkpoint({"ranks": b""}),
            lambda: buffer.checkpoint(3),  # type: ignore[arg-type]
            lambda: told.append(buffer.checkpoint({"step": b"1"})),
            lambda: buffer.resize(memory=-1 if rank else 3),
            lambda: buffer.add(samples(100, 2)),
        ]
        for call in calls:
            try:
                call()
            except Exception as error:
                told.append(f"{type(error).__name__}: {error}")
    with ShardedBuffer.open(folder / "b") as buffer:
        return [told, buffer.arrivals, (buffer.value("step") or b"").decode()]


def first_draw(folder: Path, ranks: int, rank: int, seed: str) -> Any:
    """Draw from shards that hold the same samples."""
    with ShardedBuffer(folder / "b", memory=1000, schema={"x": "int64"}, seed=int(seed)) as buffer:
        buffer.shard.add({"x": np.arange(1000)})
        return buffer.sample(8)["x"].tolist()


def fewer(folder: Path, ranks: int, rank: int, _: str) -> Any:
    """Open the shards of another number of ranks."""
    try:
        ShardedBuffer.open(folder / "b").close()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


SCENARIOS = {
    work.__name__: work for work in (shared, plain, refused, refused_shards, dealt, resumed, at_odds, first_draw, fewer)
}


def main(scenario: str, folder: Path, ranks: int, rank: int, argument: str = "") -> None:
    """Meet the other ranks, run the scenario, print its result."""
    torch.set_num_threads(1)
    meet = f"file://{folder}/meet-{scenario}-{ranks}-{argument}"
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=ranks, timeout=timedelta(minutes=10))
    print(json.dumps(SCENARIOS[scenario](folder, ranks, rank, argument)), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), *sys.argv[5:])
