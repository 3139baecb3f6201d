"""The harness of every workload: options, one thread, rounds by turns, figures, tables, and the record as JSON."""

import functools
import inspect
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import click
from rich.console import Console
from rich.table import Table

from memhier.benchmarks.bench.figures import Bar, Bars, Better, Figure, Paper, Record
from memhier.benchmarks.bench.tables import figure_sheet
from memhier.benchmarks.machine import describe_machine

__all__ = [
    "Measure",
    "Outcome",
    "Row",
    "bars_of",
    "by_turns",
    "figures_of",
    "grouped",
    "rows_table",
    "skip",
    "workload",
]

Row: TypeAlias = dict[str, Any]
T = TypeVar("T")

_WIDTH = 160


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a workload.

    Attributes
    ----------
    record
        Figures, curves and bars.
    shown
        Tables and lines to print before the table of figures.
    details
        More keys of the JSON file.
    """

    record: Record
    shown: Sequence[Table | str] = ()
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Measure:
    """One column of rows as a figure: its title, its unit, the better direction, and the paper that it answers."""

    column: str
    title: str
    unit: str
    better: Better = "less"
    clock: bool = False
    paper: Paper = ""


def workload(run: Callable[..., Outcome]) -> click.Command:
    """Make a command of a function with click options: it prints the outcome and takes ``--json``.

    A function with a parameter `scratch` gets a temporary folder, and the command ``--dir``, the folder's parent. All
    thread pools of torch and faiss have one thread. A missing data set is an error in one line.
    """
    in_folder = "scratch" in inspect.signature(run).parameters

    @functools.wraps(run)
    def command(out: Path | None, folder: Path | None = None, **options: Any) -> None:
        _limit_threads()
        try:
            if in_folder:
                with tempfile.TemporaryDirectory(dir=folder) as scratch:
                    outcome = run(scratch=Path(scratch), **options)
            else:
                outcome = run(**options)
        except FileNotFoundError as error:
            raise click.ClickException(str(error)) from error
        console = Console()
        if console.width < _WIDTH:  # a broken line is better than a number cut short
            console = Console(width=_WIDTH)
        console.print(", ".join(f"{name} {value}" for name, value in describe_machine().items()), highlight=False)
        for part in (*outcome.shown, _figures_table(outcome.record)):
            console.print(part, highlight=False)
        if out is not None:
            outcome.record.write(out, **outcome.details)

    decorated = click.option("--json", "out", type=click.Path(path_type=Path), help="Write the figures to this file.")(
        command
    )
    if in_folder:
        kind = click.Path(exists=True, file_okay=False, writable=True, path_type=Path)
        help_text = "A folder on the device to measure; the temporary one by default."
        decorated = click.option("--dir", "folder", type=kind, help=help_text)(decorated)
    return click.command(help=inspect.getdoc(sys.modules[run.__module__]))(decorated)


def skip(words: object) -> None:
    """Report on stderr a part of a workload that is skipped."""
    Console(stderr=True).print(f"skipped: {words}")


def by_turns(ways: Mapping[str, Callable[[], T]], rounds: int) -> dict[str, list[T]]:
    """Call the ways one after the other, round after round; return the results of each.

    A neighbour on the machine then disturbs all ways alike.
    """
    results: dict[str, list[T]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            results[name].append(way())
    return results


def grouped(rows: Iterable[Row], *columns: str) -> dict[tuple[Any, ...], list[Row]]:
    """Return the rows by their values in some columns, in the order of their first rows."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[column] for column in columns), []).append(row)
    return groups


def figures_of(rows: Sequence[Row], measures: Sequence[Measure], name: str) -> list[Figure]:
    """Return a figure for each measure and each distinct name, over the rows that share the name.

    `name` is a format of the measure's title and the columns, such as ``"{title}, {data}, {declared:g} declared"``.
    """
    figures = []
    for one in measures:
        values: dict[str, list[float]] = {}
        for row in rows:
            values.setdefault(name.format(title=one.title, **row), []).append(row[one.column])
        figures += [
            Figure.of(at, rounds, one.unit, one.better, clock=one.clock, paper=one.paper)
            for at, rounds in values.items()
        ]
    return figures


def bars_of(title: str, unit: str, values: dict[str, Any]) -> Bars:
    """Return a bar for each name, over the values of its rounds."""
    return Bars(title, unit, [Bar.of(name, rounds) for name, rounds in values.items()])


def rows_table(title: str, rows: Sequence[Row]) -> Table:
    """Return a table with a column for each key of the first row."""
    table = Table(title=title, title_justify="left")
    for column, value in rows[0].items():
        table.add_column(column.replace("_", " "), justify="left" if isinstance(value, str) else "right")
    for row in rows:
        table.add_row(*(f"{value:,.4g}" if isinstance(value, float) else str(value) for value in row.values()))
    return table


def _figures_table(record: Record) -> Table:
    sheet = figure_sheet(record)
    table = Table(*sheet.titles, title=sheet.caption, title_justify="left")
    for cells in sheet.rows:
        table.add_row(*cells)
    return table


def _limit_threads() -> None:
    """Give one thread to the pools that are loaded: figures are per core."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    if "faiss" in sys.modules:
        sys.modules["faiss"].omp_set_num_threads(1)
