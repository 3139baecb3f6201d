"""The picture of the demo: recall against latency."""

from collections.abc import Sequence
from pathlib import Path

from memhier.benchmarks.demo.measure import Cost

__all__ = ["plot_sweep"]


def plot_sweep(path: Path, costs: Sequence[Cost], chosen: Cost) -> None:
    """Write a PNG: one line for each number of lists scanned, one point for each number of full vectors read.

    Raises
    ------
    ImportError
        When matplotlib is not installed; the message names the extra that has it.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("the picture needs matplotlib: pip install 'memhier[plots]'", name="matplotlib") from error

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for nprobe in sorted({cost.nprobe for cost in costs}):
        line = sorted((cost for cost in costs if cost.nprobe == nprobe), key=lambda cost: cost.candidates)
        x, y = [cost.p50_ms for cost in line], [cost.recall for cost in line]
        axes.plot(x, y, marker="o", markersize=4, label=f"{nprobe} lists scanned")
        if nprobe == max(cost.nprobe for cost in costs):
            for cost in line:
                axes.annotate(f"{cost.candidates}", (cost.p50_ms, cost.recall), (0, -11), textcoords="offset points",
                              fontsize=7, ha="center")  # fmt: skip
    axes.plot(chosen.p50_ms, chosen.recall, marker="*", markersize=12, color="black", linestyle="none",
              label="tuned: cheapest with recall 0.99")  # fmt: skip
    axes.set(xlabel="latency p50, ms, one query at a time, from SSD", ylabel="recall@10 against exact search",
             xscale="log", title="Full vectors read for a query stand below the points")  # fmt: skip
    for axis_ticks in (axes.xaxis.set_major_formatter, axes.xaxis.set_minor_formatter):
        axis_ticks("{x:g}")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
