"""Efforts are measured anew as vectors come and go, so that the recall declared is kept without a rebuild."""

import re
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from memhier.ann import ZoomIndex
from memhier.ann.zoom.calibration.calibration import Calibration
from memhier.ann.zoom.preview.preview import Effort
from memhier.ann.zoom.preview.space import Metric
from memhier.ann.zoom.renewal import beside, life, measuring
from memhier.errors import BudgetError

Floats = npt.NDArray[np.float32]
AXES, COUNT = 64, 4000


class Drift:
    """Clusters that move along one direction, of lengths up to `longest`."""

    def __init__(self, seed: int, weight: float, speed: float, longest: float = np.inf) -> None:
        self._random = np.random.default_rng(seed)
        self._centres = 1.2 * self._random.standard_normal((30, AXES))
        direction = self._random.standard_normal(AXES)
        self._step = speed * direction / np.linalg.norm(direction)
        self._weights = 3 * weight ** np.arange(AXES)
        self._longest = longest

    def draw(self, step: float, count: int) -> Floats:
        """Return vectors of a step."""
        near = self._centres[self._random.integers(0, 30, count)] + self._random.standard_normal((count, AXES))
        made = near * self._weights + step * self._step
        lengths = np.linalg.norm(made, axis=1, keepdims=True)
        return (made * np.minimum(1, self._longest / lengths)).astype(np.float32)


def recall_of(
    index: ZoomIndex, held: dict[int, Floats], queries: Floats, k: int, metric: str, recall: float | None = None
) -> float:
    ids = np.array([*held])
    vectors, asked = np.stack([*held.values()]).astype(np.float64), queries.astype(np.float64)
    if metric == "cosine":
        vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
        asked = asked / np.linalg.norm(asked, axis=1, keepdims=True)
    away = -2 * asked @ vectors.T
    away += 0 if metric == "ip" else np.square(vectors).sum(axis=1)
    best = ids[np.argsort(away, axis=1)[:, :k]]
    found = index.search(queries, k, recall=recall).ids
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
@pytest.mark.parametrize(("metric", "dram"), [("l2", "450KiB"), ("cosine", "425KiB"), ("ip", "425KiB")])
def test_sliding_window_keeps_the_recall(tmp_path: Path, metric: str, dram: str, compact: bool | None) -> None:
    drift = Drift(seed=3, weight=0.8, speed=1.5, longest=20.0 if metric == "ip" else np.inf)
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


@pytest.mark.parametrize("compact", [None, False])
def test_recall_of_one_is_exact_as_vectors_drift(tmp_path: Path, compact: bool | None) -> None:
    drift = Drift(seed=4, weight=0.9, speed=4.0, longest=30.0)
    first, vectors = drift.draw(0, COUNT), drift.draw(1, COUNT * 7 // 200)
    held = dict(enumerate(first))
    with ZoomIndex.build(tmp_path / "index", first, dram="1MiB", metric="ip", grow_to=2 * COUNT) as index:
        replace_oldest(index, held, vectors)
        index.commit(compact=compact)
        assert recall_of(index, held, drift.draw(1, 300), 10, "ip", recall=1) == 1


@pytest.mark.parametrize("metric", ["ip", "cosine"])
@pytest.mark.parametrize(("commits", "drifting"), [(24, 7), (1, 4)])
def test_recall_of_one_is_exact_where_few_vectors_drift(
    tmp_path: Path, metric: str, commits: int, drifting: int
) -> None:
    drift = Drift(seed=4, weight=0.9, speed=4.0, longest=20.0)
    first, usual_ones = drift.draw(0, COUNT), 0 if commits > 1 else COUNT * 8 // 100
    held = dict(enumerate(first))
    with ZoomIndex.build(tmp_path / "index", first, dram="450KiB", metric=metric, grow_to=2 * COUNT) as index:
        for _ in range(commits):
            vectors = np.concatenate([drift.draw(1, drifting), drift.draw(0, usual_ones)])
            held.update(zip(index.add(vectors).tolist(), vectors, strict=True))
            index.commit(compact=False)
        assert recall_of(index, held, drift.draw(2, 100), 1, metric, recall=1) == 1


def test_tuning_forgets_no_errors_that_point_one_way(tmp_path: Path) -> None:
    drift = Drift(seed=4, weight=0.9, speed=4.0, longest=20.0)
    vectors = np.concatenate([drift.draw(0, COUNT), drift.draw(1, COUNT * 9 // 100)])
    with ZoomIndex.build(tmp_path / "index", vectors[:COUNT], dram="450KiB", metric="ip", grow_to=2 * COUNT) as index:
        index.add(vectors[COUNT:])
        index.commit(compact=False)
        index.tune(drift.draw(0, 300))
        assert recall_of(index, dict(enumerate(vectors)), drift.draw(1, 300), 1, "ip", recall=1) == 1


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


def test_a_result_of_no_use_is_followed_by_a_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vectors, free, played, threads = usual(1, 2 * COUNT), threading.Event(), measuring.play_queries, []

    def wait_first(*given: Any) -> Any:
        threads.append(threading.current_thread().name)
        if len(threads) == 1:
            assert free.wait(300)
        return played(*given)

    monkeypatch.setattr(measuring, "play_queries", wait_first)
    with ZoomIndex.build(tmp_path / "index", vectors[:COUNT], dram="2MiB", grow_to=2 * COUNT) as index:
        index.add(vectors[COUNT : COUNT + 400])
        index.commit()  # begins
        index.compact()  # its result will be of no use
        index.add(vectors[COUNT + 400 : COUNT + 1000])  # more than a tenth
        free.set()
        wait_for_threads()
        index.commit()
        wait_for_threads()
    assert len(threads) == 2
    assert all(name.startswith("zoom-measure") for name in threads)


def test_measured_efforts_leave_a_rebuild_due(tmp_path: Path) -> None:
    vectors = usual(1, 2 * COUNT + 400)
    with ZoomIndex.build(tmp_path / "index", vectors[:COUNT], dram="3MiB", grow_to=3 * COUNT) as index:
        for number, some in enumerate(np.split(vectors[COUNT:], 4), 1):
            index.add(some)
            if number < 4:
                index.commit()
                assert is_measured(index, COUNT + 1100 * number)
                assert index.stats()["renewal"] == "none"  # due by the vectors of the build, once these have doubled
        assert index.stats()["renewal"] == "due"
        index.commit(compact=False)
    with ZoomIndex.open(tmp_path / "index", writable=True) as index:
        assert index.stats()["renewal"] == "due"


def test_removed_vectors_are_not_calibrated(tmp_path: Path) -> None:
    vectors = usual(1, 2 * COUNT)
    with ZoomIndex.build(tmp_path / "index", vectors[:COUNT], dram="2MiB", grow_to=2 * COUNT) as index:
        for step in range(6):  # a sixteenth comes and goes, so an eighth changes
            some = np.arange(step * COUNT // 16, (step + 1) * COUNT // 16)
            index.add(vectors[COUNT + some], ids=COUNT + some)
            index.remove(some)
            index.commit(compact=None if step < 2 else False)
            assert calibrated(index) == COUNT
        index.tune(usual(2, 128))
        assert calibrated(index) == COUNT


def test_index_that_began_empty_compares_not_all_before_it_is_measured(tmp_path: Path) -> None:
    vectors = usual(1, COUNT)
    with ZoomIndex.build(tmp_path / "index", np.empty((0, AXES), np.float32), dram="4MiB", grow_to=COUNT) as index:
        held = dict(zip(index.add(vectors).tolist(), vectors, strict=True))
        index.commit(compact=False)
        assert escalated(index) == "wider"
        assert recall_of(index, held, usual(2, 100), 10, "l2") >= 0.985


def test_nearly_all_vectors_may_be_removed(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    vectors = random.standard_normal((50 * COUNT, 4)).astype(np.float32)
    with ZoomIndex.build(tmp_path / "index", vectors, dram="8MiB") as index:
        kept = np.sort(random.choice(len(vectors), 135, replace=False))
        index.remove(np.setdiff1d(np.arange(len(vectors)), kept))
        index.commit()
        assert calibrated(index) == 135
        best = np.square(vectors[kept][:, None] - vectors[kept]).sum(axis=2).argsort(axis=1)[:, :10]
        assert np.isin(index.search(vectors[kept], 10).ids, kept).all()
        assert (np.sort(index.search(vectors[kept], 10, recall=1).ids) == np.sort(kept[best])).all()


def test_bounds_that_missed_neighbours_once_are_not_trusted_again() -> None:
    effort = {1: [(0.99, Effort(4, eps=0.5), 2.0)]}
    sound = Calibration(160, effort, {1: 1.0}, vectors=4000)
    unsound = replace(sound, reached={1: 0.98})
    assert sound.measured_anew(replace(sound, reached={1: 159 / 160}), sound).bounds_hold  # one neighbour missed
    after = sound.measured_anew(unsound, sound)
    assert not after.bounds_hold
    assert not after.measured_anew(sound, after).bounds_hold
    assert not Calibration.from_json(after.measured_anew(sound, after).to_json()).bounds_hold


def test_codes_of_earlier_indexes_that_err_along_their_own_vectors_are_not_trusted() -> None:
    stored = Calibration(160, {1: [(0.99, Effort(4, eps=0.5), 2.0)]}, {1: 1.0}, vectors=4000).to_json()
    assert Calibration.from_json(stored | {"overstated": False, "own_way": 2.5}).bounds_hold
    assert not Calibration.from_json(stored | {"overstated": True}).bounds_hold
    assert not Calibration.from_json(stored | {"own_way": 18.6}).bounds_hold


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


def test_changed_attributes_are_kept_as_efforts_are_measured_anew(tmp_path: Path) -> None:
    vectors = usual(1, COUNT + 2000)
    values = dict.fromkeys(range(COUNT), 0)
    with ZoomIndex.build(
        tmp_path / "index", vectors[:COUNT], attributes={"a": [0] * COUNT}, dram="6MiB", grow_to=3 * COUNT
    ) as index:
        for number, some in enumerate(np.split(vectors[COUNT:], 8), 1):
            changed = np.arange(50 * number, 50 * number + 80)
            index.update(changed, attributes={"a": [number] * 80})
            ids = index.add(some, attributes={"a": [-number] * len(some)})
            values |= dict.fromkeys(changed.tolist(), number) | dict.fromkeys(ids.tolist(), -number)
            index.commit()  # raised CorruptionError, though it was durable
            wait_for_threads()
        assert calibrated(index) > COUNT
    with ZoomIndex.open(tmp_path / "index") as index:
        assert index.fetch(np.array([*values]), fields=["a"])["a"].tolist() == [*values.values()]


def test_a_commit_stands_whatever_keeps_a_thread_from_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise ValueError("refused")

    def stream(index: ZoomIndex, blocks: list[Floats]) -> None:
        for some in blocks:
            index.add(some)
            index.commit()

    monkeypatch.setattr(measuring, "open_parts", refuse)
    vectors = usual(1, COUNT + 2000)
    with ZoomIndex.build(tmp_path / "index", vectors[:COUNT], dram="6MiB", grow_to=3 * COUNT) as index:
        with pytest.warns(UserWarning, match="refused"):
            stream(index, np.split(vectors[COUNT:], 8))
        assert recall_of(index, dict(enumerate(vectors)), usual(2, 20), 10, "l2", recall=1) == 1
    with ZoomIndex.open(tmp_path / "index") as index:
        assert len(index) == len(vectors)


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


def wait_for_threads() -> None:
    """Wait until no thread works beside the commits."""
    end = time.monotonic() + 300
    while any(thread.name.startswith("zoom-") for thread in threading.enumerate()) and time.monotonic() < end:
        time.sleep(0.01)


@pytest.mark.parametrize("metric", ["l2", "ip"])
def test_usual_vectors_that_replace_others_call_for_no_rebuild(tmp_path: Path, metric: Metric) -> None:
    vectors, step = usual(1, 2 * COUNT), COUNT * 3 // 50
    vectors[0] *= 2  # no later one is longer
    held = dict(enumerate(vectors[:COUNT]))
    with ZoomIndex.build(tmp_path / "index", vectors[:COUNT], dram="3MiB", metric=metric, grow_to=3 * COUNT) as index:
        for number in range(12):  # more than seven tenths are replaced: each sixth called for a rebuild before
            replace_oldest(index, held, vectors[COUNT + number * step : COUNT + (number + 1) * step])
            index.commit()
            wait_for_threads()
            assert index.stats()["renewal"] == "none"
            assert recall_of(index, held, usual(2, 100), 10, metric) >= 0.985
            assert recall_of(index, held, usual(2, 20), 10, metric, recall=1) == 1


def test_removed_rows_without_room_for_a_join_call_for_no_rebuild(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vectors, step = usual(1, 2 * COUNT), COUNT * 3 // 50
    held = dict(enumerate(vectors[:COUNT]))
    rebuilt: list[int] = []
    monkeypatch.setattr(life, "renew", lambda *_: rebuilt.append(1))
    with ZoomIndex.build(tmp_path / "index", vectors[:COUNT], dram="580KiB") as index:
        for number in range(12):  # unless parts were joined there would be no room for more
            replace_oldest(index, held, vectors[COUNT + number * step : COUNT + (number + 1) * step])
            index.commit()
            wait_for_threads()
        assert recall_of(index, held, usual(2, 20), 10, "l2", recall=1) == 1
    assert rebuilt == []


@pytest.mark.filterwarnings("ignore:calibration found")  # codes are short
@pytest.mark.parametrize(
    ("more", "tuned", "rich"), [(1.0, False, True), (1.0, True, False), (1.1, False, False), (1.1, True, True)]
)
def test_a_stream_that_waits_for_no_thread_stays_within_the_least_budget(
    tmp_path: Path, more: float, tuned: bool, rich: bool
) -> None:
    vectors, step = usual(1, 3 * COUNT)[:, :24].copy(), COUNT // 33

    def fields(ids: npt.NDArray[np.int64]) -> dict[str, Any]:
        documents = {"text": [f"{name}:" + "x" * (name % 50) for name in ids.tolist()]}
        return {"attributes": {"price": (ids % 100).tolist()}, "documents": documents} if rich else {}

    def build(name: str, dram: int) -> ZoomIndex:
        ids = np.arange(COUNT)
        return ZoomIndex.build(
            tmp_path / name, vectors[:COUNT], ids=ids, dram=dram, grow_to=COUNT * 11 // 10, **fields(ids)
        )

    with pytest.raises(BudgetError) as refused:
        build("refused", 1 << 16)
    bytes_named = re.search(r"\((\d+) bytes\) is needed", str(refused.value))
    assert bytes_named is not None
    dram, first = int(more * int(bytes_named[1])), 0
    with build("index", dram) as index:
        if tuned:
            index.tune(usual(2, 100)[:, :24])
        for _ in range(16):  # half of the vectors are replaced
            index.remove(np.arange(first, first + step))
            ids = np.arange(COUNT + first, COUNT + first + step)
            index.add(vectors[ids], ids=ids, **fields(ids))
            index.update(ids[::2], vectors[ids[::2]], **fields(ids[::2]))
            index.commit()
            assert index.stats()["planned_bytes"] <= dram
            first += step
            if first == 4 * step:
                index.compact()
        held = dict(enumerate(vectors[first : first + COUNT], first))
        assert recall_of(index, held, usual(2, 20)[:, :24], 10, "l2", recall=1) == 1


@pytest.mark.parametrize("turning", [True, False])
def test_a_rebuild_keeps_the_recall_near_the_newest_vectors(tmp_path: Path, turning: bool) -> None:
    random, count, step = np.random.default_rng(1), 8000, 240

    def draw(rows: int, moment: float) -> Floats:
        axes = np.roll(np.linspace(2.5, 0.1, 32), int(moment * 32 / 6) * turning)
        return (random.standard_normal((rows, 32)) * axes).astype(np.float32)

    held = dict(enumerate(draw(count, 0)))
    with ZoomIndex.build(tmp_path / "index", np.stack([*held.values()]), dram=590_000, grow_to=16_000) as index:
        before = index.search(draw(400, 0), 10, recall=0.95).stats["pages"]
        for number in range(1, 21):
            replace_oldest(index, held, draw(step, 0.1 * number))
            index.commit(compact=False)
        index.compact()
        queries = draw(1000, 2)
        for recall, least in ((0.9, 0.895), (0.95, 0.945), (0.99, 0.988)):
            assert recall_of(index, held, queries, 10, "l2", recall) >= least
        if not turning:  # the newest vectors are like all others, and cost nothing
            assert index.search(queries[:400], 10, recall=0.95).stats["pages"] <= 1.15 * before


def test_copies_are_dealt_into_the_lists_of_their_spot(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    vectors = usual(1, 3 * COUNT)
    spot = random.random(len(vectors)) < 0.4
    vectors[spot] = 50.0  # copies, far from all others
    with ZoomIndex.build(tmp_path / "index", vectors[:COUNT], dram="4MiB", grow_to=4 * COUNT) as index:
        before = index.stats()["longest_list"]
        for some in np.split(vectors[COUNT:], 20):
            index.add(some)
            index.commit(compact=False)
        assert index.stats()["longest_list"] < 1.5 * before
        assert recall_of(index, dict(enumerate(vectors)), usual(2, 100), 10, "l2") >= 0.985
        assert (index.search(vectors[spot][:20], 100).distances == 0).all()


def test_a_ready_rebuild_is_taken_over_by_a_commit_of_many_vectors(tmp_path: Path) -> None:
    vectors = usual(1, COUNT + 6000)
    with ZoomIndex.build(tmp_path / "index", vectors[:COUNT], dram="3MiB", grow_to=4 * COUNT) as index:
        for some in np.split(vectors[COUNT:], 4):  # the third doubles the vectors
            index.add(some)
            index.commit()
            wait_for_threads()
        assert index.stats()["trained_vectors"] > COUNT


def test_usual_vectors_are_not_taken_for_strays_by_chance(tmp_path: Path) -> None:
    vectors = (3 * np.random.default_rng(1).standard_normal((23_000, AXES))).astype(np.float32)
    with ZoomIndex.build(tmp_path / "index", vectors[:0], dram="2MiB", grow_to=len(vectors)) as index:
        index.add(vectors[:3000])
        index.commit(compact=False)
        index.compact()
        for some in np.split(vectors[3000:], 40):
            index.add(some)
            index.commit(compact=False)
            assert index.search(vectors[:1], 10).stats["escalated"] != "exact"


def test_changes_while_a_rebuild_is_made_call_for_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vectors, free, renew, begun = usual(1, 6 * COUNT), threading.Event(), life.renew, []

    def wait(*given: Any) -> Any:
        begun.append(1)
        assert free.wait(300)
        return renew(*given)

    monkeypatch.setattr(life, "renew", wait)
    with ZoomIndex.build(tmp_path / "index", vectors[:COUNT], dram="6MiB", grow_to=5 * COUNT) as index:
        held = dict(enumerate(vectors[:COUNT]))
        for step in range(1, 6):
            some = vectors[step * COUNT : (step + 1) * COUNT]
            if step < 3:  # the vectors double, and more
                held |= dict(zip(index.add(some).tolist(), some, strict=True))
            else:  # as many as there were at the beginning come and go, three times
                replace_oldest(index, held, some)
            index.commit()
        assert begun == [1]
        free.set()
        while index.stats()["trained_vectors"] == COUNT:
            wait_for_threads()
            index.commit()
        for _ in range(3):
            wait_for_threads()
            index.commit()
        assert begun == [1]
        assert index.stats()["renewal"] == "none"
        assert recall_of(index, held, usual(2, 100), 10, "l2") >= 0.985


def leave_no_room(patch: pytest.MonkeyPatch) -> None:
    """Let no commit find room for the next, nor for a join of all parts."""
    patch.setattr(life, "_MARGIN", 1e6)
    patch.setattr(life, "merged_bytes", lambda *_: 1 << 40)


def test_a_commit_without_room_takes_over_the_rebuild_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vectors, begun, renew = usual(1, 2 * COUNT), [], life.renew

    def slowly(*given: Any) -> Any:
        begun.append(1)
        time.sleep(1)
        return renew(*given)

    monkeypatch.setattr(life, "renew", slowly)
    with ZoomIndex.build(tmp_path / "index", vectors[:COUNT], dram="580KiB") as index:
        first = COUNT * 6 // 10
        index.remove(np.arange(first))
        index.commit()  # few vectors are left for the lists
        assert index.stats()["renewal"] in ("running", "ready")
        leave_no_room(monkeypatch)
        index.add(vectors[COUNT : COUNT + 400])
        index.remove([first])
        index.commit()
        assert begun == [1]
        assert index.stats()["trained_vectors"] == COUNT - first
        held = dict(enumerate(vectors[first + 1 : COUNT + 400], first + 1))
        assert recall_of(index, held, usual(2, 20), 10, "l2", recall=1) == 1


def test_a_takeover_that_frees_no_room_is_followed_by_a_join(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vectors, free, renew = usual(1, 3 * COUNT), threading.Event(), life.renew

    def slowly(*given: Any) -> Any:
        assert free.wait(300)
        return renew(*given)

    monkeypatch.setattr(life, "renew", slowly)
    with ZoomIndex.build(tmp_path / "index", vectors[:COUNT], dram="1MiB") as index:
        first = COUNT * 6 // 10
        index.remove(np.arange(first))
        index.commit()
        assert index.stats()["renewal"] == "running"
        index.add(vectors[COUNT : COUNT + 1200])
        index.commit()
        index.remove(np.arange(first, COUNT))  # all that the rebuild is made of
        leave_no_room(monkeypatch)
        free.set()
        index.commit()
        assert index.stats()["parts"] == 1
        assert len(index) == 1200
        assert index.check() == []


def test_an_interrupt_while_a_commit_waits_for_a_rebuild_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vectors, free, renew, finish = usual(1, 2 * COUNT), threading.Event(), life.renew, beside.Renewals.finish

    def held(*given: Any) -> Any:
        assert free.wait(20)
        return renew(*given)

    def interrupted(self: Any, changes: int) -> None:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        finish(self, changes)

    monkeypatch.setattr(life, "renew", held)
    with ZoomIndex.build(tmp_path / "index", vectors[:COUNT], dram="1MiB") as index:
        first = COUNT * 6 // 10
        index.remove(np.arange(first))
        index.commit()
        assert index.stats()["renewal"] == "running"
        index.add(vectors[COUNT : COUNT + 100])
        index.commit()
        with monkeypatch.context() as scarce:
            leave_no_room(scarce)
            scarce.setattr(beside.Renewals, "finish", interrupted)
            added = index.add(vectors[COUNT + 100 : COUNT + 200])  # joined with those before
            with pytest.raises(KeyboardInterrupt):
                index.commit()
        free.set()
        index.remove(added)
        index.commit()
    with ZoomIndex.open(tmp_path / "index") as index:
        assert sorted(np.concatenate([*index.ids()]).tolist()) == [*range(first, COUNT + 100)]
        assert index.check() == []
