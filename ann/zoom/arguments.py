"""Checks at the border of the index: every error names the argument, its value and the values expected."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.files import as_array
from memhier.arguments import check_int, check_number

__all__ = [
    "AS_FLOAT32",
    "STORED_DTYPES",
    "SearchOptions",
    "check_columns",
    "check_either",
    "check_fields",
    "check_given",
    "check_ids",
    "check_options",
    "check_queries",
    "check_query",
    "check_radius",
    "check_values_of_all",
    "check_vectors",
    "refuse_rounded",
    "stored_dtype",
]

STORED_DTYPES = tuple(np.dtype(name) for name in ("float32", "float16", "int8", "uint8"))
# Stored as float32: rounded from float64, as they are from bfloat16, and integers only where each is held exactly.
AS_FLOAT32 = ("float64", "bfloat16", "int16", "uint16", "int32", "uint32", "int64", "uint64")
_COMPARED = 2**53  # up to which float64 holds every integer, so that equal means equal

Floats: TypeAlias = npt.NDArray[np.float32]
Ints: TypeAlias = npt.NDArray[np.int64]


@dataclass(slots=True)  # a frozen one takes a microsecond more in each search
class SearchOptions:
    """The options of one search, checked; see :meth:`memhier.ann.ZoomIndex.search`."""

    k: int
    recall: float | None = None
    where: str | None = None
    candidates: int | None = None
    nprobe: int | None = None
    max_reads: int | None = None
    deadline_ms: float | None = None
    fields: bool | Sequence[str] | None = None
    radius: float | npt.ArrayLike | None = None
    allow: object = None
    deny: object = None

    @property
    def filtered(self) -> bool:
        """Whether a filter or a list of ids leaves vectors out."""
        return self.where is not None or self.allow is not None or self.deny is not None

    @property
    def is_plain(self) -> bool:
        """Whether it is a recall alone that is asked for, or none."""
        by_recall = self.candidates is None and self.nprobe is None
        unlimited = self.max_reads is None and self.deadline_ms is None and self.radius is None
        return by_recall and unlimited and not self.fields and not self.filtered

    def __post_init__(self) -> None:
        check_fields(self.fields)
        ms = self.deadline_ms
        if self.max_reads is not None:
            check_int("max_reads", self.max_reads, 1)
        if ms is not None:
            check_number("deadline_ms", ms, 0, above=True)
        check_int("k", self.k, 1)
        if self.recall is not None:
            check_number("recall", self.recall, 0, 1, above=True)
            if self.candidates is not None or self.nprobe is not None:
                raise ValueError(
                    f"recall={self.recall}: expected either a recall, or nprobe= and candidates=, not both"
                )
        if self.nprobe is not None:
            check_int("nprobe", self.nprobe, 1)


def check_either(ids: object, where: object) -> None:
    """Refuse vectors that are named neither by ids nor by a filter, or by both."""
    if (ids is None) == (where is None):
        given = "neither was given" if where is None else "both were given"
        raise ValueError(f"{given}: expected either ids= or where=")


def check_given(vectors: object, attributes: object, documents: object) -> None:
    """Refuse an update of nothing."""
    if vectors is None and attributes is None and documents is None:
        raise ValueError("nothing to update: expected vectors=, attributes= or documents=")


def check_values_of_all(vectors: object, attributes: object, documents: object) -> dict[str, list[Any]]:
    """Return the values that an update sets for all vectors of a filter, as columns by name of one row."""
    if vectors is not None or documents is not None:
        name = "vectors=" if vectors is not None else "documents="
        raise ValueError(f"{name} with where=: a filter sets attributes alone; name the vectors by ids=")
    if not isinstance(attributes, Mapping) or not attributes:
        raise TypeError(
            f"attributes={attributes!r}: expected a dict with one value for each name, such as {{'sold': True}}, for "
            "all vectors of where="
        )
    return {name: [value] for name, value in attributes.items()}


def check_options(options: Iterable[str]) -> None:
    """Refuse names that are no options of a search; `k` is none of them."""
    if unknown := set(options) - (SearchOptions.__dataclass_fields__.keys() - {"k"}):
        raise TypeError(f"{min(unknown)}=: expected options of ZoomIndex.search")


def check_radius(radius: object, count: int) -> Floats | None:
    """Return the largest distance wanted of each query, float32 ``[q]``; None where there is none."""
    if radius is None:
        return None
    if isinstance(radius, bool) or (array := np.asarray(radius)).dtype.kind not in "fiu":
        raise TypeError(f"radius={radius!r}: expected a distance, or one for each query")
    if array.shape not in ((), (count,)):
        raise ValueError(f"radius has shape {array.shape}: expected one distance, or [{count}], one for each query")
    if np.isnan(array).any():
        raise ValueError("radius holds NaN: expected distances; infinity is none")
    with np.errstate(over="ignore"):  # beyond float32 lies every vector
        return np.full(count, array.astype(np.float32))  # the core takes no array that repeats a number by its strides


def check_columns(names: Iterable[Any], argument: str) -> list[Any]:
    """Return the names of the columns of a table; refuse two of the same name."""
    counts = Counter(names)
    for name, count in counts.items():
        if count > 1:
            raise ValueError(f"{argument} has {count} columns {name!r}: expected different names")
    return list(counts)


def check_fields(fields: object) -> None:
    """Refuse fields that are neither True, False, None nor a sequence of names."""
    if fields is None or isinstance(fields, bool):
        return
    names = fields if isinstance(fields, Sequence) and not isinstance(fields, str | bytes) else [None]
    if not all(isinstance(name, str) for name in names):
        raise TypeError(f"fields={fields!r}: expected True for all fields, or a list of their names")


def check_queries(queries: object, dimension: int) -> tuple[Floats, bool]:
    """Return queries as float32 ``[q, d]``, and whether there was a single one."""
    array: npt.NDArray[Any]
    if isinstance(queries, np.ndarray) and type(queries) is np.ndarray and queries.dtype.kind in "fiu":
        array = queries  # as most are
    else:
        array = as_array(queries, "queries")
    if array.dtype.kind not in "fiu":
        array = array.astype(np.float32) if array.dtype.name == "bfloat16" else array
    if array.dtype.kind not in "fiu":
        raise TypeError(f"queries has dtype {array.dtype}: expected real numbers")
    if array.ndim not in (1, 2) or array.shape[-1] != dimension:
        raise ValueError(
            f"queries has shape {array.shape}: expected [q, {dimension}] or [{dimension}], the dimension of the index"
        )
    whole = array.dtype.kind != "f"  # numbers, which are all finite
    if whole:
        array = array.astype(np.float32)
    elif array.dtype != np.float32:
        with np.errstate(over="ignore"):  # reported below, as infinity
            array = array.astype(np.float32)
    matrix = np.ascontiguousarray(array if array.ndim == 2 else array[None])
    if not whole and np.count_nonzero(np.isfinite(matrix)) < matrix.size:
        finite = np.isfinite(matrix).all(axis=1)
        raise ValueError(f"queries row {int(np.argmin(finite))} holds NaN or infinity: every value must be finite")
    return matrix, array.ndim == 1


def check_query(query: object, dimension: int) -> Floats:
    """Return one query as float32 ``[d]``."""
    array = as_array(query, "query")
    if array.shape != (dimension,):
        raise ValueError(f"query has shape {array.shape}: expected [{dimension}], one query")
    matrix, _ = check_queries(array, dimension)
    return matrix.reshape(dimension)


def check_ids(ids: object, name: str = "ids") -> Ints:
    """Return ids as int64 ``[n]``, each once."""
    array = np.atleast_1d(np.asarray(ids))
    if array.size == 0:
        return np.empty(0, np.int64)
    if array.dtype.kind not in "iu" or array.ndim != 1:
        raise TypeError(f"{name} has dtype {array.dtype} and shape {array.shape}: expected integers of shape [n]")
    if array.dtype == np.uint64 and (array > np.iinfo(np.int64).max).any():
        raise ValueError(f"{name} holds {array.max()}: expected values below 2**63")
    values, counts = np.unique(array, return_counts=True)
    if (counts > 1).any():
        raise ValueError(f"{name} holds {values[counts > 1][0]} more than once: every vector needs an id of its own")
    if values[0] == -1 or (values[0] < 0 and -1 in values):
        raise ValueError(f"{name} holds -1, which stands for no vector in results: expected another number")
    return array.astype(np.int64)


def check_vectors(vectors: object, dimension: int, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Return vectors to add, ``[n, d]`` of the index's dtype."""
    array = as_array(vectors)
    if array.ndim == 1:
        array = array[None]
    if array.ndim != 2 or array.shape[1] != dimension:
        raise ValueError(f"vectors has shape {array.shape}: expected [n, {dimension}], the dimension of the index")
    if stored_dtype(array.dtype) not in STORED_DTYPES:
        raise TypeError(f"vectors has dtype {array.dtype}: expected {dtype}, that of the index; convert it to that")
    array = array.astype(np.float32) if array.dtype.name == "bfloat16" else array
    with np.errstate(over="ignore", invalid="ignore"):
        stored = np.ascontiguousarray(array, dtype=dtype)
    if dtype.kind == "f":
        finite = np.isfinite(stored).all(axis=1)
        if not finite.all():
            raise ValueError(f"vectors row {int(np.argmin(finite))} holds NaN or infinity (in {dtype})")
        refuse_rounded(array, stored, 0)
    elif not np.array_equal(stored, array):
        row = int(np.flatnonzero((stored != array).any(axis=1))[0])
        raise ValueError(f"vectors row {row} does not fit {dtype}, that of the index: it would be stored as others")
    return stored


def stored_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype that vectors are stored in; the same dtype if it cannot be stored."""
    native = dtype.newbyteorder("=")
    return np.dtype(np.float32) if native.name in AS_FLOAT32 else native


def refuse_rounded(block: npt.NDArray[Any], stored: npt.NDArray[Any], start: int, name: str = "vectors") -> None:
    """Refuse integers that the stored dtype would round; `start` is the number of the first row."""
    if block.dtype.kind in "iu" and stored.dtype.kind == "f":
        wrong = (stored.astype(np.float64) != block).any(axis=1) | (np.abs(stored) > _COMPARED).any(axis=1)
        if wrong.any():
            row = int(np.argmax(wrong))
            raise ValueError(
                f"{name} row {start + row} holds integers that {stored.dtype} does not hold exactly: convert them "
                f"yourself, with {name}.astype('float32') or after scaling"
            )
