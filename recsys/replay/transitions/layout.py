"""The fields of a transition, nested or not, and the bytes of a row on SSD."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from memhier.recsys.replay.schema import Column, Columns, Field, as_array

__all__ = ["Layout", "flat_names", "nested"]

_ALIGNED = 8


class Layout:
    """Named columns of fixed size, and their places in a row.

    A nested field has the names on the way to it joined by dots: ``next.observation``. A row on SSD has the values of
    all fields end to end, filled up to a whole number of eight bytes.

    Parameters
    ----------
    schema
        From a name to a dtype, a pair of dtype and shape, or a dict of more names.
    """

    def __init__(self, schema: Mapping[str, Any]) -> None:
        if not isinstance(schema, Mapping) or not schema:
            raise ValueError(f"schema={schema!r}: expected a dict from names to fields, with at least one")
        self.columns: dict[str, Column] = {}
        for name, value in flat_names("schema", schema):
            within = [other for other in self.columns if f"{other}.".startswith(f"{name}.")
                      or f"{name}.".startswith(f"{other}.")]  # fmt: skip
            if within:
                raise ValueError(f"schema: {name!r} and {within[0]!r} have one place in nested dicts; rename one")
            self.columns[name] = _column(name, value)
        self.offsets: dict[str, int] = {}
        end = 0
        for name, column in self.columns.items():
            self.offsets[name] = end
            end += column.bytes
        self.column_bytes: int = end
        self.row_bytes: int = -(-end // _ALIGNED) * _ALIGNED

    def check(self, batch: Mapping[str, Any]) -> tuple[int, Columns]:
        """Return the number of transitions in a batch and its columns; raise for an unfit batch.

        Raises
        ------
        TypeError, ValueError
            For a field that is missing or unknown, or values of another dtype or shape.
        """
        if not isinstance(batch, Mapping):
            raise TypeError(f"batch: expected a dict of the fields {list(self.columns)}, got {type(batch).__name__}")
        names = [name for name, _ in flat_names("batch", batch)]
        if len(set(names)) < len(names):
            raise ValueError(f"batch: expected each field once, got {names}")
        given = dict(flat_names("batch", batch))
        if given.keys() != self.columns.keys():
            raise ValueError(f"batch: expected the fields {list(self.columns)}, got {list(given)}")
        columns: Columns = {}
        count = -1
        for name, column in self.columns.items():
            array = as_array(f"batch[{name!r}]", given[name])
            if array.dtype != column.dtype:
                raise TypeError(f"batch[{name!r}]: expected an array of {column.dtype}, got {array.dtype}; convert it")
            if array.ndim == 0 or array.shape[1:] != column.shape:
                expected = "".join(f", {length}" for length in column.shape)
                raise ValueError(f"batch[{name!r}]: expected shape [n{expected}], got {list(array.shape)}")
            if count not in (-1, len(array)):
                raise ValueError(f"batch[{name!r}]: expected {count} transitions as in the fields before, got "
                                 f"{len(array)}")  # fmt: skip
            columns[name], count = array, len(array)
        return count, columns

    def unpack(self, rows: NDArray[np.uint8], name: str) -> NDArray[Any]:
        """Return the values of one field of rows, uint8 [n, row_bytes], as an array [n, *shape] of its own."""
        column, start = self.columns[name], self.offsets[name]
        values = np.ascontiguousarray(rows[:, start : start + column.bytes])
        found: NDArray[Any] = values.view(column.dtype).reshape(len(rows), *column.shape)
        return found

    def pack(self, columns: Columns, rows: NDArray[np.uint8]) -> None:
        """Fill rows, uint8 [n, row_bytes], with the values of columns [n, *shape]."""
        count = len(rows)
        for name, column in self.columns.items():
            start = self.offsets[name]
            values = np.ascontiguousarray(columns[name]).reshape(count, -1)
            rows[:, start : start + column.bytes] = values.view(np.uint8).reshape(count, column.bytes)

    def encode(self) -> list[Any]:
        """Return the argument of `decode`, for JSON."""
        return [[name, column.dtype.str, list(column.shape)] for name, column in self.columns.items()]

    @classmethod
    def decode(cls, fields: Sequence[Any]) -> Self:
        """Return the layout that `encode` described."""
        return cls({name: (np.dtype(dtype), tuple(shape)) for name, dtype, shape in fields})

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and json.dumps(self.encode()) == json.dumps(other.encode())

    def __hash__(self) -> int:
        return hash(json.dumps(self.encode()))


def flat_names(where: str, values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested dicts by their names, joined by dots."""
    for name, value in values.items():
        if not isinstance(name, str) or not name or (before and "." in name):
            raise ValueError(f"{where}: field {name!r}: expected a name such as 'observation', or 'next.observation'")
        if isinstance(value, Mapping):
            yield from flat_names(where, value, f"{before}{name}.")
        else:
            yield before + name, value


def nested(columns: Columns) -> dict[str, Any]:
    """Return columns as nested dicts: the reverse of `flat_names`."""
    found: dict[str, Any] = {}
    for name, values in columns.items():
        *way, last = name.split(".")
        inner = found
        for step in way:
            inner = inner.setdefault(step, {})
        inner[last] = values
    return found


def _column(name: str, value: Any) -> Column:
    try:
        if value is None:
            raise TypeError("None is no dtype")  # numpy takes it for float64
        dtype, shape = value if isinstance(value, list | tuple) and len(value) == 2 else (value, ())
        field = Field(dtype, shape if isinstance(shape, tuple) else (shape,))
    except TypeError as error:
        raise TypeError(f"schema[{name!r}]={value!r}: expected a dtype, or (dtype, shape); {error}") from error
    if np.dtype(field.dtype).kind == "V":
        raise ValueError(f"schema[{name!r}]={value!r}: expected numbers, booleans or texts; make each part a field")
    if field.varies:
        raise ValueError(f"schema[{name!r}]={value!r}: expected a shape of fixed lengths")
    return field.columns(name)[name]
