"""Manners of all commands: figures as a table or JSON, notes, and termination that cleans up."""

import json
import os
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from memhier.budget import format_bytes

__all__ = ["notes", "report", "terminable"]


def _in_a_folder(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """Refuse a FILE in a missing folder before a long build, not after it."""
    if value not in (None, "-") and not os.access(Path(value).absolute().parent, os.W_OK):
        raise click.BadParameter(f"{value}: its folder does not exist or cannot be written to")
    return value


json_option = click.option("--json", "json_path", metavar="FILE", callback=_in_a_folder,
                     type=click.Path(dir_okay=False, writable=True, allow_dash=True),
                     help="Write the figures as JSON to FILE; '-' prints them in place of the table.")  # fmt: skip


def report(title: str, figures: dict[str, Any], json_path: str | None) -> None:
    """Print figures as a table, and write them to `json_path` if it is given."""
    if json_path == "-":
        click.echo(json.dumps(figures, indent=2))
        return
    if json_path is not None:
        Path(json_path).write_text(json.dumps(figures, indent=2) + "\n")
    table = Table(show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, value in figures.items():
        table.add_row(name.replace("_", " "), _plain(name, value))
    console = Console()
    console.print(title, markup=False, highlight=False)
    console.print(table)


def _plain(name: str, value: Any) -> str:
    if isinstance(value, bool | str) or value is None:
        return str(value)
    if name == "dram" or name.endswith("bytes"):
        return format_bytes(value)
    return f"{value:,.4f}" if "recall" in name else f"{value:,.1f}" if isinstance(value, float) else f"{value:,}"


@contextmanager
def notes() -> Iterator[None]:
    """Print warnings as notes, without the place in the code that they come from."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        yield
    for note in dict.fromkeys(str(warning.message) for warning in caught):
        click.echo(f"note: {note}", err=True)


@contextmanager
def terminable() -> Iterator[None]:
    """Leave by an exception at SIGTERM, so that a half-made file or index is removed."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
