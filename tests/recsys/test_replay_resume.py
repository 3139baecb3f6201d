"""A run that was killed and resumed equals one that was not, slot by slot and batch by batch."""

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memhier.recsys.replay import AgeSwap, CarouselBuffer, DeckSwap, Field, GateSwap, LossSwap, RandomSwap, SwapPolicy
from memhier.recsys.replay.storage.storage import Storage

STEPS = 60
EVERY = 7
POLICIES: dict[str, Any] = {
    "random": RandomSwap, "deck": DeckSwap, "age": AgeSwap, "gate": GateSwap, "loss": LossSwap,
}  # fmt: skip


def make(place: Path, policy: str, admit: str, delay: int, way_back: bool = False) -> CarouselBuffer:
    swap: SwapPolicy = POLICIES[policy](0.6)
    schema = {
        "image": ("uint8", (4, 4, 3)),
        "latent": ("float32", (6,)),
        "logits": Field("float32", (3,), mutable=True),
    }
    return CarouselBuffer(place, memory=20, storage=70 if admit == "class_balanced" else None, schema=schema,
                          admit=admit, swap=swap, codec={"latent": "int8"}, seed=5, delay=delay,
                          way_back=way_back)  # fmt: skip


def digest(*arrays: np.ndarray) -> str:
    return hashlib.sha256(b"".join(np.ascontiguousarray(array).tobytes() for array in arrays)).hexdigest()


def run(buffer: CarouselBuffer, until: int) -> list[str]:
    """Train on from the buffer's step; return the batch of each step and the memory after it."""
    seen = []
    while buffer.step < until:
        step = buffer.step
        data = np.random.default_rng(step)
        count = int(data.integers(0, 9))
        buffer.add(
            {
                "image": data.integers(0, 256, (count, 4, 4, 3), np.uint8),
                "latent": data.normal(size=(count, 6)).astype(np.float32),
                "logits": np.zeros((count, 3), np.float32),
            },
            labels=data.integers(0, 3, count),
        )
        batch = buffer.sample(5)
        logits = batch["image"].reshape(len(batch), -1)[:, :3].astype(np.float32) / 100 + batch["latent"][:, :3]
        swap = buffer.swap
        scores = logits if isinstance(swap, GateSwap) else logits.sum(axis=1)
        buffer.feedback(batch, scores=scores, update={"logits": logits})
        everything = buffer.reader().read(np.arange(buffer.capacity))
        used = digest(batch.slots, batch.ids, batch.labels, *batch.data.values())
        seen.append(used + digest(everything.ids, everything.labels, *everything.data.values()))
        if buffer.step % EVERY == 0:
            buffer.checkpoint({"step": str(buffer.step).encode()})
    return seen


@pytest.mark.parametrize(
    ("policy", "admit", "delay"),
    [
        ("random", "class_balanced", 2), ("random", "ring", 0), ("deck", "reservoir", 3), ("age", "everything", 1),
        ("gate", "reservoir", 1), ("loss", "class_balanced", 1),
    ],
)  # fmt: skip
def test_a_run_resumed_at_every_checkpoint_equals_one_that_was_not(
    tmp_path: Path, policy: str, admit: str, delay: int
) -> None:
    with make(tmp_path / "whole", policy, admit, delay) as buffer:
        expected = run(buffer, STEPS)
        assert buffer.stats()["swapped"] > 20
    with make(tmp_path / "parts", policy, admit, delay) as buffer:
        run(buffer, EVERY)
    for step in range(EVERY, STEPS, 2 * EVERY):
        with CarouselBuffer.open(tmp_path / "parts") as buffer:
            assert buffer.step == step
            assert buffer.value("step") == str(step).encode()
            until = min(STEPS, step + 2 * EVERY + 3)
            assert run(buffer, until) == expected[step:until]


CHILD = """
import importlib.util, json, sys
from pathlib import Path
spec = importlib.util.spec_from_file_location("resume", sys.argv[1])
resume = importlib.util.module_from_spec(spec)
spec.loader.exec_module(resume)
place = Path(sys.argv[2])
buffer = resume.CarouselBuffer.open(place)
print(json.dumps([buffer.step, None]), flush=True)
while buffer.step < int(sys.argv[3]):
    step = buffer.step
    print(json.dumps([step, resume.run(buffer, step + 1)]), flush=True)
sys.stdin.read()
"""


def test_killed_again_and_again(tmp_path: Path) -> None:
    with make(tmp_path / "whole", "random", "reservoir", 1) as buffer:
        expected = run(buffer, STEPS)
    make(tmp_path / "killed", "random", "reservoir", 1).close()
    chance = random.Random(7)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    # The child of round r goes no further than its r-th checkpoint and then waits for its end, so a fast machine is
    # killed as often as a slow one.
    limits = [EVERY * (kill + 1) for kill in range(8)] + [STEPS]
    last = -1
    for limit in limits:
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, __file__, str(tmp_path / "killed"), str(limit)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip
        assert child.stdout is not None
        start = json.loads(child.stdout.readline())[0]
        assert start % EVERY == 0
        if limit < STEPS:
            time.sleep(chance.uniform(0, 0.12))
            child.send_signal(signal.SIGKILL)
        lines = child.communicate()[0].splitlines()
        assert child.returncode == (-signal.SIGKILL if limit < STEPS else 0)
        for step, seen in (json.loads(line) for line in lines if line.endswith("]")):
            assert seen == [expected[step]], step
            last = step
    assert last == STEPS - 1
    with CarouselBuffer.open(tmp_path / "killed") as buffer:
        assert buffer.check() == []


def test_slow_reads_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads that take a random time give the same run."""
    with make(tmp_path / "fast", "random", "reservoir", 1) as buffer:
        expected = run(buffer, STEPS)
    with make(tmp_path / "slow", "random", "reservoir", 1) as buffer:
        read, chance = Storage.read_settled, random.Random(1)

        def slow(*arguments: Any) -> None:
            time.sleep(chance.choice([0, 0, 0.01]))
            read(*arguments)

        monkeypatch.setattr(Storage, "read_settled", slow)
        assert run(buffer, STEPS) == expected
        assert buffer.stats()["stalls"] > 0
        assert buffer.stats()["stall_s"] > 0


@pytest.mark.parametrize(("policy", "admit"), [("random", "reservoir"), ("deck", "class_balanced"), ("gate", "ring")])
def test_a_buffer_goes_back_to_the_checkpoint_before(tmp_path: Path, policy: str, admit: str) -> None:
    place = tmp_path / "b"
    with make(place, policy, admit, 1, way_back=True) as buffer:
        run(buffer, 2 * EVERY)
        expected = run(buffer, 3 * EVERY)
        run(buffer, 3 * EVERY + 3)  # lost
    with CarouselBuffer.open(place) as buffer:
        assert buffer.step == 3 * EVERY
    for _ in range(2):
        CarouselBuffer.go_back(place)
        with pytest.raises(ValueError, match="kept no way back"):
            CarouselBuffer.go_back(place)
        with CarouselBuffer.open(place) as buffer:
            assert (buffer.value("step"), buffer.step) == (str(2 * EVERY).encode(), 2 * EVERY)
            assert run(buffer, 3 * EVERY) == expected
            assert buffer.check() == []


def test_no_way_leads_back_to_forgotten_samples(tmp_path: Path) -> None:
    place = tmp_path / "b"
    marked = np.full((60, 40), 0x5A5A5A5A, np.int64)
    with CarouselBuffer(place, memory=8, schema={"x": ("int64", 40)}, way_back=True) as buffer:
        buffer.add({"x": marked}, labels=np.arange(60) % 2)
        buffer.checkpoint()
        buffer.add({"x": marked}, labels=np.arange(60) % 2)
        assert buffer.forget({"label": [0, 1]})["samples"] == 120
    assert not any(marked[0].tobytes()[:64] in file.read_bytes() for file in place.rglob("*") if file.is_file())
    CarouselBuffer.go_back(place)
    with CarouselBuffer.open(place) as buffer:
        assert len(buffer.stored_ids()) == 0
    with pytest.raises(ValueError, match="kept no way back"):
        CarouselBuffer.go_back(place)


def test_the_first_checkpoint_has_none_before_it(tmp_path: Path) -> None:
    for name, way_back in (("with", True), ("without", False)):
        make(tmp_path / name, "random", "reservoir", 1, way_back).close()
        with pytest.raises(ValueError, match="kept no way back"):
            CarouselBuffer.go_back(tmp_path / name)
