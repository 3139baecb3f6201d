"""What the index commands share: their options, ids and attributes from files, figures, notes."""

import json
import os
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import click
import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from memhier.budget import format_bytes
from memhier.errors import FormatError
from memhier.io.outside import npy_header, reading

__all__ = [
    "given_ids",
    "notes",
    "read_table",
    "report",
    "terminable",
]


def _in_a_folder(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """Refuse a FILE that could not be written before a long build, not after it."""
    if value not in (None, "-") and not os.access(Path(value).absolute().parent, os.W_OK):
        raise click.BadParameter(f"{value}: its folder does not exist or cannot be written to")
    return value


index_path = click.argument("path", type=click.Path(exists=True, file_okay=False))
key_option = click.option("--key", help="Data set of an HDF5 file.")
column_option = click.option("--column", help="Column of a Parquet file.  [default: the only one of vectors]")
json_option = click.option("--json", "json_path", metavar="FILE", callback=_in_a_folder,
                     type=click.Path(dir_okay=False, writable=True, allow_dash=True),
                     help="Write the figures as JSON to FILE; '-' prints them in place of the table.")  # fmt: skip
ids_option = click.option("--ids", "ids_path", metavar="FILE", type=click.Path(exists=True, dir_okay=False),
                          help="Ids of the vectors: .npy [n], .parquet, or text with one a line.  [default: the next "
                          "free integers, from 0]")  # fmt: skip
id_column_option = click.option("--id-column", help="Column of ids, integers or text, of a Parquet file: that of the "
                                "ids where there is one, else that of the vectors.")  # fmt: skip
attributes_option = click.option("--attributes", "table_path", metavar="FILE",
                                 type=click.Path(exists=True, dir_okay=False),
                                 help="What searches may filter by: a .parquet file with a row for each vector; lists "
                                 "are left out.")  # fmt: skip


def given_ids(vectors: str, ids: str | None, column: str | None, kind: str) -> npt.NDArray[Any] | None:
    """Return the ids that go with a file of vectors, None where none are given.

    Parameters
    ----------
    vectors, ids
        Files.
    column
        Of a Parquet file.
    kind
        What lines of text are: ``"int64"`` or ``"str"``.
    """
    if ids is None and column is None:
        return None
    path = vectors if ids is None else ids
    suffix = Path(path).suffix.lower()
    if column is not None and suffix != ".parquet":
        raise ValueError(f"--id-column {column}: {path} is no .parquet file, which have columns")
    if suffix == ".parquet":
        return _column_of_ids(path, column)
    if suffix == ".npy":
        return _array_of_ids(path)
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise FormatError(
            f"{path}: expected .npy, .parquet, or text with an id a line, but byte {error.start:,} is no UTF-8"
        ) from None
    # Not splitlines(), which ends a line at letters that a string may hold.
    lines = text.removesuffix("\n").split("\n") if text else []
    return np.array(lines, np.object_) if kind == "str" else _numbers(path, lines)


def _array_of_ids(path: str) -> npt.NDArray[Any]:
    with open(path, "rb") as file:
        npy_header(file, path, os.fstat(file.fileno()).st_size)
        file.seek(0)
        with reading(path):
            array: npt.NDArray[Any] = np.load(file, allow_pickle=False)
            return array


def _numbers(path: str, lines: list[str]) -> npt.NDArray[np.int64]:
    numbers = []
    for line, text in enumerate(lines, 1):
        try:
            numbers.append(int(text))
        except ValueError:
            raise ValueError(f"{path}: line {line} is {text[:40]!r}, expected an integer") from None
    return np.array(numbers, np.int64)


def _column_of_ids(path: str, column: str | None) -> npt.NDArray[Any]:
    arrow, parquet = _arrow(path)
    try:
        schema = parquet.read_schema(path)
        fitting = [field.name for field in schema if _holds_ids(arrow.types, field.type)]
        if column is None and len(fitting) == 1:
            column = fitting[0]
        if column not in fitting:
            named = "no --id-column" if column is None else f"--id-column {column}"
            raise ValueError(f"{path}: {named}, expected one of {', '.join(fitting) or 'integers or text'}")
        found = parquet.read_table(path, columns=[column]).column(0)
    except (OSError, arrow.ArrowException) as error:
        raise _damaged(path, error) from error
    if found.null_count:
        raise ValueError(f"{path}[{column!r}]: {found.null_count:,} rows are null, expected an id in each")
    ids: npt.NDArray[Any] = found.to_numpy()
    return ids


def _damaged(path: str, error: Exception) -> Exception:
    """Arrow reports damage as an `OSError` without a number, or as an error of its own."""
    return error if isinstance(error, OSError) and error.errno else FormatError(f"{path}: {error}")


def _holds_ids(types: Any, kind: Any) -> bool:
    return bool(types.is_integer(kind) or types.is_string(kind) or types.is_large_string(kind))


def _arrow(path: str) -> tuple[Any, Any]:
    try:
        return import_module("pyarrow"), import_module("pyarrow.parquet")
    except ImportError as error:
        raise ImportError(f"{path}: Parquet needs the package pyarrow: pip install 'memhier[parquet]'") from error


def read_table(path: str) -> Any:
    """Return the columns of a Parquet file that searches can filter by, as a table of pyarrow."""
    if Path(path).suffix.lower() != ".parquet":
        raise ValueError(f"--attributes {path}: expected a .parquet file")
    arrow, parquet = _arrow(path)
    try:
        table = parquet.read_table(path)
    except (OSError, arrow.ArrowException) as error:
        raise _damaged(path, error) from error
    return table.select([field.name for field in table.schema if not arrow.types.is_nested(field.type)])


def report(title: str, figures: dict[str, Any], json_path: str | None) -> None:
    """Print figures as a table, and write them to `json_path` where it is given."""
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
    """Leave by an exception when terminated, so that what is half built is removed."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
