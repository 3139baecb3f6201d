"""Attributes and documents on their way between a caller and shards."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.zoom.filters.given import as_columns, as_objects

__all__ = ["Columns", "Rows", "as_values", "filled", "joined", "taken", "typed"]

Columns: TypeAlias = dict[str, npt.NDArray[Any]]
Rows: TypeAlias = list[dict[str, Any]]


def typed(values: Sequence[Any] | npt.NDArray[Any], kind: str) -> npt.NDArray[Any]:
    """Return Python values of an attribute as an array whose dtype tells the type, also where all are null."""
    values = list(values)
    nulls = np.array([value is None for value in values], bool)
    if kind == "str":
        return np.ma.MaskedArray(np.full(len(values), "", "U1"), True) if nulls.all() else _objects(values)
    if kind == "float64":
        return np.array([np.nan if value is None else value for value in values], np.float64)
    if kind == "datetime":
        return np.array([np.datetime64("NaT") if value is None else value for value in values], "M8[us]")
    if kind in ("int64", "bool"):
        plain = np.array([0 if value is None else value for value in values], np.int64 if kind == "int64" else np.bool_)
        return np.ma.MaskedArray(plain, nulls)
    return _objects(values)


def taken(columns: Mapping[str, npt.NDArray[Any]], rows: npt.NDArray[Any]) -> Columns:
    """Return rows of columns."""
    return {name: values[rows] for name, values in columns.items()}


def joined(pieces: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """Return columns of fields one after the other; masks stay."""
    if not any(map(np.ma.isMaskedArray, pieces)):
        return np.concatenate(pieces)
    made: npt.NDArray[Any] = np.ma.concatenate(pieces)  # type: ignore[no-untyped-call]
    return made


def filled(fields: Mapping[str, npt.NDArray[Any]], names: Iterable[str], shape: tuple[int, ...]) -> Columns:
    """Return the fields of these names; a document that a shard does not know is None there."""
    return {name: fields[name] if name in fields else np.full(shape, None, object) for name in names}


def as_values(fields: Mapping[str, npt.NDArray[Any]], schema: Mapping[str, Any], count: int) -> Columns:
    """Return fields of a result that are attributes as Python values; null where the shard does not know one."""
    known = {name: fields[name] for name in schema if name in fields}
    values: Columns = {**as_objects(as_columns(known, count), schema)}
    return {name: values.get(name, np.full(count, None, object)) for name in schema}


def _objects(values: Sequence[Any]) -> npt.NDArray[Any]:
    made = np.empty(len(values), object)
    made[:] = values
    return made
