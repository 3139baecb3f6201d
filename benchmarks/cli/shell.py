"""Manners of all commands: figures as a table or JSON, text for terminals, pipes and files, and notes."""

import base64
import json
import math
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any, Literal

import click
from rich.console import Console
from rich.status import Status
from rich.table import Table
from rich.text import Text

from memhier.budget import format_bytes

__all__ = [
    "FiniteRange",
    "NameList",
    "Terminal",
    "in_a_folder",
    "json_option",
    "new_table",
    "notes",
    "plain_value",
    "print_figures",
    "report",
    "working",
    "write_json",
]

_UNLIMITED = 10_000  # columns of a file or a pipe
# All but tabs, ends of lines and those that rich leaves out: an index must not steer the terminal.
_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(7), *range(14, 32), *range(127, 160))}


class NameList(click.Choice[str]):
    """One or several of some names, with commas between them; each counts once."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return list(dict.fromkeys(super(NameList, self).convert(name.strip(), param, ctx) for name in value.split(",")))


class FiniteRange(click.FloatRange):
    """A range of numbers, without NaN and infinity."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the number."""
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


class Terminal(Console):
    """Standard output, or standard error: text is printed as it is, with control characters as ``\\x1b``.

    A narrow terminal folds lines. In a file or a pipe a line is as long as it must be, whatever COLUMNS says.
    """

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, markup=False, emoji=False, highlight=False)
        if not self.is_terminal:
            self.width = _UNLIMITED

    def render_str(self, text: str, **options: Any) -> Text:
        """Return text as rich prints it."""
        return super().render_str(text.expandtabs().translate(_CONTROLS), **options)

    def on_broken_pipe(self) -> None:
        """Let the command end, as by a plain print."""
        raise BrokenPipeError


def working(text: str) -> Status:
    """Return a block that names the work under way, on a terminal."""
    return Terminal(stderr=True).status(text, spinner="line")  # the plain one, which ASCII has


def new_table(*columns: tuple[str, Literal["left", "right"]], header: bool = True) -> Table:
    """Return a table whose cells are folded where a terminal is narrow, not cut."""
    table = Table(show_header=header)
    for name, side in columns:
        table.add_column(name, justify=side, overflow="fold")
    return table


def in_a_folder(ctx: click.Context, param: click.Parameter, value: Any) -> Any:
    """Refuse a FILE in a missing folder before long work, not after it."""
    if value not in (None, "-") and not os.access(Path(value).absolute().parent, os.W_OK):
        raise click.BadParameter(f"{value}: its folder does not exist or cannot be written to")
    return value


json_option = click.option("--json", "json_path", metavar="FILE", callback=in_a_folder,
                     type=click.Path(dir_okay=False, writable=True, allow_dash=True),
                     help="Write the figures as JSON to FILE; '-' prints them in place of the table.")  # fmt: skip


def plain_value(value: object) -> object:
    """Return a value that JSON lacks as one that it has: bytes as ``{"base64": text}``, datetimes in ISO 8601."""
    if isinstance(value, bytes):
        return {"base64": base64.b64encode(value).decode()}
    return value.isoformat() if isinstance(value, date) else str(value)


def write_json(value: Any, json_path: str | None) -> bool:
    """Write a value as JSON to `json_path` if it is given; return whether that is standard output."""
    if json_path == "-":
        click.echo(json.dumps(value, indent=2, default=plain_value))
    elif json_path is not None:
        Path(json_path).write_text(json.dumps(value, indent=2, default=plain_value) + "\n")
    return json_path == "-"


def report(title: str, figures: dict[str, Any], json_path: str | None, always: Sequence[str] = ()) -> None:
    """Print figures as a table, and write them to `json_path` if it is given.

    Parameters
    ----------
    title
        A line above the table.
    figures
        By name. The table leaves out zero and None; the JSON has all of them.
    json_path
        A file, ``"-"`` for JSON in place of the table, or None.
    always
        Names that are in the table with any value.
    """
    if write_json(figures, json_path):
        return
    terminal = Terminal()
    terminal.print(title)
    print_figures(terminal, figures, always)


def print_figures(terminal: Terminal, figures: dict[str, Any], always: Sequence[str] = ()) -> None:
    """Print the table of :func:`report`."""
    table = new_table(("", "left"), ("", "right"), header=False)
    for name, value in figures.items():
        zero = value is None or (not isinstance(value, bool | str) and value == 0)
        if not zero or name in always or "recall" in name:
            table.add_row(name.replace("_", " "), _plain(name, value))
    terminal.print(table)


def _plain(name: str, value: Any) -> str:
    if isinstance(value, bool | str) or value is None:
        return str(value)
    if name == "dram" or name.endswith("bytes"):
        return format_bytes(value)
    if isinstance(value, float):
        return f"{value:,.4f}" if "recall" in name else f"{value:,.1f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{value:,}"


@contextmanager
def notes() -> Iterator[None]:
    """Print warnings as notes, without the place in the code that they come from."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        yield
    for note in dict.fromkeys(str(warning.message) for warning in caught):
        click.echo(f"note: {note}", err=True)
