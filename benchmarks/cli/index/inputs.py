"""Inputs of the index commands: their options, and ids and attributes from files."""

import os
from importlib import import_module
from pathlib import Path
from typing import Any

import click
import numpy as np
import numpy.typing as npt

from memhier.errors import FormatError
from memhier.io.outside import npy_header, reading

__all__ = ["given_ids", "parquet_of", "query_key", "read_table"]


index_path = click.argument("path", type=click.Path(exists=True, file_okay=False))
key_option = click.option("--key", help="Data set of an HDF5 file.")
column_option = click.option("--column", help="Column of a Parquet file.  [default: the only one of vectors]")
ids_option = click.option("--ids", "ids_path", metavar="FILE", type=click.Path(exists=True, dir_okay=False),
                          help="Ids of the vectors: .npy [n], .parquet, or text with one a line.  [default: the next "
                          "free integers, from 0]")  # fmt: skip
id_column_option = click.option("--id-column", help="Column of ids, integers or text, in the Parquet file of the "
                                "ids, or else of the vectors.")  # fmt: skip
attributes_option = click.option("--attributes", "table_path", metavar="FILE",
                                 type=click.Path(exists=True, dir_okay=False),
                                 help="Columns to filter by: a .parquet file with a row for each vector; lists are "
                                 "left out.")  # fmt: skip


def query_key(path: str, key: str | None) -> str | None:
    """Return the data set of queries in a file: in HDF5 files of ann-benchmarks, ``test``."""
    return "test" if key is None and Path(path).suffix.lower() in (".hdf5", ".h5") else key


class Fields(click.ParamType[bool | list[str]]):
    """Names of attributes and documents with commas between them, or `all`: a list, or True."""

    name = "names"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> bool | list[str]:
        """Return the names."""
        names = [name.strip() for name in value.split(",") if name.strip()]
        return True if names == ["all"] else names


fields_option = click.option("--fields", type=Fields(), help="Attributes and documents to print: names with commas "
                             "between them, or all.")  # fmt: skip


def given_ids(vectors: str, ids: str | None, column: str | None, kind: str) -> npt.NDArray[Any] | None:
    """Return the ids for a file of vectors, None if none are given.

    Parameters
    ----------
    vectors, ids
        Files.
    column
        Of a Parquet file.
    kind
        The type of lines of text: ``"int64"`` or ``"str"``.
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
    arrow, parquet = parquet_of(path)
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


def parquet_of(path: str) -> tuple[Any, Any]:
    """Return pyarrow and its module for Parquet, which `path` needs."""
    try:
        return import_module("pyarrow"), import_module("pyarrow.parquet")
    except ImportError as error:
        raise ImportError(f"{path}: Parquet needs the package pyarrow: pip install 'memhier[parquet]'") from error


def read_table(path: str) -> Any:
    """Return the columns of a Parquet file that searches can filter by, as a table of pyarrow."""
    if Path(path).suffix.lower() != ".parquet":
        raise ValueError(f"--attributes {path}: expected a .parquet file")
    arrow, parquet = parquet_of(path)
    try:
        table = parquet.read_table(path)
    except (OSError, arrow.ArrowException) as error:
        raise _damaged(path, error) from error
    return table.select([field.name for field in table.schema if not arrow.types.is_nested(field.type)])
