"""Inputs of the index commands: their options, the index that they open, and ids from files."""

import os
from importlib import import_module
from pathlib import Path
from typing import Any

import click
import numpy as np
import numpy.typing as npt

from memhier.arguments import is_url
from memhier.errors import FormatError
from memhier.io.outside import npy_header, reading
from memhier.lazy import extra_for
from memhier.store.store import CACHE_BYTES

__all__ = ["damaged", "given_ids", "parquet_of", "query_key"]


class PathOrUrl(click.Path):
    """A path of something that exists, or a URL, which is looked at when it is opened."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path, or the URL."""
        return value if is_url(value) else super().convert(value, param, ctx)


class ChangedIndex(click.Path):
    """The directory of an index to be changed."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path; refuse a URL."""
        if is_url(value):
            self.fail(f"{value} is a backup, which is only read: pull it, change the copy, and push that.", param, ctx)
        return super().convert(value, param, ctx)


index_path = click.argument("path", type=ChangedIndex(exists=True, file_okay=False))
read_path = click.argument("path", type=PathOrUrl(exists=True, file_okay=False))
vectors_path = click.argument("vectors", type=PathOrUrl(exists=True, dir_okay=False))
queries_path = click.argument("queries", type=PathOrUrl(exists=True, dir_okay=False))
cache_option = click.option("--cache", metavar="DIR", type=click.Path(file_okay=False), help="Keeps the pages read, "
                            "where PATH is a URL.  [default: memhier in $XDG_CACHE_HOME or ~/.cache]")  # fmt: skip
cache_bytes_option = click.option("--cache-bytes", default=CACHE_BYTES, show_default=True,
                                  help="The most that these pages take.")  # fmt: skip
key_option = click.option("--key", help="Data set of an HDF5 file.")
column_option = click.option("--column", help="Column of a Parquet file.  [default: the only one of vectors]")
ids_option = click.option("--ids", "ids_path", metavar="FILE", type=click.Path(exists=True, dir_okay=False),
                          help="Ids of the vectors: .npy [n], .parquet, or text with one a line.  [default: the next "
                          "free integers, from 0]")  # fmt: skip
id_column_option = click.option("--id-column", help="Column of ids, integers or text, in the Parquet file of the "
                                "ids, or else of the vectors.")  # fmt: skip


def query_key(path: str, key: str | None) -> str | None:
    """Return the data set of queries in a file: in HDF5 files of ann-benchmarks, ``test``."""
    return "test" if key is None and Path(path).suffix.lower() in (".hdf5", ".h5") else key


class Fields(click.ParamType[bool | list[str]]):
    """Names of attributes and documents with commas between them, or `all`: a list, or True."""

    name = "names"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> bool | list[str]:
        """Return the names."""
        names = [*dict.fromkeys(name.strip() for name in value.split(",") if name.strip())]
        return True if names == ["all"] else names


fields_option = click.option("--fields", type=Fields(), help="Attributes and documents of the neighbours: names with "
                             "commas between them, or all.")  # fmt: skip


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
    if is_url(path):
        raise ValueError(f"--id-column {column}: {path} is a URL: give the ids by --ids, a file of this machine")
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
        raise damaged(path, error) from error
    if found.null_count:
        raise ValueError(f"{path}[{column!r}]: {found.null_count:,} rows are null, expected an id in each")
    ids: npt.NDArray[Any] = found.to_numpy()
    return ids


def damaged(path: str, error: Exception) -> Exception:
    """Arrow reports damage as an `OSError` without a number, or as an error of its own."""
    return error if isinstance(error, OSError) and error.errno else FormatError(f"{path}: {error}")


def _holds_ids(types: Any, kind: Any) -> bool:
    return bool(types.is_integer(kind) or types.is_string(kind) or types.is_large_string(kind))


def parquet_of(path: str) -> tuple[Any, Any]:
    """Return pyarrow and its module for Parquet, which `path` needs."""
    with extra_for(f"{path}: Parquet"):
        return import_module("pyarrow"), import_module("pyarrow.parquet")
