"""Storage in bytes that counts samples of different lengths by their own bytes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memhier.errors import BudgetError
from memhier.recsys.replay import CarouselBuffer, Field, Weighted

TOKENS = Field("int32", (None,), longest=2048, mean=60)
SCHEMA = {"text": TOKENS, "loss": "float32"}


def on_disk(place: Path) -> int:
    return sum(file.stat().st_size for file in place.rglob("*") if file.is_file())


def texts(step: int, scale: int = 1) -> dict[str, Any]:
    """Return samples whose tokens are their lengths."""
    random = np.random.default_rng(step)
    lengths = np.minimum(2048, scale * random.geometric(1 / 60, int(random.integers(1, 80))))
    return {
        "text": [np.full(length, length, np.int32) for length in lengths],
        "loss": random.exponential(size=len(lengths)).astype(np.float32),
    }


def check_whole(buffer: CarouselBuffer) -> None:
    batch = buffer.sample(12)
    for text, length in zip(batch["text"], batch["text.length"].tolist(), strict=True):
        assert (text[:length] == length).all()


@pytest.mark.parametrize("admit", ["reservoir", "class_balanced", "ring", Weighted("loss")])
@pytest.mark.parametrize("scale", [1, 8])
def test_bytes_hold_many_more_short_samples(tmp_path: Path, admit: Any, scale: int) -> None:
    """Also where they turn out longer than the mean: some leave, and the budget holds at every moment."""
    place, budget, came = tmp_path / "b", 2**21, 0
    with CarouselBuffer(place, memory=40, storage=budget_text(budget), schema=SCHEMA, admit=admit) as buffer:
        first = buffer.stats()["storage_limit"]
        for step in range(60):
            columns = texts(step, scale if step > 20 else 1)
            count = len(columns["text"])
            slots = buffer.add(columns, labels=np.arange(count) % 3)
            there = np.full(buffer.capacity, -1)
            there[buffer.occupied()] = buffer.reader().ids()[buffer.occupied()]
            ids = np.arange(came, came + count)
            assert np.array_equal(there[slots[slots >= 0]], ids[slots >= 0])
            assert not np.isin(ids[slots < 0], there).any()
            came += count
            check_whole(buffer)
            buffer.feedback(buffer.sample(8))
            if step % 9 == 0:
                buffer.checkpoint()
            assert on_disk(place) <= budget
        assert buffer.stats()["storage_samples"] > (500 if scale == 1 else 150)
        assert first > 1000
        buffer.checkpoint()
    with CarouselBuffer.open(place) as buffer:
        for step in range(20):
            buffer.add(texts(step, scale), labels=np.zeros(len(texts(step)["text"]), int))
            assert on_disk(place) <= budget
        buffer.forget({"label": 1})
        check_whole(buffer)
        buffer.checkpoint()
        assert all(finding.harmless for finding in buffer.check())


def budget_text(budget: int) -> str:
    return f"{budget}B"


def test_longer_samples_are_as_likely_to_stay(tmp_path: Path) -> None:
    schema = {"text": Field("int32", (None,), longest=500, mean=60)}
    long, total = 0, 0
    for seed in range(8):
        random = np.random.default_rng(seed)
        with CarouselBuffer(
            tmp_path / str(seed), memory=8, storage="900KiB", schema=schema, seed=seed, swap=None
        ) as buffer:
            for _ in range(30):
                lengths = np.where(random.random(100) < 0.1, 500, 40)
                buffer.add({"text": [np.zeros(length, np.int32) for length in lengths]}, ids=lengths)
            ids = buffer.stored_ids()
        assert 300 < len(ids) < 600
        long, total = long + int((ids == 500).sum()), total + len(ids)
    assert abs(long - 0.1 * total) < 4.5 * np.sqrt(0.09 * total)


def test_a_resumed_run_equals_one_that_was_not(tmp_path: Path) -> None:
    found = []
    for name in ("one", "two"):
        options: Any = {"memory": 12, "storage": "1MiB", "schema": SCHEMA, "seed": 3}
        buffer = CarouselBuffer(tmp_path / name, **options)
        for step in range(30):
            buffer.add(texts(step, 1 + step // 10))
            buffer.feedback(buffer.sample(4))
            if step % 5 == 4:
                buffer.checkpoint()
                if name == "two":
                    buffer.close()
                    buffer = CarouselBuffer.open(tmp_path / name)
        found.append((buffer.stored_ids().tolist(), buffer.reader().ids().tolist()))
        buffer.close()
    assert found[0] == found[1]


def test_a_storage_that_keeps_everything_says_that_bytes_do_not_fit(tmp_path: Path) -> None:
    with CarouselBuffer(tmp_path / "b", memory=12, storage="1MiB", schema=SCHEMA, admit="everything") as buffer:
        whole = {"text": [np.zeros(2048, np.int32)] * 10, "loss": np.zeros(10, np.float32)}
        for _ in range(4):
            buffer.add(whole)
        with pytest.raises(BudgetError, match="bytes of more do not fit"):
            buffer.add({"text": whole["text"] * 10, "loss": np.zeros(100, np.float32)})
        there = buffer.stats()["storage_samples"]
        assert there == buffer.stats()["arrivals"] == 40
        assert on_disk(tmp_path / "b") <= 2**20


def test_one_sample_may_be_longer_than_the_room(tmp_path: Path) -> None:
    with pytest.raises(BudgetError, match="needs up to") as told:
        CarouselBuffer(tmp_path / "b", memory=2, storage="1B", schema=SCHEMA)
    least = int(str(told.value).split("needs up to ")[1].split()[0])
    with CarouselBuffer(tmp_path / "b", memory=2, storage=budget_text(least), schema=SCHEMA) as buffer:
        for _ in range(20):
            buffer.add({"text": [np.full(2048, 2048, np.int32)] * 3, "loss": np.zeros(3, np.float32)})
            assert on_disk(tmp_path / "b") <= least
            assert buffer.stats()["storage_samples"] == 1
            check_whole(buffer)


def test_a_number_of_samples_stays_one_of_the_longest(tmp_path: Path) -> None:
    with CarouselBuffer(tmp_path / "b", memory=4, storage=100, schema=SCHEMA) as buffer:
        whole = {"text": [np.full(2048, 2048, np.int32)] * 40, "loss": np.zeros(40, np.float32)}
        for _ in range(5):
            buffer.add(whole)
        assert buffer.stats()["storage_samples"] == 100
        buffer.resize(storage="440KiB")
        assert 1 <= buffer.stats()["storage_samples"] < 10
        buffer.checkpoint()
        assert on_disk(tmp_path / "b") <= 440 * 2**10
        check_whole(buffer)
