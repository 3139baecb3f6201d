"""Plans against Belady as written by hand, and the figures counted independently on real training data."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from memhier import backend
from memhier.errors import BudgetError
from memhier.planning.plan import Lookahead, Step, plan

CORES = ["python"] if backend.core is None else ["native", "python"]
Batches = list[list[int]]

batches = st.lists(st.lists(st.integers(0, 12), max_size=6), max_size=25)


@pytest.fixture(params=CORES)
def core(request: pytest.FixtureRequest) -> Iterator[str]:
    with on_core(request.param):
        yield request.param


def on_core(name: str) -> Any:
    return mock.patch.object(backend, "core", backend.core if name == "native" else None)


@pytest.fixture(scope="module")
def criteo(data: Callable[[str], Path]) -> list[np.ndarray[Any, np.dtype[np.int64]]]:
    """Ids of consecutive batches of 512 rows; the last one is shorter."""
    with np.load(data("criteo-dac80k") / "criteo_dac80k_hashed.npz") as file:
        ids, offset = file["id20"].astype(np.int64), file["offset"]
    return [ids[offset[row] : offset[min(row + 512, len(offset) - 1)]] for row in range(0, len(offset) - 1, 512)]


class HandBelady:
    """Belady restricted to a window, step by step over plain sets, with exact arithmetic beyond the window."""

    def __init__(self, batches: Batches, capacity: int, lookahead: int) -> None:
        self.needs = [dict.fromkeys(batch) for batch in batches]
        self.capacity = capacity
        self.lookahead = lookahead
        self.half_life = 4 * capacity
        self.resident: set[int] = set()
        self.uses: dict[int, list[int]] = {}  # clock of each access since a key came into view
        self.last: dict[int, int] = {}
        self.clock = self.accesses = 0
        self.is_tied = False

    def ties(self, keys: list[int], window: list[dict[int, None]]) -> bool:
        """Whether the last key to leave and the first to stay weigh the same by other uses; floats may differ then."""
        ranks = [self.rank(key, window) for key in keys]
        return len(keys) == 2 and ranks[0][:2] == ranks[1][:2] and self.uses[keys[0]] != self.uses[keys[1]]

    def loads(self) -> Iterator[list[int]]:
        for index, needed in enumerate(self.needs):
            window = self.needs[index + 1 : index + 1 + self.lookahead]
            load = [key for key in needed if key not in self.resident]
            spare = sorted(self.resident - set(needed), key=lambda key: self.rank(key, window))
            leaving = max(0, len(self.resident) + len(load) - self.capacity)
            self.is_tied |= self.ties(spare[leaving - 1 : leaving + 1] if leaving else [], window)
            self.resident -= set(spare[:leaving])
            self.resident |= set(needed)
            for key in self.uses.keys() - self.resident.union(*window):  # evicted, and not announced: forgotten
                del self.uses[key]
            for key in needed:
                self.accesses += 1
                self.uses.setdefault(key, []).append(self.clock)
                self.last[key] = self.accesses
            self.clock += len(needed)
            yield load

    def rank(self, key: int, window: list[dict[int, None]]) -> tuple[int, int, int]:
        """Smallest leaves first."""
        ahead = next((ahead for ahead, later in enumerate(window) if key in later), None)
        if ahead is not None:
            return (1, -ahead, 0)
        halvings = [divmod(clock, self.half_life) for clock in self.uses[key]]
        return (0, sum((self.half_life + rest) << count for count, rest in halvings), self.last[key])


@given(batches=batches, capacity=st.integers(6, 13), lookahead=st.integers(0, 6))
@settings(max_examples=150, deadline=None)
def test_loads_equal_belady_restricted_to_the_window(batches: Batches, capacity: int, lookahead: int) -> None:
    """In number: of two keys needed next by the same batch it does not matter which one goes."""
    by_hand = HandBelady(batches, capacity, lookahead)
    expected = [len(load) for load in by_hand.loads()]
    assume(not by_hand.is_tied)
    for core in CORES:
        with on_core(core):
            steps = list(plan(batches, capacity, lookahead=lookahead))
        assert [len(step.load) for step in steps] == expected, core


@pytest.mark.parametrize("lookahead", [0, 3, None])
def test_loads_equal_belady_restricted_to_the_window_on_real_batches(
    criteo: list[np.ndarray[Any, np.dtype[np.int64]]], lookahead: int | None
) -> None:
    part = [batch[:700] for batch in criteo[:24]]
    plain = [batch.tolist() for batch in part]
    for capacity in (1_000, 1_503):
        by_hand = HandBelady(plain, capacity, len(part) if lookahead is None else lookahead)
        expected = [len(load) for load in by_hand.loads()]
        for core in CORES:
            with on_core(core):
                assert [len(step.load) for step in plan(part, capacity, lookahead=lookahead)] == expected, core


@given(
    batches=batches,
    capacity=st.integers(6, 13),
    lookahead=st.one_of(st.integers(0, 6), st.none()),
    beyond=st.sampled_from(["keep", "drop"]),
    dirty=st.booleans(),
)
@settings(deadline=None)
def test_steps_can_be_carried_out(
    batches: Batches, capacity: int, lookahead: int | None, beyond: Any, dirty: bool
) -> None:
    answers = []
    for core in CORES:
        resident: set[int] = set()
        with on_core(core):
            steps = list(plan(batches, capacity, lookahead=lookahead, beyond=beyond, dirty=dirty))
        assert [step.index for step in steps] == list(range(len(batches)))
        for step, batch in zip(steps, batches, strict=True):
            needed, load, keep, evict = (part.tolist() for part in (step.needed, step.load, step.keep, step.evict))
            assert needed == list(dict.fromkeys(batch))
            assert load == [key for key in needed if key not in resident]
            assert keep == [key for key in needed if key in resident]
            assert set(evict) <= resident - set(needed)
            assert len(set(evict)) == len(evict)
            assert step.write.tolist() == (evict if dirty else [])
            resident = (resident - set(evict)) | set(load)
            assert len(resident) <= capacity
        answers.append([(step.load.tolist(), step.evict.tolist()) for step in steps])
    assert all(answer == answers[0] for answer in answers)


@given(batches=batches, lookahead=st.integers(1, 6))
@settings(deadline=None)
def test_drop_loads_what_was_not_used_within_the_window(batches: Batches, lookahead: int) -> None:
    steps = plan(batches, 13, lookahead=lookahead, beyond="drop")
    for index, step in enumerate(steps):
        recent = set().union(*batches[max(0, index - lookahead) : index])
        assert step.load.tolist() == [key for key in step.needed.tolist() if key not in recent]


def test_share_of_criteo_ids_to_load(criteo: list[np.ndarray[Any, np.dtype[np.int64]]]) -> None:
    """Of a batch's distinct ids, those that none of the last `lookahead` batches used have to be loaded."""
    sets = [set(batch.tolist()) for batch in criteo]
    last: dict[int, int] = {}
    since = []  # how many batches back each needed id was used last
    for index, needed in enumerate(sets):
        since.append(np.array([index - last.get(key, -(10**9)) for key in needed]))
        last.update(dict.fromkeys(needed, index))
    for lookahead, share in ((2, 0.606), (10, 0.392), (50, 0.254)):
        counted = [int((distance > lookahead).sum()) for distance in since]
        assert round(sum(counted) / sum(map(len, sets)), 3) == share
        steps = list(plan(criteo, 10**6, lookahead=lookahead, beyond="drop"))
        assert [len(step.needed) for step in steps] == [len(needed) for needed in sets]
        assert [len(step.load) for step in steps] == counted


def test_more_lookahead_never_loads_more_on_criteo(criteo: list[np.ndarray[Any, np.dtype[np.int64]]]) -> None:
    part = [batch[:1_700] for batch in criteo[:60]]
    loads = [sum(len(step.load) for step in plan(part, 3_000, lookahead=ahead)) for ahead in (0, 2, 10, None)]
    assert loads == sorted(loads, reverse=True)
    assert loads[-1] < 0.85 * loads[0]


def test_the_stream_is_read_no_further_than_the_window(core: str) -> None:
    taken = []

    def stream() -> Iterator[list[int]]:
        for index in range(100):
            taken.append(index)
            yield [index % 7]

    steps = plan(stream(), 3, lookahead=4)
    assert next(steps).index == 0
    assert len(taken) == 5
    next(steps)
    assert len(taken) == 6


def test_memory_follows_the_window_and_not_the_stream(core: str) -> None:
    def memory_after(count: int) -> int:
        planner = Lookahead(500)
        rng = np.random.default_rng(0)
        for _ in range(count):
            planner.announce(rng.integers(0, 10_000, 30))
            if planner.pending > 10:
                planner.next()
        return planner.memory_bytes

    assert memory_after(1_500) <= 1.2 * memory_after(150)


def test_a_batch_that_does_not_fit(core: str) -> None:
    planner = Lookahead(3)
    planner.announce([1, 2, 1, 3])
    with pytest.raises(BudgetError, match=r"capacity=3: .* 4 rows; a capacity of 4 would be enough"):
        planner.announce([4, 5, 6, 7, 7])
    assert planner.pending == 1
    planner.announce([2])
    assert planner.next().load.tolist() == [1, 2, 3]
    assert planner.next().keep.tolist() == [2]
    assert planner.resident == 3
    with pytest.raises(ValueError, match="no batch is announced"):
        planner.next()
    with pytest.raises(BudgetError, match="a capacity of 2 would be enough"):
        list(plan([[1], [1, 2]], 1))


def test_arguments_are_checked_at_once() -> None:
    with pytest.raises(ValueError, match="beyond='lru': expected 'keep' or 'drop'"):
        Lookahead(3, beyond="lru")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="lookahead=-1: expected at least 0"):
        plan([], 3, lookahead=-1)
    with pytest.raises(TypeError, match=r"lookahead=1\.5"):
        plan([], 3, lookahead=1.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="capacity=0"):
        plan([], 0)
    assert list(plan([], 3)) == []
    empty: list[Step] = list(plan([[], []], 1))
    assert [len(step.needed) for step in empty] == [0, 0]
