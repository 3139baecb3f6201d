"""Attributes as callers give them: columns by name, a table, or a dict for each row."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.zoom.arguments import check_columns
from memhier.ann.zoom.filters.columns import AnyColumn, ArrayColumn, Column, ListColumn, is_missing
from memhier.ann.zoom.filters.conditions import KEYWORDS, AttributeType, ItemType, item_type
from memhier.ann.zoom.filters.lists import ArrayListColumn
from memhier.ann.zoom.filters.stored_column import converted
from memhier.ann.zoom.filters.times import as_moments

__all__ = ["array_column", "as_columns", "as_objects"]

Objects: TypeAlias = npt.NDArray[np.object_]

_NAME_PATTERN = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")


def as_columns(attributes: Any, count: int) -> dict[str, AnyColumn]:
    """Return columns by name from a mapping or table of columns, or from a sequence of one mapping per row.

    Parameters
    ----------
    attributes
        ``{name: values}``, a DataFrame or pyarrow Table, or ``[{name: value}, ...]``; absent names are null.
    count
        Rows.

    Raises
    ------
    ValueError, TypeError
        For names that no expression could name, and as :func:`array_column` does.
    """
    if isinstance(attributes, Mapping):
        columns = dict(attributes)
    else:
        # pyarrow's name for them, and that of pandas and polars.
        names = getattr(attributes, "column_names", getattr(attributes, "columns", None))
        if names is None:
            columns = _transposed(attributes, count)
        else:
            columns = {name: attributes[name] for name in check_columns(names, "attributes")}
    made: dict[str, AnyColumn] = {}
    for name, data in columns.items():
        _check_name(name)
        if not isinstance(data, Column | ListColumn):
            data = array_column(name, data, count)
        if len(data) != count:
            raise ValueError(f"attribute {name!r} has {len(data)} values: expected {count}, one for each row")
        made[name] = data
    return made


def as_objects(columns: Mapping[str, AnyColumn], schema: Mapping[str, AttributeType]) -> dict[str, Objects]:
    """Return columns as arrays of Python values of the types of a schema: tuples of lists, None for null."""
    found: dict[str, Objects] = {}
    for name, column in columns.items():
        rows = np.arange(len(column))
        if isinstance(column, ListColumn):
            starts, stops, nulls = column.bounds(rows)
            items = np.arange(len(column.items))
            values = _objects(name, column.items, item_type(schema[name]), items)
            lists = (tuple(values[low:high]) for low, high in zip(starts.tolist(), stops.tolist(), strict=True))
            found[name] = np.fromiter(lists, object, len(column))
            found[name][nulls] = None
        else:
            found[name] = _objects(name, column, None, rows)
    return found


def _objects(name: str, column: Column, kind: ItemType | None, rows: npt.NDArray[np.int64]) -> Objects:
    """Return values as Python's, those of numbers as `kind` where it is given."""
    if column.type is None:
        return np.full(len(rows), None, object)
    cells = column.read(rows)
    cells = cells if kind is None else converted(name, cells, kind, rows)
    values = cells.values.astype(object)
    if column.type == "str":
        words = [word.decode() for word in column.words()]
        values[:] = [words[rank] if rank >= 0 else None for rank in cells.values.tolist()]
    elif column.type == "datetime":
        values = as_moments(cells.values)
    elif column.type == "bool":
        values[:] = cells.values.astype(np.bool_)
    if cells.nulls is not None:
        values[cells.nulls] = None
    return values


def _transposed(rows: Any, count: int) -> dict[str, list[Any]]:
    if not isinstance(rows, Sequence) or not all(isinstance(row, Mapping) for row in rows):
        raise TypeError(f"attributes={type(rows).__name__}: expected columns by name, or one dict for each row")
    if len(rows) != count:
        raise ValueError(f"attributes has {len(rows)} rows: expected {count}")
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}


def _check_name(name: object) -> None:
    if not isinstance(name, str) or not _NAME_PATTERN.fullmatch(name):
        raise ValueError(
            f"attribute {name!r}: expected a name of 1 to 64 letters, digits or '_' that begins with no digit"
        )
    if name.lower() in KEYWORDS:
        raise ValueError(
            f"attribute {name!r}: filters have this word for something else (their words are "
            f"{', '.join(sorted(KEYWORDS))}); rename the column, to {name + '_'!r} for instance"
        )


def _as_array(data: Any) -> npt.NDArray[Any]:
    if isinstance(data, np.ndarray):
        return np.ma.getdata(data)
    # As arrays, columns of pandas' own types, of polars and of pyarrow round integers to make room for NaN.
    kind = str(getattr(data, "dtype", ""))
    if "Datetime(" in kind and hasattr(data, "to_numpy"):  # of polars, whose lists leave out nanoseconds
        if kind.startswith("Datetime("):
            return np.asarray(data.to_numpy())
        data = [None if each is None else each.to_numpy() for each in data]
    if not isinstance(getattr(data, "dtype", None), np.dtype) and getattr(data, "null_count", None) != 0:
        to_list = getattr(data, "to_pylist", getattr(data, "to_list", None))
        data = data if to_list is None else to_list()
    if isinstance(data, list | tuple):
        # numpy would guess a common type of unlike values, and cut zeros off the end of text.
        return np.fromiter(data, object, len(data))
    return np.asarray(data)


def array_column(name: str, data: Any, count: int) -> AnyColumn:
    """Return a column from an array, a list, a Series of pandas or polars, an array of pyarrow or another object.

    Parameters
    ----------
    name
        For errors.
    data
        `count` values, or lists of values; None, NaN, pandas.NA and masked entries are null.

    Raises
    ------
    ValueError, TypeError
        For another length or shape, and as `ArrayColumn` and `ArrayListColumn` do.
    """
    mask = np.ma.getmaskarray(data) if isinstance(data, np.ma.MaskedArray) else None
    array = _as_array(data)
    if array.ndim != 1:
        hint = "; for a list of each row give its .tolist()" if array.ndim > 1 else ""
        raise ValueError(f"attribute {name!r} has shape {array.shape}: expected [{count}]{hint}")
    if len(array) != count:
        raise ValueError(f"attribute {name!r} has {len(array)} values: expected {count}, one for each row")
    if array.dtype == object:
        hidden = np.zeros(count, np.bool_) if mask is None else mask
        first = next(
            (value for value, null in zip(array, hidden, strict=True) if not null and not is_missing(value)), 0
        )
        if isinstance(first, list | tuple | np.ndarray):
            return ArrayListColumn(name, array, hidden)
    return ArrayColumn(name, array, mask)
