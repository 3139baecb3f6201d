"""Samples of different lengths in a memory that gives each as many bytes as it has."""

import multiprocessing
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memhier.recsys.replay import CarouselBuffer, Field, MemoryReader, RandomSwap, Reservoir, Schema, StoredSamples
from memhier.recsys.replay.batch import Batch
from memhier.recsys.replay.packing import SourceShares, pack_rows
from memhier.recsys.replay.placement.memory import Memory
from memhier.recsys.replay.settings import BufferSettings

LONGEST = 500


def lengths(count: int, seed: int = 0) -> np.ndarray:
    """Return skewed lengths: many short, a few of the longest, some of zero."""
    random = np.random.default_rng(seed)
    return np.minimum(LONGEST, random.lognormal(3, 1.2, count)).astype(np.int64) * (random.random(count) > 0.02)


def tokens(ids: np.ndarray, sizes: np.ndarray) -> list[np.ndarray]:
    return [(1 + id + np.arange(sizes[id])).astype(np.int32) for id in ids.tolist()]


def schema(mean: int) -> dict[str, Any]:
    return {"text": Field("int32", (None,), longest=LONGEST, mean=mean), "mark": Field("int64", mutable=True)}


def slots_in(size: int, fields: dict[str, Any]) -> int:
    """Return how many slots so many bytes hold, without buffers."""
    return BufferSettings(Schema(fields), {}, Reservoir(), None, 0, 1, None).slots_within(size)


def check(batch: Any, sizes: np.ndarray) -> None:
    for id, length, row in zip(batch.ids.tolist(), batch["text.length"].tolist(), batch["text"], strict=True):
        assert length == sizes[id]
        np.testing.assert_array_equal(row[:length], 1 + id + np.arange(length))
        assert not row[length:].any()


@pytest.mark.parametrize("admit", ["reservoir", "class_balanced", "ring"])
@pytest.mark.parametrize("mean", [10, 45, 200])
@pytest.mark.parametrize("swap", [RandomSwap(0.5), None])
def test_samples_keep_their_values_however_full_memory_is(
    tmp_path: Path, admit: str, mean: int, swap: RandomSwap | None
) -> None:
    sizes = lengths(900)
    options: Any = {"schema": schema(mean), "admit": admit, "swap": swap, "seed": 4}
    place = tmp_path / "b"
    with CarouselBuffer(place, memory=slots_in(40 * 2**10, schema(mean)), storage=600, **options) as buffer:
        reader = pickle.loads(pickle.dumps(buffer.reader()))
        for start in range(0, 900, 30):
            ids = np.arange(start, start + 30)
            slots = buffer.add({"text": tokens(ids, sizes), "mark": ids}, labels=ids % 4)
            there = slots >= 0
            taken = reader.read(slots[there])
            check(taken, sizes)
            batch = buffer.sample(16)
            check(batch, sizes)
            buffer.feedback(batch, update={"mark": batch["mark"]})
            if start == 600:
                buffer.forget({"id": range(0, 300, 5)})
                buffer.checkpoint()
        buffer.resize(memory=slots_in(28 * 2**10, schema(mean)))
        check(buffer.sample(1000), sizes)
        buffer.resize(memory=slots_in(64 * 2**10, schema(mean)))
        for _ in range(10):
            buffer.feedback(buffer.sample(8))
        check(buffer.sample(1000), sizes)
        buffer.checkpoint()
        with buffer.dataset() as stored:
            check(stored.read(np.arange(len(stored))), sizes)
    with CarouselBuffer.open(place, schema=options["schema"]) as buffer:
        check(buffer.sample(1000), sizes)
        assert buffer.check() == []
    with StoredSamples(place) as stored:
        assert stored.schema == Schema(schema(mean))


@pytest.mark.parametrize("delay", [0, 1, 3])
def test_a_resumed_run_goes_on_as_it_would_have(tmp_path: Path, delay: int) -> None:
    sizes = lengths(1200, 5)

    def run(place: Path, stop: int | None) -> list[Any]:
        options: Any = {"schema": schema(30), "swap": RandomSwap(0.7), "seed": 8, "delay": delay}
        buffer = CarouselBuffer(place, memory=slots_in(36 * 2**10, schema(30)), storage=400, **options)
        seen: list[Any] = []
        for step in range(60):
            if step == stop:
                buffer.checkpoint()
                buffer.close()
                buffer = CarouselBuffer.open(place)
            ids = np.arange(20 * step, 20 * step + 20)
            buffer.add({"text": tokens(ids, sizes), "mark": ids})
            batch = buffer.sample(12)
            buffer.feedback(batch)
            seen.append([batch.ids.tolist(), batch.slots.tolist(), len(buffer)])
        buffer.close()
        return seen

    unbroken = run(tmp_path / "a", None)
    for stop in (1, 17, 40):
        assert run(tmp_path / str(stop), stop) == unbroken


def test_memory_holds_as_many_as_its_bytes_allow(tmp_path: Path) -> None:
    sizes = lengths(4000, 1)
    mean = int(sizes.mean())
    counts = {}
    for given in (0, mean):
        with CarouselBuffer(
            tmp_path / str(given), memory=slots_in(128 * 2**10, schema(given)), schema=schema(given), seed=1
        ) as buffer:
            for start in range(0, 4000, 100):
                ids = np.arange(start, start + 100)
                buffer.add({"text": tokens(ids, sizes), "mark": ids})
                buffer.feedback(buffer.sample(32))
            counts[given] = len(buffer)
            held = sizes[buffer.sample(4000).ids].sum() * 4
            assert given == 0 or held > 0.45 * 128 * 2**10
    assert counts[mean] > 0.5 * LONGEST / mean * counts[0]


def test_memory_is_a_uniform_sample_whatever_the_lengths(tmp_path: Path) -> None:
    count, runs = 300, 60
    sizes = lengths(count, 2)
    inside = np.zeros(count)
    held = 0
    slots = slots_in(28 * 2**10, schema(40))
    for seed in range(runs):
        with CarouselBuffer(tmp_path / str(seed), memory=slots, schema=schema(40), seed=seed, delay=0) as buffer:
            for start in range(0, count, 50):
                ids = np.arange(start, start + 50)
                buffer.add({"text": tokens(ids, sizes), "mark": ids})
            for _ in range(12):
                buffer.feedback(buffer.sample(20))
            there = buffer.sample(count).ids
            inside[there] += 1
            held += len(there)
    share = held / runs / count
    assert 0.05 < share < 0.5
    long = sizes > np.median(sizes)
    # Both halves are drawn at the same rate, within four standard errors.
    error = np.sqrt(2 * share * (1 - share) / (runs * count / 2))
    assert abs(inside[long].mean() - inside[~long].mean()) / runs < 4 * error


def test_blocks_are_used_again_and_lose_none(tmp_path: Path) -> None:
    made = Schema(
        {"a": Field("uint8", (None, 3), longest=70, mean=9), "b": Field("uint16", (None,), longest=90, mean=40)}
    )
    memory, random = Memory.make(made, 20), np.random.default_rng(0)
    assert memory.blocks is not None
    total = memory.blocks.free_count
    expected: dict[int, Any] = {}
    for _ in range(400):
        slots = random.permutation(20)[: random.integers(1, 4)]
        values = [
            (
                random.integers(0, 256, (random.integers(0, 12), 3), np.uint8),
                np.arange(random.integers(0, 60), dtype=np.uint16),
            )
            for _ in slots
        ]
        _, columns = made.check({"a": [a for a, _ in values], "b": [b for _, b in values]})
        if memory.blocks_for(columns).sum() > memory.blocks_at(slots).sum() + memory.blocks.free_count:
            memory.clear(slots)
            expected |= {slot: (np.zeros((0, 3), np.uint8), np.zeros(0, np.uint16)) for slot in slots.tolist()}
        else:
            memory.write(slots, columns, slots, slots)
            expected |= dict(zip(slots.tolist(), values, strict=True))
        assert memory.blocks.free_count == total - memory.blocks_at(np.arange(20)).sum()
        batch = Batch.empty(made, 20)
        memory.read(np.arange(20), batch)
        for slot, (a, b) in expected.items():
            np.testing.assert_array_equal(batch.ragged("a")[slot], a)
            np.testing.assert_array_equal(batch.ragged("b")[slot], b)
    memory.clear(np.arange(20))
    assert memory.blocks.free_count == total
    memory.close()


def test_an_unfit_mean_is_told() -> None:
    with pytest.raises(ValueError, match="mean"):
        Field("int32", (3,), mean=2)
    with pytest.raises(ValueError, match="mean"):
        Field("int32", (None,), longest=4, mean=5)


@pytest.mark.parametrize("length", [1, 7, 64])
def test_rows_hold_each_sequence_once_and_in_order(tmp_path: Path, length: int) -> None:
    sizes = lengths(60, 9) // 10
    with CarouselBuffer(tmp_path / "b", memory=60, schema=schema(0)) as buffer:
        buffer.add({"text": tokens(np.arange(60), sizes), "mark": np.arange(60)})
        batch = buffer.sample(60)
    values, offsets = batch.packed("text")
    for begin, end, value in zip(offsets[:-1], offsets[1:], batch.ragged("text"), strict=True):
        np.testing.assert_array_equal(values[begin:end], value)
    rows = pack_rows(values, offsets, length, pad=-1)
    assert rows.tokens.shape[1] == length
    assert len(values) == np.count_nonzero(rows.segments)
    assert len(rows.tokens) <= 2 * len(values) / length + 1
    assert ((rows.tokens == -1) == (rows.segments == 0)).all()
    found = []
    for row, segments, positions in zip(*rows, strict=True):
        for number in range(1, segments.max() + 1):
            some = segments == number
            np.testing.assert_array_equal(positions[some], np.arange(np.count_nonzero(some)))
            found.append(row[some].tolist())
    expected = [value[start : start + length].tolist()
                for value in batch.ragged("text") for start in range(0, len(value), length)]  # fmt: skip
    assert sorted(found) == sorted(expected)
    assert pack_rows(values[:0], [0], length).tokens.shape == (0, length)
    with pytest.raises(ValueError, match="offsets"):
        pack_rows(values, offsets[:-1], length)


def test_shares_of_sources_hold_over_all_steps() -> None:
    shares = {"a": 0.01, "b": 0.19, "c": 0.8}
    mixed = SourceShares(shares)
    for step in range(1, 200):
        assert sum(mixed.counts(7).values()) == 7
        assert all(abs(mixed.taken[name] - share * 7 * step) < 2 for name, share in shares.items())
        again = SourceShares(shares)
        again.taken = dict(mixed.taken)
    assert again.counts(11) == mixed.counts(11)
    for unfit in ({"a": 0.5}, {"a": 1.0, "b": 0.0}, {}):
        with pytest.raises(ValueError, match="shares"):
            SourceShares(unfit)


def read_all(reader: MemoryReader, sizes: np.ndarray) -> None:
    random = np.random.default_rng(0)
    for _ in range(400):
        found = reader.read(random.integers(0, len(reader), 16))
        some = found["text.length"] > 0
        data = {name: values[some] for name, values in found.data.items()}
        check(Batch(data, found.labels[some], found.ids[some], found.slots[some]), sizes)


def test_another_process_reads_whole_samples_while_blocks_change_hands(tmp_path: Path) -> None:
    sizes = lengths(20_000, 3)
    memory = slots_in(40 * 2**10, schema(20))
    with CarouselBuffer(tmp_path / "b", memory=memory, storage=400, schema=schema(20), admit="ring") as buffer:
        buffer.add({"text": tokens(np.arange(200), sizes), "mark": np.arange(200)})
        child = multiprocessing.get_context("fork").Process(target=read_all, args=(buffer.reader(), sizes))
        child.start()
        next_id = 200
        while child.is_alive():
            ids = np.arange(next_id, next_id + 20) % len(sizes)
            buffer.add({"text": tokens(ids, sizes), "mark": ids}, ids=ids)
            buffer.feedback(buffer.sample(16))
            next_id += 20
        child.join()
    assert child.exitcode == 0
