"""Records of figures: bad numbers are refused, and a written record is read."""

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memhier.benchmarks.bench.figures import Bar, Bars, Curves, Figure, Record, Series

FINITE = st.floats(-1e6, 1e6)


@given(st.lists(FINITE, min_size=1, max_size=7))
def test_a_figure_is_the_median_and_its_spread(rounds: list[float]) -> None:
    figure = Figure.of("a", rounds, "ms", "less")
    ordered = sorted(rounds)
    middle = [ordered[(len(rounds) - 1) // 2], ordered[len(rounds) // 2]]
    assert figure.value == pytest.approx(sum(middle) / 2)
    assert (figure.least, figure.greatest) == (ordered[0], ordered[-1])
    bar = Bar.of("a", rounds)
    assert (bar.least, bar.value, bar.greatest) == (figure.least, figure.value, figure.greatest)


def test_a_single_number_has_no_spread() -> None:
    figure = Figure.of("a", 3, "reads", "less")
    assert (figure.least, figure.value, figure.greatest) == (3, 3, 3)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"value": math.nan}, "in this order"),
        ({"greatest": math.inf}, "in this order"),
        ({"least": 2.0}, "in this order"),
        ({"better": "smaller"}, "better='smaller'"),
        ({"paper": "Zoomed"}, "paper='Zoomed'"),
    ],
)
def test_a_figure_that_says_nothing_is_refused(changed: dict[str, object], words: str) -> None:
    whole = {"name": "a", "value": 1.0, "unit": "ms", "better": "less", "least": 1.0, "greatest": 1.5}
    with pytest.raises(ValueError, match=words):
        Record.read({"figures": [whole | changed]})


def test_other_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="rounds is empty"):
        Figure.of("a", [], "ms", "less")
    figure = Figure.of("twice", 1, "ms", "less")
    with pytest.raises(ValueError, match="twice"):
        Record([figure, figure])
    for raw in ({}, {"figures": [{"name": "a"}]}, {"figures": [], "curves": [{"title": "a"}]}):
        with pytest.raises(ValueError, match="not a record"):
            Record.read(raw)
    with pytest.raises(ValueError, match="no logarithm"):
        Curves("a", "x", "y", [Series("b", [(0.0, 1.0)])], log_x=True)
    with pytest.raises(ValueError, match="not finite"):
        Curves("a", "x", "y", [Series("b", [(0.0, math.nan)])])


def test_what_was_written_is_read(tmp_path: Path) -> None:
    record = Record(
        [Figure.of("a", [1, 2, 4], "ms", "less", clock=True, paper="FGD")],
        [Curves("c", "x", "y", [Series("s", [(1.0, 2.0), (3.0, 4.0)])], log_y=True)],
        [Bars("b", "%", [Bar.of("CarM", [60, 61])])],
        "small",
    )
    record.write(tmp_path / "out.json", rounds=3)
    raw = json.loads((tmp_path / "out.json").read_text())
    assert Record.read(raw) == record
    assert raw["rounds"] == 3
    assert raw["machine"]["cores"] > 0
