"""Forgetting by age, its cost, and buffers of the version before times were kept."""

import json
from pathlib import Path

import numpy as np
import pytest

from memhier import Reader, RowLog, Store
from memhier.recsys.replay import CarouselBuffer, StoredSamples
from memhier.recsys.replay.storage.index import INDEX_ROW_BYTES, POSITIONS, POSITIONS_2
from memhier.recsys.replay.storage.storage import META

SCHEMA = {"x": ("uint8", (1024,))}


def sizes(folder: Path) -> dict[str, int]:
    """Return the sizes of the files of samples and of the index, by name."""
    return {file.name: file.stat().st_size for file in (folder / "segments").iterdir()}


def test_samples_are_forgotten_by_their_age(tmp_path: Path) -> None:
    expected: dict[int, int] = {}
    with CarouselBuffer(tmp_path / "b", memory=8, schema={"x": "int64"}, seed=3) as buffer:
        for second in range(40):
            ids = np.arange(5 * second, 5 * second + 5)
            buffer.add({"x": ids}, ids=ids, times=1000 + second if second % 2 else np.full(5, 1000 + second))
            expected |= dict.fromkeys(ids.tolist(), 1000 + second)
            buffer.feedback(buffer.sample(4))
        buffer.forget({"id": range(0, 200, 7)})  # the last positions move
        buffer.checkpoint()
    expected = {id: time for id, time in expected.items() if id % 7}
    with CarouselBuffer.open(tmp_path / "b") as buffer:
        count = sum(time < 1017 for time in expected.values())
        assert buffer.forget({"before": 1017})["samples"] == count
        expected = {id: time for id, time in expected.items() if time >= 1017}
        assert sorted(buffer.stored_ids().tolist()) == sorted(expected)
        assert buffer.forget({"before": 1020, "id": range(85, 95)})["samples"] == sum(
            time < 1020 and 85 <= id < 95 for id, time in expected.items()
        )
        assert buffer.forget({"before": 2**32})["samples"] == buffer.stats()["arrivals"] - 29 - count - 9
        assert len(buffer) == 0
        buffer.add({"x": np.arange(3)})
        assert buffer.forget({"before": 1_700_000_000})["samples"] == 0  # they came now


@pytest.mark.parametrize("admit", ["reservoir", "class_balanced", "ring"])
def test_a_sample_that_takes_a_place_brings_its_time(tmp_path: Path, admit: str) -> None:
    random = np.random.default_rng(5)
    with CarouselBuffer(tmp_path / "b", memory=4, storage=20, schema={"x": "int64"}, admit=admit, seed=2) as buffer:
        for start in range(0, 120, 3):
            ids = np.arange(start, start + 3)
            buffer.add({"x": ids}, labels=random.integers(0, 4, 3), ids=ids, times=5000 + ids)
        there = buffer.stored_ids()
        middle = int(np.sort(there)[len(there) // 2])
        assert buffer.forget({"before": 5000 + middle})["samples"] == np.count_nonzero(there < middle)
        assert buffer.stored_ids().min() == middle


def test_unfit_times_change_nothing(tmp_path: Path) -> None:
    with CarouselBuffer(tmp_path / "b", memory=4, schema={"x": "int64"}) as buffer:
        for times, error in ((-1, ValueError), (2**32, ValueError), ([1, 2], ValueError), (0.5, TypeError)):
            with pytest.raises(error, match="times"):
                buffer.add({"x": np.arange(3)}, times=times)
        with pytest.raises(ValueError, match="before"):
            buffer.forget({"before": -1})
        assert buffer.stats()["arrivals"] == 0


def test_a_forgotten_sample_costs_a_few_parts_and_leaves_no_bytes(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    values = random.integers(0, 256, (16_000, 1024), np.uint8)
    with CarouselBuffer(tmp_path / "b", memory=16, schema=SCHEMA) as buffer:
        for start in range(0, len(values), 1000):
            buffer.add({"x": values[start : start + 1000]})
        buffer.checkpoint()
        for id in (7000, 3):
            before = sizes(tmp_path / "b")
            assert buffer.forget({"id": id})["samples"] == 1
            after = sizes(tmp_path / "b")
            written = sum(size for name, size in after.items() if name not in before)
            assert written < len(values) * 1024 // 4
            for file in (tmp_path / "b").rglob("*"):
                assert not file.is_file() or values[id, :64].tobytes() not in file.read_bytes(), file
        assert buffer.check() == []
    with StoredSamples(tmp_path / "b") as stored:
        batch = stored.read(np.arange(len(stored)))
        np.testing.assert_array_equal(batch["x"], values[batch.ids])
        assert sorted(batch.ids.tolist()) == sorted(set(range(16_000)) - {7000, 3})


@pytest.mark.parametrize("storage", [None, 300])
def test_samples_forgotten_by_age_leave_no_bytes(tmp_path: Path, storage: int | None) -> None:
    values = np.random.default_rng(2).integers(0, 256, (500, 1024), np.uint8)
    with CarouselBuffer(tmp_path / "b", memory=16, storage=storage, schema=SCHEMA) as buffer:
        for start in range(0, 500, 50):
            buffer.add({"x": values[start : start + 50]}, times=1000 + start)
            buffer.feedback(buffer.sample(8))
            buffer.checkpoint()
        there = buffer.stored_ids()
        assert buffer.forget({"before": 1200})["samples"] == np.count_nonzero(there < 200)
        assert buffer.check() == []
        files = b"".join(file.read_bytes() for file in (tmp_path / "b").rglob("*") if file.is_file())
        for id in range(500):
            # A sample that a full storage has dropped before is gone as well.
            assert (values[id, :64].tobytes() in files) == (id >= 200 and id in there), id


def as_version_2(folder: Path) -> None:
    """Write a buffer's index and description as version 2 had them."""
    with Store.open(folder, "replay", writable=True) as store, Reader() as reader:
        meta = json.loads(store.get(META) or b"")
        with RowLog(store, "index", INDEX_ROW_BYTES, reader, 1000) as log:
            keys = POSITIONS.keys(0, POSITIONS.rows(meta["size"]))
            entries = POSITIONS.unpack(log.read(keys)[0], meta["size"])
            rows = np.arange(len(keys))
            columns = {name: entries[name] for name in ("id", "label", "rank")}
            for some, contents in POSITIONS_2.pack(rows, meta["size"], columns):
                log.append(some, contents)
            meta["version"] = 2
            log.commit({META: json.dumps(meta).encode()})


def test_a_buffer_of_version_2_goes_on_as_it_was(tmp_path: Path) -> None:
    drawn = []
    for name in ("new", "old"):
        with CarouselBuffer(tmp_path / name, memory=8, schema={"x": "int64"}, seed=3) as buffer:
            buffer.add({"x": np.arange(200)}, labels=np.arange(200) % 3, ids=np.arange(200) + 2**40)
            buffer.checkpoint()
        if name == "old":
            as_version_2(tmp_path / name)
            with StoredSamples(tmp_path / name) as stored:
                assert stored.ids.tolist() == (np.arange(200) + 2**40).tolist()
        with CarouselBuffer.open(tmp_path / name) as buffer:
            for _ in range(5):
                batch = buffer.sample(4)
                buffer.feedback(batch)
                drawn.append(batch.ids.tolist())
            assert buffer.forget({"before": 1_700_000_000})["samples"] == 0  # the ages begin with the new version
        with CarouselBuffer.open(tmp_path / name) as buffer:
            assert buffer.forget({"before": 2**32})["samples"] == 200
    assert drawn[:5] == drawn[5:]
