"""Axes of a plot as inline SVG: the marks, and the place of each number."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from html import escape

__all__ = ["COLOURS", "Frame", "Scale", "fitted", "linear_scale", "log_scale", "recall_scale"]

COLOURS = ("#0b6e4f", "#c1121f", "#1d4ed8", "#b45309", "#7c3aed", "#0891b2", "#be185d", "#4d7c0f", "#475569")
_WIDTH, _HEIGHT = 640, 380
_LEFT, _TOP, _BOTTOM = 76, 14, 46
# The width of a letter of the legend, and the most that the legend takes of the plot.
_LETTER, _LEGEND = 6.6, 260
_TICKS = 5
# Numbers nearer to each other than this are one: a step between them would have no round number.
_FLAT = 1e-12
# Misses on a logarithmic scale from 50 % to 0.05 %: recall of 0.95 and 0.99 are as far apart as 0.75 and 0.95.
_MOST, _LEAST = 0.5, 0.0005


@dataclass(frozen=True, slots=True)
class Scale:
    """One axis: `share` maps a number to 0 (its start) to 1 (its end); `marks` are the numbers with a line."""

    share: Callable[[float], float]
    marks: tuple[float, ...]


def recall_scale() -> Scale:
    """Return an axis of recall, 0 to 1, that opens up towards 1."""

    def share(recall: float) -> float:
        missed = min(_MOST, max(_LEAST, 1 - recall))
        return math.log(_MOST / missed) / math.log(_MOST / _LEAST)

    return Scale(share, (0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999))


def log_scale(values: Iterable[float]) -> Scale:
    """Return an axis of whole powers of ten around positive numbers."""
    logs = [math.log10(value) for value in values]
    low = math.floor(min(logs))
    high = max(math.ceil(max(logs)), low + 1)
    # Beyond a dozen powers the numbers would run into each other.
    step = -(-(high - low) // 12)
    marks = tuple(10.0**power for power in range(low, high + 1, step))
    return Scale(lambda value: (math.log10(value) - low) / (high - low), marks)


def linear_scale(values: Iterable[float]) -> Scale:
    """Return an axis from 0, or from the least number below it, with marks at round numbers."""
    numbers = [0.0, *values]
    low, high = min(numbers), max(numbers)
    if high - low < _FLAT:
        high = low + 1
    step = 10.0 ** math.floor(math.log10((high - low) / _TICKS))
    step *= next(factor for factor in (1, 2, 5, 10) if (high - low) / (factor * step) <= _TICKS)
    first, last = math.floor(low / step), math.ceil(high / step)
    marks = tuple(number * step for number in range(first, last + 1))
    return Scale(lambda value: (value - marks[0]) / (marks[-1] - marks[0]), marks)


def fitted(name: str, letters: int) -> str:
    """Return the inside of an SVG text of so many letters; a longer name appears whole under the pointer."""
    if len(name) <= letters:
        return escape(name)
    return f"<title>{escape(name)}</title>{escape(name[: letters - 1])}…"


class Frame:
    """A plot in the making: the axes, lines and points on them, and the names beside it."""

    def __init__(self, x: Scale, y: Scale, x_title: str, y_title: str, names: list[str]) -> None:
        self._x, self._y = x, y
        self._label = f"{y_title} against {x_title}"
        legend = min(_LEGEND, 20 + _LETTER * max((len(name) for name in names), default=0))
        self._right, self._bottom = _WIDTH - legend, _HEIGHT - _BOTTOM
        self._parts = [
            f'<rect x="{_LEFT}" y="{_TOP}" width="{self._right - _LEFT:.1f}" height="{self._bottom - _TOP}" '
            'fill="none" stroke="#999"/>'
        ]
        self._mark_axes(x_title, y_title)
        for number, name in enumerate(names):
            place = f'x="{self._right + 8:.1f}" y="{_TOP + 14 + 15 * number}"'
            words = fitted(name, int((_LEGEND - 20) / _LETTER))
            self._parts.append(f'<text {place} fill="{self.colour(number)}" font-size="12">{words}</text>')

    @staticmethod
    def colour(number: int) -> str:
        """Return the colour of the line of this number."""
        return COLOURS[number % len(COLOURS)]

    def place(self, x: float, y: float) -> tuple[float, float]:
        """Return the place of a point."""
        width, height = self._right - _LEFT, self._bottom - _TOP
        return _LEFT + self._x.share(x) * width, self._bottom - self._y.share(y) * height

    def add_line(self, number: int, points: list[tuple[float, float]]) -> None:
        """Join points in their order."""
        path = " ".join("{:.1f},{:.1f}".format(*self.place(x, y)) for x, y in points)
        stroke = f'stroke="{self.colour(number)}" stroke-width="1.8"'
        self._parts.append(f'<polyline points="{path}" fill="none" {stroke}/>')

    def add_point(self, number: int, point: tuple[float, float], words: str) -> None:
        """Draw a dot; the words appear under the pointer."""
        x, y = self.place(*point)
        dot = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{self.colour(number)}">'
        self._parts.append(f"{dot}<title>{escape(words)}</title></circle>")

    def svg(self) -> str:
        """Return the plot."""
        return (
            f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(self._label)}" '
            f'font-family="sans-serif">{"".join(self._parts)}</svg>'
        )

    def _mark_axes(self, x_title: str, y_title: str) -> None:
        line = 'stroke="#e3e3e3"/>'
        for mark in self._x.marks:
            x = _LEFT + self._x.share(mark) * (self._right - _LEFT)
            self._parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{self._bottom}" {line}')
            place = f'x="{x:.1f}" y="{self._bottom + 16}" text-anchor="middle" font-size="11"'
            self._parts.append(f"<text {place}>{mark:,.9g}</text>")
        for mark in self._y.marks:
            y = self._bottom - self._y.share(mark) * (self._bottom - _TOP)
            self._parts.append(f'<line x1="{_LEFT}" x2="{self._right:.1f}" y1="{y:.1f}" y2="{y:.1f}" {line}')
            place = f'x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end" font-size="11"'
            self._parts.append(f"<text {place}>{mark:,.9g}</text>")
        middle, centre = (_TOP + self._bottom) / 2, (_LEFT + self._right) / 2
        style = 'text-anchor="middle" font-size="12"'
        self._parts.append(
            f'<text x="{centre:.1f}" y="{_HEIGHT - 8}" {style}>{escape(x_title)}</text>'
            f'<text transform="translate(14 {middle}) rotate(-90)" {style}>{escape(y_title)}</text>'
        )
