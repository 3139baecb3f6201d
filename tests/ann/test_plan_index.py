"""Plans of indexes: sizes beside those of real builds, effort beside real searches, answers to each question."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from memhier.ann import ZoomIndex
from memhier.ann.plan import IndexPlan, SearchWorkload, plan_index
from memhier.ann.plan.build_law import BuildLaw
from memhier.ann.plan.effort_law import EffortLaw
from memhier.ann.plan.geometry import find_geometry
from memhier.ann.plan.small_index import SmallIndex
from memhier.ann.zoom.construction.build import BuildOptions, write_index
from memhier.ann.zoom.preview.space import Metric
from memhier.ann.zoom.storage.catalog import KIND
from memhier.ann.zoom.storage.layout import IndexLayout
from memhier.planning.node import Node
from memhier.rows.rank_request import round_sizes
from memhier.store.store import Store

NODE = Node.parse("8 cores, 8 GiB, NVMe 500k IOPS 1 TB")


def clustered(count: int, dimension: int, seed: int = 0) -> npt.NDArray[np.float32]:
    random = np.random.default_rng(seed)
    centres = np.random.default_rng(99).normal(size=(200, dimension))
    points = centres[random.integers(0, 200, count)] + 0.5 * random.normal(size=(count, dimension))
    return points.astype(np.float32)


@pytest.fixture(scope="module")
def sample() -> npt.NDArray[np.float32]:
    return clustered(2048 + 256, 24)


@pytest.fixture(scope="module")
def plan(sample: npt.NDArray[np.float32]) -> IndexPlan:
    return plan_index(sample, SearchWorkload(4_000_000, qps=100), NODE, sample_rows=2048)


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "float16", "uint8"])
@pytest.mark.parametrize(("count", "dimension"), [(1, 3), (700, 1), (5000, 33), (3000, 1030)])
@pytest.mark.parametrize("metric", ["l2", "ip"])
def test_sizes_are_those_of_a_real_index(
    dtype: str, count: int, dimension: int, metric: Metric, tmp_path: Path
) -> None:
    vectors = np.random.default_rng(0).integers(1, 200, (count, dimension)).astype(dtype)
    dram = (2 << 20) + count * (dimension // 3 + 40)
    found = find_geometry(count, dimension, dtype, metric, dram)
    assert found is not None
    ZoomIndex.build(tmp_path / "index", vectors, metric=metric, dram=dram).close()
    with ZoomIndex.open(tmp_path / "index") as index:
        stats = index.stats()
    assert stats["planned_bytes"] <= found.layout.memory_bytes <= dram
    assert stats["lists"] == found.layout.lists
    assert found.layout.memory_bytes <= 1.1 * stats["planned_bytes"] + 65536
    assert abs(found.file_bytes - stats["file_bytes"]) <= 0.02 * stats["file_bytes"] + 131072


def test_a_budget_that_is_too_small_gives_no_sizes() -> None:
    assert find_geometry(10**6, 96, "float32", "l2", 1 << 20) is None


def test_a_small_index_has_the_layout_it_is_told(tmp_path: Path) -> None:
    layout = IndexLayout(7, "rabitq", 5, 24, True, 2, 0)
    with Store.create(tmp_path / "index", kind=KIND) as store:
        write_index(
            store, clustered(900, 24), None, None, None, BuildOptions("l2", "rabitq", 64 << 20, 0, 0, False, layout)
        )
    with ZoomIndex.open(tmp_path / "index") as index:
        stats = index.stats()
        assert (stats["lists"], stats["searches"], stats["dram"]) == (7, 2, 64 << 20)
        assert stats["code_bytes"] <= 5
        assert index.check() == []


def test_reads_of_a_search_come_in_the_rounds_of_the_simulation(tmp_path: Path) -> None:
    vectors = clustered(6000, 200)
    with ZoomIndex.build(tmp_path / "index", vectors, dram=1 << 20) as index:
        for query in clustered(40, 200, seed=5):
            stats = index.search(query, 10, recall=0.99).stats
            assert stats["rounds"] == len(round_sizes(stats["page_requests"], 10))


@pytest.mark.long
def test_reads_are_those_of_a_larger_index(tmp_path: Path) -> None:
    """Calibrated on 3,000 vectors, it predicts the reads among 12,000, with the same DRAM for each."""
    vectors, queries = np.split(np.random.default_rng(0).normal(size=(12_200, 24)).astype("float32"), [12_000])
    node = Node(1, int(np.ceil(12_000 * 60 / 0.85)), 1, 500_000.0)
    found = plan_index(vectors[:3000], SearchWorkload(12_000, qps=1), node, queries=queries, sample_rows=3000)
    ZoomIndex.build(tmp_path / "index", vectors, dram=12_000 * 60).close()
    with ZoomIndex.open(tmp_path / "index") as index:
        stats = [index.search(query, 10, recall=0.95).stats for query in queries]
        assert index.stats()["planned_bytes"] == pytest.approx(found.dram_bytes, rel=0.05)
    assert found.nodes == 1
    assert found.reads == pytest.approx(np.mean([each["page_requests"] for each in stats]), rel=0.25)
    assert found.probes == pytest.approx(np.mean([each["probed"] for each in stats]), rel=0.5)


@pytest.mark.long
def test_a_plan_keeps_its_machines_limits(plan: IndexPlan) -> None:
    assert plan.nodes == plan.shards * plan.replicas
    assert plan.vectors_per_shard * plan.shards >= 4_000_000
    assert plan.dram_bytes <= 0.85 * NODE.dram
    assert plan.build_disk_bytes >= plan.disk_bytes > 4_000_000 * 96 / plan.shards
    assert max(plan.cores, plan.drives, plan.searches) < 0.8
    assert plan.qps_most >= 100 / 0.7
    assert 0 < plan.p50_ms <= plan.p99_ms
    assert plan.build_hours > 0
    assert plan.ranges["reads"][0] <= plan.reads <= plan.ranges["reads"][1]
    assert plan.ranges["probes"][0] <= plan.probes <= plan.ranges["probes"][1]
    assert plan.cost_per_million(3.6) == pytest.approx(plan.nodes * 10.0)
    assert any("N^" in sentence for sentence in plan.assumptions)


@pytest.mark.long
def test_more_queries_take_more_machines(sample: npt.NDArray[np.float32], plan: IndexPlan) -> None:
    asked = 30 * plan.qps_most  # each plan measures the processor, which others may keep busy
    more = plan_index(sample, dataclasses.replace(plan.workload, qps=asked), NODE, sample_rows=2048)
    assert more.nodes > plan.nodes
    assert more.replicas >= 2
    assert more.workload.qps <= more.qps_most


@pytest.mark.long
def test_a_latency_that_no_machine_keeps_is_refused(sample: npt.NDArray[np.float32]) -> None:
    with pytest.raises(ValueError, match=r"p99_ms=1e-05: .* expected a limit above that"):
        plan_index(sample, SearchWorkload(10_000, p99_ms=1e-5), NODE, sample_rows=2048)


def test_vectors_that_no_machines_hold_are_refused(sample: npt.NDArray[np.float32]) -> None:
    tiny = dataclasses.replace(NODE, dram=1 << 20)
    with pytest.raises(ValueError, match="cannot hold 1,000,000,000,000 vectors"):
        plan_index(sample, SearchWorkload(10**12), tiny, sample_rows=2048)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"vectors": 0}, "vectors=0"),
        ({"recall": 1.0}, "recall=1.0"),
        ({"qps": 0.0}, "qps=0.0"),
        ({"k": 0}, "k=0"),
        ({"metric": "l1"}, "metric='l1'"),
        ({"p99_ms": -1.0}, "p99_ms=-1.0"),
    ],
)
def test_a_wrong_question_is_refused(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        SearchWorkload(**({"vectors": 10} | wrong))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"sample": np.zeros((100, 4), np.float32)}, "sample: 100 vectors: expected at least 2048"),
        ({"queries": np.zeros((5, 3), np.float32)}, "queries: 5 of dimension 3: expected one or more of 24"),
        ({"sample_rows": 5}, "sample_rows=5"),
        ({"cpu_factor": 0.0}, "cpu_factor=0.0"),
        ({"seed": -1}, "seed=-1"),
    ],
)
def test_a_wrong_argument_is_refused(given: dict[str, Any], words: str, sample: npt.NDArray[np.float32]) -> None:
    arguments = {"sample": sample, "workload": SearchWorkload(10_000), "node": NODE, "sample_rows": 2048} | given
    with pytest.raises(ValueError, match=words):
        plan_index(**arguments)


def made(vectors: int, growth: float) -> SmallIndex:
    """Return measurements that follow known laws: a call of 300 us, 10 ns a code, 5 us a page; 2 s + 1 us a vector."""
    scanned = np.full(50, 1000.0 * (vectors / 1000) ** growth)
    pages = np.full(50, 10.0 * (vectors / 1000) ** 0.2)
    layout = IndexLayout(vectors // 100, "rabitq", 8, 64, True, 8, 0)
    codes = scanned + layout.lists + 10 * 20.0
    cpu_s = 300e-6 + 10e-9 * codes + 5e-6 * pages
    phases = {"train": 2.0, "assign": 1e-6 * vectors, "encode": 1e-3, "calibrate": 1e-3, "write": 1e-3}
    waking = ((0.0, 0.0),)
    return SmallIndex(vectors, layout, np.full(50, 20.0), scanned, pages, pages, cpu_s, 10e-9, 5e-6, waking, phases)


def test_known_laws_are_found_again() -> None:
    small = [made(vectors, 0.3) for vectors in (8192, 16384, 32768, 65536)]
    law = EffortLaw.fit(small, 10)
    assert law.call_s == pytest.approx(300e-6, rel=1e-6)
    work = law.at(655_360, 6553)
    assert work.scanned == pytest.approx(1000 * 655.36**0.3, rel=0.01)
    assert work.pages == pytest.approx(10 * 655.36**0.2, rel=0.01)
    assert work.cpu_s == pytest.approx(300e-6 + 10e-9 * (work.scanned + 6553 + 10 * work.probed) + 5e-6 * work.pages)
    build = BuildLaw.fit(small)
    assert build.seconds(655_360, made(655_360, 0.3).layout) == pytest.approx(2 + 0.655, rel=0.1)


def test_no_query_scans_more_than_there_is() -> None:
    law = EffortLaw.fit([made(vectors, 1.0) for vectors in (4096, 8192, 16384)], 10)
    work = law.at(20_000, 15)
    assert work.probed <= 15
    assert work.scanned <= 20_000
