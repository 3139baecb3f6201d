"""Attributes and documents on their way between a caller and shards."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.zoom.filters.columns import AnyColumn, ArrayColumn, NullColumn
from memhier.ann.zoom.filters.conditions import AttributeType, is_list, item_type
from memhier.ann.zoom.filters.given import as_columns, as_objects
from memhier.ann.zoom.filters.lists import ArrayListColumn

__all__ = ["Columns", "Rows", "as_values", "filled", "joined", "taken", "typed"]

Columns: TypeAlias = dict[str, npt.NDArray[Any]]
Rows: TypeAlias = list[dict[str, Any]]


def typed(name: str, values: Sequence[Any] | npt.NDArray[Any], kind: AttributeType) -> AnyColumn:
    """Return Python values of an attribute as a column of its type, also where all are null or there are none."""
    made = _objects([*values])
    if is_list(kind):
        return ArrayListColumn(name, made, np.zeros(len(made), np.bool_), item_type(kind))
    if all(value is None for value in made):
        return NullColumn(len(made), item_type(kind))
    if kind == "float64":
        return ArrayColumn(name, np.array([np.nan if value is None else value for value in made], np.float64))
    return ArrayColumn(name, made)


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
