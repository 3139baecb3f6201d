"""The workload of declared recall: it prints the figures of its searches."""

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
from memhier.benchmarks.workloads.search import sets
from memhier.benchmarks.workloads.search.recall import Ask, main, measure
from memhier.benchmarks.workloads.search.sets import SearchCase


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

    monkeypatch.setattr(sets, "load_search_set", load)
    return data


def test_one_recall_is_measured_as_searched(small: SearchSet, tmp_path: Path) -> None:
    queries = small.queries[:20]
    ask = Ask.of(SearchCase(small.base, queries), 10, queries)
    ids = exact_neighbours(small.base, queries, 10)[0]
    assert np.array_equal(ask.ids, ids)
    with ZoomIndex.build(tmp_path / "index", small.base, dram="4MiB") as index:
        before = index.stats()
        sure = measure(index, [ask], 1.0, 10, batch=False)
        pages = index.stats()["pages"] - before["pages"]
        result = index.search(queries, 10, recall=0.5)
        loose = measure(index, [ask], 0.5, 10, batch=False)
        together = measure(index, [ask], 0.5, 10, batch=True)
        others = measure(index, [replace(ask, ids=ask.ids + 3_000)], 1.0, 10, batch=False)
        by_id = measure(index, [replace(ask, ids=ask.ids + 3_000)], 1.0, 10, batch=False, by_id=True)
    assert (sure["recall"], sure["id_recall"], sure["declared"], sure["left"]) == (1.0, 1.0, 1.0, 1.0)
    assert (others["recall"], others["id_recall"]) == (1.0, 0.0)  # as near, but not the ids expected
    assert by_id["recall"] == 0
    assert sure["pages"] == pages / 20
    assert loose["scanned"] == together["scanned"] == result.stats["scanned"] / 20
    assert together["recall"] == loose["recall"]
    pairs = zip(result.ids.tolist(), ids.tolist(), strict=True)
    hits = np.mean([len(set(found) & set(true)) / 10 for found, true in pairs])
    assert loose["id_recall"] == pytest.approx(hits)
    assert loose["id_recall"] <= loose["recall"]
    assert loose["scanned"] < sure["scanned"]
    assert loose["pages"] < sure["pages"]
    assert 1 <= loose["rounds"] <= result.stats["rounds"]


def test_every_form_and_recall_has_a_row(small: SearchSet, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    asked = [
        "--workload",
        "search-recall",
        "--data",
        "small",
        "--data",
        "absent",
        "--share",
        "12",
        "--queries",
        "20",
        "--json",
        str(out),
    ]
    result = CliRunner().invoke(main, asked, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert "skipped: no data set 'absent'" in result.output
    rows: list[dict[str, Any]] = json.loads(out.read_text())["results"]
    assert [(row["form"], row["declared"]) for row in rows] == [
        ("bounds", 0.95), ("bounds", 0.99), ("paper", 0.95), ("paper", 0.99),
    ]  # fmt: skip
    assert rows[1]["rounds"] >= rows[3]["rounds"] == 1  # the paper's form reads all it reads at once
    for row in rows:
        assert f"{row['recall']:,.4g}" in result.output
        assert f"recall@10, small, {row['form']}, {row['declared']} declared" in result.output
        assert row["recall"] > 0.9


def test_a_data_set_that_a_family_lacks_and_a_workload_that_is_none_are_refused(small: SearchSet) -> None:
    result = CliRunner().invoke(main, ["--data", "small"])
    assert result.exit_code == 2
    assert "'small': expected one of mixed, clusters" in " ".join(result.output.split())
    result = CliRunner().invoke(main, ["--workload", "search-sift"])
    assert result.exit_code == 2
    assert "'search-sift': expected one of search-declared" in " ".join(result.output.split())


def test_the_same_items_at_length_one_stand_beside_factors(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    options = ["--data", "clusters, sigma 1", "--count", "700", "--users", "50", "--share", "1", "--recall", "0.9"]
    result = CliRunner().invoke(main, ["--workload", "search-products", *options, "--json", str(out)])
    assert result.exit_code == 0, result.output
    figures = {figure["name"]: figure["value"] for figure in json.loads(out.read_text())["figures"]}
    at = "clusters, sigma 1, {}DRAM 1 of raw, 0.9 declared"
    varied, level = (figures[f"pages, {at.format(kind)}"] for kind in ("", "normalised, "))
    assert figures[f"pages by those of equal norms, {at.format('')}"] == pytest.approx(varied / level)


def test_a_budget_too_small_is_told_and_nothing_is_no_table(small: SearchSet) -> None:
    result = CliRunner().invoke(main, ["--workload", "search-recall", "--data", "small", "--share", "0.1"])
    assert result.exit_code == 1
    assert "skipped: small, bounds: dram=" in result.output
    assert "nothing was measured" in result.output
