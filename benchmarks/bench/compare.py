"""Two files of results held against each other: what changed beyond the noise of either."""

from dataclasses import dataclass

from rich.table import Table

from memhier.benchmarks.bench.results import Row
from memhier.benchmarks.bench.summary import METRICS, TARGETS, at_recall, curve, search_peers
from memhier.benchmarks.bench.tables import number, search_sizes

__all__ = ["Change", "changes", "compare_rows"]

# Two runs on one quiet machine differ by less than this share in CPU seconds; the clock differs by more.
_LEAST_CHANGE = 0.1
_CLOCK = ("qps_wall", "p50_ms", "p99_ms")


@dataclass(frozen=True, slots=True)
class Change:
    """A figure in both results.

    Attributes
    ----------
    where, metric
        Workload, peer and recall; one of :data:`~memhier.benchmarks.bench.summary.METRICS`, or ``"reached"`` where a
        recall is reached in one of the results only.
    old, new
        The figures.
    verdict
        ``"same"``, ``"better"`` or ``"worse"``.
    """

    where: str
    metric: str
    old: float
    new: float
    verdict: str


def changes(old: list[Row], new: list[Row]) -> list[Change]:
    """Return every figure of search that both results hold.

    A change is one of the medians by more than a tenth where no round of one result lies within the rounds of the
    other. The clock is never called worse: a neighbour would be blamed on the code.
    """
    out = []
    for workload, size in search_sizes(new):
        before, after = search_peers(old, workload, size), search_peers(new, workload, size)
        for peer in after:
            for target in TARGETS:
                for metric in METRICS if peer in before else ():
                    where = f"{workload} ({size}), {peer}, recall {target}"
                    change = _change(where, before[peer], after[peer], target, metric)
                    out += [change] if change else []
    return out


def _change(where: str, old: list[Row], new: list[Row], target: float, metric: str) -> Change | None:
    pair = [at_recall(curve(rounds), target, metric) for rounds in (old, new)]
    if pair[0] is None or pair[1] is None:
        if pair[0] is pair[1] or metric != "cpu_ms":
            return None
        reached = pair[0] is None
        return Change(where, "reached", float(not reached), float(reached), "better" if reached else "worse")
    before, after = pair[0][0], pair[1][0]
    ratio = after / before if before else 1.0
    first, second = (_range(rounds, target, metric) for rounds in (old, new))
    overlap = first[0] <= second[1] and second[0] <= first[1]
    if overlap or 1 / (1 + _LEAST_CHANGE) <= ratio <= 1 + _LEAST_CHANGE:
        return Change(where, metric, before, after, "same")
    better = (ratio < 1) == METRICS[metric][1]
    return Change(where, metric, before, after, "same" if metric in _CLOCK else "better" if better else "worse")


def _range(rounds: list[Row], target: float, metric: str) -> tuple[float, float]:
    """Return the least and the greatest figure of single rounds."""
    singles = [found[0] for row in rounds if (found := at_recall(curve([row]), target, metric)) is not None]
    return min(singles, default=float("-inf")), max(singles, default=float("inf"))


def compare_rows(old: list[Row], new: list[Row]) -> tuple[Table, int]:
    """Return a table of what changed, and the number of regressions."""
    found = changes(old, new)
    told = [change for change in found if change.verdict != "same"]
    table = Table("where", "metric", "old", "new", "", title=f"{len(found)} figures in both, {len(told)} changed")
    for change in told:
        table.add_row(change.where, change.metric, number(change.old), number(change.new), change.verdict)
    return table, sum(change.verdict == "worse" for change in told)
