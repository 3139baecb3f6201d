"""Plans of tables and replay buffers, beside plain sums, real tiers and real buffers."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memhier.planning.node import Node
from memhier.recsys.plan import ReplayWorkload, TableWorkload, Zipf, plan_replay, plan_tables
from memhier.recsys.plan.table_plan import Limit, fewest
from memhier.table.sizes import TRAINING_ASIDE
from memhier.table.tiered import Tiered

NODE = Node.parse("16 cores, 64 GiB, 2x NVMe 800k IOPS 2 TB")


def plain_shares(rows: int, exponent: float) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return the share of accesses of each row: the integral of the density over its rank."""
    edges = np.arange(1, rows + 2, dtype=np.float64)
    whole = np.log(edges) if exponent == 1 else (edges ** (1 - exponent) - 1) / (1 - exponent)
    return np.diff(whole) / whole[-1]


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 20_000),
    exponent=st.one_of(st.sampled_from([0.0, 1.0, 2.0]), st.floats(0, 3)),
    accesses=st.integers(1, 100_000),
    resident=st.integers(0, 20_000),
)
def test_rows_needed_and_missed_are_those_of_plain_sums(
    rows: int, exponent: float, accesses: int, resident: int
) -> None:
    shares = plain_shares(rows, exponent)
    law = Zipf(rows, exponent)
    needed = 1 - (1 - shares) ** accesses
    assert law.distinct(accesses) == pytest.approx(needed.sum(), rel=2e-3)
    assert law.missed(accesses, resident) == pytest.approx(needed[resident:].sum(), rel=2e-3, abs=1e-6)
    assert law.hit_ratio(resident) == pytest.approx(shares[:resident].sum(), abs=1e-6)


def test_numbers_of_any_size_stay_finite() -> None:
    for exponent in (0.0, 0.7, 1.0, 1.05, 3.0):
        law = Zipf(10**12, exponent)
        assert 0 < law.missed(65536, 10**9) <= law.distinct(65536) <= 65536 * (1 + 1e-9)
        assert 0 <= law.hit_ratio(10**9) <= law.hit_ratio(10**12) == pytest.approx(1.0)


@pytest.mark.parametrize("exponent", [0.3, 0.8, 1.2])
def test_a_law_is_found_again_in_its_draws(exponent: float) -> None:
    ids = np.random.default_rng(0).choice(50_000, 40_000, p=plain_shares(50_000, exponent))
    law = Zipf.fit(50_000, len(ids), len(np.unique(ids)))
    assert law.exponent == pytest.approx(exponent, abs=0.04)
    assert law.distinct(10_000) == pytest.approx(len(np.unique(ids[:10_000])), rel=0.05)


@settings(max_examples=100, deadline=None)
@given(thresholds=st.lists(st.integers(1, 10**6), min_size=1, max_size=3))
def test_the_fewest_machines_are_found(thresholds: list[int]) -> None:
    limits: list[tuple[Limit, Callable[[int], bool]]] = [
        ("DRAM", lambda nodes, least=least: nodes >= least) for least in thresholds
    ]  # fmt: skip
    assert fewest(limits, "question")[0] == max(thresholds)


def test_a_limit_that_no_number_meets_is_named() -> None:
    with pytest.raises(ValueError, match=r"question: .* do not meet the limit of disk"):
        fewest([("DRAM", lambda nodes: True), ("disk", lambda nodes: False)], "question")


def test_resident_rows_are_those_of_a_real_tier(tmp_path: Path) -> None:
    node = Node(2, int(np.ceil((64 << 20) / 0.85)))
    rows, row_bytes = 300_000, 128
    plan = plan_tables(TableWorkload(rows, row_bytes, 4096), node)
    with Tiered(
        tmp_path / "tier", "rows", np.uint8, row_bytes, rows=rows, dram=int(0.85 * node.dram), policy="belady",
        key_space=rows, batch=4096, aside=TRAINING_ASIDE,
    ) as tier:  # fmt: skip
        assert tier.capacity == pytest.approx(plan.resident, rel=0.01)


def test_tables_on_one_machine_and_on_many() -> None:
    one = plan_tables(TableWorkload(10**9, 128, 65536), NODE)
    assert (one.nodes, one.resident < one.rows) == (1, True)
    many = plan_tables(TableWorkload(10**12, 128, 65536), NODE)
    assert many.limit == "rows a machine"
    assert many.nodes * many.rows >= 10**12 > (many.nodes - 1) * (2**31 - 1)
    assert many.index_bytes < many.dram_bytes < NODE.dram
    assert 0 < many.reads < many.distinct
    small = plan_tables(TableWorkload(1000, 64, 256), NODE)
    assert (small.reads, small.hit_ratio) == (0.0, pytest.approx(1.0))


def test_a_short_step_takes_more_machines() -> None:
    slow = dataclasses.replace(NODE, drive_iops=1000.0, dram=1 << 30)
    workload = TableWorkload(10**8, 512, 4096, exponent=0.5)
    easy = plan_tables(dataclasses.replace(workload, step_ms=1e5), slow)
    hard = plan_tables(dataclasses.replace(workload, step_ms=100.0), slow)
    assert (hard.limit, hard.nodes > 1, 0 < hard.io_ms <= 100.0) == ("step time", True, True)
    assert (easy.nodes < hard.nodes, easy.step_ms) == (True, 1e5)
    tighter = plan_tables(dataclasses.replace(workload, step_ms=hard.io_ms * 0.99), slow)
    assert tighter.nodes >= hard.nodes


def test_a_sample_tells_the_exponent() -> None:
    ids = np.random.default_rng(0).choice(50_000, 40_000, p=plain_shares(50_000, 0.8))
    plan = plan_tables(TableWorkload(50_000, 128, 1024, exponent=3.0), NODE, sample=ids)
    assert "exponent 0.8" in plan.assumptions[0] or "exponent 0.79" in plan.assumptions[0]


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        (np.array([1.5, 2.5]), "float64"),
        (np.zeros((2, 2), np.int64), "shape"),
        (np.array([7]), "two ids or more"),
        (np.arange(2000), "2,000 distinct ids, rows=1,000"),
    ],
)
def test_an_unfit_sample_is_refused(ids: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        plan_tables(TableWorkload(1000, 128, 64), NODE, sample=ids)


@pytest.mark.parametrize("field", ["rows", "row_bytes", "batch", "step_ms"])
def test_tables_of_nothing_are_refused(field: str) -> None:
    with pytest.raises(ValueError, match=f"{field}=0"):
        TableWorkload(**({"rows": 1, "row_bytes": 1, "batch": 1} | {field: 0}))


def test_a_replay_buffer_keeps_its_limits() -> None:
    workload = ReplayWorkload(10**10, 3072, 4096, add_rate=1e5, step_ms=50)
    plan = plan_replay(workload, NODE)
    fewer = dataclasses.replace(workload, samples=10**10 * (plan.nodes - 1) // plan.nodes)
    assert plan.samples * plan.nodes >= 10**10
    assert plan.disk_bytes <= NODE.disk_bytes
    assert plan.io_ms <= 50
    assert plan_replay(fewer, NODE).nodes < plan.nodes
    assert plan.written_bytes_per_s * plan.nodes == pytest.approx(2 * 1e5 * 3072)
    assert plan.reads == -(-plan.batch // 2)
    assert plan_replay(dataclasses.replace(workload, ratio=0.0), NODE).reads == 0


@pytest.mark.parametrize("field", ["samples", "sample_bytes", "batch", "step_ms"])
def test_a_buffer_of_nothing_is_refused(field: str) -> None:
    with pytest.raises(ValueError, match=f"{field}=0"):
        ReplayWorkload(**({"samples": 1, "sample_bytes": 1, "batch": 1} | {field: 0}))
