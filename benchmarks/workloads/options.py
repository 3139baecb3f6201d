"""The options that the scripts of all workloads share."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

__all__ = ["FOLDER", "folder_option", "json_option"]

Function = Callable[..., Any]
FOLDER = click.Path(exists=True, file_okay=False, writable=True, path_type=Path)
"""A folder that is there."""


def folder_option(function: Function) -> Function:
    """Add ``--dir``, where the workload keeps its files."""
    help_text = "A folder on the device; else the temporary one."
    return click.option("--dir", "folder", type=FOLDER, help=help_text)(function)


def json_option(function: Function) -> Function:
    """Add ``--json``, the file that the runner reads the figures from."""
    return click.option("--json", "out", type=click.Path(path_type=Path), help="Write the figures to this file.")(
        function
    )
