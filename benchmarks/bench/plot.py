"""Plots as inline SVG: they need no script, no font and no network."""

from dataclasses import dataclass
from html import escape

from memhier.benchmarks.bench.axes import COLOURS, Frame, Scale, fitted, linear_scale, log_scale, recall_scale
from memhier.benchmarks.bench.figures import Bars, Curves
from memhier.benchmarks.bench.tables import number

__all__ = ["Line", "bars_plot", "curves_plot", "line_plot"]

_BAR, _BAR_GAP, _BAR_WIDTH, _LETTER = 20, 8, 720, 6.8
# Letters of a bar's name: half of the plot is left for the bars.
_NAME = 50


@dataclass(frozen=True, slots=True)
class Line:
    """One competitor: points ``(x, y, words)`` by rising x; the words appear under the pointer."""

    name: str
    points: list[tuple[float, float, str]]


def line_plot(lines: list[Line], x_title: str, y_title: str, *, less_is_better: bool) -> str:
    """Return an SVG of recall (0 to 1) on an axis that opens up towards 1, against a logarithmic figure.

    A line joins the points that no other of its competitor outdoes; the rest stand alone. Points without a positive y
    cannot be drawn and are left out.
    """
    drawn = [(line.name, [p for p in line.points if p[1] > 0]) for line in lines]
    values = [y for _, points in drawn for _, y, _ in points]
    if not values:
        return f"<p>No points for {escape(y_title)}.</p>"
    frame = Frame(recall_scale(), log_scale(values), x_title, y_title, [name for name, _ in drawn])
    for line, (name, points) in enumerate(drawn):
        frame.add_line(line, [(x, y) for x, y, _ in _best(points, less_is_better)])
        for x, y, words in points:
            frame.add_point(line, (x, y), f"{name}: {words}")
    return frame.svg()


def curves_plot(curves: Curves) -> str:
    """Return an SVG of the curves that a script declared, over axes as it declared them."""
    points = [point for series in curves.series for point in series.points]
    if not points:
        return f"<p>No points for {escape(curves.title)}.</p>"
    x, y = (_scale([point[axis] for point in points], log) for axis, log in enumerate((curves.log_x, curves.log_y)))
    frame = Frame(x, y, curves.x, curves.y, [series.name for series in curves.series])
    for line, series in enumerate(curves.series):
        frame.add_line(line, list(series.points))
        for point in series.points:
            frame.add_point(line, point, f"{series.name}: {number(point[0])}, {number(point[1])}")
    return f"<figure><figcaption>{escape(curves.title)}</figcaption>{frame.svg()}</figure>"


def bars_plot(bars: Bars) -> str:
    """Return an SVG of bars below each other, their spread as a line over their end."""
    if not bars.bars:
        return f"<p>No bars for {escape(bars.title)}.</p>"
    letters = min(_NAME, max(len(bar.name) for bar in bars.bars))
    left = 12 + _LETTER * letters
    width = _BAR_WIDTH - left - 110
    scale = linear_scale([value for bar in bars.bars for value in (bar.least, bar.greatest)])
    start = left + scale.share(0) * width
    parts = []
    for index, bar in enumerate(bars.bars):
        top = index * (_BAR + _BAR_GAP) + 4
        least, end, most = (left + scale.share(value) * width for value in (bar.least, bar.value, bar.greatest))
        middle = top + _BAR / 2
        shown = f"{number(bar.value)} ({number(bar.least)} to {number(bar.greatest)})"
        parts.append(
            f'<text x="{left - 6:.1f}" y="{middle + 4}" text-anchor="end" font-size="12">'
            f"{fitted(bar.name, letters)}</text>"
            f'<rect x="{min(start, end):.1f}" y="{top}" width="{max(abs(end - start), 1):.1f}" height="{_BAR}" '
            f'fill="{COLOURS[index % len(COLOURS)]}"><title>{escape(f"{bar.name}: {shown} {bars.unit}")}</title></rect>'
            f'<line x1="{least:.1f}" x2="{most:.1f}" y1="{middle}" y2="{middle}" stroke="#111" stroke-width="2"/>'
            f'<text x="{max(end, most, start) + 6:.1f}" y="{middle + 4}" font-size="12">{number(bar.value)}</text>'
        )
    height = len(bars.bars) * (_BAR + _BAR_GAP) + 8
    title = escape(f"{bars.title}, {bars.unit}")
    drawn = (
        f'<svg viewBox="0 0 {_BAR_WIDTH} {height}" role="img" aria-label="{title}" '
        f'font-family="sans-serif">{"".join(parts)}</svg>'
    )
    return f"<figure><figcaption>{title}</figcaption>{drawn}</figure>"


def _scale(values: list[float], log: bool) -> Scale:
    return log_scale(values) if log else linear_scale(values)


def _best(points: list[tuple[float, float, str]], less_is_better: bool) -> list[tuple[float, float, str]]:
    """Return the points that none with at least their recall betters, by rising recall."""
    sign = 1 if less_is_better else -1
    kept: list[tuple[float, float, str]] = []
    for point in sorted(points, key=lambda point: (-point[0], sign * point[1])):
        if not kept or sign * point[1] < sign * kept[-1][1]:
            kept.append(point)
    return kept[::-1]
