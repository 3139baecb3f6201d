"""The simulator against counting by hand, curves against runs, samples against wholes."""

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memhier import backend
from memhier.benchmarks.cli.traces import read_blocks
from memhier.benchmarks.workloads.tiers.plain_caches import PLAIN_CACHES
from memhier.budget import parse_bytes
from memhier.errors import BudgetError
from memhier.planning.curves import CURVE_POLICIES, miss_ratio_curve
from memhier.planning.offline import NEVER, StackDistances, belady_hits, next_uses
from memhier.planning.sampling import hash_keys, sample_keys
from memhier.planning.simulation import SIMULATED_POLICIES, _pages_and_reads, simulate
from memhier.policies import LRU, Belady, Static
from memhier.rows.rows import rows_per_page

CORES = ["python"] if backend.core is None else ["native", "python"]
Keys = npt.NDArray[np.int64]

key = st.one_of(st.integers(0, 12), st.sampled_from([-(2**63), 2**63 - 1]))
traces = st.lists(key, max_size=80).map(lambda keys: np.array(keys, np.int64))
batches = st.lists(st.lists(st.integers(0, 40), max_size=6), max_size=20)


@pytest.fixture(params=CORES)
def core(request: pytest.FixtureRequest) -> Iterator[str]:
    with on_core(request.param):
        yield request.param


def on_core(name: str) -> Any:
    return mock.patch.object(backend, "core", backend.core if name == "native" else None)


def skewed(count: int, keys: int, seed: int = 0) -> Keys:
    return (keys * np.random.default_rng(seed).random(count) ** 3).astype(np.int64)


# What can be known of a whole trace


@given(trace=traces)
@settings(deadline=None)
def test_next_uses_and_stack_distances_by_definition(trace: Keys) -> None:
    keys = trace.tolist()
    following, distance = [], []
    for place, each in enumerate(keys):
        following.append(next((later for later in range(place + 1, len(keys)) if keys[later] == each), NEVER))
        before = [earlier for earlier in range(place) if keys[earlier] == each]
        distance.append(len(set(keys[before[-1] : place])) if before else 0)
    for core in CORES:
        with on_core(core):
            assert next_uses(trace).tolist() == following
            stack = StackDistances()
            parts = [stack.access(part) for part in np.array_split(trace, 3)]
        assert np.concatenate(parts).tolist() == distance


@given(trace=traces, capacity=st.integers(1, 9))
@settings(deadline=None)
def test_belady_hits_equal_the_plain_cache(trace: Keys, capacity: int) -> None:
    for core in CORES:
        with on_core(core):
            assert belady_hits(next_uses(trace), capacity).tolist() == PLAIN_CACHES["belady"](trace.tolist(), capacity)


def test_long_traces_on_both_cores() -> None:
    """Longer than the compiled core's first table of times, with strided input, and more keys than fit it."""
    trace = skewed(300_000, 150_000)[::2]
    answers = []
    for core in CORES:
        with on_core(core):
            following = next_uses(trace)
            answers.append((following, belady_hits(following, 1_503), StackDistances().access(trace)))
    for answer in answers[1:]:
        assert all(np.array_equal(ours, theirs) for ours, theirs in zip(answer, answers[0], strict=True))
    following, hit, distance = answers[0]
    assert np.array_equal(trace[following[following != NEVER]], trace[following != NEVER])
    assert np.array_equal(Belady(1_503).replay(trace), hit)
    lru = LRU(1_503).replay(trace)
    assert np.array_equal((distance > 0) & (distance <= 1_503), lru)


# Curves


@pytest.mark.parametrize("policy", CURVE_POLICIES)
@given(trace=traces.filter(len), sizes=st.lists(st.integers(1, 20), min_size=1, max_size=6))
@settings(deadline=None)
def test_curves_equal_runs(policy: str, trace: Keys, sizes: list[int]) -> None:
    curve = miss_ratio_curve(np.array_split(trace, 3), sizes, policy=policy)
    for size, ratio in zip(sizes, curve.miss_ratio, strict=True):
        assert round(ratio * len(trace)) == PLAIN_CACHES[policy](trace.tolist(), size).count(False)
    assert (curve.accesses, curve.sampled, curve.rate, curve.error.any()) == (len(trace), len(trace), 1.0, False)


@pytest.mark.parametrize("policy", CURVE_POLICIES)
def test_real_curves_equal_runs(core: str, data: Callable[[str], Path], policy: str) -> None:
    trace = next(read_blocks(data("cache-traces") / "lirs_2_pools.trace.gz"))[:8_000]
    sizes = [1, 30, 97, 300, 1_000]
    misses = [PLAIN_CACHES[policy](trace.tolist(), size).count(False) for size in sizes]
    assert np.rint(miss_ratio_curve(trace, sizes, policy=policy).miss_ratio * len(trace)).tolist() == misses


@pytest.mark.parametrize("policy", ["lru", "s3fifo", "belady"])
@pytest.mark.parametrize("how", [{"rate": 0.1}, {"keys": 5_000}])
def test_sampled_curves_keep_to_their_stated_error(
    data: Callable[[str], Path], policy: str, how: dict[str, Any]
) -> None:
    trace = next(read_blocks(data("cache-traces") / "scarab_scarab-recs.trace.xz"))
    sizes = np.array([2_000, 10_000, 40_000])
    whole = miss_ratio_curve(trace, sizes, policy=policy)
    sampled = miss_ratio_curve(trace, sizes, policy=policy, **how)
    assert sampled.sampled < 0.2 * sampled.accesses
    assert np.all(sampled.error > 0)
    assert np.all(sampled.error < 0.05)
    # The interval is one of 95 %: over all of these, a few may lie outside it, though not far.
    assert np.all(np.abs(sampled.miss_ratio - whole.miss_ratio) < 2 * sampled.error)


def test_a_capacity_below_the_samples_grain_has_no_error() -> None:
    curve = miss_ratio_curve(skewed(50_000, 5_000), [10, 2_000], rate=0.05)
    assert np.isnan(curve.error).tolist() == [True, False]


def test_bad_arguments_of_curves() -> None:
    trace = skewed(100, 10)
    for arguments, words in (
        ({"capacities": [0]}, "capacities=0"),
        ({"policy": "fifo"}, "policy='fifo': expected one of lru, lfu"),
        ({"rate": 0.1, "keys": 5}, "expected one of the two"),
        ({"policy": "lfu", "rate": 0.5}, "cannot be told from a sample"),
        ({"rate": 0.0}, "rate=0.0: expected a number above 0"),
        ({"rate": float("nan")}, "rate=nan"),
        ({"keys": 0}, "keys=0: expected at least 1"),
    ):
        with pytest.raises(ValueError, match=words):
            miss_ratio_curve(trace, **({"capacities": [5]} | arguments))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="trace: no accesses"):
        miss_ratio_curve(np.empty(0, np.int64), [5])
    with pytest.raises(TypeError, match="seed='a'"):
        sample_keys(trace, rate=0.5, seed="a")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="trace: expected integers, got an array of float64"):
        miss_ratio_curve(np.array([0.5]), [5])


# Samples


@given(trace=traces, keys=st.integers(1, 8), pieces=st.integers(1, 5), seed=st.integers(0, 3))
@settings(deadline=None)
def test_a_sample_holds_all_accesses_of_the_keys_with_the_smallest_hashes(
    trace: Keys, keys: int, pieces: int, seed: int
) -> None:
    sample = sample_keys(np.array_split(trace, pieces), keys=keys, seed=seed)
    distinct = np.unique(trace)
    hashes = hash_keys(distinct, seed)
    assert len(np.unique(hashes)) == len(distinct)
    chosen = distinct[np.argsort(hashes)[:keys]]
    assert sample.keys.tolist() == [each for each in trace.tolist() if each in chosen]
    assert sample.accesses == len(trace)
    assert sample.rate == 1.0 or np.array_equal(np.sort(hashes[hashes < sample.rate * 2.0**64]), np.sort(hashes)[:keys])


def test_a_fixed_rate_takes_its_share_of_the_keys() -> None:
    trace = np.tile(np.arange(100_000), 2)
    sample = sample_keys(trace, rate=0.03)
    share = len(np.unique(sample.keys)) / 100_000
    assert abs(share - 0.03) < 0.003
    assert len(sample.keys) == 2 * len(np.unique(sample.keys))
    assert not np.array_equal(sample_keys(trace, rate=0.03, seed=1).keys, sample.keys)
    assert np.array_equal(sample_keys(np.array_split(trace, 7), rate=0.03).keys, sample.keys)
    assert sample_keys(trace, rate=1).keys.tolist() == trace.tolist()


# The simulator


def count_by_hand(trace: list[list[int]], capacity: int, row_bytes: int) -> tuple[int, int, int, int]:
    """LRU over batches: hits, reads, evictions, pages."""
    order: OrderedDict[int, None] = OrderedDict()
    hits = reads = evictions = pages = 0
    for batch in trace:
        fresh = dict.fromkeys(each for each in batch if each not in order)
        while len(order) + len(fresh) > capacity:
            del order[next(each for each in order if each not in batch)]
            evictions += 1
        hits += len(batch) - len(fresh)
        reads += len(fresh)
        for each in batch:
            order[each] = None
            order.move_to_end(each)
        pages += len({byte // 4096 for each in fresh for byte in range(each * row_bytes, (each + 1) * row_bytes, 8)})
    return hits, reads, evictions, pages


@given(trace=batches, capacity=st.integers(6, 20), row_bytes=st.sampled_from([8, 1024, 1600, 4096, 5000]))
@settings(deadline=None)
def test_batches_are_counted_right(trace: list[list[int]], capacity: int, row_bytes: int) -> None:
    for core in CORES:
        with on_core(core):
            result = simulate(trace, dram=capacity * row_bytes, row_bytes=row_bytes, policy="lru", dirty=True)
        expected = count_by_hand(trace, capacity, row_bytes)
        assert (result.hits, result.reads, result.writes, result.pages) == expected
        assert (result.capacity, result.steps, result.accesses) == (capacity, len(trace), sum(map(len, trace)))


@pytest.mark.parametrize("policy", SIMULATED_POLICIES)
@given(trace=traces, capacity=st.integers(2, 9))
@settings(deadline=None)
def test_single_accesses_equal_batches_of_one(policy: str, trace: Keys, capacity: int) -> None:
    for core in CORES:
        with on_core(core):
            single = simulate(trace, dram=64 * capacity, row_bytes=64, policy=policy, dirty=True)
            batched = simulate([[each] for each in trace], dram=64 * capacity, row_bytes=64, policy=policy, dirty=True)
        assert (single.hits, single.reads, single.steps) == (batched.hits, batched.reads, batched.steps)
        assert single.pages == batched.pages == single.reads
        assert single.writes == batched.writes


def test_cutting_an_array_equals_passing_batches() -> None:
    trace = skewed(10_000, 3_000)
    for policy in SIMULATED_POLICIES:
        arguments: dict[str, Any] = {"dram": "64KiB", "row_bytes": 64, "policy": policy}
        assert simulate(trace, batch=97, **arguments) == simulate(
            [trace[start : start + 97] for start in range(0, len(trace), 97)], **arguments
        )


def test_rows_are_counted_where_the_store_puts_them() -> None:
    """Rows of 1,000 bytes are packed four to a page; rows of 3,000 lie end to end and may straddle two."""
    assert simulate([[0, 1, 2, 3]], dram="1MB", row_bytes=1_000).pages == 1
    assert simulate([[0, 4]], dram="1MB", row_bytes=1_000).pages == 2
    assert simulate([[0]], dram="1MB", row_bytes=3_000).pages == 1
    assert simulate([[1]], dram="1MB", row_bytes=3_000).pages == 2
    assert simulate(np.array([0, 1]), dram="1MB", row_bytes=3_000).pages == 3


@given(
    keys=st.sets(st.integers(-40, 40)),
    base=st.sampled_from([0, 2**40, 2**62 + 1, -(2**63) + 40]),
    extremes=st.booleans(),
    row_bytes=st.sampled_from([1, 64, 1_000, 3_000, 4_095, 4_096, 4_097, 8_200, 2**20 + 1]),
)
@settings(deadline=None)
def test_pages_of_any_keys(keys: set[int], base: int, extremes: bool, row_bytes: int) -> None:
    """Hashes are keys as well: numbers of rows whose places exceed 64 bits."""
    rows = sorted({base + each for each in keys} | ({-(2**63), 2**63 - 1} if extremes else set()))
    packed = rows_per_page(row_bytes)
    if packed is not None:
        spans = [(row // packed, row // packed) for row in rows]
    else:
        spans = [(row * row_bytes // 4096, (row * row_bytes + row_bytes - 1) // 4096) for row in rows]
    pages = {page for first, last in spans for page in range(first, last + 1)}
    joined = sum(before[1] == after[0] for before, after in itertools.pairwise(spans))
    assert _pages_and_reads(np.array(rows, np.int64), row_bytes) == (len(pages), len(rows) - joined)
    alone = simulate(np.array(rows, np.int64), dram="1GiB", row_bytes=row_bytes)
    assert alone.pages == sum(last - first + 1 for first, last in spans)


@pytest.mark.parametrize("policy", SIMULATED_POLICIES)
def test_more_dram_than_this_machine_has(policy: str) -> None:
    """Nothing is made whose size follows from `dram`: a cache for the largest would take 2**54 rows' tables."""
    trace = np.concatenate([np.arange(40), skewed(400, 60)])
    distinct = len(np.unique(trace))
    for batch in (1, 40, 200):
        for dram in ("64GiB", "999999999TiB"):
            result = simulate(trace, dram=dram, row_bytes=64, policy=policy, batch=batch, dirty=True)
            assert (result.reads, result.writes) == (distinct, 0)
            assert result.capacity == parse_bytes(dram) // 64
    for ratio in miss_ratio_curve(
        trace, [distinct, 2**40, 2**62], policy=policy if policy in CURVE_POLICIES else "lru"
    ).miss_ratio:
        assert ratio == distinct / len(trace)
    with pytest.raises(ValueError, match="a trace that is one array"):
        simulate([trace], dram="64GiB", row_bytes=64, policy=policy)


def test_belady_reads_least_and_static_keeps_the_frequent() -> None:
    trace = skewed(30_000, 5_000)
    reads = {policy: simulate(trace, dram=500 * 64, row_bytes=64, policy=policy).reads for policy in SIMULATED_POLICIES}
    assert min(reads, key=reads.__getitem__) == "belady"
    keys, uses = np.unique(trace, return_counts=True)
    kept = keys[np.argsort(-uses, kind="stable")[:499]]
    assert reads["static"] == int((~Static(500, kept).replay(trace)).sum())


def test_less_lookahead_reads_more() -> None:
    trace = skewed(20_000, 5_000)
    arguments: dict[str, Any] = {"dram": 500 * 64, "row_bytes": 64}
    known = [simulate(trace, lookahead=ahead, **arguments).reads for ahead in (0, 500, 5_000, 20_000)]
    assert known == sorted(known, reverse=True)
    assert known[-1] == simulate(trace, **arguments).reads
    batched = [simulate(trace, lookahead=ahead, batch=100, **arguments).reads for ahead in (0, 5, 50, 200)]
    assert batched == sorted(batched, reverse=True)
    assert batched[-1] == simulate(trace, batch=100, **arguments).reads


def test_empty_traces() -> None:
    for policy in SIMULATED_POLICIES:
        for trace in (np.empty(0, np.int64), [], [[], []]):
            result = simulate(trace, dram=64, row_bytes=8, policy=policy, device="sata-ssd")
            assert (result.accesses, result.reads, result.pages, result.hit_ratio) == (0, 0, 0, 0.0)
            assert result.forecast is not None
            assert result.forecast.stall_s == 0.0


def test_bad_arguments_of_simulate() -> None:
    trace = skewed(100, 50)
    for arguments, words in (
        ({"policy": "mru"}, "policy='mru': expected one of belady, lru"),
        ({"policy": "lru", "lookahead": 3}, "policy='lru' does not look ahead"),
        ({"dram": "0.5 furlongs"}, "dram='0.5 furlongs'"),
        ({"dram": 63}, "dram=63 holds no row of 64 bytes; 64 B would be enough"),
        ({"batch": 0}, "batch=0"),
        ({"row_bytes": 0}, "row_bytes=0"),
        ({"device": "floppy"}, "device: expected one of sata-ssd, nvme-gen4"),
        ({"lookahead": -1}, "lookahead=-1"),
        ({"device": "sata-ssd", "ahead": -1}, "ahead=-1"),
        ({"device": "sata-ssd", "compute_s": -0.5}, r"compute_s: .* got -0\.5"),
    ):
        with pytest.raises(ValueError, match=words):
            simulate(trace, **({"dram": 640, "row_bytes": 64} | arguments))  # type: ignore[arg-type]
    with pytest.raises(BudgetError, match="a capacity of 20 would be enough"):
        simulate([np.arange(20)], dram=640, row_bytes=64)
    with pytest.raises(TypeError, match="device=3"):
        simulate(trace, dram=640, row_bytes=64, device=3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"lookahead=1\.5"):
        simulate(trace, dram=640, row_bytes=64, lookahead=1.5)  # type: ignore[arg-type]


def test_what_is_wrong_is_said_before_the_run() -> None:
    def trace() -> Iterator[Keys]:
        raise AssertionError("the trace was read")
        yield

    for wrong in (
        {"ahead": -1},
        {"compute_s": float("nan")},
        {"lookahead": -1},
        {"device": "floppy"},
        {"row_bytes": 0},
    ):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            simulate(trace(), **({"dram": 640, "row_bytes": 64, "device": "sata-ssd"} | wrong))  # type: ignore[arg-type]


def test_the_name_of_the_package_is_the_function() -> None:
    """Whatever was imported before: a module of that name would take its place as soon as anything imports it."""
    import memhier
    import memhier.benchmarks.cli.simulate
    import memhier.planning.simulation

    assert memhier.simulate is simulate
    assert memhier.miss_ratio_curve is miss_ratio_curve
