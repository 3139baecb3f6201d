"""Queues by simulation, beside queueing theory; and the machines whose queues they are."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memhier.io.device_profile import DepthProfile, DeviceProfile
from memhier.planning.node import Node
from memhier.planning.queues import Fleet, QueryTrace, simulate_queues
from memhier.rows.rank_request import round_sizes

NODE = Node(4, 1 << 30, 2, 100_000.0)


def trace_of(cpu_s: float, pages: int, page_cpu_s: float = 0.0) -> QueryTrace:
    return QueryTrace(np.full(5, cpu_s), np.full(5, pages), page_cpu_s, 10)


@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
def test_one_core_and_equal_queries_wait_as_theory_says(load: float) -> None:
    """M/D/1: the mean wait is load / (2 (1 - load)) services."""
    fleet = Fleet(Node(1, 1 << 30), searches=10**6)
    found = simulate_queues(trace_of(1e-3, 0), fleet, load / 1e-3, queries=200_000)
    assert found.mean_s == pytest.approx(1e-3 * (1 + load / (2 * (1 - load))), rel=0.05)
    assert found.cores == pytest.approx(load, rel=0.02)
    assert found.drives == 0


@pytest.mark.parametrize("cores", [2, 5])
def test_several_cores_and_unlike_queries_wait_as_theory_says(cores: int) -> None:
    """M/M/c: Erlang's C is the share of queries that wait."""
    load = 0.8
    random = np.random.default_rng(0)
    trace = QueryTrace(random.exponential(1e-3, 50_000), np.zeros(50_000, np.int64), 0.0, 10)
    found = simulate_queues(trace, Fleet(Node(cores, 1 << 30), searches=10**6), load * cores / 1e-3, queries=200_000)
    offered = load * cores
    last = offered**cores / math.factorial(cores) / (1 - load)
    waits = last / (sum(offered**n / math.factorial(n) for n in range(cores)) + last)
    assert found.mean_s == pytest.approx(1e-3 * (1 + waits / (cores * (1 - load))), rel=0.06)


def test_places_for_searches_are_servers_too() -> None:
    """With one place, a query holds it for all of its time: M/D/1 again, however many cores there are."""
    found = simulate_queues(trace_of(1e-3, 0), Fleet(NODE, searches=1), 500.0, queries=100_000)
    assert found.mean_s == pytest.approx(1.5e-3, rel=0.05)
    assert found.searches == pytest.approx(0.5, rel=0.03)


def test_an_idle_machine_takes_the_sum_of_its_rounds() -> None:
    node = Node(4, 1 << 30, 1, 1e6, None, 100.0, 100.0)  # every read takes 100 us
    alone = simulate_queues(trace_of(1e-3, 30, 1e-6), Fleet(node), 0.1, queries=50)
    rounds = len(round_sizes(30, 10))
    assert alone.p50_s == pytest.approx(1e-3 + rounds * 1e-4, rel=1e-6)
    assert alone.p99_s == pytest.approx(alone.p50_s, rel=1e-6)


@pytest.mark.long
@settings(max_examples=30, deadline=None)
@given(
    cpu_us=st.integers(1, 2000),
    pages=st.integers(0, 60),
    shards=st.integers(1, 4),
    replicas=st.integers(1, 4),
    share=st.floats(0.05, 0.6),
    seed=st.integers(0, 2**31),
)
def test_work_is_neither_lost_nor_made(
    cpu_us: int, pages: int, shards: int, replicas: int, share: float, seed: int
) -> None:
    trace = trace_of(cpu_us * 1e-6, pages, 1e-7 if cpu_us > 6 else 0.0)
    rate = share * replicas * min(NODE.cores / (cpu_us * 1e-6), NODE.iops / max(1, pages))
    fleet = Fleet(NODE, shards, replicas, searches=10**6)
    found = simulate_queues(trace, fleet, rate, queries=2000, seed=seed)
    assert found.cores == pytest.approx(rate / replicas * cpu_us * 1e-6 / NODE.cores, rel=0.25)
    assert found.drives == pytest.approx(rate / replicas * pages / NODE.iops, rel=0.3)
    assert cpu_us * 1e-6 * (1 - 1e-9) <= found.p50_s <= found.p99_s
    assert found == simulate_queues(trace, fleet, rate, queries=2000, seed=seed)


def test_a_query_over_many_shards_ends_with_the_last() -> None:
    one, many = (simulate_queues(trace_of(1e-4, 20), Fleet(NODE, shards), 500.0) for shards in (1, 16))
    assert one.p50_s < many.p50_s
    assert one.p99_s < many.p99_s


def test_too_many_queries_are_answered_at_the_rate_of_the_busiest() -> None:
    found = simulate_queues(trace_of(1e-3, 0), Fleet(NODE, 1, 3), 1e5, queries=20_000)
    assert found.answered_per_s == pytest.approx(3 * NODE.cores / 1e-3, rel=0.02)


@given(reads=st.integers(0, 5000), first=st.integers(1, 300))
def test_rounds_bring_all_reads(reads: int, first: int) -> None:
    sizes = round_sizes(reads, first)
    assert sum(sizes) == reads
    assert all(size > 0 for size in sizes)
    assert sizes[:1] == ([min(first, reads)] if reads else [])


def test_scaled_traces_keep_their_means() -> None:
    random = np.random.default_rng(0)
    trace = QueryTrace(random.random(4000), random.integers(0, 40, 4000), 1e-6, 10)
    scaled = trace.scaled(0.5, 1.3)
    assert scaled.pages.mean() == pytest.approx(1.3 * trace.pages.mean(), rel=0.01)
    assert scaled.cpu_s.mean() == pytest.approx(0.5 * trace.cpu_s.mean())


@pytest.mark.parametrize(("read_us", "p99_us"), [(90.0, 270.0), (90.0, 90.0), (80.0, 100.0), (100.0, 1400.0)])
def test_times_of_reads_have_the_mean_and_the_tail_of_the_drive(read_us: float, p99_us: float) -> None:
    node = Node(1, 1 << 30, 1, 1e6, None, read_us, p99_us)
    mu, sigma = node.read_law()
    drawn = np.random.default_rng(0).lognormal(mu, sigma, 400_000)
    assert drawn.mean() == pytest.approx(node.channels / node.drive_iops, rel=0.02)
    assert np.quantile(drawn, 0.99) / drawn.mean() == pytest.approx(p99_us / read_us, rel=0.03)


def test_a_tail_beyond_any_log_normal_is_cut() -> None:
    mu, sigma = Node(1, 1 << 30, 1, 1e6, None, 10.0, 1e6).read_law()
    assert math.isfinite(mu)
    assert 0 < sigma < 2.4


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("16 cores, 64 GiB, 2x NVMe 800k IOPS", (16, 64 << 30, 2, 8e5, None)),
        ("1 core,2GB,ssd 90000 iops", (1, 2 * 10**9, 1, 9e4, None)),
        ("8 vCPUs, 32 GiB DRAM, 4 x NVMe 1.2M IOPS 3.84 TB 80 us", (8, 32 << 30, 4, 1.2e6, 3840 * 10**9)),
    ],
)
def test_a_machine_in_words(text: str, wanted: tuple[object, ...]) -> None:
    node = Node.parse(text)
    assert (node.cores, node.dram, node.drives, node.drive_iops, node.drive_bytes) == wanted
    assert str(node.cores) in str(node)


@pytest.mark.parametrize(
    "text", ["", "16 cores", "16 cores, 64 GiB", "x, 64 GiB, NVMe 8k IOPS", "2 cores, 1 GiB, NVMe"]
)
def test_a_machine_that_lacks_something_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected such as '16 cores"):
        Node.parse(text)


@pytest.mark.parametrize("field", ["cores", "dram", "drives", "drive_iops", "read_us", "read_p99_us"])
def test_a_machine_with_nothing_of_something_is_refused(field: str) -> None:
    with pytest.raises(ValueError, match=f"{field}=0"):
        Node(**{"cores": 1, "dram": 1, field: 0})


def test_a_probe_makes_a_machine() -> None:
    rows = tuple(
        DepthProfile(depth, iops, 1.0, 60.0, 900.0, 10)
        for depth, iops in ((1, 10_000.0), (8, 40_000.0), (64, 50_000.0))
    )
    probed = DeviceProfile("/x", "ext4", "d", "k", "t", "uring", True, 4096, 1, 0, 100.0, rows, ())
    node = Node.of_probe(probed, 2, 1 << 30)
    assert (node.drive_iops, node.read_us, node.read_p99_us, node.channels) == (50_000.0, 200.0, 900.0, 10)


@pytest.mark.parametrize(("cpu_s", "pages"), [([], []), ([1.0], [1, 2]), ([-1.0], [1]), ([np.nan], [1]), ([1.0], [-1])])
def test_an_unfit_trace_is_refused(cpu_s: list[float], pages: list[int]) -> None:
    with pytest.raises(ValueError, match="cpu_s, pages"):
        QueryTrace(np.array(cpu_s), np.array(pages, np.int64), 0.0, 10)


@pytest.mark.parametrize("wrong", [{"rate": 0.0}, {"rate": math.nan}, {"queries": 3}])
def test_unfit_numbers_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        simulate_queues(trace_of(1e-3, 1), Fleet(NODE), **({"rate": 1.0} | wrong))  # type: ignore[arg-type]


def test_a_query_takes_longer_on_a_thread_that_was_idle() -> None:
    plain = trace_of(1e-3, 0)
    waking = replace(plain, waking=((0.0, 0.0), (1.0, 2e-3)))
    fleet = Fleet(Node.parse("1 cores, 16 GiB, NVMe 400k IOPS"), searches=1)
    assert simulate_queues(plain, fleet, 1e-3).p50_s == pytest.approx(1e-3)
    assert simulate_queues(waking, fleet, 1e-3).p50_s == pytest.approx(3e-3)
    assert waking.woken(0.5) == pytest.approx(1e-3)
    busy = [simulate_queues(each, fleet, 2000).answered_per_s for each in (plain, waking)]
    assert busy[0] == pytest.approx(busy[1], rel=0.01)  # a thread that is never idle is not slower
    with pytest.raises(ValueError, match="waking"):
        replace(plain, waking=((0.0, -1.0),))
