"""An index of documents by text ids, made with the first of them: the part that vector stores share."""

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Any, Literal

import numpy as np

from memhier.ann.zoom import ZoomIndex
from memhier.ann.zoom.filters.where import And, Expression, IsNull, Not, Or, parse
from memhier.ann.zoom.preview.space import Metric
from memhier.arguments import check_int
from memhier.closing import Closing

__all__ = ["DocumentIndex", "comparison"]

_RECORD = "record"


class DocumentIndex(Closing):
    """Records (dicts that JSON can hold) with a vector each, by text ids; every change is durable when it returns.

    Parameters
    ----------
    path
        The directory of the index. It is opened if it exists, for changes, and otherwise made with the first record,
        whose vector settles the dimension.
    attributes
        Keys of the metadata of records by which searches may filter. Values of one key are of one type: number, bool,
        text or None.
    metric, dram, grow_to, seed
        Of :meth:`memhier.ann.ZoomIndex.build`, for a new index.

    Examples
    --------
    >>> import tempfile
    >>> from memhier.ann.documents import DocumentIndex
    >>> with DocumentIndex(tempfile.mkdtemp() + "/x", attributes=["year"], dram="16MiB", grow_to=1000) as index:
    ...     index.put(["a", "b"], [[1, 0], [0, 1]], [{"text": "A"}, {"text": "B"}], [{"year": 1999}, {"year": 2024}])
    ...     index.search([1, 0], 2, "year > 2000")
    [('b', {'text': 'B'}, 1.0)]
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        attributes: Sequence[str] = (),
        metric: Metric = "cosine",
        dram: int | str = "256MiB",
        grow_to: int = 100_000,
        seed: int = 0,
    ) -> None:
        self._path = Path(path).absolute()
        if isinstance(attributes, str):
            raise TypeError(f"attributes={attributes!r}: expected a list of names")
        self.attributes: tuple[str, ...] = tuple(attributes)
        self._options: dict[str, Any] = {
            "metric": metric, "dram": dram, "grow_to": check_int("grow_to", grow_to, 1), "seed": seed
        }  # fmt: skip
        self._changing = Lock()  # ids are sorted into old and new ones, then both are changed
        self.index: ZoomIndex | None = ZoomIndex.open(self._path, writable=True) if self._path.exists() else None

    @property
    def metric(self) -> Metric:
        """The metric of the index."""
        metric: Metric = self._options["metric"] if self.index is None else self.index.metric
        return metric

    def put(
        self,
        ids: Sequence[str],
        vectors: object,
        records: Sequence[Mapping[str, Any]],
        metadata: Sequence[Mapping[str, Any]],
    ) -> None:
        """Add records, and replace those whose ids are there; the last of a repeated id counts.

        Parameters
        ----------
        ids, vectors, records, metadata
            One for each record; vectors are ``[n, d]``. Of the metadata only the keys in `attributes` are taken.
        """
        if not len(ids):
            return
        matrix = np.asarray(vectors, np.float32)
        last = np.array(sorted({name: row for row, name in enumerate(ids)}.values()))
        with self._changing:
            if self.index is None:
                empty = np.empty((0, matrix.shape[-1]), np.float32)
                self.index = ZoomIndex.build(self._path, empty, ids=np.array([], "U1"), **self._options)
            known = self.index.contains([ids[row] for row in last])
            old, new = (self._columns(rows, ids, matrix, records, metadata) for rows in (last[known], last[~known]))
            if new["ids"]:
                self.index.add(**new)
            try:
                if old["ids"]:
                    self.index.update(**old)
            except BaseException:
                self.index.remove(new["ids"])
                raise
            self.index.commit()

    def discard(self, ids: Sequence[str]) -> None:
        """Remove records; ids that are not there are passed over."""
        with self._changing:
            if self.index is not None and (there := self._there(ids)):
                self.index.remove(there)
                self.index.commit()

    def discard_where(self, where: str, ids: Sequence[str] | None = None) -> None:
        """Remove all records that a filter selects, or those of them that have one of these ids."""
        with self._changing:
            if self.index is not None and (chosen := self.select(where, ids)):
                self.index.remove(chosen)
                self.index.commit()

    def select(self, where: str | None = None, ids: Sequence[str] | None = None) -> list[str]:
        """Return the ids of all records that a filter selects, or those of them that are in `ids`."""
        if self.index is None or not len(self.index) or (selected := self._selected(where)) is False:
            return []
        if where is None and ids is not None:
            return self._there(ids)
        names: list[str] = [name for block in self.index.ids(selected) for name in block.tolist()]
        if ids is None:
            return names
        chosen = set(names)
        return [name for name in dict.fromkeys(ids) if name in chosen]

    def get(self, ids: Sequence[str]) -> list[tuple[str, dict[str, Any]]]:
        """Return ids and records; ids that are not there are left out."""
        if self.index is None or not (there := self._there(ids)):
            return []
        return list(zip(there, self.index.fetch(there, [_RECORD])[_RECORD].tolist(), strict=True))

    def search(
        self, query: object, k: int, where: str | None = None, **options: Any
    ) -> list[tuple[str, dict[str, Any], float]]:
        """Return ids, records and distances of the `k` nearest, or fewer, nearest first.

        Parameters
        ----------
        query
            ``[d]``.
        where
            A filter on the attributes.
        **options
            Of :meth:`memhier.ann.ZoomIndex.search`, such as ``recall=``.
        """
        if self.index is None or not len(self.index) or (selected := self._selected(where)) is False:
            return []
        found = self.index.search(query, k, where=selected, fields=[_RECORD], **options)
        return [(row["id"], row[_RECORD], row["distance"]) for row in found.rows()]

    def close(self) -> None:
        """Close the index. May be called twice."""
        if self.index is not None:
            self.index.close()

    def _selected(self, where: str | None) -> str | Literal[False] | None:
        """Return a filter without attributes that are null in all records; None for all records, False for none."""
        assert self.index is not None
        missing = set(self.attributes) - self.index.fields.keys()
        if where is None or missing.isdisjoint((expression := parse(where)).names):
            return where
        found = _settled(expression, missing, wanted=True)
        if isinstance(found, bool):
            return None if found else False
        return str(found)

    def _columns(
        self,
        rows: Any,
        ids: Sequence[str],
        matrix: Any,
        records: Sequence[Mapping[str, Any]],
        metadata: Sequence[Mapping[str, Any]],
    ) -> dict[str, Any]:
        """Return the arguments of a change of some rows."""
        assert self.index is not None
        columns = {key: [metadata[row].get(key) for row in rows] for key in self.attributes}
        told = {  # a column of nulls does not tell its type
            key: values
            for key, values in columns.items()
            if key in self.index.fields or any(value is not None for value in values)
        }
        return {
            "ids": [ids[row] for row in rows], "vectors": matrix[rows], "attributes": told or None,
            "documents": {_RECORD: [dict(records[row]) for row in rows]},
        }  # fmt: skip

    def _there(self, ids: Sequence[str]) -> list[str]:
        assert self.index is not None
        if isinstance(ids, str):
            raise TypeError(f"ids={ids!r}: expected a list of ids")
        distinct = list(dict.fromkeys(ids))
        return [distinct[row] for row in np.flatnonzero(self.index.contains(distinct))] if distinct else []


_OF_SEVERAL = ("in", "not in", "contains any", "contains all")  # operators whose value is a sequence


def comparison(name: str, operator: str, value: Any) -> str:
    """Return a test of a filter: ``comparison("lang", "==", "en")`` is ``lang == 'en'``.

    Parameters
    ----------
    operator
        ``==``, ``!=``, ``<``, ``<=``, ``>``, ``>=``, ``in``, ``not in``, ``like``; of lists ``contains``,
        ``contains any``, ``contains all``.
    value
        A number, a bool or text; a sequence of these for ``in``, ``any`` and ``all``, which may be empty; None, which
        is null, for ``==`` and ``!=``.

    Raises
    ------
    TypeError
        For any other value.
    ValueError
        For NaN, which compares to nothing, and for an infinite number.

    Examples
    --------
    >>> from memhier.ann.documents import comparison
    >>> comparison("price", "<", 10), comparison("lang", "in", ["en", "de"])
    ('price < 10', "lang in ('en', 'de')")
    """
    if value is None and operator in ("==", "!="):
        return f"{name} is {'' if operator == '==' else 'not '}null"
    if operator in _OF_SEVERAL and not len(value):
        return f"{name} is null {'and' if operator in ('in', 'contains any') else 'or'} {name} is not null"
    if operator in _OF_SEVERAL:
        return f"{name} {operator} ({', '.join(_literal(name, each) for each in value)})"
    return f"{name} {operator} {_literal(name, value)}"


def _settled(expression: Expression, missing: set[str], *, wanted: bool) -> Expression | bool:
    """Return the condition that another one is true, or is false, where the attributes `missing` are null."""
    if isinstance(expression, Not):
        return _settled(expression.operand, missing, wanted=not wanted)
    if isinstance(expression, And | Or):
        parts = [_settled(operand, missing, wanted=wanted) for operand in expression.operands]
        every = isinstance(expression, And) == wanted
        if (not every) in parts:
            return not every
        left = tuple(part for part in parts if not isinstance(part, bool))
        return (And if every else Or)(left) if len(left) > 1 else left[0] if left else every
    if missing.isdisjoint(expression.names):
        return expression if wanted else Not(expression)
    return isinstance(expression, IsNull) and wanted  # other tests of a null are unknown


def _literal(name: str, value: Any) -> str:
    if isinstance(value, bool | np.bool_):
        return "true" if value else "false"
    if isinstance(value, int | float | np.number):
        number = value.item() if isinstance(value, np.number) else value
        if isinstance(number, float) and not math.isfinite(number):
            raise ValueError(f"filter: {name} is compared with {number}: expected a finite number")
        return repr(number)
    if isinstance(value, str):
        return "'" + value.replace("'", "''") + "'"
    raise TypeError(f"filter: {name} is compared with {value!r}: expected a number, a bool or text")
