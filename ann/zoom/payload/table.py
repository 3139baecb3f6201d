"""Hits as tables: a row for each vector found, with its fields, as dicts or for other libraries."""

import itertools
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.lazy import extra_for

__all__ = ["HitTable", "Hits", "are_there"]

Ints: TypeAlias = npt.NDArray[np.int64]
Fields: TypeAlias = Mapping[str, npt.NDArray[Any]]


def are_there(ids: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Return which ids are those of a vector."""
    missing: Any = None if ids.dtype == object else -1
    there: npt.NDArray[np.bool_] = np.not_equal(ids, missing).astype(np.bool_)
    return there


@dataclass(frozen=True, slots=True)
class HitTable:
    """Vectors found, without those that are missing.

    Attributes
    ----------
    query, rank
        int64 ``[n]``: the query that found a vector, and its place among those that the query found, from 0 on.
    ids, distances
        ``[n]``.
    fields
        ``[n]`` by name, as :class:`memhier.ann.SearchResult` has them.
    measure
        The name of the distances.
    """

    query: Ints
    rank: Ints
    ids: npt.NDArray[Any]
    distances: npt.NDArray[np.float32]
    fields: Fields
    measure: str = "distance"

    @classmethod
    def of_grid(cls, ids: npt.NDArray[Any], distances: npt.NDArray[np.float32], fields: Fields, measure: str) -> Self:
        """Return the hits of queries, ``[q, k]`` or ``[k]`` each."""
        grid = np.atleast_2d(ids)
        query, rank = np.nonzero(are_there(grid))
        found = {name: column.reshape(grid.shape)[query, rank] for name, column in fields.items()}
        return cls(query, rank, grid[query, rank], np.atleast_2d(distances)[query, rank], found, measure)

    def rows(self) -> list[dict[str, Any]]:
        """Return a dict for each."""
        names = ["id", self.measure, *_shown(self.fields, ("id", self.measure))]
        columns = [self.ids.tolist(), self.distances.tolist(), *map(_python, self.fields.values())]
        return [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]

    def columns(self) -> dict[str, npt.NDArray[Any]]:
        """Return all columns by their name in a table."""
        own: tuple[npt.NDArray[Any], ...] = (self.query, self.rank, self.ids, self.distances)
        first = ("query", "rank", "id", self.measure)
        names = (*first, *_shown(self.fields, first))
        return dict(zip(names, (*own, *self.fields.values()), strict=True))


class Hits:
    """A result that can be turned into rows and tables."""

    __slots__ = ()

    def rows_of(self, ends: Ints | None) -> list[Any]:
        """Return a dict for each vector found; for a batch, whose queries end at `ends`, such a list for each query."""
        rows = self.hit_table().rows()
        return rows if ends is None else [rows[low:high] for low, high in itertools.pairwise([0, *ends.tolist()])]

    def hit_table(self) -> HitTable:
        """Return the vectors found, with the missing ones left out."""
        raise NotImplementedError

    def to_arrow(self) -> Any:
        """Return the vectors found as a ``pyarrow.Table``: query, rank (from 0 on), id, distance and the fields.

        A document becomes text, bytes, bool, int64, float64 or a list of one of these where all of its values in the
        result are of that kind, otherwise JSON text. A field named like one of the first four columns gets a ``_``
        behind its name.

        Raises
        ------
        ImportError
            When pyarrow is not installed; the message names the extra.
        """
        arrow = _library("pyarrow")
        columns = {name: _arrow(arrow, name, column) for name, column in self.hit_table().columns().items()}
        return arrow.table(columns)

    def to_pandas(self) -> Any:
        """Return the vectors found as a ``pandas.DataFrame``, with the columns of :meth:`to_arrow`.

        Documents are Python objects. Integers and bools with missing values have pandas' types that allow them.

        Raises
        ------
        ImportError
            When pandas is not installed; the message names the extra.
        """
        pandas = _library("pandas")
        columns: dict[str, Any] = dict(self.hit_table().columns())
        for name, column in columns.items():
            if column.dtype == object:  # which pandas would guess a type of
                columns[name] = pandas.Series(column, dtype=object)
            elif isinstance(column, np.ma.MaskedArray):
                missing = {"b": "boolean"}.get(column.dtype.kind, "Int64") if np.ma.getmaskarray(column).any() else None
                columns[name] = pandas.Series(column.tolist(), dtype=missing or column.dtype)
        return pandas.DataFrame(columns)

    def to_polars(self) -> Any:
        """Return the vectors found as a ``polars.DataFrame``, with the columns of :meth:`to_arrow`.

        Raises
        ------
        ImportError
            When polars or pyarrow is not installed; the message names the extra.
        """
        return _library("polars").from_arrow(self.to_arrow())


def _library(name: str) -> Any:
    with extra_for("this table"):
        return import_module(name)


def _shown(fields: Fields, taken: tuple[str, ...]) -> list[str]:
    """Return the names of fields, none of them equal to another or to those taken."""
    names: list[str] = []
    for name in fields:
        while name in taken or name in names:
            name += "_"
        names.append(name)
    return names


def _python(column: npt.NDArray[Any]) -> list[Any]:
    """Return a column as Python values, None where null."""
    values: list[Any] = column.tolist()  # masked entries and NaT become None
    if column.dtype.kind == "f":
        return [None if value != value else value for value in values]
    return [_moments(value) for value in values] if column.dtype == object else values


def _moments(value: Any) -> Any:
    """Return a value with datetimes as Python's where it is a list of them."""
    listed = isinstance(value, list) and bool(value) and isinstance(value[0], np.datetime64)
    return [each.item() for each in value] if listed else value


def _arrow(arrow: Any, name: str, column: npt.NDArray[Any]) -> Any:
    if isinstance(column, np.ma.MaskedArray):
        return arrow.array(np.ma.getdata(column), mask=np.ma.getmaskarray(column))
    if column.dtype != object:
        return arrow.array(column, from_pandas=True)  # NaN is null
    values = column.tolist()
    if not any(_has_dict(value) for value in values):
        with suppress(arrow.ArrowException, OverflowError, TypeError, ValueError):  # of several kinds
            return arrow.array(values)
    try:
        texts = [None if value is None else json.dumps(value, ensure_ascii=False) for value in values]
    except TypeError:
        raise TypeError(
            f"field {name!r} holds bytes and other values: expected one kind for a table; rows() gives them as they are"
        ) from None
    return arrow.array(texts, arrow.string())


def _has_dict(value: object) -> bool:
    return isinstance(value, dict) or (isinstance(value, list) and any(map(_has_dict, value)))
