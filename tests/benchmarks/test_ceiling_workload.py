"""The workload of the DRAM ceiling: all ways answer the same queries, and the cheapest that is good enough counts."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from memhier.benchmarks.workloads.search.ceiling import cheapest, main, ratios

COLD, HELD, SCAN = "memhier, cold", "memhier, all in DRAM", "faiss fast-scan, codes of 16"


@pytest.mark.long
def test_every_way_is_measured_and_dram_for_all_reads_nothing(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    arguments = ["--data", "clusters", "--vectors", "5000", "--queries", "20", "--share", "1", "--recall", "0.6"]
    result = CliRunner().invoke(main, [*arguments, "--dir", str(tmp_path), "--json", str(out)])
    assert result.exit_code == 0, result.output
    rows = json.loads(out.read_text())["results"]
    by_way = {name: [row for row in rows if row["way"] == name] for name in (COLD, HELD, SCAN)}
    assert len(by_way[COLD]) == len(by_way[HELD]) == 9
    assert all(row["reads"] == 0 for row in by_way[HELD] + by_way[SCAN])
    assert all(row["reads"] > 0 for row in by_way[COLD])
    for rows_of in by_way.values():
        assert max(row["recall"] for row in rows_of) > 0.9
    assert by_way[COLD][0]["dram_share"] < 1 < by_way[HELD][0]["dram_share"]
    titles = [figure["name"] for figure in json.loads(out.read_text())["figures"]]
    assert f"CPU of {HELD}, by the better peer, clusters, 0.6 or more" in titles


def test_the_cheapest_setting_that_reaches_a_recall_counts() -> None:
    settings = [
        (COLD, 0.9, 2.0), (COLD, 0.95, 3.0), (HELD, 0.96, 1.0), (SCAN, 0.8, 1.0), (SCAN, 0.9, 4.0),
        ("hnswlib", 0.9, 0.5), ("hnswlib", 0.89, 0.1),
    ]  # fmt: skip
    rows = [{"way": way, "recall": recall, "cpu_ms": cpu} for way, recall, cpu in settings]
    best = cheapest(rows, 0.9)
    assert {name: row["cpu_ms"] for name, row in best.items()} == {COLD: 2.0, HELD: 1.0, SCAN: 4.0, "hnswlib": 0.5}
    assert [figure.value for figure in ratios(best, "here")] == [0.5, 2.0]
    assert {*cheapest(rows, 0.95)} == {COLD, HELD}
    assert not [*ratios(cheapest(rows, 0.95), "here")]
