"""Plots: the places of bars and points, and axes that hold their numbers."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memhier.benchmarks.bench.axes import linear_scale, log_scale
from memhier.benchmarks.bench.figures import Bar, Bars, Curves, Series
from memhier.benchmarks.bench.plot import Line, bars_plot, curves_plot, line_plot


def test_plots_stand_in_their_frame() -> None:
    points = [(1.0, 5000.0, "x<y"), (0.2, 0.001, ""), (0.9, 0.0, "left out"), (0.8, 6000.0, "outdone")]
    svg = line_plot([Line("a&b", points)], "recall", "figure", less_is_better=True)
    assert "a&amp;b" in svg
    assert svg.count("<circle") == 3
    line = svg.split('<polyline points="')[1].split('"')[0]
    assert len(line.split()) == 2
    assert line.split()[0].startswith("76.0,")  # recall below the axis stands at its start
    assert "x&lt;y" in svg
    assert "No points" in line_plot([Line("a", [(0.9, 0.0, "")])], "recall", "figure", less_is_better=True)


def test_declared_curves_and_bars_are_drawn() -> None:
    lines = [Series("a<b", [(1.0, 0.0), (1000.0, 0.5)]), Series("empty", [])]
    svg = curves_plot(Curves("misses", "rows", "ratio", lines, log_x=True))
    assert svg.count("<circle") == 2
    assert "a&lt;b" in svg
    first = svg.split('<polyline points="')[1].split('"')[0].split()
    assert first[0] == "76.0,334.0"  # the start of both axes
    assert "No points" in curves_plot(Curves("none", "x", "y", []))
    drawn = bars_plot(Bars("accuracy", "%", [Bar("up", 40.0, 30.0, 50.0), Bar("down", -10.0, -10.0, -10.0)]))
    widths = [float(width) for width in re.findall(r'<rect [^>]* width="([^"]*)"', drawn)]
    assert widths[0] == pytest.approx(4 * widths[1], abs=0.2)
    assert "No bars" in bars_plot(Bars("none", "%", []))


@given(st.lists(st.floats(-1e9, 1e9), max_size=6))
def test_a_linear_axis_holds_its_numbers_between_round_marks(values: list[float]) -> None:
    scale = linear_scale(values)
    assert all(-1e-9 <= scale.share(value) <= 1 + 1e-9 for value in [0.0, *values])
    assert 2 <= len(scale.marks) <= 8
    assert list(scale.marks) == sorted(set(scale.marks))


@given(st.lists(st.floats(1e-9, 1e12), min_size=1, max_size=6))
def test_a_logarithmic_axis_holds_its_numbers(values: list[float]) -> None:
    scale = log_scale(values)
    assert all(-1e-9 <= scale.share(value) <= 1 + 1e-9 for value in values)
    assert 2 <= len(scale.marks) <= 13
