"""Results as sheets of text, and as tables for the terminal."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from memhier.benchmarks.bench.figures import Record
from memhier.benchmarks.bench.results import Row
from memhier.benchmarks.bench.summary import METRICS, TARGETS, at_recall, curve, search_peers
from memhier.benchmarks.machine import is_loaded

__all__ = [
    "Sheet", "builds_of", "command_of", "figure_sheet", "machines_of", "number", "problem_rows", "problem_sheets",
    "search_sheets", "search_sizes", "tables", "warnings_of",
]  # fmt: skip

BUILD_TITLES = (
    "peer", "version", "build CPU s", "build peak MiB", "files / raw", "DRAM B/vector: budget", "held by parameters",
    "found private", "most files in cache",
)  # fmt: skip
# File systems that keep everything in DRAM.
_IN_DRAM = ("tmpfs", "ramfs")


@dataclass(frozen=True, slots=True)
class Sheet:
    """A table of text."""

    caption: str
    titles: Sequence[str]
    rows: Sequence[Sequence[str]]


def search_sheets(rows: list[Row], workload: str, size: str) -> Iterator[Sheet]:
    """Yield the figures of a search workload at each recall, then its builds."""
    peers = {peer: curve(rounds) for peer, rounds in search_peers(rows, workload, size).items()}
    titles = ("peer", *(label for label, _ in METRICS.values()))
    for target in TARGETS:
        cells = []
        for peer, points in peers.items():
            found = [at_recall(points, target, metric) for metric in METRICS]
            cells.append([peer, *("not reached" if one is None else number(one[0]) for one in found)])
        yield Sheet(f"At recall@10 of {target}: medians over rounds, interpolated between efforts", titles, cells)
    yield Sheet("Builds and memory", BUILD_TITLES, builds_of(rows, workload, size))


def figure_sheet(record: Record) -> Sheet:
    """Return the figures of a script."""
    cells = [
        [figure.name, number(figure.value), number(figure.least), number(figure.greatest), figure.unit, figure.better,
         "clock" if figure.clock else "counted" if figure.exact else ""]
        for figure in record.figures
    ]  # fmt: skip
    return Sheet("figures", ("figure", "median", "least", "greatest", "unit", "better", ""), cells)


def problem_sheets(rows: list[Row]) -> list[Sheet]:
    """Return the tasks that were not measured, if there are any."""
    problems = problem_rows(rows)
    return [Sheet("Not measured", ("workload", "peer", "what", "why"), problems)] if problems else []


def tables(rows: list[Row]) -> Iterator[Table]:
    """Yield the sheets of every search workload, and of the problems, as tables."""
    sheets = [
        Sheet(f"{workload} ({size}). {sheet.caption}", sheet.titles, sheet.rows)
        for workload, size in search_sizes(rows)
        for sheet in search_sheets(rows, workload, size)
    ]
    for sheet in [*sheets, *problem_sheets(rows)]:
        justify: Any = "left" if sheet.caption == "Not measured" else "right"
        table = Table(title=sheet.caption)
        for title in sheet.titles:
            table.add_column(title, justify="left" if title == "peer" else justify, overflow="fold")
        for cells in sheet.rows:
            table.add_row(*cells)
        yield table


def search_sizes(rows: list[Row]) -> list[tuple[str, str]]:
    """Return workload and size of all search rows, each once."""
    return list(dict.fromkeys((row["workload"], row["size"]) for row in rows if row["kind"] == "search"))


def builds_of(rows: list[Row], workload: str, size: str) -> list[list[str]]:
    """Return the cells of the table of builds, titles not included."""
    out = []
    peers = search_peers(rows, workload, size)
    for row in rows:
        if row["kind"] != "build" or (row["workload"], row["size"]) != (workload, size):
            continue
        count = row["vectors"]
        found = peers.get(row["peer"], [])
        if not found:
            # Not zeros: its memory is unknown.
            out.append([*_built(row), "not searched", "", ""])
            continue
        private = max((point["private_bytes"] for search in found for point in search["rows"]), default=0)
        held = max((search["held_bytes"] for search in found), default=0)
        cached = max((point["cached_bytes"] for search in found for point in search["rows"]), default=0)
        over = " (over)" if private > row["dram_bytes"] else ""
        out.append([*_built(row), number(held / count), number(private / count) + over, number(cached / count)])
    return out


def _built(row: Row) -> list[str]:
    return [
        row["peer"], row["version"], number(row["cpu_s"]), number(row["peak_private_bytes"] / 2**20),
        f"{row['file_bytes'] / row['raw_bytes']:.2f}", number(row["dram_bytes"] / row["vectors"]),
    ]  # fmt: skip


def command_of(workload: str, size: str) -> str:
    """Return the command line that measures a workload."""
    return f"memhier bench run {workload} --suite {size}"


def warnings_of(rows: list[Row]) -> list[str]:
    """Return a sentence for each reason to read the figures with care."""
    out = []
    during = dict.fromkeys(str(row.get("workload", "the probe of the device")) for row in rows if is_loaded(row))
    if during:
        out.append(f"Others used this machine during {', '.join(during)}: trust CPU seconds and reads, not the clock.")
    if len(machines_of(rows)) > 1:
        out.append("These results are of several machines or kernels.")
    if any(row["device"].get("file_system") in _IN_DRAM for row in rows if row["kind"] == "machine"):
        out.append("The folder given as --work lies in DRAM: nothing was read from a device.")
    return out


def machines_of(rows: list[Row]) -> set[tuple[str, ...]]:
    """Return processor, cores and kernel of every machine that rows were measured on."""
    found = [row for row in rows if row["kind"] == "machine"]
    return {tuple(str(row.get(key, "")) for key in ("processor", "cores", "kernel")) for row in found}


def problem_rows(rows: list[Row]) -> list[list[str]]:
    """Return workload, peer, stage and reason of everything that was not measured."""
    failed = [
        [str(row["workload"]), str(row.get("peer", "")), f"{row['kind']} ({row.get('stage', '')})", str(row["why"])]
        for row in rows
        if row["kind"] in ("failed", "skipped")
    ]
    return failed + [
        [str(row["workload"]), "", f"interrupted ({row['size']})", "the run ended before; the same command goes on"]
        for row in rows
        if row["kind"] == "state" and row["state"] != "finished"
    ]


def number(value: float) -> str:
    """Return a figure with three digits or all before the point."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.3g}"
