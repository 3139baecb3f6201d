"""The picture of the demo: recall against reads."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from memhier.benchmarks.cli.demo.measure import Cost
from memhier.lazy import extra_for

__all__ = ["plot_costs"]


def plot_costs(path: Path, lines: Mapping[str, Sequence[Cost]]) -> None:
    """Write a PNG: one named line for each index, one point for each recall that was declared.

    Raises
    ------
    ImportError
        When matplotlib is not installed; the message names the extra that has it.
    """
    with extra_for("the picture"):
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for name, costs in lines.items():
        axes.plot([cost.pages for cost in costs], [cost.recall for cost in costs], marker="o", markersize=4, label=name)
        for cost in costs:
            axes.annotate(f"{cost.declared:g}", (cost.pages, cost.recall), (0, -11), textcoords="offset points",
                          fontsize=7, ha="center")  # fmt: skip
    axes.set(xlabel="pages of 4 KiB read from SSD for a query", ylabel="recall@10 against exact search",
             title="The recall that was declared stands below the points")  # fmt: skip
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
