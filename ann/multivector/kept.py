"""The values of attributes that an update of items keeps."""

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.multivector.storage.part import positions
from memhier.ann.multivector.storage.snapshot import ItemSnapshot
from memhier.ann.zoom.renewal.kept import Kept, column_objects, rows_lacking

__all__ = ["values_kept"]

Ints: TypeAlias = npt.NDArray[np.int64]


def values_kept(state: ItemSnapshot, ids: Ints, attributes: Any) -> dict[str, Kept]:
    """Return the values that an update of items with these attributes keeps, by name.

    A table or columns by name replace whole columns. With a dict for each item, it keeps the names that its dict lacks.
    """
    count = len(ids)
    asked = {name: rows_lacking(name, attributes, count) for name in state.schema}
    missing = {name: flags for name, flags in asked.items() if flags.any()}
    found = {name: np.full(count, None, object) for name in missing}
    if not found:
        return {}
    waiting = state.waiting
    here = np.flatnonzero(np.isin(ids, waiting.ids))
    order = np.argsort(waiting.ids)
    rows = order[np.searchsorted(waiting.ids, ids[here], sorter=order)]
    for name, values in found.items():
        if name in waiting.attributes:
            values[here] = waiting.attributes[name][rows]
    for number, places, rows in positions(state.parts, ids):
        attributes_of = state.parts[number].attributes
        if attributes_of is not None:
            for name, column in attributes_of.take(rows, list(missing)).items():
                found[name][places] = column_objects(column)
    return {name: Kept(found[name], flags) for name, flags in missing.items()}
