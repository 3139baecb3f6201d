"""Documents as callers give them: columns by name, a table, a dict for each row, or streams of these."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np

from memhier.ann.zoom.arguments import check_columns
from memhier.ann.zoom.payload.record import Document, encode, is_missing

__all__ = ["NAMES_MOST", "GivenDocuments", "check_names"]

NAMES_MOST = 1000
_NAME_LETTERS = 200


class GivenDocuments:
    """The documents of rows, in their order.

    Parameters
    ----------
    documents
        ``{name: values}``, where the values of a name are a sequence, an array or an iterator; a table of pandas,
        polars or pyarrow; or a sequence or an iterator of a dict for each row.

    Attributes
    ----------
    names
        As far as they are known: with a dict for each row, those of the rows read until now.
    streamed
        Whether any of them can be read only once.

    Raises
    ------
    TypeError, ValueError
        For names that are no text, and values that are no column.
    """

    def __init__(self, documents: Any) -> None:
        self._rows: Any = None
        self._columns: dict[str, Any] = {}
        if isinstance(documents, Mapping):
            self._columns = {name: _column(name, values) for name, values in documents.items()}
        elif (names := getattr(documents, "column_names", getattr(documents, "columns", None))) is not None:
            self._columns = {name: documents[name] for name in check_columns(names, "documents")}
        elif isinstance(documents, Iterable) and not isinstance(documents, str | bytes):
            self._rows = _column("rows", documents)
        else:
            raise TypeError(
                f"documents={type(documents).__name__}: expected columns by name, a table, or a dict for each row"
            )
        self.names: dict[str, None] = {}
        self._learn(self._columns)
        every = [self._rows] if self._rows is not None else [*self._columns.values()]
        self.streamed: bool = any(isinstance(each, Iterator) for each in every)
        self._taken = 0

    def check_length(self, count: int) -> None:
        """Refuse columns of another length than `count`; those of streams are not known."""
        for name, values in self._sources():
            if not isinstance(values, Iterator) and len(values) != count:
                raise ValueError(f"documents{name} has {len(values)} values: expected {count}, one for each row")

    def block(self, start: int, stop: int) -> list[dict[str, Any]]:
        """Return the values of rows by name, each as a Python value, None where it is missing."""
        if self._rows is not None:
            rows = _values(self._rows, start, stop)
            for number, row in enumerate(rows, start):
                if not isinstance(row, Mapping):
                    raise TypeError(f"documents[{number}]={type(row).__name__}: expected a dict for each row")
                self._learn(row)
            return [dict(row) for row in rows]
        columns = {name: _values(values, start, stop) for name, values in self._columns.items()}
        for name, values in columns.items():
            if len(values) != stop - start:
                raise ValueError(
                    f"documents[{name!r}] ended after {start + len(values)} values: expected one for each row"
                )
        return [{name: values[row] for name, values in columns.items()} for row in range(stop - start)]

    def take(self, count: int) -> list[dict[str, Any]]:
        """Return the values of the next rows."""
        start, self._taken = self._taken, self._taken + count
        rows = self.block(start, self._taken)
        if len(rows) != count:
            raise ValueError(f"documents ended after {start + len(rows)} rows: expected one for each vector")
        return rows

    def check_ended(self) -> None:
        """Refuse streams with values beyond the rows taken."""
        for name, values in self._sources():
            if isinstance(values, Iterator) and next(values, self) is not self:
                raise ValueError(f"documents{name} goes on after {self._taken} values: expected one for each vector")

    def encoded(self, values: Mapping[str, Any], numbers: Mapping[str, int], row: int) -> dict[int, Document | None]:
        """Return the documents of a row by the numbers of their names, None where a value is missing."""
        return {
            numbers[name]: None if is_missing(value) else encode(value, f"documents[{name!r}] of row {row}")
            for name, value in values.items()
        }

    def _sources(self) -> list[tuple[str, Any]]:
        """Return the columns with their names as a caller writes them."""
        if self._rows is not None:
            return [("", self._rows)]
        return [(f"[{name!r}]", values) for name, values in self._columns.items()]

    def _learn(self, names: Iterable[Any]) -> None:
        for name in names:
            if name in self.names:
                continue
            if not isinstance(name, str) or not 1 <= len(name) <= _NAME_LETTERS:
                raise ValueError(f"documents have the name {name!r}: expected text of 1 to {_NAME_LETTERS} letters")
            self.names[name] = None


def check_names(known: Sequence[str], new: Iterable[str], attributes: Iterable[str]) -> tuple[str, ...]:
    """Return the names of documents with new ones behind those that are known.

    Raises
    ------
    ValueError
        When one is the name of an attribute, or there are too many.
    """
    names = tuple(dict.fromkeys((*known, *new)))
    if both := set(names) & set(attributes):
        raise ValueError(f"{min(both)!r} is an attribute and a document: expected a name for each")
    if len(names) > NAMES_MOST:
        raise ValueError(
            f"documents have {len(names):,} names: expected at most {NAMES_MOST:,}; put changing names into a dict"
        )
    return names


def _column(name: object, values: Any) -> Any:
    """Return values that can be cut, or an iterator."""
    if isinstance(values, str | bytes | Mapping):
        raise TypeError(f"documents[{name!r}]={type(values).__name__}: expected a value for each row")
    kind = getattr(getattr(values, "dtype", None), "kind", "O")
    if kind in ("M", "m"):
        raise TypeError(
            f"documents[{name!r}] has dtype {values.dtype}: expected text, bytes or JSON values; attributes= takes "
            f"datetimes"
        )
    if hasattr(values, "__len__") and hasattr(values, "__getitem__"):
        return values
    if not isinstance(values, Iterable):
        raise TypeError(f"documents[{name!r}]={type(values).__name__}: expected a value for each row")
    return iter(values)


def _values(values: Any, start: int, stop: int) -> list[Any]:
    """Return a part of a column as a list of Python values."""
    if isinstance(values, Iterator):
        return list(islice(values, stop - start))
    if hasattr(values, "iloc"):  # pandas, where NaN stands for a missing value
        part = values.iloc[start:stop]
        return [
            None if null is True else value for value, null in zip(part.tolist(), part.isna().tolist(), strict=True)
        ]
    part = values.slice(start, stop - start) if hasattr(values, "to_pylist") else values[start:stop]
    for name in ("to_pylist", "to_list", "tolist"):  # of pyarrow, polars, NumPy
        if hasattr(part, name):
            found: list[Any] = getattr(part, name)()
            return found
    return [value.item() if isinstance(value, np.generic) else value for value in part]
