"""The harness of workloads: figures from rows, turns, and a command that prints, writes and reports missing data."""

import json
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from memhier.benchmarks.bench.figures import Figure, Record
from memhier.benchmarks.datasets import data_set_folder
from memhier.benchmarks.workloads.harness import Measure, Outcome, by_turns, figures_of, grouped, rows_table, workload

ROWS = [{"data": "a", "seed": 0, "ms": 1.0}, {"data": "b", "seed": 0, "ms": 5.0}, {"data": "a", "seed": 1, "ms": 3.0}]


def test_a_figure_is_over_the_rows_that_share_its_name() -> None:
    measure = Measure("ms", "time", "ms", clock=True, paper="FGD")
    assert figures_of(ROWS, [measure], "{title}, {data}") == [
        Figure("time, a", 2.0, "ms", "less", 1.0, 3.0, clock=True, paper="FGD"),
        Figure("time, b", 5.0, "ms", "less", 5.0, 5.0, clock=True, paper="FGD"),
    ]
    assert {key: len(rows) for key, rows in grouped(ROWS, "data").items()} == {("a",): 2, ("b",): 1}


def test_ways_take_turns() -> None:
    order: list[str] = []
    ways = {name: lambda name=name: order.append(name) or len(order) for name in "ab"}  # type: ignore[misc,func-returns-value]
    assert by_turns(ways, 2) == {"a": [1, 3], "b": [2, 4]}
    assert order == ["a", "b", "a", "b"]


@workload
@click.option("--count", default=3)
def sample(scratch: Path, count: int) -> Outcome:
    (scratch / "file").touch()
    figures = [Figure.of("count", count, "things", "more")]
    return Outcome(Record(figures), [rows_table("rows", ROWS)], {"place": str(scratch), "rows": ROWS})


@workload
def needy() -> Outcome:
    data_set_folder("nowhere")
    raise AssertionError("not reached")


def test_a_workload_prints_its_figures_and_writes_them(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    told = CliRunner().invoke(sample, ["--count", "7", "--dir", str(tmp_path), "--json", str(out)])
    assert told.exit_code == 0, told.output
    assert "processor" in told.output
    assert "count" in told.output
    written = json.loads(out.read_text())
    assert written["rows"] == ROWS
    assert Record.read(written).figures[0].value == 7
    assert Path(written["place"]).parent == tmp_path
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]  # the scratch folder is gone


def test_missing_data_are_an_error_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMHIER_DATA", str(tmp_path))
    told = CliRunner().invoke(needy, [])
    assert told.exit_code == 1
    assert told.output.startswith("Error: no data set 'nowhere'")
    assert "no such option" in CliRunner().invoke(needy, ["--dir", str(tmp_path)]).output.lower()
