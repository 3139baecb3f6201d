"""The workload of item retrieval: its training, and its ways to the best items."""

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

torch = pytest.importorskip("torch")

from memhier.benchmarks.workloads.decode import items  # noqa: E402


def test_a_factorisation_learns_and_is_repeatable() -> None:
    visits = items.generated_visits(300, 200)
    assert len(visits.train) == 300 * 20
    assert not {*map(tuple, visits.train.tolist())} & {*map(tuple, visits.held_out.tolist())}
    model, again = (items.learn(visits, 8, 60) for _ in range(2))
    assert torch.equal(model.user.weight, again.user.weight)
    assert torch.equal(model.item.weight, again.item.weight)
    assert items.ranked_well(model, visits) > items.ranked_well(items.learn(visits, 8, 0), visits) + 0.2


def test_users_who_ask_were_not_learned_from() -> None:
    visits = items.generated_visits(300, 200)
    model = items.learn(visits, 8, 1)
    layer = items.layer_of(model)
    assert layer.weight.shape == (200, 8)
    assert not {*map(tuple, layer.learned.tolist())} & {*map(tuple, layer.asked.tolist())}
    with torch.no_grad():
        liked = model(torch.zeros(200, dtype=torch.int64), torch.arange(200))[0].numpy()
        user = model.user.weight[0].numpy()
    np.testing.assert_allclose(layer.weight @ user + layer.bias, liked, atol=1e-5)


def test_the_workload_compares_ways(tmp_path: Path) -> None:
    words = ["--generated", "600", "--k", "5", "--k", "60", "--width", "12", "--epochs", "4", "--rounds", "2",
             "--dir", str(tmp_path), "--json", str(tmp_path / "out.json")]  # fmt: skip
    told = CliRunner().invoke(items.main, words, catch_exceptions=False)
    assert told.exit_code == 0, told.output
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert {row["k"] for row in rows} == {5, 60}
    for row in rows:
        if row["way"] in ("full, fp32", "decoder, certified"):
            assert row["recall"] == 1
        elif row["way"] == "decoder, auto":
            assert row["recall"] > 0.97
        assert row["MiB"] > 0
    assert len({row["way"] for row in rows}) == 11
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


def test_missing_visits_are_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MEMHIER_DATA", str(tmp_path))
    told = CliRunner().invoke(items.main, ["--dir", str(tmp_path)])
    assert told.exit_code == 1
    assert "no data set 'gowalla'" in told.output
