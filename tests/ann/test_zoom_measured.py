"""Efforts are measured anew as vectors come and go, so that the recall declared is kept without a rebuild."""

import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from memhier.ann import ZoomIndex

Floats = npt.NDArray[np.float32]
AXES, COUNT = 64, 4000


class Drift:
    """Clusters that move along one direction."""

    def __init__(self, seed: int, weight: float, speed: float) -> None:
        self._random = np.random.default_rng(seed)
        self._centres = 1.2 * self._random.standard_normal((30, AXES))
        direction = self._random.standard_normal(AXES)
        self._step = speed * direction / np.linalg.norm(direction)
        self._weights = 3 * weight ** np.arange(AXES)

    def draw(self, step: float, count: int) -> Floats:
        """Return vectors of a step."""
        near = self._centres[self._random.integers(0, 30, count)] + self._random.standard_normal((count, AXES))
        return (near * self._weights + step * self._step).astype(np.float32)


def recall_of(index: ZoomIndex, held: dict[int, Floats], queries: Floats, k: int, metric: str) -> float:
    ids = np.array([*held])
    vectors, asked = np.stack([*held.values()]), queries
    if metric == "cosine":
        vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
        asked = queries / np.linalg.norm(queries, axis=1, keepdims=True)
    away = np.square(vectors).sum(axis=1) - 2 * asked @ vectors.T
    best = ids[np.argsort(away, axis=1)[:, :k]]
    found = index.search(queries, k).ids
    return float(np.mean([len(np.intersect1d(some, true)) / k for some, true in zip(found, best, strict=True)]))


def replace_oldest(index: ZoomIndex, held: dict[int, Floats], vectors: Floats) -> None:
    names = np.arange(max(held) + 1, max(held) + 1 + len(vectors))
    index.add(vectors, ids=names)
    gone = [*held][: len(vectors)]
    index.remove(gone)
    for name in gone:
        del held[name]
    held.update(zip(names.tolist(), vectors, strict=True))


@pytest.mark.filterwarnings("ignore:calibration found")  # codes are short
@pytest.mark.parametrize("compact", [None, False])
@pytest.mark.parametrize(("metric", "dram"), [("l2", "450KiB"), ("cosine", "425KiB")])
def test_sliding_window_keeps_the_recall(tmp_path: Path, metric: str, dram: str, compact: bool | None) -> None:
    drift = Drift(seed=3, weight=0.8, speed=1.5)
    first = drift.draw(0, COUNT)
    held = dict(enumerate(first))
    with ZoomIndex.build(tmp_path / "index", first, dram=dram, metric=metric, grow_to=2 * COUNT) as index:
        for step in range(1, 5):
            replace_oldest(index, held, drift.draw(step, COUNT // 8))
            if step % 2 == 0:
                index.commit(compact=compact)
            queries = drift.draw(step, 80)
            found = {k: recall_of(index, held, queries, k, metric) for k in (1, 10, 100)}
            assert min(found.values()) >= 0.965, (step, found)


def usual(seed: int, count: int) -> Floats:
    return Drift(seed, 1.0, 0.0).draw(0, count)


def escalated(index: ZoomIndex) -> Any:
    return index.search(usual(1, 20), 10).stats["escalated"]


def calibrated(index: ZoomIndex) -> Any:
    return index.stats()["calibrated_vectors"]


def is_measured(index: ZoomIndex, count: int) -> bool:
    """Wait until a thread has measured, if one does."""
    end = time.monotonic() + 300
    while calibrated(index) != count and time.monotonic() < end:
        time.sleep(0.02)
    return bool(calibrated(index) == count)


def test_thread_hands_its_efforts_to_searches_and_to_the_next_commit(tmp_path: Path) -> None:
    vectors = usual(1, COUNT + 300)
    with ZoomIndex.build(tmp_path / "index", vectors[:COUNT], dram="2MiB", grow_to=2 * COUNT) as index:
        index.add(vectors[COUNT:])
        index.commit()
        assert is_measured(index, len(vectors))  # without another change
        index.commit()
    with ZoomIndex.open(tmp_path / "index") as index:
        assert calibrated(index) == len(vectors)


def test_a_writer_that_closes_at_once_measures_at_a_commit(tmp_path: Path) -> None:
    vectors = usual(1, COUNT + 800)
    ZoomIndex.build(tmp_path / "index", vectors[:COUNT], dram="2MiB", grow_to=2 * COUNT).close()
    for some in np.split(vectors[COUNT:], 8):
        with ZoomIndex.open(tmp_path / "index", writable=True) as index:
            index.add(some)
            index.commit()
    with ZoomIndex.open(tmp_path / "index") as index:
        assert calibrated(index) > COUNT
        assert escalated(index) == "no"


def test_measured_efforts_leave_a_rebuild_due(tmp_path: Path) -> None:
    vectors = usual(1, COUNT + 2000)
    with ZoomIndex.build(tmp_path / "index", vectors[:COUNT], dram="3MiB", grow_to=3 * COUNT) as index:
        for number, some in enumerate(np.split(vectors[COUNT:], 4), 1):
            index.add(some)
            if number < 4:
                index.commit()
                assert is_measured(index, COUNT + 500 * number)  # a tenth has changed
                assert index.stats()["renewal"] == "none"
        assert index.stats()["renewal"] == "due"
        index.commit(compact=False)
    with ZoomIndex.open(tmp_path / "index", writable=True) as index:
        assert index.stats()["renewal"] == "due"


def test_tuned_efforts_are_not_measured_anew(tmp_path: Path) -> None:
    vectors = usual(1, COUNT + 1000)
    with ZoomIndex.build(tmp_path / "index", vectors[:COUNT], dram="2MiB", grow_to=2 * COUNT) as index:
        index.tune(usual(2, 128))
        index.add(vectors[COUNT:])
        index.commit()
        assert calibrated(index) == COUNT
        assert escalated(index) != "no"


def test_commit_that_keeps_within_dram_measures_nothing(tmp_path: Path) -> None:
    vectors = usual(1, COUNT + 1000)
    with ZoomIndex.build(tmp_path / "index", vectors[:COUNT], dram="2MiB", grow_to=2 * COUNT) as index:
        index.add(vectors[COUNT:])
        index.commit(compact=False)
        assert calibrated(index) == COUNT
        assert escalated(index) == "wider"


def test_measuring_depends_on_nothing_but_the_index(tmp_path: Path) -> None:
    found = []
    for name in ("one", "two"):
        drift = Drift(seed=3, weight=0.9, speed=1.0)
        first = drift.draw(0, COUNT)
        with ZoomIndex.build(tmp_path / name, first, dram="1MiB", grow_to=2 * COUNT) as index:
            index.add(drift.draw(1, COUNT // 4))
            index.commit()
            assert calibrated(index) > COUNT
            result = index.search(drift.draw(1, 30), 10)
            found.append((result.ids.tolist(), result.stats["pages"]))
    assert found[0] == found[1]


@pytest.mark.parametrize("end", ["close", "tune", "compact"])
def test_end_of_a_measurement_under_way(tmp_path: Path, end: str) -> None:
    vectors = usual(1, COUNT + 400)
    index = ZoomIndex.build(tmp_path / "index", vectors[:COUNT], dram="2MiB", grow_to=2 * COUNT)
    index.add(vectors[COUNT:])
    index.commit()  # begins
    if end == "tune":
        index.tune(usual(2, 128))
    elif end == "compact":
        index.compact()
        assert escalated(index) == "no"
    index.close()
    with ZoomIndex.open(tmp_path / "index") as again:
        assert again.check() == []
        assert len(again) == len(vectors)
