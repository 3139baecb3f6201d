"""Line plots as inline SVG: they need no script, no font and no network."""

import math
from dataclasses import dataclass
from html import escape

__all__ = ["Line", "line_plot"]

_WIDTH, _HEIGHT = 640, 380
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 116, 14, 46
_COLOURS = ("#0b6e4f", "#c1121f", "#1d4ed8", "#b45309", "#7c3aed", "#0891b2", "#be185d", "#4d7c0f", "#475569")


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
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    high = max(high, low + 1)
    parts = [_axes(low, high, x_title, y_title)]
    for number, (name, points) in enumerate(drawn):
        colour = _COLOURS[number % len(_COLOURS)]
        best = _best(points, less_is_better)
        path = " ".join(f"{_x(x):.1f},{_y(y, low, high):.1f}" for x, y, _ in best)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8"/>')
        for x, y, words in [(_x(x), _y(y, low, high), words) for x, y, words in points]:
            title = escape(f"{name}: {words}")
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"><title>{title}</title></circle>')
        top = _TOP + 14 + 15 * number
        parts.append(f'<text x="{_WIDTH - _RIGHT + 8}" y="{top}" fill="{colour}" font-size="12">{escape(name)}</text>')
    label = escape(f"{y_title} against {x_title}")
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}" '
        f'font-family="sans-serif">{"".join(parts)}</svg>'
    )


def _best(points: list[tuple[float, float, str]], less_is_better: bool) -> list[tuple[float, float, str]]:
    """Return the points that none with at least their recall betters, by rising recall."""
    sign = 1 if less_is_better else -1
    kept: list[tuple[float, float, str]] = []
    for point in sorted(points, key=lambda point: (-point[0], sign * point[1])):
        if not kept or sign * point[1] < sign * kept[-1][1]:
            kept.append(point)
    return kept[::-1]


# Misses on a logarithmic scale from 50 % to 0.05 %: recall of 0.95 and 0.99 are as far apart as 0.75 and 0.95.
_MOST, _LEAST = 0.5, 0.0005


def _x(recall: float) -> float:
    missed = min(_MOST, max(_LEAST, 1 - recall))
    share = math.log(_MOST / missed) / math.log(_MOST / _LEAST)
    return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)


def _y(value: float, low: int, high: int) -> float:
    return _TOP + (high - math.log10(value)) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)


def _axes(low: int, high: int, x_title: str, y_title: str) -> str:
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    parts = [
        f'<rect x="{_LEFT}" y="{_TOP}" width="{right - _LEFT}" height="{bottom - _TOP}" fill="none" stroke="#999"/>'
    ]
    for recall in (0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999):
        x = _x(recall)
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{bottom}" stroke="#e3e3e3"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle" font-size="11">{recall:g}</text>')
    for power in range(low, high + 1):
        y = _y(10.0**power, low, high)
        parts.append(f'<line x1="{_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e3e3e3"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end" font-size="11">{10.0**power:,g}</text>')
    middle, centre = (_TOP + bottom) / 2, (_LEFT + right) / 2
    style = 'text-anchor="middle" font-size="12"'
    parts.append(
        f'<text x="{centre}" y="{_HEIGHT - 8}" {style}>{escape(x_title)}</text>'
        f'<text transform="translate(16 {middle}) rotate(-90)" {style}>{escape(y_title)}</text>'
    )
    return "".join(parts)
