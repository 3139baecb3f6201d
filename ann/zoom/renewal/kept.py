"""The values of attributes that an update keeps."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.zoom.filters.times import as_moments
from memhier.ann.zoom.preview.scan_arguments import split_positions
from memhier.ann.zoom.storage.ids import Located
from memhier.ann.zoom.storage.rows import RowState

__all__ = ["Kept", "column_objects", "rows_lacking", "values_kept"]

Objects: TypeAlias = npt.NDArray[np.object_]


@dataclass(frozen=True, slots=True)
class Kept:
    """The values of one attribute that are kept.

    Attributes
    ----------
    values
        Objects ``[n]``, None for null.
    rows
        bool ``[n]``: the rows that keep them.
    """

    values: Objects
    rows: npt.NDArray[np.bool_]

    def filled(self, given: Objects | None) -> Objects:
        """Return the given values, with the kept ones where none were given."""
        if given is None:
            return self.values
        values = given.copy()
        values[self.rows] = self.values[self.rows]
        return values


def values_kept(state: RowState, places: Located, attributes: Any) -> dict[str, Kept]:
    """Return the values that an update of the vectors in `places` with these attributes keeps, by name.

    A table or columns by name replace whole columns. With a dict per row, a row keeps the names that its dict lacks.
    A vector without a place has null.
    """
    count = len(places.positions)
    asked = {name: rows_lacking(name, attributes, count) for name in state.schema}
    missing = {name: flags for name, flags in asked.items() if flags.any()}
    found: dict[str, Objects] = {name: np.full(count, None, object) for name in missing}
    waiting = np.flatnonzero(places.fresh >= 0)
    for name, values in found.items():
        if name in state.fresh.attributes:
            values[waiting] = state.fresh.attributes[name][places.fresh[waiting]]
    numbers, rows = split_positions(places.positions)
    for which, part in enumerate(state.parts):
        here = np.flatnonzero((numbers == which) & (places.positions >= 0))
        if not len(here) or part.attributes is None:
            continue
        for name, column in part.attributes.take(rows[here], list(missing)).items():
            found[name][here] = column_objects(column)
    return {name: Kept(found[name], flags) for name, flags in missing.items()}


def rows_lacking(name: str, attributes: Any, count: int) -> npt.NDArray[np.bool_]:
    """Return which rows are given no value of an attribute, not even null, bool ``[count]``.

    `attributes` are those of an update: columns by name, a table, or a dict for each row.
    """
    if isinstance(attributes, Sequence) and all(isinstance(row, Mapping) for row in attributes):
        return np.array([name not in row for row in attributes], np.bool_)
    if attributes is None:
        return np.ones(count, np.bool_)
    if isinstance(attributes, Mapping):
        return np.full(count, name not in attributes)
    names = getattr(attributes, "column_names", getattr(attributes, "columns", ()))
    return np.full(count, name not in list(names))


def column_objects(column: npt.NDArray[Any]) -> Objects:
    """Return values of a column as Python's, None for null."""
    if isinstance(column, np.ma.MaskedArray):
        values, nulls = np.ma.getdata(column).astype(object), np.ma.getmaskarray(column)
    elif column.dtype.kind == "M":
        values, nulls = as_moments(column.view(np.int64)), np.isnat(column)
    elif column.dtype.kind == "f":
        values, nulls = column.astype(object), np.isnan(column)
    else:
        return column
    values[nulls] = None
    return values
