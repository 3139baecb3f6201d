"""Batches drawn ahead for a loader: a run resumed from a checkpoint goes on with those that training has not seen."""

import importlib.util
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memhier.recsys.replay import Batch, CarouselBuffer, Field, LossSwap, RandomSwap, SwapPolicy
from memhier.recsys.replay.loader import ReplayBatchSampler

TRAINING = Path(__file__).with_name("train_with_loader.py")
SCHEMA = {
    "x": ("int64", 3), "text": Field("uint8", (None,), longest=4), "logits": Field("float32", (2,), mutable=True),
}  # fmt: skip
SAMPLE = 3 * 8 + 4 + 4 + 2 * 4


def load_training() -> Any:
    """Return the script as a module: no package of another's named `tests` is taken for this one."""
    spec = importlib.util.spec_from_file_location("train_with_loader", TRAINING)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def samples(ids: np.ndarray) -> dict[str, Any]:
    return {
        "x": ids[:, None] * np.arange(1, 4),
        "text": [b"text"[: id % 5] for id in ids.tolist()],
        "logits": np.stack([ids, -ids], 1).astype(np.float32),
    }


def make(place: Path, **options: Any) -> CarouselBuffer:
    made = CarouselBuffer(place, **{"memory": 12, "schema": SCHEMA, "swap": RandomSwap(0.7), "seed": 6, **options})
    made.add(samples(np.arange(30)), labels=np.arange(30) % 3)
    return made


def seen(batch: Batch) -> list[Any]:
    return [array.tolist() for array in (batch.slots, batch.ids, batch.labels, *batch.data.values())]


class Run:
    """A training whose steps depend on their numbers; it may be closed and opened at any checkpoint."""

    def __init__(self, place: Path, ahead: int, kinds: list[str], **options: Any) -> None:
        self.place, self.ahead, self.kinds = place, ahead, kinds
        self.buffer = make(place, **options)
        self.batches = self.draw()

    def draw(self) -> Iterator[Batch]:
        return iter(ReplayBatchSampler(self.buffer, 4, len(self.kinds) - self.buffer.step, self.ahead))

    def step(self, kind: str) -> list[Any]:
        number = self.buffer.step
        batch = next(self.batches)
        found = seen(batch)
        self.buffer.feedback(batch, update={"logits": batch["logits"] + np.float32(number)})
        if kind == "add":
            arrivals = self.buffer.stats()["arrivals"]
            ids = np.arange(arrivals, arrivals + 7)
            self.buffer.add(samples(ids), labels=ids % 3)
        elif kind == "forget":
            self.buffer.forget({"id": range(number, number + 20, 3)})
        elif kind == "shrink":
            self.buffer.resize(storage=max(1, self.buffer.stats()["storage_samples"] - 4))
        elif kind == "memory":
            self.buffer.resize(memory=12 + number)
        return found

    def reopen(self) -> None:
        self.buffer.checkpoint()
        self.buffer.close()
        self.buffer = CarouselBuffer.open(self.place)
        self.batches = self.draw()


@pytest.mark.long
@settings(max_examples=40, deadline=None)
@given(
    kinds=st.lists(st.sampled_from(["", "add", "forget", "shrink", "memory"]), min_size=1, max_size=14),
    ahead=st.sampled_from([0, 1, 4, 18]), limit=st.sampled_from([None, 30]), every=st.integers(1, 4),
    delay=st.integers(0, 2), admit=st.sampled_from(["reservoir", "ring", "class_balanced"]),
)  # fmt: skip
def test_a_run_that_stops_and_goes_on_sees_the_same_batches(
    tmp_path_factory: pytest.TempPathFactory, kinds: list[str], ahead: int, limit: int | None, every: int, delay: int,
    admit: str,
) -> None:  # fmt: skip
    place = tmp_path_factory.mktemp("loader")
    options = {"storage": limit, "delay": delay, "admit": admit}
    whole, parts = (Run(place / name, ahead, kinds, **options) for name in ("whole", "parts"))
    for number, kind in enumerate(kinds):
        assert whole.step(kind) == parts.step(kind)
        if number % every == 0:
            parts.reopen()
    for run in (whole, parts):
        assert next(run.batches, None) is None
        assert len(run.buffer.ahead) == 0
        run.buffer.close()


@pytest.mark.long
def test_killed_with_any_number_of_workers(tmp_path: Path) -> None:
    training = load_training()
    with training.make(tmp_path / "whole") as buffer:
        expected = dict(training.train(buffer, 0, "", training.STEPS))
    training.make(tmp_path / "killed").close()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done: dict[int, str] = {}
    # A child is killed some steps after its last checkpoint, and with batches drawn for the steps to come.
    rounds = [(2, "fork", 9), (0, "fork", 15), (1, "spawn", training.STEPS)]
    for workers, context, until in rounds:
        child = subprocess.Popen(
            [sys.executable, str(TRAINING), str(tmp_path / "killed"), str(workers), context, str(until)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip
        assert child.stdout is not None
        start = json.loads(child.stdout.readline())
        assert start % training.EVERY == 0
        lines = [json.loads(line) for line in itertools.islice(child.stdout, until - start)]
        assert [step for step, _ in lines] == list(range(start, until))
        child.send_signal(signal.SIGKILL)
        child.communicate()
        assert child.returncode == -signal.SIGKILL
        for step, digest in lines:
            assert digest == expected[step] == done.setdefault(step, digest), (workers, context, step)
    assert done == expected


def test_batches_handed_out_and_not_used_come_again(tmp_path: Path) -> None:
    with make(tmp_path / "b") as buffer:
        first = [seen(batch) for batch in itertools.islice(ReplayBatchSampler(buffer, 4, 9, ahead=3), 3)]
        again = iter(ReplayBatchSampler(buffer, 4, 9, ahead=3))
        assert [seen(next(again)) for _ in range(3)] == first
        held = buffer.ahead.memory_bytes
        assert held == 4 * 4 * (SAMPLE + 4 * 8)
        assert buffer.memory_bytes > held
        buffer.feedback([])
        assert seen(next(iter(ReplayBatchSampler(buffer, 4, 9, ahead=3)))) == first[1]
        with pytest.raises(ValueError, match="another sampler"):
            next(again)


def test_changes_of_a_batch_change_no_other(tmp_path: Path) -> None:
    with make(tmp_path / "b") as buffer:
        batch = next(iter(ReplayBatchSampler(buffer, 4, 9, ahead=2)))
        drawn = seen(batch)
        for array in (batch.slots, batch.ids, batch.labels, *batch.data.values()):
            array[:] = 0  # a transform that works in place
        assert seen(next(iter(ReplayBatchSampler(buffer, 4, 9, ahead=2)))) == drawn
        buffer.checkpoint()
    with CarouselBuffer.open(tmp_path / "b") as buffer:
        assert seen(next(iter(ReplayBatchSampler(buffer, 4, 9, ahead=2)))) == drawn


@pytest.mark.parametrize("swap", [RandomSwap(1.0), LossSwap(1.0)], ids=str)
def test_batches_drawn_of_a_larger_memory_can_be_used(tmp_path: Path, swap: SwapPolicy) -> None:
    with make(tmp_path / "b", swap=swap) as buffer:
        waiting = [seen(batch) for batch in itertools.islice(ReplayBatchSampler(buffer, 4, 9, ahead=5), 6)]
        buffer.resize(memory=3)
        batches = iter(ReplayBatchSampler(buffer, 4, 9, ahead=5))
        for number, expected in enumerate(waiting):
            batch = next(batches)
            assert seen(batch) == expected
            values = np.full((4, 2), 100 + number, np.float32)
            inside = buffer.reader().read(np.arange(3))
            buffer.feedback(batch, scores=np.arange(4.0), update={"logits": values})
            assert buffer.step == number + 1
            there = [row for row, slot in enumerate(batch.slots) if slot < 3 and inside.ids[slot] == batch.ids[row]]
            with_values = {int(batch.ids[row]) for row in there}
            after = buffer.reader().read(np.arange(3))
            for id, logits in zip(after.ids.tolist(), after["logits"].tolist(), strict=True):
                assert (logits == [100 + number] * 2) == (id in with_values)


def test_any_number_of_batches_is_kept(tmp_path: Path) -> None:
    with make(tmp_path / "b") as buffer:
        waiting = [seen(batch) for batch in itertools.islice(ReplayBatchSampler(buffer, 4, 99, ahead=30), 20)]
        for _ in range(2):
            buffer.checkpoint()
    with CarouselBuffer.open(tmp_path / "b") as buffer:
        assert [seen(batch) for batch in itertools.islice(ReplayBatchSampler(buffer, 4, 99, ahead=30), 20)] == waiting


def test_forgotten_samples_are_not_drawn_ahead(tmp_path: Path) -> None:
    with make(tmp_path / "b", storage=30, admit="ring") as buffer:
        batches = iter(ReplayBatchSampler(buffer, 4, 9, ahead=3))
        waiting = [next(batches).ids for _ in range(3)]
        gone, lost = int(waiting[1][0]), int(waiting[2][1])
        # The ring drops some samples that wait: they are kept as values, until one is to be forgotten.
        ids = np.arange(1000, 1001 + int(lost))
        buffer.add(samples(ids), labels=ids % 3, ids=ids)
        buffer.checkpoint()
        secret = samples(np.array([lost]))["x"].tobytes()
        files = [file for file in (tmp_path / "b").rglob("*") if file.is_file()]
        assert any(secret in file.read_bytes() for file in files if file.name.startswith("index-"))
        assert buffer.forget({"id": gone})["samples"] == (gone > lost)
        assert not [file for file in (tmp_path / "b").rglob("*.seg") if secret in file.read_bytes()]
    with CarouselBuffer.open(tmp_path / "b") as buffer:
        again = [batch.ids.tolist() for batch in itertools.islice(ReplayBatchSampler(buffer, 4, 9, ahead=3), 3)]
        assert again == [[id for id in ids.tolist() if id > lost and id != gone] for ids in waiting]


def test_damage_in_batches_drawn_ahead_is_told(tmp_path: Path) -> None:
    schema = {"x": ("int64", 512)}  # a page each
    with CarouselBuffer(tmp_path / "b", memory=4, schema=schema, swap=RandomSwap(1.0), seed=1) as buffer:
        buffer.add({"x": np.repeat(np.arange(8), 512).reshape(8, 512)})
        batches = ReplayBatchSampler(buffer, 3, 9, ahead=1)
        for _ in range(2):
            buffer.feedback(next(iter(batches)))
        waiting = [next(iter(batches)).ids.tolist()]
        inside = buffer.reader().ids().tolist()
        buffer.checkpoint()
    bad = next(id for id in waiting[0] if id not in inside)
    victim = next(file for file in (tmp_path / "b" / "segments").iterdir() if file.name.startswith("samples-0."))
    data = bytearray(victim.read_bytes())
    data[4096 * bad] ^= 1
    victim.write_bytes(data)
    with pytest.warns(RuntimeWarning, match=rf"ids \[{bad}\] are damaged"):
        buffer = CarouselBuffer.open(tmp_path / "b")
    with buffer:
        batch = next(iter(ReplayBatchSampler(buffer, 3, 9, ahead=1)))
        assert batch.ids.tolist() == [id for id in waiting[0] if id != bad]
        assert batch["x"][:, 7].tolist() == batch.ids.tolist()
