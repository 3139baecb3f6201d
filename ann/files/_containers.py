"""Vectors in the containers of other libraries: as one array, or as rows that are read by slices.

No library is imported here but pyarrow, for its own objects: an object is known by its class, or by the protocols
``__array__``, ``__dlpack__`` and ``__cuda_array_interface__``.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.files._lists import holds_vectors, list_matrix

__all__ = ["Rows", "as_array", "as_rows"]

Array: TypeAlias = npt.NDArray[Any]


class Rows:
    """A matrix ``[n, d]`` that another library holds, converted slice by slice.

    Attributes
    ----------
    shape, dtype
        As those of an array; slices ``rows[start:stop]`` are arrays of this dtype.
    """

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype[Any], part: Callable[[int, int], Array]) -> None:
        self.shape: tuple[int, ...] = shape
        self.dtype: np.dtype[Any] = dtype
        self._part = part

    def __getitem__(self, rows: slice) -> Array:
        return self._part(rows.start, rows.stop)


def as_rows(vectors: Any, name: str = "vectors") -> Rows | None:
    """Return a container whose conversion would copy all of it as rows; None for any other object.

    Raises
    ------
    ValueError, TypeError
        When the container holds nulls, rows of unlike lengths or anything but vectors, as far as that is known now.
    """
    if _is_a(vectors, "torch", "Tensor"):
        if vectors.ndim != 2 or _as_numpy_has_it(vectors):
            return None
        return Rows(
            tuple(vectors.shape), as_array(vectors[:0]).dtype, lambda start, stop: as_array(vectors[start:stop])
        )
    if (column := _arrow_column(vectors)) is not None:
        return _arrow_rows(len(column), column.type, lambda start, stop: column.slice(start, stop - start), name)
    if _is_a(vectors, "datasets", "Column"):
        return _dataset_rows(vectors, name)
    if isinstance(vectors, list | tuple) or _is_a(vectors, "pandas", "Series"):
        items = vectors if isinstance(vectors, list | tuple) else vectors.to_list()
        dtypes = {getattr(item, "dtype", None) for item in items}
        if len(dtypes) == 1 and None not in dtypes and np.ndim(items[0]) == 1:
            first = as_array(items[0])
            shape = len(items), len(first)
            return Rows(shape, first.dtype, lambda start, stop: _stacked(items[start:stop], name, start, len(first)))
    return None


def as_array(vectors: Any, name: str = "vectors", start: int = 0) -> Array:
    """Return vectors of any container as one array; without a copy where the container allows it.

    Raises
    ------
    ValueError
        When rows are null, hold masked values or differ in length; the message counts rows from `start`.
    TypeError
        When an array on another device, or of a dtype that NumPy lacks, cannot be read.
    """
    _refuse_masked(vectors, name, start, within=True)
    if isinstance(vectors, np.ndarray) and vectors.dtype != object:
        return vectors
    if _is_a(vectors, "torch", "Tensor"):
        values = vectors.detach().cpu()
        return np.asarray((values if _as_numpy_has_it(values) else values.float()).numpy())
    if _is_a(vectors, "pyarrow", "ListScalar") or _is_a(vectors, "pyarrow", "FixedSizeListScalar"):
        return as_array(vectors.values, name)
    if _is_a(vectors, "pyarrow", "ExtensionScalar"):
        return as_array(vectors.value, name)
    if (column := _arrow_column(vectors)) is not None:
        return list_matrix(column, name)
    if _is_a(vectors, "datasets", "Column"):
        rows = _dataset_rows(vectors, name)
        return _stacked(list(vectors), name) if rows is None else rows[0 : len(vectors)]
    if hasattr(vectors, "__cuda_array_interface__") and hasattr(vectors, "get"):  # CuPy refuses __array__
        return np.asarray(vectors.get())
    if isinstance(vectors, list | tuple):
        return _stacked(vectors, name, start)
    if hasattr(vectors, "__dlpack__") and not hasattr(vectors, "__array__"):
        return _from_dlpack(vectors, name)
    array = np.asarray(vectors)
    return _stacked(array.tolist(), name) if array.dtype == object and array.ndim == 1 else array


def _is_a(value: Any, library: str, name: str) -> bool:
    """Whether an object is of a class, or of one below it, of a library that need not be installed."""
    return any(kind.__name__ == name and kind.__module__.partition(".")[0] == library for kind in type(value).__mro__)


def _as_numpy_has_it(tensor: Any) -> bool:
    """Whether a tensor lies in DRAM in a dtype of NumPy's; torch's short floats have names of their own."""
    dtype = str(tensor.dtype)
    return tensor.device.type == "cpu" and "bfloat" not in dtype and "float8" not in dtype and "float4" not in dtype


def _arrow_column(vectors: Any) -> Any:
    """Return an Arrow array, or a Series of pandas over one, if its rows are lists; None for any other object."""
    if _is_a(vectors, "pandas", "Series") and hasattr(vectors.array, "__arrow_array__"):
        vectors = vectors.array.__arrow_array__()
    if not (_is_a(vectors, "pyarrow", "Array") or _is_a(vectors, "pyarrow", "ChunkedArray")):
        return None
    return vectors if holds_vectors(getattr(vectors.type, "storage_type", vectors.type), of_any=True) else None


def _arrow_rows(count: int, kind: Any, part: Callable[[int, int], Any], name: str) -> Rows:
    """Return rows of an Arrow column of type `kind`, of which `part` returns a run."""
    first = list_matrix(part(0, min(1, count)), name)  # settles the dimension, which a type of lists does not tell
    dimension = first.shape[1]
    return Rows(
        (count, dimension), first.dtype, lambda start, stop: list_matrix(part(start, stop), name, start, dimension)
    )


def _dataset_rows(column: Any, name: str) -> Rows | None:
    """Return a column of a data set of Hugging Face as rows, or None where only its own iteration yields vectors."""
    data, label = column.source, column.column_name
    if not hasattr(data, "with_format") or data.format["type"] == "custom":
        return None
    table = data.select_columns([label]).with_format("arrow")
    kind = table[:0][label].type
    if not holds_vectors(kind):
        return None
    return _arrow_rows(len(data), kind, lambda start, stop: table[start:stop][label], name)


def _from_dlpack(vectors: Any, name: str) -> Array:
    try:
        on_cpu = int(vectors.__dlpack_device__()[0]) == 1
        return np.from_dlpack(vectors) if on_cpu else np.from_dlpack(vectors, device="cpu")
    except (TypeError, ValueError, BufferError, RuntimeError) as error:
        raise TypeError(
            f"{name}={type(vectors).__name__}: NumPy cannot read it by DLPack ({error}); copy it to the CPU as float32"
        ) from error


def _stacked(items: Sequence[Any], name: str, start: int = 0, dimension: int | None = None) -> Array:
    """Return vectors that are objects of their own as one matrix; `start` is the number of the first."""
    plain = all(isinstance(item, list | tuple | np.ndarray | float | int) for item in items)
    rows = items if plain else [item if _is_plain(item) else as_array(item, name) for item in items]
    for row, item in enumerate(rows, start):
        _refuse_masked(item, name, row)
    try:
        matrix = np.asarray(rows)
    except ValueError:
        matrix = np.empty(0, object)
    wrong_width = dimension is not None and matrix.ndim == 2 and matrix.shape[1] != dimension
    if (matrix.dtype == object and len(items)) or wrong_width:
        raise _odd_row(rows, name, start, dimension)
    return matrix


def _refuse_masked(values: Any, name: str, row: int, *, within: bool = False) -> None:
    """Refuse an array with masked values; `row` is its number, or `within` that of its first row."""
    if isinstance(values, np.ma.MaskedArray) and np.ma.is_masked(values):
        mask = np.atleast_1d(np.ma.getmaskarray(values))
        row += int(np.unravel_index(int(mask.argmax()), mask.shape)[0]) if within else 0
        raise ValueError(f"{name} row {row} holds a masked value: expected numbers")


def _is_plain(item: Any) -> bool:
    return item is None or isinstance(item, list | tuple | np.ndarray | str | bytes | float | int)


def _odd_row(rows: Sequence[Any], name: str, start: int, dimension: int | None) -> Exception:
    """Return the error for the first row that makes no matrix with the others."""
    for row, item in enumerate(rows, start):
        if item is None or (isinstance(item, float) and item != item):
            return ValueError(f"{name} row {row} is null: expected a vector")
        try:
            array = np.asarray(item)
        except ValueError:
            array = np.empty(0, object)
        if array.dtype == object:
            return TypeError(f"{name} row {row} is {_short(item)}: expected numbers only")
        if dimension is None:
            dimension = array.size
        elif array.shape != (dimension,):
            shown = f"dimension {len(array)}" if array.ndim == 1 else f"shape {array.shape}"
            return ValueError(f"{name} row {row} has {shown}: expected dimension {dimension}, as the rows before")
    return TypeError(f"{name}: expected rows of numbers")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + "..."
