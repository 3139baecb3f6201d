"""The record of a benchmark program: figures to compare, curves and bars to draw.

A script of the groups ``tiers``, ``decode``, ``embedding`` and ``replay`` is a module of
:mod:`memhier.benchmarks.workloads` with an option ``--json FILE``. It writes that file with :meth:`Record.write`::

    {"machine": {...},
     "figures": [{"name": "hidden", "value": 0.97, "unit": "share of the reads", "better": "more",
                  "least": 0.95, "greatest": 0.98, "clock": true, "exact": false, "paper": ""}],
     "curves":  [{"title": "a trace", "x": "rows in DRAM", "y": "misses per access", "log_x": true, "log_y": false,
                  "series": [{"name": "lru", "points": [[10, 0.9], [100, 0.5]]}]}],
     "bars":    [{"title": "accuracy", "unit": "%", "bars": [{"name": "CarM", "value": 61.0, "least": 60.2,
                  "greatest": 61.5}]}],
     "scale":   "50,000 words on two cores",
     ...more details, under names of the script's own}

``memhier bench compare`` compares figures of one name, so a name says the subject of a figure and never its result.
``memhier bench report`` draws curves and bars. ``memhier bench papers`` shows figures with a `paper` beside that
paper's headline, and `scale` as the difference to it.
"""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from memhier.benchmarks.machine import describe_machine

__all__ = ["Bar", "Bars", "Better", "Curves", "Figure", "Paper", "Record", "Series"]

Better = Literal["less", "more", "neither"]
Paper = Literal["", "Zoom", "FGD", "Bagpipe", "CarM"]


@dataclass(frozen=True, slots=True)
class Figure:
    """One number with its name, its unit and its spread.

    Attributes
    ----------
    name
        Subject, way and setting of the measurement; unique in its record and the same in every run.
    value
        The median over rounds.
    unit
        Such as ``"ms"``, ``"MB/s"`` or ``"times"``.
    better
        Whether ``"less"`` or ``"more"`` of it is better; ``"neither"`` for a description.
    least, greatest
        Over rounds or seeds; both equal `value` if there is only one.
    clock
        Whether it depends on wall time, which neighbours disturb: on a loaded machine it is no regression.
    exact
        Whether it was counted and is the same in every run, such as misses of a trace: any difference is a change. A
        measured figure changes if it leaves the old spread and differs by a tenth.
    paper
        The paper whose headline it answers, such as a speed-up over the paper's own rival.

    Raises
    ------
    ValueError
        When a number is not finite or not in order, or a word is not one of those above.

    Examples
    --------
    >>> Figure.of("hidden, numpy, one batch ahead", [0.97, 0.95, 0.98], "share of the reads", "more", clock=True).value
    0.97
    """

    name: str
    value: float
    unit: str
    better: Better
    least: float
    greatest: float
    clock: bool = False
    exact: bool = False
    paper: Paper = ""

    def __post_init__(self) -> None:
        """Refuse a number or a word that can be neither compared nor drawn."""
        _check_spread("figure", self.name, self.least, self.value, self.greatest)
        for argument, value, expected in (
            ("better", self.better, get_args(Better)),
            ("paper", self.paper, get_args(Paper)),
        ):
            if value not in expected:
                raise ValueError(f"figure {self.name!r}: {argument}={value!r}: expected one of {expected}")

    @classmethod
    def of(
        cls,
        name: str,
        rounds: float | Iterable[float],
        unit: str,
        better: Better,
        *,
        clock: bool = False,
        exact: bool = False,
        paper: Paper = "",
    ) -> "Figure":
        """Return the median of `rounds` with its least and greatest, or a single number as it is."""
        least, value, greatest = _spread(name, rounds)
        return cls(name, value, unit, better, least, greatest, clock, exact, paper)


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a plot: points ``(x, y)`` by rising x."""

    name: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Curves:
    """Lines over common axes, such as miss ratios against DRAM; `x` and `y` name the axes, with their units."""

    title: str
    x: str
    y: str
    series: Sequence[Series]
    log_x: bool = False
    log_y: bool = False

    def __post_init__(self) -> None:
        """Refuse points that cannot be drawn."""
        for line in self.series:
            for point in line.points:
                if not all(map(math.isfinite, point)):
                    raise ValueError(f"curves {self.title!r}, {line.name!r}: {point} is not finite")
                if (self.log_x and point[0] <= 0) or (self.log_y and point[1] <= 0):
                    raise ValueError(f"curves {self.title!r}, {line.name!r}: {point} has no logarithm")


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar with its spread."""

    name: str
    value: float
    least: float
    greatest: float

    def __post_init__(self) -> None:
        """Refuse a spread that cannot be drawn."""
        _check_spread("bar", self.name, self.least, self.value, self.greatest)

    @classmethod
    def of(cls, name: str, rounds: float | Iterable[float]) -> "Bar":
        """Return the median of `rounds` with its least and greatest, or a single number as it is."""
        least, value, greatest = _spread(name, rounds)
        return cls(name, value, least, greatest)


@dataclass(frozen=True, slots=True)
class Bars:
    """Bars of one unit beside each other, such as the accuracy of every method."""

    title: str
    unit: str
    bars: Sequence[Bar]


@dataclass(frozen=True, slots=True)
class Record:
    """The results of a script; the module's docstring shows them as JSON.

    Raises
    ------
    ValueError
        When two figures have one name.
    """

    figures: Sequence[Figure]
    curves: Sequence[Curves] = field(default_factory=tuple)
    bars: Sequence[Bars] = field(default_factory=tuple)
    scale: str = ""

    def __post_init__(self) -> None:
        """Refuse figures that a comparison could not tell apart."""
        names = [figure.name for figure in self.figures]
        double = sorted({name for name in names if names.count(name) > 1})
        if double:
            raise ValueError(f"figures={double}: expected names that are used once")

    def write(self, path: Path, **details: Any) -> None:
        """Write the record with the machine it was made on, and `details` beside it, as JSON."""
        path.write_text(json.dumps({"machine": describe_machine(), **asdict(self), **details}, indent=2) + "\n")

    @classmethod
    def read(cls, raw: dict[str, Any]) -> "Record":
        """Return a record that :meth:`write` wrote, without the script's own keys.

        Raises
        ------
        ValueError
            When it is not of this shape.
        """
        try:
            curves = [
                Curves(**(one | {"series": [Series(line["name"], _pairs(line["points"])) for line in one["series"]]}))
                for one in raw.get("curves", [])
            ]
            bars = [Bars(one["title"], one["unit"], [Bar(**bar) for bar in one["bars"]]) for one in raw.get("bars", [])]
            return cls([Figure(**figure) for figure in raw["figures"]], curves, bars, str(raw.get("scale", "")))
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a record of figures: {error!r}") from error


def _pairs(points: list[list[float]]) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in points]


def _spread(name: str, rounds: float | Iterable[float]) -> tuple[float, float, float]:
    values = [float(rounds)] if isinstance(rounds, int | float | np.number) else [float(value) for value in rounds]
    if not values:
        raise ValueError(f"{name!r}: rounds is empty: expected at least one number")
    return min(values), float(np.median(values)), max(values)


def _check_spread(kind: str, name: str, least: float, value: float, greatest: float) -> None:
    if not (math.isfinite(least) and math.isfinite(greatest) and least <= value <= greatest):
        raise ValueError(
            f"{kind} {name!r}: least={least}, value={value}, greatest={greatest}: expected finite numbers in this order"
        )
