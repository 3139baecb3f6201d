"""The ids that a search is limited to, out of any collection of a caller."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from memhier.ann.files import as_array

__all__ = ["collected", "holds_collections", "is_collection"]

_DROPS = ("drop_null", "drop_nulls", "dropna")  # of pyarrow, polars and pandas


def collected(ids: Any, name: str) -> npt.NDArray[Any] | list[str]:
    """Return ids without those that stand for none; an iterator is used up, so call it once for each search.

    Parameters
    ----------
    ids
        A set, view, iterator, range, list, column of pandas, polars or pyarrow, or an array or tensor of any shape.
        -1, None, masked values and nulls of a column count for nothing, so ``result.ids`` may be given as it is.
    name
        For errors.

    Returns
    -------
    list or numpy.ndarray
        The strings, or an array of the type of the others, not checked further.

    Raises
    ------
    TypeError
        For dicts, bytes and tables, and for lists that hold bools or other lists.

    Examples
    --------
    >>> import numpy as np
    >>> from memhier.ann.zoom.ids.collection import collected
    >>> collected(np.array([[7, 3], [5, -1]]), "deny").tolist(), collected({"a"}, "deny")
    ([7, 3, 5], ['a'])
    """
    if isinstance(ids, Mapping | bytes | bytearray | memoryview) or hasattr(ids, "columns"):
        hint = "; give its keys()" if isinstance(ids, Mapping) else "; give a column" if hasattr(ids, "columns") else ""
        raise TypeError(f"{name} is a {type(ids).__name__}: expected ids, such as a list, a set or an array{hint}")
    if isinstance(ids, str):
        return [ids]
    if isinstance(ids, np.ma.MaskedArray):
        ids = ids.compressed()
    for drop in _DROPS:
        if hasattr(ids, drop):
            ids = getattr(ids, drop)()
    if hasattr(ids, "__cuda_array_interface__") or (hasattr(ids, "__dlpack__") and not hasattr(ids, "__array__")):
        ids = as_array(ids, name)
    elif isinstance(ids, Iterable) and not hasattr(ids, "__array__"):
        return _of_objects(list(ids), name)
    array = np.asarray(ids).ravel()
    return _of_objects(array.tolist(), name) if array.dtype == object else _without_missing(array)


def holds_collections(ids: object) -> bool:
    """Return whether `ids` is a list with collections of ids in it."""
    if not isinstance(ids, list | tuple):
        return False
    kinds = {kind for kind in set(map(type, ids)) if issubclass(kind, Iterable) and not issubclass(kind, str | bytes)}
    return any(type(each) in kinds and is_collection(each) for each in ids) if kinds else False


def is_collection(value: object) -> bool:
    """Return whether a value holds ids, and is none itself."""
    return isinstance(value, Iterable) and not isinstance(value, str | bytes) and getattr(value, "ndim", 1) > 0


def _of_objects(values: list[Any], name: str) -> npt.NDArray[Any] | list[str]:
    left = [value for value in values if value is not None]
    for kind in set(map(type, left)):
        if issubclass(kind, bool | np.bool_ | list | tuple | np.ndarray):
            raise TypeError(f"{name} holds a {kind.__name__}: expected integers or, where ids are strings, strings")
    return left if left and isinstance(left[0], str) else _without_missing(np.asarray(left))


def _without_missing(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return array[array != -1] if array.dtype.kind in "iu" else array
