"""A buffer of fields of every kind, used in any order through public calls, next to dicts of the samples."""

import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from memhier.recsys.replay import (
    AgeSwap,
    Batch,
    CarouselBuffer,
    DeckSwap,
    Field,
    GateSwap,
    LossSwap,
    RandomSwap,
    SteeredRatio,
    StoredSamples,
)
from memhier.recsys.replay.loader import ReplayBatchSampler

pytest.importorskip("PIL")

PAIR = np.dtype([("a", "<i2"), ("b", ">f4")])
SCHEMA = {
    "image": ("uint8", (8, 8, 3)), "latent": ("float32", 5), "text": Field("uint8", (None,), longest=6),
    "points": Field("int16", (None, 2), longest=3), "word": "S3", "name": "U2", "pair": PAIR, "flag": "bool",
    "logits": Field("float32", (3,), mutable=True), "seen": Field(">i4", mutable=True),
}  # fmt: skip
LOSSY = ("image", "latent", "logits")
SWAPS: list[Any] = [
    None, lambda: RandomSwap(1.0), lambda: RandomSwap(SteeredRatio(0.7)), lambda: DeckSwap(0.6), lambda: AgeSwap(0.5),
    lambda: GateSwap(0.8), lambda: LossSwap(0.4),
]  # fmt: skip


def samples(ids: np.ndarray) -> dict[str, Any]:
    """Return samples that can be told from their ids."""
    shades = (ids[:, None, None, None] * 3 + np.arange(8)[:, None, None] * 9) % 256
    return {
        "image": np.broadcast_to(shades, (len(ids), 8, 8, 3)).astype(np.uint8),
        "latent": np.sin(ids[:, None] + np.arange(5)).astype(np.float32),
        "text": [b"sample"[: id % 7] for id in ids.tolist()],
        "points": [np.full((id % 4, 2), id, np.int16) for id in ids.tolist()],
        "word": np.array([b"w%d" % (id % 90) for id in ids.tolist()], "S3"),
        "name": np.array([f"ä{id % 10}" for id in ids.tolist()], "U2"),
        "pair": np.array([(id, id / 4) for id in ids.tolist()], PAIR),
        "flag": ids % 2 == 0,
        "logits": np.stack([ids % 7, ids % 5, ids % 3], 1).astype(np.float32),
        "seen": np.full(len(ids), -1, ">i4"),
    }


class Everything(RuleBasedStateMachine):
    """Samples stay as they came, and their mutable fields as last given."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.first: dict[int, dict[str, bytes]] = {}  # the values after a lossy codec, by id
        self.given: dict[int, dict[str, Any]] = {}  # mutable fields
        self.forgotten: set[int] = set()
        self.came = 0
        self.durable: tuple[int, dict[int, dict[str, Any]], set[int], int] = (0, {}, set(), 0)

    @initialize(
        image=st.sampled_from(["none", "jpeg", "webp:70", "zstd"]), latent=st.sampled_from(["none", "int8", "bf16"]),
        text=st.sampled_from(["none", "zstd"]), logits=st.sampled_from(["none", "fp16", "int8"]),
        admit=st.sampled_from(["reservoir", "class_balanced", "ring", "everything"]), limit=st.sampled_from([None, 9]),
        memory=st.integers(1, 8), swap=st.sampled_from(SWAPS), delay=st.integers(0, 2),
    )  # fmt: skip
    def make(
        self, image: str, latent: str, text: str, logits: str, admit: str, limit: int | None, memory: int, swap: Any,
        delay: int,
    ) -> None:  # fmt: skip
        self.codec = {"image": image, "latent": latent, "text": text, "logits": logits}
        self.buffer = CarouselBuffer(
            self.folder / "b", memory=memory, storage=None if admit == "everything" else limit, schema=SCHEMA,
            admit=admit, swap=swap and swap(), codec=self.codec, delay=delay, seed=11,
        )  # fmt: skip

    def is_right(self, batch: Batch) -> None:
        """Assert that samples are as they came."""
        expected = self.buffer.schema.check(samples(batch.ids))[1]
        assert batch.labels.tolist() == (batch.ids % 3).tolist()
        assert not self.forgotten & set(batch.ids.tolist())
        for row, id in enumerate(batch.ids.tolist()):
            given = self.given.get(id, {})
            for name, values in batch.data.items():
                value = values[row : row + 1]
                wanted = np.asarray(given.get(name, expected[name][row : row + 1]), values.dtype)
                if name in LOSSY and self.codec[name] not in ("none", "zstd"):
                    assert np.abs(value.astype(float) - wanted.astype(float)).max() <= (
                        40 if name == "image" else 0.1
                    ), (name, id)
                    if name != "logits":
                        assert self.first.setdefault(id, {}).setdefault(name, value.tobytes()) == value.tobytes()
                else:
                    assert value.tobytes() == wanted.tobytes(), (name, id)

    def scores(self, count: int) -> Any:
        swap = self.buffer.swap
        if swap is None or swap.name not in ("gate", "loss"):
            return None
        values = np.random.default_rng(self.buffer.step).normal(size=(count, 4))
        return values if swap.name == "gate" else values[:, 0]

    @rule(count=st.integers(0, 7))
    def add(self, count: int) -> None:
        ids = np.arange(self.came, self.came + count)
        self.came += count
        slots = self.buffer.add(samples(ids), labels=ids % 3, ids=ids)
        inside = self.buffer.reader().read(slots[slots >= 0])
        assert inside.ids.tolist() == ids[slots >= 0].tolist()
        self.is_right(inside)

    @rule(n=st.integers(0, 9), updates=st.booleans(), as_slots=st.booleans())
    def train(self, n: int, updates: bool, as_slots: bool) -> None:
        batch = self.buffer.sample(n)
        assert len(batch) == min(n, len(self.buffer)) == len(set(batch.slots.tolist()))
        self.end(batch, updates, as_slots)

    @rule(n=st.integers(1, 4), ahead=st.integers(0, 3), updates=st.booleans())
    def train_with_a_loader(self, n: int, ahead: int, updates: bool) -> None:
        batch = next(iter(ReplayBatchSampler(self.buffer, n, 5, ahead)))
        # It was drawn steps ago: mutable fields are those of then.
        given = self.given
        self.given = {
            id: {name: batch[name][row].copy() for name in ("logits", "seen")}
            for row, id in enumerate(batch.ids.tolist())
        }  # fmt: skip
        self.is_right(batch)
        self.given = given
        if len(batch) == 0 or batch.slots.max() < self.buffer.capacity:
            self.end(batch, updates, False)
        else:
            self.buffer.feedback(batch, scores=self.scores(len(batch)))

    def end(self, batch: Batch, updates: bool, as_slots: bool) -> None:
        self.is_right_or_old(batch)
        inside = self.buffer.reader().read(batch.slots)
        still = inside.ids == batch.ids
        update = None
        if updates:
            update = {
                "logits": np.full((len(batch), 3), self.buffer.step % 9, np.float32),
                "seen": np.full(len(batch), self.buffer.step, ">i4"),
            }
            used = inside if as_slots else batch
            for row, id in enumerate(used.ids.tolist()):
                if as_slots or still[row]:
                    self.given[id] = {name: values[row] for name, values in update.items()}
        self.buffer.feedback(
            batch.slots if as_slots else batch, scores=self.scores(len(batch)), update=update
        )  # fmt: skip

    def is_right_or_old(self, batch: Batch) -> None:
        """Assert that samples are distinct and that all their labels are theirs."""
        assert len(set(batch.ids.tolist())) == len(batch)
        assert batch.labels.tolist() == (batch.ids % 3).tolist()

    @rule(n=st.integers(1, 5))
    def refresh(self, n: int) -> None:
        batch = self.buffer.sample(n)
        self.buffer.refresh(batch, {"seen": np.full(len(batch), 7, ">i4")})
        for id in batch.ids.tolist():
            self.given[id] = self.given.get(id, {}) | {"seen": np.int32(7)}

    @rule(twice=st.lists(st.integers(0, 7), max_size=9))
    def feed_back_slots_of_all_kinds(self, twice: list[int]) -> None:
        slots = [slot for slot in twice if slot < self.buffer.capacity]
        self.buffer.feedback(slots, scores=self.scores(len(slots)))

    @rule(ids=st.lists(st.integers(0, 40), max_size=6))
    def hold(self, ids: list[int]) -> None:
        before = len(self.buffer)
        held = self.buffer.hold(np.array(ids, np.int64))
        assert held <= len(set(ids))
        assert len(self.buffer) <= before

    @rule(kind=st.sampled_from(["id", "label", "function"]), number=st.integers(0, 30))
    def forget(self, kind: str, number: int) -> None:
        where: Any = {"id": {"id": [number, number + 1]}, "label": {"label": number % 3},
                      "function": lambda ids, labels: ids % 5 == number % 5}[kind]  # fmt: skip
        self.checkpointed()
        with StoredSamples(self.folder / "b") as stored:
            ids, labels = stored.ids.copy(), stored.labels.astype(np.int64)
        gone = set(ids[where(ids, labels) if callable(where) else np.isin({"id": ids, "label": labels}[kind],
                                                                         where[kind])].tolist())  # fmt: skip
        assert self.buffer.forget(where)["samples"] == len(gone)
        self.forgotten |= gone
        self.remember()

    @rule(memory=st.integers(1, 9))
    def resize_memory(self, memory: int) -> None:
        self.buffer.resize(memory=memory)
        assert self.buffer.capacity == memory
        assert len(self.buffer) <= memory

    @precondition(lambda self: self.buffer.stats()["storage_limit"] is not None)
    @rule(less=st.integers(0, 3))
    def resize_storage(self, less: int) -> None:
        limit = max(1, self.buffer.stats()["storage_samples"] - less)
        if limit <= self.buffer.stats()["storage_samples"]:
            self.buffer.resize(storage=limit)
            assert self.buffer.stats()["storage_samples"] <= limit

    @rule()
    def checkpoint(self) -> None:
        self.checkpointed()
        assert self.buffer.value("came") == str(self.came).encode()
        with StoredSamples(self.folder / "b") as stored:
            assert len(stored) == self.buffer.stats()["storage_samples"]
            for batch in stored.blocks(4):
                self.is_right(batch)
            inside = self.buffer.reader().read(self.buffer.occupied())
            assert sorted(stored.ids[stored.in_memory].tolist()) == sorted(inside.ids.tolist())
            assert stored.check() == []

    def checkpointed(self) -> None:
        self.buffer.checkpoint({"came": str(self.came).encode()})
        self.remember()

    def remember(self) -> None:
        given = {id: dict(values) for id, values in self.given.items()}
        self.durable = (self.came, given, set(self.forgotten), self.buffer.step)

    @rule(memory=st.sampled_from([None, None, 3]), swap=st.sampled_from([None, *SWAPS[1:]]))
    def crash(self, memory: int | None, swap: Any) -> None:
        self.buffer.close()
        self.buffer = CarouselBuffer.open(self.folder / "b", memory=memory, swap=swap and swap(), schema=SCHEMA)
        self.came, given, forgotten, step = self.durable
        self.given, self.forgotten = {id: dict(values) for id, values in given.items()}, set(forgotten)
        assert self.buffer.step == step
        # Ids come again after a crash, with the same values.
        self.came = max(self.came, 0)

    @invariant()
    def memory_is_right(self) -> None:
        if not hasattr(self, "buffer"):
            return
        occupied = self.buffer.occupied()
        assert len(occupied) == len(self.buffer) <= self.buffer.capacity
        batch = self.buffer.reader().read(occupied)
        assert len(set(batch.ids.tolist())) == len(batch)
        self.is_right(batch)
        numbers = self.buffer.stats()
        assert numbers["arrivals"] == self.came
        assert numbers["memory_samples"] <= numbers["storage_samples"]
        assert numbers["errors"] == 0

    def teardown(self) -> None:
        if hasattr(self, "buffer"):
            self.buffer.close()
        shutil.rmtree(self.folder)


TestEverything = Everything.TestCase
TestEverything.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
