"""Shares, quotas and weights of admission: exact, within quotas, resumed bit for bit, and right after forgetting."""

import math
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memhier import CorruptionError
from memhier.recsys.replay import Balanced, CarouselBuffer, ClassBalanced, DeckSwap, RandomSwap, StoredSamples, Weighted
from memhier.recsys.replay.placement.admit import Admission
from memhier.recsys.replay.placement.placement import Placement

SCHEMA = {"x": "int64", "task": "int32", "loss": "float32"}


def group_sizes(placement: Placement, slots: bool = False) -> dict[int, int]:
    positions = placement.planned[placement.planned >= 0] if slots else np.arange(placement.size)
    numbers, counts = np.unique(placement.members.groups_at(positions), return_counts=True)
    return dict(zip(numbers.tolist(), counts.tolist(), strict=True))


def placement_of(buffer: CarouselBuffer) -> Placement:
    return buffer._placement


def rehearse(admit: Any, seed: int, limit: int | None, values: np.ndarray, slots: int = 4, parts: int = 3) -> Placement:
    """Return the placement after samples came in parts, without the tiers."""
    placement = Placement(seed, slots, limit, admit.by_class, beside=admit.beside, weights=admit.weights)
    for ids in np.array_split(np.arange(len(values)), parts):
        none = np.full(len(ids), -1, np.int64)
        admit.admit(placement, none, ids, values[ids])
    return placement


def samples(step: int) -> dict[str, np.ndarray]:
    data = np.random.default_rng(step)
    count = int(data.integers(0, 12))
    return {
        "x": 1000 * step + np.arange(count),
        "task": data.choice(4, count, p=[0.6, 0.3, 0.08, 0.02]).astype(np.int32),
        "loss": data.exponential(size=count).astype(np.float32),
    }


# Weighted admission.


def inclusion(weights: list[float], count: int) -> np.ndarray:
    """Return the probability of each sample among `count` drawn one after the other without replacement."""
    found = np.zeros(len(weights))
    for order in permutations(range(len(weights)), count):
        rest, probability = sum(weights), 1.0
        for sample in order:
            probability *= weights[sample] / rest
            rest -= weights[sample]
        found[[*order]] += probability
    return found


@pytest.mark.parametrize("limit", [1, 2, 4])
@pytest.mark.parametrize("parts", [1, 5])
def test_weighted_storage_has_the_probabilities_of_draws_without_replacement(limit: int, parts: int) -> None:
    weights = [1.0, 5.0, 0.5, 2.0, 2.0, 9.0]
    runs, held = 3000, np.zeros(6)
    for seed in range(runs):
        placement = rehearse(Weighted("loss"), seed, limit, np.array(weights), parts=parts)
        assert placement.size == limit
        held[placement.members.ids] += 1
    expected = inclusion(weights, limit) * runs
    deviations = (held - expected) / np.sqrt(expected * (1 - expected / runs) + 1e-9)
    assert np.abs(deviations).max() < 4.5, (held, expected)


@pytest.mark.parametrize("together", [pytest.param(1, marks=pytest.mark.long), 40])
@pytest.mark.parametrize("spread", ["equal", "exponential", "six decades", "some zero"])
def test_weighted_storage_by_chi_square(together: int, spread: str) -> None:
    random = np.random.default_rng(6)
    weights = {
        "equal": np.ones(40), "exponential": random.exponential(size=40),
        "six decades": 10.0 ** random.uniform(-3, 3, 40), "some zero": random.random(40) * (random.random(40) > 0.3),
    }[spread]  # fmt: skip
    # The 10 smallest of exponential times: draws one after the other without replacement (Efraimidis and Spirakis).
    times = random.exponential(size=(100_000, 40)) / np.maximum(weights, 1e-300)
    expected = np.bincount(np.argpartition(times, 10, axis=1)[:, :10].reshape(-1), minlength=40) / 100_000
    runs, held = 1000, np.zeros(40)
    for seed in range(runs):
        placement = rehearse(Weighted("loss"), seed, 10, weights, parts=40 // together)
        held[placement.members.ids] += 1
    drawn = (expected > 1e-3) & (expected < 1 - 1e-3)
    variance = runs * (1 + runs / 100_000) * expected * (1 - expected)
    statistic = float(((held - runs * expected)[drawn] ** 2 / variance[drawn]).sum())
    free = np.count_nonzero(drawn) - 1
    assert statistic < free + 4.5 * math.sqrt(2 * free) + 1, (statistic, free)
    assert (held[weights == 0] == 0).all()


def test_memory_is_a_uniform_sample_of_weighted_storage() -> None:
    held, stored = np.zeros(30), np.zeros(30)
    weights = np.random.default_rng(0).exponential(size=30)
    for seed in range(3000):
        placement = rehearse(Weighted("loss"), seed, 12, weights)
        ids = placement.members.ids
        stored[ids] += 1
        held[ids[placement.planned]] += 1
    expected = stored * 4 / 12
    assert ((held - expected) ** 2 / expected).sum() < 30 + 4.5 * math.sqrt(60)


def test_weights_of_zero_stay_while_there_is_room(tmp_path: Path) -> None:
    with CarouselBuffer(tmp_path / "b", memory=3, storage=10, schema=SCHEMA, admit=Weighted("loss")) as buffer:
        for start, loss in ((0, 0), (6, 0), (12, 1e-30), (18, 0), (24, 1e30)):
            columns = {"x": np.arange(start, start + 6), "task": np.zeros(6, np.int32)}
            buffer.add(columns | {"loss": np.full(6, loss, np.float32)})
        ids = buffer.stored_ids()
        assert {*range(24, 30)} < {*ids.tolist()}
        assert np.count_nonzero((ids >= 12) & (ids < 18)) == 4


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf, 1e-38])
def test_unfit_weights_change_nothing(tmp_path: Path, bad: float) -> None:
    with CarouselBuffer(tmp_path / "b", memory=3, storage=4, schema=SCHEMA, admit=Weighted("loss")) as buffer:
        columns = {"x": np.arange(2), "task": np.zeros(2, np.int32), "loss": np.array([1, bad], np.float32)}
        with pytest.raises(ValueError, match=r"batch\['loss'\]: expected weights of 0, or of 1e-30"):
            buffer.add(columns)
        assert buffer.stats()["arrivals"] == 0


def test_a_smaller_weighted_storage_keeps_the_smallest_keys(tmp_path: Path) -> None:
    """As many as would have stayed of the same stream: resized, forgotten or never larger are one."""
    found = []
    for storage in (40, 15):
        with CarouselBuffer(tmp_path / str(storage), memory=3, storage=storage, schema=SCHEMA, seed=4,
                            admit=Weighted("loss")) as buffer:  # fmt: skip
            for step in range(20):
                buffer.add(samples(step))
            if storage == 40:
                buffer.resize(storage=15)
            found.append(sorted(buffer.stored_ids().tolist()))
    assert found[0] == found[1]


def test_the_largest_keys_go_with_many_equal_ones() -> None:
    """Also where the hand of the largest is dealt anew, as in a resumed run."""
    random = np.random.default_rng(3)
    values = random.choice([0.0, 1.0], 4000, p=[0.5, 0.5])
    one = rehearse(Weighted("loss"), 1, 1500, values, parts=7)
    two = Placement(1, 4, 1500, False, beside="key")
    for ids in np.array_split(np.arange(4000), 7):
        Weighted("loss").admit(two, np.full(len(ids), -1, np.int64), ids, values[ids])
        assert two.members.keys is not None
        two.members.keys.forget_order()
    assert np.array_equal(one.members.ids, two.members.ids)
    assert one.members.keys is not None
    assert two.members.keys is not None
    assert np.array_equal(one.members.keys.values, two.members.keys.values)


# Quotas and groups of a field.


@pytest.mark.parametrize("quotas", [None, 7, {0: 40, 1: 20, 2: 10, 3: 5}, {0: 1, 1: 1, 2: 30, 3: 1000}])
@pytest.mark.parametrize("limit", [None, 25, 200])
def test_quotas_hold_at_every_moment(quotas: Any, limit: int | None) -> None:
    for seed in range(6):
        random = np.random.default_rng(seed)
        admit = Balanced("task", quotas=quotas)
        placement = Placement(seed, 9, limit, True, beside="group", weights=admit.weights)
        came: dict[int, int] = {}
        for start in range(0, 600, 30):
            groups = random.choice(4, 30, p=[0.6, 0.3, 0.08, 0.02])
            groups[: start // 30] = 3 - start // 150
            admit.admit(placement, np.full(30, -1, np.int64), np.arange(start, start + 30), groups)
            for group in groups.tolist():
                came[group] = came.get(group, 0) + 1
            sizes = group_sizes(placement)
            assert sizes == placement.members.sizes
            assert group_sizes(placement, slots=True) == placement.of_group
            assert all(size <= admit.quota(group) for group, size in sizes.items())
            most = sum(min(count, admit.quota(group)) for group, count in came.items())
            assert placement.size <= (most if limit is None else min(limit, most))
            assert limit is not None or placement.size == most
            assert placement.planned_count == 9 or limit is not None or placement.size < 9


def test_groups_share_both_tiers_in_proportion_to_quotas(tmp_path: Path) -> None:
    admit = Balanced("task", quotas={0: 60, 1: 30, 2: 10})
    with CarouselBuffer(tmp_path / "b", memory=20, storage=50, schema=SCHEMA, admit=admit, delay=0) as buffer:
        for start, task in ((0, 2), (300, 1), (600, 0)):
            columns = {"x": np.arange(start, start + 300), "task": np.full(300, task, np.int32)}
            buffer.add(columns | {"loss": np.zeros(300, np.float32)})
        for _ in range(20):
            buffer.feedback(buffer.sample(5))
        assert group_sizes(placement_of(buffer)) == {0: 30, 1: 15, 2: 5}
        assert group_sizes(placement_of(buffer), slots=True) == {0: 12, 1: 6, 2: 2}
        buffer.resize(memory=10)
        assert group_sizes(placement_of(buffer), slots=True) == {0: 6, 1: 3, 2: 1}


@pytest.mark.parametrize("quotas", [5, {0: 5, 1: 8}])
def test_each_group_within_its_quota_is_uniform(quotas: Any) -> None:
    values = np.random.default_rng(0).permutation(np.repeat([0, 1], [20, 16]))
    held = np.zeros(36)
    shown = np.zeros(36)
    runs = 2000
    for seed in range(runs):
        placement = rehearse(Balanced("task", quotas=quotas), seed, None, values, slots=6)
        held[placement.members.ids] += 1
        shown[placement.members.ids[placement.planned]] += 1
    for counts in (held, shown):
        for group in (0, 1):
            found = counts[values == group]
            share = found.sum() / runs / len(found)
            assert (((found - runs * share) ** 2) / (runs * share * (1 - share))).sum() < len(found) + 4.5 * math.sqrt(
                2 * len(found)
            )


def test_balanced_by_label_is_class_balanced(tmp_path: Path) -> None:
    found = []
    for name, admit in (("one", "class_balanced"), ("two", Balanced()), ("three", ClassBalanced())):
        with CarouselBuffer(tmp_path / name, memory=9, storage=30, schema=SCHEMA, admit=admit, seed=2) as buffer:
            for step in range(30):
                columns = samples(step)
                buffer.add(columns, labels=columns["task"])
                buffer.feedback(buffer.sample(4))
            found.append((buffer.stored_ids().tolist(), buffer.sample(9).ids.tolist()))
    assert found[0] == found[1] == found[2]


def test_groups_of_a_field_are_those_of_the_same_labels(tmp_path: Path) -> None:
    """Labels are kept beside, and need not be given."""
    found = []
    for name, by in (("one", "label"), ("two", "task"), ("three", "task")):
        with CarouselBuffer(tmp_path / name, memory=9, storage=30, schema=SCHEMA, admit=Balanced(by), seed=2) as buffer:
            for step in range(30):
                columns = samples(step)
                labels = {"one": columns["task"], "two": columns["x"] % 5, "three": None}[name]
                buffer.add(columns, labels=labels)
                buffer.feedback(buffer.sample(4))
            batch = buffer.sample(9)
            found.append((buffer.stored_ids().tolist(), batch.ids.tolist()))
            if name == "two":
                assert np.array_equal(batch.labels, batch["x"] % 5)
                buffer.checkpoint()
                with StoredSamples(tmp_path / name) as stored:
                    assert np.array_equal(stored.labels, np.concatenate([b["x"] for b in stored.blocks()]) % 5)
                buffer.forget({"label": 3})
                assert 3 not in buffer.sample(9).labels
    assert found[0] == found[1] == found[2]


def test_swaps_keep_the_groups_of_a_field(tmp_path: Path) -> None:
    with CarouselBuffer(
        tmp_path / "b", memory=8, schema=SCHEMA, admit=Balanced("task"), delay=0, swap=RandomSwap(1.0)
    ) as buffer:
        task = np.arange(80, dtype=np.int32) % 4
        buffer.add({"x": np.arange(80), "task": task, "loss": np.zeros(80, np.float32)}, labels=np.arange(80) // 4)
        seen = set()
        for _ in range(20):
            batch = buffer.sample(8)
            assert np.bincount(batch["task"]).tolist() == [2, 2, 2, 2]
            seen |= {*batch["x"].tolist()}
            buffer.feedback(batch)
        assert len(seen) > 60


ADMITS: dict[str, Any] = {
    "by task": lambda: Balanced("task"),
    "quotas": lambda: Balanced("task", quotas={0: 20, 1: 12, 2: 5, 3: 2}),
    "one quota": lambda: Balanced("task", quotas=9),
    "by label": lambda: Balanced(quotas=11),
    "weighted": lambda: Weighted("loss"),
}


def run(buffer: CarouselBuffer, until: int) -> list[Any]:
    seen = []
    while buffer.step < until:
        step, columns = buffer.step, samples(buffer.step)
        buffer.add(columns, labels=columns["task"])
        batch = buffer.sample(5)
        buffer.feedback(batch)
        if step % 13 == 9:
            buffer.forget({"id": (7 * step + np.arange(5)).tolist()})
        if step % 17 == 16:
            buffer.forget({"label": 1})
        seen.append([batch.ids.tolist(), buffer.stored_ids().tolist(), buffer.reader().ids().tolist()])
        if buffer.step % 7 == 0:
            buffer.checkpoint()
    return seen


@pytest.mark.parametrize("name", [*ADMITS])
@pytest.mark.parametrize("storage", [None, 30])
def test_a_resumed_run_equals_one_that_was_not(tmp_path: Path, name: str, storage: int | None) -> None:
    swap = DeckSwap if storage is None else RandomSwap
    options: Any = {"memory": 8, "storage": storage, "schema": SCHEMA, "admit": ADMITS[name](), "seed": 3}
    with CarouselBuffer(tmp_path / "one", swap=swap(0.6), **options) as buffer:
        expected = run(buffer, 42)
    options["admit"] = ADMITS[name]()
    with CarouselBuffer(tmp_path / "two", swap=swap(0.6), **options) as buffer:
        run(buffer, 20)  # the steps after the last checkpoint are lost
    found: dict[int, Any] = {}
    while len(found) == 0 or max(found) < 41:
        with CarouselBuffer.open(tmp_path / "two") as buffer:
            first = buffer.step
            found |= enumerate(run(buffer, min(42, first + 11)), first)
            placement = placement_of(buffer)
            assert group_sizes(placement) == placement.members.sizes
            assert sum(placement.members.sizes.values()) == placement.size
            assert all(finding.harmless for finding in buffer.check())
    assert found == {step: expected[step] for step in found}


def test_forgetting_makes_room_within_quotas(tmp_path: Path) -> None:
    with CarouselBuffer(
        tmp_path / "b", memory=8, storage=100, schema=SCHEMA, admit=Balanced("task", quotas={0: 20, 1: 20})
    ) as buffer:

        def add(task: int, start: int, count: int) -> None:
            columns = {"x": np.arange(start, start + count), "task": np.full(count, task, np.int32)}
            buffer.add(columns | {"loss": np.zeros(count, np.float32)})

        add(0, 0, 50)
        buffer.forget(lambda ids, _: np.arange(len(ids)) < 5)
        assert buffer.stats()["storage_limit"] == 100
        add(1, 100, 15)
        assert group_sizes(placement_of(buffer)) == {0: 15, 1: 15}
        add(0, 200, 60)  # a sample of the stream: it stays as large as it was left
        add(1, 300, 60)
        assert group_sizes(placement_of(buffer)) == {0: 15, 1: 20}
        buffer.forget(lambda ids, _: ids < 300)
        add(0, 400, 60)
        assert group_sizes(placement_of(buffer))[0] == 20


@pytest.mark.parametrize(
    ("admit", "labels", "task", "message"),
    [
        (Balanced("task", quotas={0: 3}), None, 1, r"batch\['task'\]: group 1 has no quota"),
        (Balanced(quotas={0: 3}), 2, 0, "labels: group 2 has no quota"),
        (Balanced("task"), None, -1, r"batch\['task'\]"),
        (Balanced(), None, 0, "labels: this buffer keeps classes"),
    ],
)
def test_unfit_groups_change_nothing(tmp_path: Path, admit: Admission, labels: Any, task: int, message: str) -> None:
    with CarouselBuffer(tmp_path / "b", memory=3, schema=SCHEMA, admit=admit) as buffer:
        columns = {"x": np.arange(2), "task": np.array([0, task], np.int32), "loss": np.zeros(2, np.float32)}
        with pytest.raises(ValueError, match=message):
            buffer.add(columns, labels=None if labels is None else np.array([0, labels]))
        assert buffer.stats()["arrivals"] == 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: {"admit": Balanced("colour")}, "admit=Balanced.'colour'.: expected 'label'"),
        (lambda: {"admit": Balanced("loss")}, "admit=Balanced.'loss'.: expected 'label'"),
        (lambda: {"admit": Weighted("colour")}, "admit=Weighted.'colour'.: expected a field"),
        (lambda: {"admit": Balanced("task"), "same_class": True}, "same_class=True: swaps keep the groups of 'task'"),
        (lambda: {"admit": Balanced(quotas=0)}, "quotas=0"),
        (lambda: {"admit": Balanced(quotas={1: 0})}, r"quotas\[1\]=0"),
    ],
)
def test_unfit_settings_are_refused(tmp_path: Path, make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CarouselBuffer(tmp_path / "b", memory=3, schema=SCHEMA, **make())
    assert not (tmp_path / "b").exists()


def test_a_buffer_opens_with_other_quotas_that_fit(tmp_path: Path) -> None:
    with CarouselBuffer(tmp_path / "b", memory=3, schema=SCHEMA, admit=Balanced("task", quotas=4)) as buffer:
        buffer.add({"x": np.arange(40), "task": np.arange(40, dtype=np.int32) % 2, "loss": np.zeros(40, np.float32)})
        buffer.checkpoint()
    for quotas, message in (({0: 9}, "group 1 has no quota"), (3, "beyond its quota of 3")):
        with pytest.raises(ValueError, match=message):
            CarouselBuffer.open(tmp_path / "b", admit=Balanced("task", quotas=quotas))
    for other in (ClassBalanced(), "class_balanced"):
        with pytest.raises(ValueError, match="goes by 'label'") as refused:
            CarouselBuffer.open(tmp_path / "b", admit=other)
        assert not isinstance(refused.value, CorruptionError)
    with CarouselBuffer.open(tmp_path / "b", admit=Balanced("task", quotas={0: 4, 1: 8})) as buffer:
        buffer.checkpoint()
    with CarouselBuffer.open(tmp_path / "b") as buffer:
        buffer.forget(lambda ids, _: ids >= 0)
        buffer.add({"x": np.arange(40), "task": np.arange(40, dtype=np.int32) % 2, "loss": np.zeros(40, np.float32)})
        assert group_sizes(placement_of(buffer)) == {0: 4, 1: 8}


@pytest.mark.parametrize("name", [*ADMITS])
def test_a_budget_in_bytes_counts_groups_and_keys(tmp_path: Path, name: str) -> None:
    with CarouselBuffer(tmp_path / "b", memory="1MiB", storage=3000, schema=SCHEMA, admit=ADMITS[name]()) as buffer:
        for start in range(0, 6000, 500):
            task = np.arange(start, start + 500, dtype=np.int32) % 4
            loss = np.random.default_rng(start).exponential(size=500).astype(np.float32)
            buffer.add({"x": np.arange(start, start + 500), "task": task, "loss": loss}, labels=task)
            assert buffer.memory_bytes <= 2**20
