"""The changes between two files of results that exceed the noise of either."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from rich.table import Table

from memhier.benchmarks.bench.figures import Figure
from memhier.benchmarks.bench.results import Row
from memhier.benchmarks.bench.summary import CLOCK, METRICS, TARGETS, at_recall, curve, script_records, search_peers
from memhier.benchmarks.bench.tables import machines_of, number, search_sizes
from memhier.benchmarks.machine import is_loaded

__all__ = ["Change", "Verdict", "change_cells", "changes", "compare_rows"]

# Two runs on one quiet machine differ by less than this share in CPU seconds. On a machine that others use, the same
# code took up to half as many again. Reads are counted exactly on either.
_LEAST_CHANGE, _LEAST_LOADED = 0.1, 0.5
# Of a figure that is counted: the rounding of floating-point sums in another order.
_ROUNDING = 1e-6
Verdict: TypeAlias = Literal["same", "better", "worse", "changed", "slower on the clock", "other settings"]


@dataclass(frozen=True, slots=True)
class Change:
    """A figure in both results.

    Attributes
    ----------
    where, metric
        Workload and peer or script; name of the figure. ``"reached"`` is a recall that one of the results does not
        reach, ``"measured"`` a workload or peer that one of them could not run: both 1 or 0.
    old, new
        The figures.
    verdict
        ``"worse"`` is a regression; ``"slower on the clock"`` is one of wall time on a machine that others used, and
        may be a neighbour's fault; ``"changed"`` is of a figure that is neither better nor worse;
        ``"other settings"`` of results that cannot be compared.
    """

    where: str
    metric: str
    old: float
    new: float
    verdict: Verdict


def changes(old: list[Row], new: list[Row]) -> list[Change]:
    """Return every figure that both results hold.

    A figure changes if its medians differ by more than a tenth (times on a machine that others used: by a half) and no
    round of one result lies within the rounds of the other. Any difference changes a figure that is counted exactly.
    """
    quiet = not any(map(is_loaded, (*old, *new)))
    return [*_stopped(old, new), *_search_changes(old, new, quiet), *_script_changes(old, new, quiet)]


def compare_rows(old: list[Row], new: list[Row]) -> tuple[Table, int]:
    """Return a table of the changes, and the number of regressions."""
    found = changes(old, new)
    cells = change_cells(found)
    table = Table(title=f"{len(found)} figures in both, {len(cells)} changed")
    for title in ("where", "metric", "old", "new", ""):
        table.add_column(title, overflow="fold")
    for line in cells:
        table.add_row(*line)
    if len(machines_of([*old, *new])) > 1:
        table.caption = "They were measured on different machines or kernels: a change may be theirs."
    return table, sum(change.verdict == "worse" for change in found)


def change_cells(found: list[Change]) -> list[list[str]]:
    """Return where, metric, old, new and verdict of each change, regressions first."""
    told = [change for change in found if change.verdict != "same"]
    told.sort(key=lambda change: change.verdict != "worse")
    return [[c.where, c.metric, number(c.old), number(c.new), c.verdict] for c in told]


def _stopped(old: list[Row], new: list[Row]) -> list[Change]:
    """Return the tasks that were measured once and fail now: without their rows a table would hide the worst."""
    kinds = ("build", "search", "script")
    done = [row for row in old if row["kind"] in kinds]
    # A whole workload may fail where its peers had each a task.
    before = {row["task"] for row in done} | {f"{row['workload']}/{row['size']}" for row in done}
    return [
        Change(f"{row['workload']} ({row['size']}) {row.get('peer', '')}".rstrip(), "measured", 1.0, 0.0, "worse")
        for row in new
        if row["kind"] == "failed" and row["task"] in before
    ]


def _script_changes(old: list[Row], new: list[Row], quiet: bool) -> list[Change]:
    out = []
    before = script_records(old)
    for key, (row, record) in script_records(new).items():
        if key not in before:
            continue
        where = f"{row['workload']} ({row['size']})"
        old_row, old_record = before[key]
        figures = {figure.name: figure for figure in old_record.figures}
        if old_row["settings"] != row["settings"]:
            out.append(Change(where, "all", 0.0, 0.0, "other settings"))
            continue
        for figure in record.figures:
            if figure.name in figures:
                verdict = _verdict(figures[figure.name], figure, quiet)
                name = f"{figure.name}, {figure.unit}"
                out.append(Change(where, name, figures[figure.name].value, figure.value, verdict))
    return out


def _search_changes(old: list[Row], new: list[Row], quiet: bool) -> list[Change]:
    out = []
    verdict: Verdict
    for workload, size in search_sizes(new):
        before, after = search_peers(old, workload, size), search_peers(new, workload, size)
        for peer in after:
            for target in TARGETS if peer in before else ():
                where = f"{workload} ({size}), {peer}, recall {target}"
                pair = [_figures_at(rounds, target) for rounds in (before[peer], after[peer])]
                if bool(pair[0]) != bool(pair[1]):
                    reached = bool(pair[1])
                    verdict = "better" if reached else "worse"
                    out.append(Change(where, "reached", float(not reached), float(reached), verdict))
                    continue
                for metric, first in pair[0].items():
                    second = pair[1][metric]
                    verdict = _verdict(first, second, quiet or metric == "pages")
                    out.append(Change(where, metric, first.value, second.value, verdict))
    return out


def _figures_at(rounds: list[Row], target: float) -> dict[str, Figure]:
    """Return every metric at a recall with its spread over single rounds; none if the recall is not reached."""
    points, singles = curve(rounds), [curve([row]) for row in rounds]
    out = {}
    for metric, (unit, less) in METRICS.items():
        whole = at_recall(points, target, metric)
        if whole is not None:
            values = [found[0] for single in singles if (found := at_recall(single, target, metric)) is not None]
            least, greatest = min([whole[0], *values]), max([whole[0], *values])
            better: Literal["less", "more"] = "less" if less else "more"
            out[metric] = Figure(metric, whole[0], unit, better, least, greatest, clock=metric in CLOCK)
    return out


def _verdict(old: Figure, new: Figure, quiet: bool) -> Verdict:
    overlap = old.least <= new.greatest and new.least <= old.greatest
    least = _LEAST_CHANGE if quiet else _LEAST_LOADED
    least = _ROUNDING if new.exact else least / (1 + least)
    if overlap or abs(new.value - old.value) <= least * max(abs(new.value), abs(old.value)):
        return "same"
    if new.better == "neither":
        return "changed"
    if (new.value < old.value) == (new.better == "less"):
        return "better"
    return "worse" if quiet or not new.clock else "slower on the clock"
