"""Storage in bytes: held to at every moment, whatever comes and however rarely a checkpoint is made."""

import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memhier.errors import BudgetError
from memhier.recsys.replay import CarouselBuffer, Field, StoredSamples

MIB = 2**20
IMAGE = {"image": ("uint8", (8, 8, 3))}
MUTABLE = {"x": "int64", "logits": Field("float32", (20,), mutable=True)}
TEXT = {"text": Field("uint8", (None,), longest=9000)}


def on_disk(place: Path) -> int:
    total = 0
    for folder, _, names in os.walk(place):
        for name in names:
            try:
                total += os.stat(os.path.join(folder, name)).st_size
            except FileNotFoundError:
                continue  # removed meanwhile
    return total


class Watch(threading.Thread):
    """Looks at the size of a directory all the time."""

    def __init__(self, place: Path) -> None:
        super().__init__()
        self._place = place
        self._over = threading.Event()
        self.most = 0

    def look(self) -> int:
        now = on_disk(self._place)
        self.most = max(self.most, now)
        return now

    def run(self) -> None:
        while not self._over.wait(0.001):
            self.look()

    def end(self) -> None:
        self._over.set()
        self.join()


@contextmanager
def watched(place: Path, budget: int) -> Iterator[Watch]:
    watch = Watch(place)
    watch.start()
    try:
        yield watch
    finally:
        watch.end()
    assert watch.most <= 1.05 * budget


def batch_of(schema: Any, ids: np.ndarray) -> dict[str, Any]:
    """Return samples whose values follow from their ids; texts of all lengths, one in nine the longest there may be."""
    if schema is IMAGE:
        return {"image": np.repeat((ids % 251).astype(np.uint8), 192).reshape(-1, 8, 8, 3)}
    if schema is MUTABLE:
        return {"x": ids.astype(np.int64), "logits": np.repeat(ids.astype(np.float32), 20).reshape(-1, 20)}
    if schema is TEXT:
        return {"text": [np.full(9000 if id % 9 == 0 else id * 37 % 400, id % 251, np.uint8) for id in ids.tolist()]}
    return {"x": (ids % 251).astype(np.uint8)}


@pytest.mark.long
@pytest.mark.parametrize(("every", "way_back"), [(0, False), (1, False), (9, False), (1, True), (5, True)])
@pytest.mark.parametrize(("schema", "admit", "count"), [
    (IMAGE, "ring", 400), (IMAGE, "reservoir", 400), (IMAGE, "class_balanced", 400), (MUTABLE, "ring", 400),
    (TEXT, "ring", 100), (TEXT, "reservoir", 100), ({"x": "uint8"}, "ring", 2000),
])  # fmt: skip
def test_bytes_are_held_to_at_every_moment(
    tmp_path: Path, schema: Any, admit: str, count: int, every: int, way_back: bool
) -> None:
    budget, place = 2 * MIB, tmp_path / "b"
    options: Any = {"schema": schema, "admit": admit, "seed": 1, "way_back": way_back}
    with (
        CarouselBuffer(place, memory=40, storage=budget_text(budget), **options) as buffer,
        watched(place, budget) as watch,
    ):
        for number in range(27):
            ids = np.arange(number * count, (number + 1) * count)
            buffer.add(batch_of(schema, ids), labels=ids % 5, ids=ids)
            batch = buffer.sample(20)
            buffer.feedback(batch, update={"logits": batch["logits"]} if schema is MUTABLE else None)
            assert watch.look() <= 1.05 * budget
            assert buffer.stats()["storage_bytes"] <= 1.05 * budget
            if every and number % every == every - 1:
                buffer.checkpoint()
                assert watch.look() <= 1.05 * budget
        stats = buffer.stats()
        if schema is not TEXT:  # of texts few are as long as they may be
            assert stats["storage_samples"] == stats["storage_limit"] < 27 * count
        check_samples(buffer, schema)
        buffer.checkpoint()
        assert buffer.check() == []
    with CarouselBuffer.open(place) as buffer, watched(place, budget):
        check_samples(buffer, schema)
        ids = np.arange(27 * count, 45 * count)
        buffer.add(batch_of(schema, ids), labels=ids % 5, ids=ids)  # many at once, after it was opened


def budget_text(budget: int) -> str:
    return f"{budget}B"


def check_samples(buffer: CarouselBuffer, schema: Any) -> None:
    """See that stored samples are as they came, as far as swaps bring them in."""
    for _ in range(10):
        batch = buffer.sample(40)
        expected = batch_of(schema, batch.ids)
        for name, values in expected.items():
            found = batch.ragged(name) if schema is TEXT else batch[name]
            for one, other in zip(found, values, strict=True):
                assert np.array_equal(one, other)
        buffer.feedback(batch)


@pytest.mark.parametrize("admit", ["ring", "reservoir"])
def test_more_in_one_call_than_storage_holds(tmp_path: Path, admit: str) -> None:
    budget, place = 2 * MIB, tmp_path / "b"
    with CarouselBuffer(place, memory=10, storage="2MiB", schema=IMAGE, admit=admit) as buffer, watched(place, budget):
        for number in range(3):
            ids = np.arange(40_000 * number, 40_000 * (number + 1))
            buffer.add(batch_of(IMAGE, ids), ids=ids)
            check_samples(buffer, IMAGE)
            buffer.checkpoint()


@pytest.mark.parametrize("schema", [IMAGE, TEXT, MUTABLE], ids=["image", "text", "mutable"])
def test_a_crash_at_any_time_finds_the_last_checkpoint(fast_path: Path, schema: Any) -> None:
    place, following = fast_path / "b", 0
    random = np.random.default_rng(5)
    with CarouselBuffer(place, memory=20, storage="1MiB", schema=schema, admit="ring", seed=2) as buffer:
        durable: list[int] = []
        for number in range(24):
            count = int(random.integers(1, 1200 if schema is not TEXT else 80))
            ids = np.arange(following, following + count)
            following += count
            buffer.add(batch_of(schema, ids), ids=ids)
            if number % 5 == 3:
                buffer.checkpoint()
                durable = stored_ids(buffer)
            # A process that is killed now leaves the same files as a copy.
            copy = fast_path / f"copy-{number}"
            shutil.copytree(place, copy)
            if number >= 3:
                with StoredSamples(copy) as stored:
                    assert stored.ids.tolist() == durable
                    found = stored.read(np.arange(len(stored)))
                    expected = batch_of(schema, stored.ids)
                    for name, values in expected.items():
                        values_found = found.ragged(name) if schema is TEXT else found[name]
                        assert all(map(np.array_equal, values_found, values))
                with CarouselBuffer.open(copy) as again:
                    again.add(batch_of(schema, ids), ids=ids)
                    again.checkpoint()
                    assert again.check() == []
            shutil.rmtree(copy)


def stored_ids(buffer: CarouselBuffer) -> list[int]:
    found: list[int] = []

    def look(ids: np.ndarray, labels: np.ndarray) -> np.ndarray:
        found.extend(ids.tolist())
        return np.zeros(len(ids), np.bool_)

    buffer.forget(look)
    return found


def test_a_checkpoint_leaves_room_for_all_to_change(tmp_path: Path) -> None:
    """Between two checkpoints everything is replaced, several times: the last one stays, and the bytes are held to."""
    budget, place = 4 * MIB, tmp_path / "b"
    with CarouselBuffer(place, memory=9, storage="4MiB", schema=IMAGE, admit="reservoir") as buffer:
        following = 0
        with watched(place, budget):
            for _ in range(3):
                for _ in range(12):
                    ids = np.arange(following, following + 3000)
                    following += 3000
                    buffer.add(batch_of(IMAGE, ids), ids=ids)
                buffer.checkpoint()
        assert buffer.stats()["storage_samples"] > 5000  # with everything there twice


def test_a_limit_in_samples_bounds_the_bytes_too(tmp_path: Path) -> None:
    place = tmp_path / "b"
    with (
        CarouselBuffer(place, memory=9, storage=2000, schema=IMAGE, admit="ring") as buffer,
        watched(place, 2 * MIB),
    ):
        for number in range(30):
            ids = np.arange(1000 * number, 1000 * (number + 1))
            buffer.add(batch_of(IMAGE, ids), ids=ids)
        assert buffer.stats()["storage_samples"] == 2000


def test_mutable_fields_without_a_budget_take_little_more_than_live_bytes(tmp_path: Path) -> None:
    schema = {"x": "int64", "logits": Field("float32", (200,), mutable=True)}
    with CarouselBuffer(tmp_path / "b", memory=200, schema=schema, swap="random") as buffer:
        ids, written = np.arange(1000), np.zeros((1000, 200), np.float32)
        buffer.add({"x": ids, "logits": written}, ids=ids)
        alive = written.nbytes
        for number in range(600):
            batch = buffer.sample(100)
            written[batch.ids] = number
            buffer.feedback(batch, update={"logits": written[batch.ids]})
            assert on_disk(tmp_path / "b") < 5 * alive  # twice as of the checkpoint, and since
            if number == 300:
                buffer.checkpoint()
        for _ in range(30):
            batch = buffer.sample(100)
            assert np.array_equal(batch["logits"], written[batch.ids])
            buffer.feedback(batch)
        buffer.checkpoint()
        assert buffer.check() == []
        assert buffer.stats()["read_bytes"] > 5 * alive  # so much came and went


def test_everything_needs_no_room_for_two(tmp_path: Path) -> None:
    limits = {}
    for admit in ("reservoir", "everything"):
        with CarouselBuffer(tmp_path / admit, memory=9, storage="8MiB", schema=IMAGE, admit=admit) as buffer:
            limits[admit] = buffer.stats()["storage_limit"]
            with watched(tmp_path / admit, 8 * MIB):
                for number in range(limits[admit] // 1000):
                    buffer.add(batch_of(IMAGE, np.arange(1000 * number, 1000 * (number + 1))))
                    buffer.checkpoint()
    assert limits["everything"] > 1.3 * limits["reservoir"]


def test_too_few_bytes_say_how_many_it_takes(tmp_path: Path) -> None:
    with pytest.raises(BudgetError, match=r"one sample, .*, needs up to \d+ bytes") as caught:
        CarouselBuffer(tmp_path / "b", memory=4, storage="10KiB", schema=IMAGE)
    least = str(caught.value).split("up to ")[1].split(" bytes")[0]
    with CarouselBuffer(tmp_path / "b", memory=4, storage=f"{least}B", schema=IMAGE) as buffer:
        assert buffer.stats()["storage_limit"] == 1
