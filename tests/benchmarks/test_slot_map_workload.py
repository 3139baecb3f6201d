"""The slot map's benchmark at a size that takes no time: its answers agree, its words and figures come out."""

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from memhier.benchmarks.workloads.tiers import slot_map


def test_prints_and_writes_every_way(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    sizes = ["--ids", "300", "--slots", "50", "--universe", "1000", "--rounds", "3"]
    done = CliRunner().invoke(slot_map.main, [*sizes, "--json", str(out)], catch_exceptions=False)
    assert done.exit_code == 0
    assert "300 ids, 50 slots" in done.output
    written = json.loads(out.read_text())
    assert set(written["results"]) == {"zipf 1.05", "uniform"}
    for ways in written["results"].values():
        assert list(ways) == ["np.unique + searchsorted", "SlotMap", "SlotMap, key_space"]
        assert all(taken["median_ms"] >= taken["p10_ms"] >= 0 for taken in ways.values())


def test_wrong_answers_stop_it() -> None:
    ids = np.array([5, 6, 5])
    right = (np.array([5, 6]), np.array([0, 1, 0]), np.array([3, -1]))
    wrong = (np.array([5, 6]), np.array([0, 1, 0]), np.array([3, 4]))
    with pytest.raises(AssertionError, match="disagree"):
        slot_map._check(ids, [right, wrong])
