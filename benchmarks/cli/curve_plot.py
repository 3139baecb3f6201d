"""Miss-ratio curves drawn in a terminal, and saved as a picture."""

from pathlib import Path

import numpy as np

from memhier.budget import format_bytes
from memhier.lazy import extra_for
from memhier.planning.curves import MissRatioCurve

__all__ = ["draw_curves", "save_curves"]

_WIDTH, _HEIGHT = 72, 14


def draw_curves(curves: list[MissRatioCurve], row_bytes: int, dram_bytes: int) -> str:
    """Return curves as text: miss ratio upwards, DRAM on a logarithmic axis to the right, a bar at `dram_bytes`.

    The first curve is on top of the others.
    """
    sizes = curves[0].capacities * row_bytes
    low, high = np.log(sizes[0]), max(np.log(sizes[-1]), np.log(sizes[0]) + 1)
    columns = low + (high - low) * np.arange(_WIDTH) / (_WIDTH - 1)
    grid = [[" "] * _WIDTH for _ in range(_HEIGHT)]
    bar = round(float(np.clip((np.log(dram_bytes) - low) / (high - low), 0, 1)) * (_WIDTH - 1))
    for line in grid:
        line[bar] = "┊"
    marks = _marks(curves)
    for curve, mark in reversed(list(zip(curves, marks, strict=True))):
        ratios = np.interp(columns, np.log(curve.capacities * row_bytes), curve.miss_ratio)
        for column, ratio in enumerate(ratios):
            grid[round((1 - ratio) * (_HEIGHT - 1))][column] = mark
    labels = {0: "1.0", (_HEIGHT - 1) // 2: "0.5", _HEIGHT - 1: "0.0"}
    lines = [f"{labels.get(row, ''):>4} │{''.join(line).rstrip()}" for row, line in enumerate(grid)]
    left, right = format_bytes(int(sizes[0])), format_bytes(int(sizes[-1]))
    lines.append("     └" + "─" * _WIDTH)
    lines.append("      " + left + right.rjust(_WIDTH - len(left)))
    key = "  ".join(f"{mark} {curve.policy}" for curve, mark in zip(curves, marks, strict=True))
    return "\n".join([*lines, f"      {key}  ┊ {format_bytes(dram_bytes)}"])


def _marks(curves: list[MissRatioCurve]) -> list[str]:
    """Return a letter for each curve: the first letter of its policy's name that is free."""
    marks: list[str] = []
    for curve in curves:
        marks.append(next(letter for letter in curve.policy.upper() + "*" if letter not in marks))
    return marks


def save_curves(curves: list[MissRatioCurve], row_bytes: int, dram_bytes: int, path: str) -> None:
    """Save curves as a picture, with the error of sampled ones as a band.

    Raises
    ------
    ImportError
        Without matplotlib; the message names the extra to install.
    """
    with extra_for(Path(path).name):
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for curve in curves:
        size = curve.capacities * row_bytes
        (line,) = axes.plot(size, curve.miss_ratio, label=curve.policy)
        if curve.rate < 1:
            error = np.nan_to_num(curve.error)
            axes.fill_between(
                size, curve.miss_ratio - error, curve.miss_ratio + error, color=line.get_color(), alpha=0.2, linewidth=0
            )
    axes.axvline(dram_bytes, color="grey", linestyle=":", label=format_bytes(dram_bytes))
    axes.set(xscale="log", ylim=(0, 1), xlabel="DRAM for rows, bytes", ylabel="misses per access")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150, format="png")
