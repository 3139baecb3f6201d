"""Attributes and documents from files: the columns of Parquet, or the objects of JSON Lines."""

import json
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

import click

from memhier.benchmarks.cli.index.inputs import damaged, parquet_of
from memhier.errors import FormatError
from memhier.io.outside import reading

__all__ = ["TableFile", "attributes_option", "documents_option", "read_attributes", "read_documents"]

_SUFFIXES = (".parquet", ".jsonl")
_BLOCK = 256  # rows of Parquet at a time
_BUFFER_BYTES = 1 << 20

Row: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True)
class TableFile:
    """A file with a row for each vector, and the columns to take; None for those that fit."""

    path: str
    names: list[str] | None

    @property
    def is_parquet(self) -> bool:
        """Whether it is Parquet, and otherwise JSON Lines."""
        return self.path.lower().endswith(".parquet")


class _TableFileType(click.Path):
    """``FILE`` or ``FILE:NAME,NAME``."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path, colon, names = (value, "", "") if os.path.exists(value) else value.rpartition(":")
        path = str(super().convert(path if colon else value, param, ctx))
        if Path(path).suffix.lower() not in _SUFFIXES:
            self.fail(f"{path}: expected a file ending in {' or '.join(_SUFFIXES)}.", param, ctx)
        chosen = [name.strip() for name in names.split(",") if name.strip()]
        if colon and not chosen:
            self.fail(f"{value}: expected names behind the colon.", param, ctx)
        return TableFile(path, chosen if colon else None)


_metavar = "FILE[:NAMES]"
attributes_option = click.option(
    "--attributes", metavar=_metavar, type=_TableFileType(exists=True, dir_okay=False),
    help="Columns to filter by: a .parquet file with a row, or a .jsonl file with an object, for each vector. NAMES "
    "are columns with commas between them.  [default: all, without lists of numbers, which may be vectors, and nested "
    "values]",
)  # fmt: skip
documents_option = click.option(
    "--documents", metavar=_metavar, type=_TableFileType(exists=True, dir_okay=False),
    help="Columns that searches return with --fields: files as for --attributes, read as a stream.  "
    "[default: all, without vectors]",
)  # fmt: skip


def read_attributes(file: TableFile) -> dict[str, Any]:
    """Return the columns that searches can filter by: lists, or chunked arrays of pyarrow."""
    if not file.is_parquet:
        rows = [*_lines(file)]
        return {name: [row.get(name) for row in rows] for name in dict.fromkeys(chain.from_iterable(rows))}
    arrow, parquet = parquet_of(file.path)
    try:
        schema = parquet.read_schema(file.path)
        names = _chosen(file, schema, lambda kind: _can_filter(arrow, kind))
        if file.names is None and (left := [name for name in schema.names if name not in names]):
            warnings.warn(
                f"{file.path}: attributes leave out {', '.join(left)}, of lists of numbers or nested values; "
                f"{file.path}:NAMES takes the columns NAMES",
                stacklevel=2,
            )
        table = parquet.read_table(file.path, columns=names)
        table.validate(full=True)  # text is not checked before
    except (OSError, arrow.ArrowException) as error:
        raise damaged(file.path, error) from error
    return {name: table[name] for name in names}


def read_documents(file: TableFile) -> Iterator[Row]:
    """Yield the documents of each row by name; a few rows of the file are held at a time."""
    return _batches(file) if file.is_parquet else _lines(file)


def _batches(file: TableFile) -> Iterator[Row]:
    arrow, parquet = parquet_of(file.path)
    try:
        with parquet.ParquetFile(file.path, buffer_size=_BUFFER_BYTES, pre_buffer=False) as opened:
            names = _chosen(file, opened.schema_arrow, lambda kind: not _holds_vectors(arrow, kind))
            for batch in opened.iter_batches(_BLOCK, columns=names, use_threads=False):
                batch.validate(full=True)  # text is not checked before
                yield from batch.to_pylist()
    except (OSError, arrow.ArrowException) as error:
        raise damaged(file.path, error) from error


def _chosen(file: TableFile, schema: Any, fits: Any) -> list[str]:
    if file.names is None:
        return [field.name for field in schema if fits(field.type)]
    if unknown := [name for name in file.names if name not in schema.names]:
        raise ValueError(f"{file.path} has no column {unknown[0]!r}: expected some of {', '.join(schema.names)}")
    return file.names


def _holds_vectors(arrow: Any, kind: Any) -> bool:
    types = arrow.types
    return _is_list(types, kind) and bool(types.is_floating(kind.value_type) or types.is_integer(kind.value_type))


def _can_filter(arrow: Any, kind: Any) -> bool:
    if not _is_list(arrow.types, kind):
        return not arrow.types.is_nested(kind)
    return not arrow.types.is_nested(kind.value_type) and not _holds_vectors(arrow, kind)


def _is_list(types: Any, kind: Any) -> bool:
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _lines(file: TableFile) -> Iterator[Row]:
    """Yield the objects of a file of JSON Lines, with the names asked for."""
    line, found = 0, set[str]()
    with (
        reading(file.path, lambda: f"line {line:,}"),
        open(file.path, encoding="utf-8-sig", newline="\n") as text,
    ):
        for line, each in enumerate(text, 1):
            row = json.loads(each)
            if not isinstance(row, dict):
                raise FormatError(f'{file.path}: line {line:,} is {each[:40].strip()!r}, expected {{"name": value}}')
            found.update(row)
            yield row if file.names is None else {name: row.get(name) for name in file.names}
    if line and file.names is not None and (missing := [name for name in file.names if name not in found]):
        raise ValueError(f"{file.path}: no line has the name {missing[0]!r}: expected some of {', '.join(found)}")
