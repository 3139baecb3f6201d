"""The workload of declared recall: what it prints is what its searches did."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from memhier.ann import ZoomIndex
from memhier.benchmarks.datasets import SearchSet
from memhier.benchmarks.exact import exact_neighbours
from memhier.benchmarks.workloads.search import recall
from memhier.benchmarks.workloads.search.recall import Truth, main, measure


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> SearchSet:
    """Three thousand vectors in forty clusters, and queries among them."""
    random = np.random.default_rng(0)
    centres = random.normal(size=(40, 24)) * 3
    points = (centres[random.integers(0, 40, 3_050)] + random.normal(size=(3_050, 24))).astype(np.float32)
    data = SearchSet("small", points[50:], points[:50])

    def load(name: str) -> SearchSet:
        if name != "small":
            raise FileNotFoundError(f"no data set {name!r}")
        return data

    monkeypatch.setattr(recall, "load_search_set", load)
    return data


def test_one_recall_is_measured_as_searched(small: SearchSet, tmp_path: Path) -> None:
    truth = Truth.of(small, 20)
    ids = exact_neighbours(small.base, small.queries[:20], 10)[0]
    assert np.array_equal(truth.ids, ids)
    with ZoomIndex.build(tmp_path / "index", small.base, dram="4MiB") as index:
        before = index.stats()
        sure = measure(index, truth, 1.0, "small", "bounds", 2.5)
        pages = index.stats()["pages"] - before["pages"]
        result = index.search(small.queries[:20], 10, recall=0.5)
        loose = measure(index, truth, 0.5, "small", "bounds", 2.5)
        memory = index.memory_bytes
        others = measure(index, replace(truth, ids=truth.ids + 3_000), 1.0, "small", "bounds", 2.5)
    assert (sure.recall, sure.id_recall, sure.declared, sure.build_cpu_s) == (1.0, 1.0, 1.0, 2.5)
    assert (others.recall, others.id_recall) == (1.0, 0.0)  # as near, but not the ids expected
    assert sure.pages == pages / 20
    assert loose.dram_share == memory / small.base.nbytes
    assert loose.scanned == result.stats["scanned"] / 20
    pairs = zip(result.ids.tolist(), ids.tolist(), strict=True)
    hits = np.mean([len(set(found) & set(true)) / 10 for found, true in pairs])
    assert loose.id_recall == pytest.approx(hits)
    assert loose.id_recall <= loose.recall
    assert loose.scanned < sure.scanned
    assert loose.pages < sure.pages
    assert 1 <= loose.rounds <= result.stats["rounds"]


def test_every_form_and_recall_has_a_row(small: SearchSet, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    asked = ["--data", "small", "--data", "absent", "--share", "12", "--queries", "20", "--json", str(out)]
    result = CliRunner().invoke(main, asked, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert "skipped: no data set 'absent'" in result.output
    rows: list[dict[str, Any]] = json.loads(out.read_text())["results"]
    assert [(row["form"], row["declared"]) for row in rows] == [
        ("bounds", 0.95), ("bounds", 0.99), ("paper", 0.95), ("paper", 0.99),
    ]  # fmt: skip
    assert rows[1]["rounds"] >= rows[3]["rounds"] == 1  # the paper's form reads all it reads at once
    for row in rows:
        assert f"{row['recall']:.4f}" in result.output
        assert f"{row['pages']:.1f}" in result.output
        assert row["recall"] > 0.9


def test_a_budget_too_small_is_told_and_nothing_is_no_table(small: SearchSet) -> None:
    result = CliRunner().invoke(main, ["--data", "small", "--share", "0.1"])
    assert result.exit_code == 1
    assert "skipped: small, bounds: dram=" in result.output
    assert "nothing was measured" in result.output
