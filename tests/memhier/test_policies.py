"""Policies against plain caches, access by access, and the compiled core against Python, victim by victim."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memhier import backend
from memhier.benchmarks.cli.traces import read_blocks
from memhier.benchmarks.workloads.tiers.plain_caches import PLAIN_CACHES
from memhier.errors import BudgetError
from memhier.policies import LFU, LRU, S3FIFO, Belady, Policy, Static

CORES = ["python"] if backend.core is None else ["native", "python"]
POLICIES: dict[str, Callable[[int], Policy]] = {"lru": LRU, "lfu": LFU, "s3fifo": S3FIFO, "belady": Belady}
# The smallest whole, prefixes of the others; `python -m memhier.benchmarks.workloads.tiers.policies` runs all of them
# whole.
TRACES = {
    "lirs_multi3.trace.gz": 30_241,
    "lirs_sprite.trace.gz": 12_000,
    "lirs_2_pools.trace.gz": 12_000,
    "cache2k_web07.trace.xz": 12_000,
    "cache2k_web12.trace.xz": 12_000,
    "adapt_size_request.trace.xz": 12_000,
    "cloudPhysicsIO.oracleGeneral.bin.xz": 12_000,
    "cache2k_orm-busy.trace.xz": 12_000,
    "cloud_physics_w106.trace.xz": 12_000,
    "scarab_scarab-recs.trace.xz": 12_000,
}

# Few keys and small capacities meet every corner; the extremes of int64 are keys like any other.
key = st.one_of(st.integers(0, 12), st.sampled_from([-(2**63), 2**63 - 1, -1]))
trace = st.lists(key, max_size=60)
capacity = st.sampled_from([1, 2, 3, 5, 9, 14, 20])
batches = st.lists(st.lists(key, max_size=8), max_size=12)


@pytest.fixture(params=CORES)
def core(request: pytest.FixtureRequest) -> Any:
    with on_core(request.param):
        yield request.param


def on_core(name: str) -> Any:
    """Make the policies built under it run on one core or the other."""
    return mock.patch.object(backend, "core", backend.core if name == "native" else None)


def skewed(count: int, keys: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.int64]]:
    return (keys * np.random.default_rng(seed).random(count) ** 3).astype(np.int64)


@pytest.mark.long
@pytest.mark.parametrize("name", POLICIES)
@given(keys=trace, capacity=capacity)
@settings(deadline=None)
def test_replay_equals_the_plain_cache(name: str, keys: list[int], capacity: int) -> None:
    expected = PLAIN_CACHES[name](keys, capacity)
    for core in CORES:
        with on_core(core):
            policy = POLICIES[name](capacity)
        assert policy.replay(keys).tolist() == expected, core
        assert len(policy) <= capacity


@pytest.mark.long
@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("file", TRACES)
def test_real_traces_equal_the_plain_cache(data: Callable[[str], Path], file: str, name: str) -> None:
    keys = next(read_blocks(data("cache-traces") / file))[: TRACES[file]]
    for capacity in (97, len(np.unique(keys)) // 10):
        expected = PLAIN_CACHES[name](keys.tolist(), capacity)
        for core in CORES:
            with on_core(core):
                policy = POLICIES[name](capacity)
            assert policy.replay(keys).tolist() == expected, core


@pytest.mark.long
@pytest.mark.parametrize("name", POLICIES)
@given(keys=trace, capacity=capacity)
@settings(deadline=None)
def test_batches_of_one_equal_a_replay(name: str, keys: list[int], capacity: int) -> None:
    for core in CORES:
        with on_core(core):
            policy, whole = POLICIES[name](capacity), POLICIES[name](capacity)
        if isinstance(policy, Belady):
            for each in keys:
                policy.announce([each])
        resident: set[int] = set()
        for each, expected in zip(keys, whole.replay(keys), strict=True):
            hit, evicted = policy.access([each])
            assert hit.tolist() == [expected] == [each in resident]
            resident -= set(evicted.tolist())
            resident.add(each)
            assert len(resident) == len(policy) <= capacity
            assert all(inside in policy for inside in resident)


def run_batches(policy: Policy, batches: list[list[int]], pins: list[list[int]], ahead: int) -> list[Any]:
    """Return everything a policy answers to batches, of which `ahead` are announced where it listens."""
    seen: list[Any] = []
    for index, batch in enumerate(batches):
        if isinstance(policy, Belady) and ahead:
            for later in batches[index + policy.pending : index + 1 + ahead]:
                try:
                    policy.announce(later)
                except BudgetError as error:
                    return [*seen, str(error)]
        try:
            hit, evicted = policy.access(batch, pinned=pins[index % len(pins)] if pins else ())
        except BudgetError as error:
            seen.append(str(error))
            if isinstance(policy, Belady) and ahead:
                policy.access(batch)
            continue
        seen.append((hit.tolist(), evicted.tolist(), len(policy)))
        if index % 5 == 4:
            policy.discard(batch[::2])
        if isinstance(policy, Belady) and index % 7 == 3:
            policy.withdraw()
    if isinstance(policy, Belady):
        seen.append(policy.expire().tolist())
        seen.append(len(policy))
    return seen


@pytest.mark.parametrize("core", CORES)
def test_a_key_that_left_and_is_withdrawn_has_no_uses_from_before(core: str) -> None:
    with on_core(core):
        policy = Belady(2)
    for batch in ([1], [1], [2, 3], [1]):
        policy.announce(batch)
    for batch in ([1], [1], [2, 3]):
        policy.access(batch)
    policy.withdraw()
    policy.access([3])
    assert policy.access([1]).evicted.tolist() == [2]
    assert policy.access([4]).evicted.tolist() == [1]


@pytest.mark.long
@pytest.mark.skipif(backend.core is None, reason="no compiled core to compare")
@pytest.mark.parametrize("name", [*POLICIES, "belady, one half-life an access"])
@given(
    batches=batches,
    pins=st.lists(st.lists(key, max_size=4), max_size=3),
    capacity=capacity,
    ahead=st.integers(0, 4),
)
@settings(max_examples=200, deadline=None)
def test_both_cores_choose_the_same_victims(
    name: str, batches: list[list[int]], pins: list[list[int]], capacity: int, ahead: int
) -> None:
    make = POLICIES.get(name, lambda capacity: Belady(capacity, half_life=1))
    native = make(capacity)
    with on_core("python"):
        plain = make(capacity)
    assert run_batches(native, batches, pins, ahead) == run_batches(plain, batches, pins, ahead)


@pytest.mark.long
@pytest.mark.parametrize("name", POLICIES)
@given(batches=batches, pins=st.lists(key, max_size=6), capacity=capacity, rest=st.integers(0, 3))
@settings(deadline=None)
def test_a_batch_is_resident_together(
    name: str, batches: list[list[int]], pins: list[int], capacity: int, rest: int
) -> None:
    for core in CORES:
        with on_core(core):
            policy = POLICIES[name](capacity)
        resident: set[int] = set()
        for batch in batches:
            held = set(batch) | (set(pins) & resident)
            if len(held) > capacity:
                with pytest.raises(BudgetError, match=f"a capacity of {len(held)} would be enough"):
                    policy.access(batch, pinned=pins)
            else:
                hit, evicted = policy.access(batch, pinned=pins)
                first = {each: place for place, each in reversed(list(enumerate(batch)))}
                assert hit.tolist() == [each in resident or first[each] < place for place, each in enumerate(batch)]
                gone = set(evicted.tolist())
                assert len(gone) == len(evicted)
                assert gone <= resident - held
                # S3-FIFO's main queue may let a key go while the small queue makes room.
                if name != "s3fifo":
                    assert len(gone) == max(0, len(resident | held) - capacity)
                resident = resident - gone | held
            assert len(policy) == len(resident)
            assert all(each in policy for each in resident)


@pytest.mark.long
@pytest.mark.parametrize("name", POLICIES)
def test_large_batches_on_both_cores(name: str) -> None:
    """Rings, tables and queues that grow and turn over, which small examples do not reach."""
    answers = []
    for core in CORES:
        with on_core(core):
            policy = POLICIES[name](3_001)
        accesses = skewed(60_000, 20_000)
        batches = [part.tolist() for part in np.split(accesses, range(997, len(accesses), 997))]
        answers.append(run_batches(policy, batches, [batches[0][:50]], ahead=9))
    assert all(answer == answers[0] for answer in answers)


def test_keys_used_once_come_and_go_among_frequent_ones() -> None:
    """Idle keys that come after others were put in order, and have smaller scores, more of them at times than fit."""
    frequent = np.arange(1000)
    answers = []
    for core in CORES:
        with on_core(core):
            policy = Belady(1100, half_life=10**6)
        rng, new, batches = np.random.default_rng(5), 1000, [frequent.tolist()] * 3
        for _ in range(60):
            once = np.arange(new, new := new + int(rng.integers(1, 700)))
            again = rng.choice(frequent, int(rng.integers(0, 300)), replace=False)
            batches.append(np.concatenate([once, again]).tolist())
        answers.append(run_batches(policy, batches, [[1, 2, 3], []], ahead=0))
    assert all(answer == answers[0] for answer in answers)


@pytest.mark.long
@pytest.mark.parametrize("file", ["lirs_multi3.trace.gz", "cache2k_web07.trace.xz"])
def test_belady_is_never_worse(core: str, data: Callable[[str], Path], file: str) -> None:
    keys = next(read_blocks(data("cache-traces") / file))[:6_000]
    for capacity in (1, 3, 10, 97, 300, 1_000, 6_000):
        hits = {name: int(make(capacity).replay(keys).sum()) for name, make in POLICIES.items()}
        assert hits["belady"] == max(hits.values()), capacity


def best_possible_misses(batches: list[frozenset[int]], capacity: int) -> int:
    """Try every choice of victims."""
    states = {frozenset[int](): 0}
    for batch in batches:
        after: dict[frozenset[int], int] = {}
        for resident, misses in states.items():
            spare = resident - batch
            keep_most = capacity - len(batch)
            keeps = [spare] if len(spare) <= keep_most else map(frozenset, combinations_of(sorted(spare), keep_most))
            for keep in keeps:
                state = keep | batch
                after[state] = min(after.get(state, 10**9), misses + len(batch - resident))
        states = after
    return min(states.values())


def combinations_of(keys: list[int], count: int) -> Any:
    from itertools import combinations

    return combinations(keys, count)


@given(
    batches=st.lists(st.frozensets(st.integers(0, 5), max_size=3), min_size=1, max_size=8),
    capacity=st.integers(3, 5),
)
@settings(max_examples=60, deadline=None)
def test_belady_on_batches_has_the_fewest_misses_there_can_be(batches: list[frozenset[int]], capacity: int) -> None:
    policy = Belady(capacity)
    for batch in batches:
        policy.announce(sorted(batch))
    misses = sum(int((~policy.access(sorted(batch)).hit).sum()) for batch in batches)
    assert misses == best_possible_misses(batches, capacity)


def test_belady_beyond_its_window_keeps_the_frequent(core: str) -> None:
    policy = Belady(3, half_life=1_000)
    policy.replay([1, 1, 1, 2, 2, 3], lookahead=0)
    assert policy.access([4]).evicted.tolist() == [3]
    assert policy.access([5]).evicted.tolist() == [4]
    fading = Belady(2, half_life=1)  # an access counts half as much after one more
    fading.replay([1, 1, 1, 1, 2, 2], lookahead=0)
    assert fading.access([3]).evicted.tolist() == [1]


def test_belady_scores_survive_any_number_of_half_lives(core: str) -> None:
    """The growing weights are scaled back in time: 2,000 half-lives would not fit a double."""
    policy = Belady(2, half_life=1)
    policy.replay([1, 2] * 2_000, lookahead=0)
    assert policy.access([3]).evicted.tolist() == [1]
    policy.access([2])
    assert policy.access([4]).evicted.tolist() == [3]


def test_belady_holds_to_what_was_announced(core: str) -> None:
    policy = Belady(3)
    policy.announce([1, 2, 2])
    policy.announce([3])
    for wrong in ([1], [1, 2, 3], [3], [9], []):
        with pytest.raises(ValueError, match="differ from the batch"):
            policy.access(wrong)
    assert (policy.pending, len(policy)) == (2, 0)
    assert policy.access([2, 1, 1]).hit.tolist() == [False, False, True]
    with pytest.raises(ValueError, match="1 batches are announced"):
        policy.replay([1])
    keys, (hit, evicted) = policy.advance()
    assert (keys.tolist(), hit.tolist(), evicted.tolist()) == ([3], [False], [])
    with pytest.raises(ValueError, match="no batch is announced"):
        policy.advance()
    assert policy.expire().tolist() == [1, 2, 3]
    with pytest.raises(BudgetError, match="a capacity of 4 would be enough"):
        policy.announce([1, 2, 3, 4])


def test_belady_names_the_keys_that_a_batch_awaits(core: str) -> None:
    policy = Belady(3)
    policy.access([1])
    for batch in ([1, 2], [4, 2, 3, 3], [5, 1]):
        policy.announce(batch)
    numbers = policy.announced(9)
    assert [policy.awaited(number).tolist() for number in numbers] == [[2], [4, 3], [5]]
    assert policy.announced(2) == numbers[:2]
    policy.access([1, 2])
    assert policy.announced(9) == numbers[1:]
    assert policy.awaited(numbers[0]).tolist() == []
    assert policy.awaited(numbers[1]).tolist() == [4, 3]
    policy.withdraw()
    policy.announce([7])
    assert policy.awaited(numbers[1]).tolist() == []
    assert not {*policy.announced(9)} & {*numbers}
    policy.advance()
    assert policy.announced(9) == []


def test_belady_takes_back_a_batch_that_pins_leave_no_room_for(core: str) -> None:
    policy = Belady(3)
    policy.access([1, 2])
    for _ in range(3):
        with pytest.raises(BudgetError, match="a capacity of 4 would be enough"):
            policy.access([1, 3, 4], pinned=[2])
    assert (policy.pending, len(policy)) == (0, 2)
    assert policy.access([1, 3], pinned=[2]).hit.tolist() == [True, False]


@given(keys=trace, kept=st.lists(key, max_size=6), more=st.integers(1, 5))
@settings(deadline=None)
def test_static_keeps_its_keys(keys: list[int], kept: list[int], more: int) -> None:
    for core in CORES:
        with on_core(core):
            policy = Static(len(set(kept)) + more, kept)
            others = LRU(more)
        came: set[int] = set()
        for each, hit in zip(keys, policy.replay(keys), strict=True):
            assert hit == (each in came if each in kept else others.replay([each])[0])
            came.add(each)
        assert all(each in policy for each in came & set(kept))
        assert len(policy) == len(came & set(kept)) + len(others)


def test_static_passes_others_through(core: str) -> None:
    policy = Static(4, [7, 7, 8])
    assert policy.access([7, 1, 8, 2, 7]).hit.tolist() == [False, False, False, False, True]
    hit, evicted = policy.access([7, 3], pinned=[2, 8])
    assert (hit.tolist(), evicted.tolist()) == ([True, False], [1])
    with pytest.raises(BudgetError, match=r"2 keys never leave; for the others, .* a capacity of 3 would be enough"):
        policy.access([4, 5], pinned=[3])
    policy.discard([7, 3])
    assert (7 in policy, 3 in policy, 2 in policy, len(policy)) == (False, False, True, 2)
    assert policy.access([7]).hit.tolist() == [False]
    with pytest.raises(BudgetError, match="a capacity of 3 would be enough"):
        Static(2, [1, 2])


@pytest.mark.parametrize("name", POLICIES)
def test_any_array_of_integers_will_do(core: str, name: str) -> None:
    policy = POLICIES[name](4)
    strided = np.arange(12, dtype=np.int64)[::3]
    assert policy.access(strided).hit.tolist() == [False] * 4
    assert policy.access(np.array([0, 3], np.uint8)).hit.all()
    assert policy.access(np.array([3], ">i4")).hit.all()
    assert policy.access([]).hit.shape == policy.access([]).evicted.shape == (0,)
    assert policy.replay(np.empty(0)).shape == (0,)
    policy.discard([])
    read_only = np.array([0])
    read_only.flags.writeable = False
    assert policy.access(read_only, pinned=read_only).hit.all()


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        ([1.5], TypeError, "keys: expected integers, got an array of float64"),
        (["a"], TypeError, "keys: expected integers, got an array of <U1"),
        ([[1]], ValueError, r"keys has shape \(1, 1\): expected one dimension"),
        (np.array([2**63], np.uint64), ValueError, "keys: expected int64, but 9223372036854775808"),
        ([True], TypeError, "keys: expected integers, got an array of bool"),
    ],
)
def test_bad_keys(core: str, name: str, wrong: Any, error: type[Exception], words: str) -> None:
    policy = POLICIES[name](2)
    for call in (policy.access, policy.replay, policy.discard):
        with pytest.raises(error, match=words):
            call(wrong)
    assert len(policy) == 0


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize(
    ("wrong", "error"),
    [(0, ValueError), (-1, ValueError), (2**29 + 1, ValueError), (1.0, TypeError), (True, TypeError)],
)
def test_bad_capacity(name: str, wrong: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=f"capacity={wrong}: expected"):
        POLICIES[name](wrong)


def test_bad_half_life() -> None:
    for wrong, error in ((0, ValueError), (2**41, ValueError), (1.5, TypeError)):
        with pytest.raises(error, match="half_life="):
            Belady(3, half_life=wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="lookahead=-1"):
        Belady(3).replay([1], lookahead=-1)


@pytest.mark.skipif(backend.core is None, reason="no compiled core to compare")
def test_scores_too_old_to_differ_go_by_their_last_access() -> None:
    """After 1,600 half-lives the two first keys' scores are both zero, though the older one's was the higher."""
    victims = []
    for core in CORES:
        with on_core(core):
            policy = Belady(3, half_life=4)
        for each in (1, 1, 2, *[3] * 6_400):
            policy.access([each])
        victims.append(policy.access([4, 5]).evicted.tolist())
    assert victims == [[1, 2], [1, 2]]


@pytest.mark.skipif(backend.core is None, reason="no compiled core")
@pytest.mark.parametrize("name", POLICIES)
def test_threads_that_share_a_policy_do_it_no_harm(name: str) -> None:
    """The order of their batches is theirs; the cache stays one."""
    policy = POLICIES[name](1_000)
    parts = [np.split(skewed(20_000, 5_000, seed), 50) for seed in range(4)]
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda mine: [policy.access(part) for part in mine], parts))
    misses = sum(int((~hit).sum()) for answer in answers for hit, _ in answer)
    victims = sum(len(evicted) for answer in answers for _, evicted in answer)
    assert misses - victims == len(policy) <= 1_000
