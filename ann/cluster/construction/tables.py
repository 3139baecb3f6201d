"""TableSource: the vectors of a Ray Dataset. Tasks on all nodes read its blocks and send them to their shards."""

import hashlib
import pickle
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from memhier.ann.cluster.cells import Cells
from memhier.ann.cluster.construction.dealing import Builders, Dealer, sampled
from memhier.ann.cluster.ray_extra import RayTaskError
from memhier.ann.zoom.filters.attributes import merge_schema
from memhier.ann.zoom.filters.given import as_columns, as_objects
from memhier.ann.zoom.source import VectorSource, open_source
from memhier.ann.zoom.storage.ids import IdKind, as_ids

__all__ = ["TableColumns", "TableSource"]


class TableColumns:
    """Which columns of a table are vectors, ids, attributes and documents.

    Parameters
    ----------
    vectors, ids
        Names of a column.
    attributes, documents
        Names of columns.
    """

    def __init__(self, vectors: str, ids: str, attributes: Sequence[str], documents: Sequence[str]) -> None:
        self.vectors: str = vectors
        self.ids: str = ids
        self.attributes: list[str] = [*attributes]
        self.documents: list[str] = [*documents]

    @property
    def names(self) -> list[str]:
        """All of them, each once."""
        return [*dict.fromkeys([self.vectors, self.ids, *self.attributes, *self.documents])]


class TableSource:
    """A Ray Dataset. This process holds the sample alone.

    Parameters
    ----------
    dataset
        A ``ray.data.Dataset``; it is read three times, twice where `count` is given.
    columns
        Which it has.
    count
        Its rows, where they are known.
    """

    def __init__(self, dataset: Any, columns: TableColumns, count: int | None = None) -> None:
        self._columns = columns
        schema = dataset.schema()
        known = [] if schema is None else schema.names
        for name in columns.names:
            if name not in known:
                raise ValueError(f"column {name!r}: expected one of the data set, which has {known}")
        self._dataset = dataset.select_columns(columns.names)
        types = dict(zip(schema.names, schema.types, strict=True))
        self.schema: dict[str, Any] = {name: attribute_type(name, types[name]) for name in columns.attributes}
        self._count: int = _told(dataset.count) if count is None else count
        probe = _told(partial(self._dataset.take_batch, 1, batch_format="pyarrow")) if self._count else None
        if probe is None:
            raise ValueError("vectors: the data set is empty; expected at least one row")
        with tempfile.TemporaryDirectory() as scratch, _opened(probe, columns, scratch) as source:
            self.dtype: str = source.dtype.name
            self.dimension: int = source.dimension
        self.id_kind: IdKind = "int64" if _ids(probe, columns, None).texts is None else "str"
        self.next_id: int = 0

    def sample(self, count: int, seed: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Return random vectors and their ids."""
        share = min(1.0, 1.2 * count / self._count)
        take = partial(_sample, self._columns, self.id_kind, share, seed)
        found = self._results(take)
        vectors, ids = (np.concatenate([each[place] for each in found]) for place in range(2))
        order = np.argsort(as_ids(ids, self.id_kind).numbers, kind="stable")[:count]
        return vectors[order], ids[order]

    def deal(self, cells: Cells, builders: Builders) -> npt.NDArray[np.int64]:
        """Send all vectors to their shards."""
        take = partial(_deal, self._columns, self.id_kind, self.schema, cells, builders)
        counts = np.zeros(len(builders), np.int64)
        for of_table, following in self._results(take):
            counts += of_table
            self.next_id = max(self.next_id, following)
        return counts

    def _results(self, function: Any) -> list[Any]:
        """Return the results of a function of tables, which tasks on all nodes call; raise the first error of one."""
        call = partial(_packed, function)
        results = self._dataset.map_batches(call, batch_format="pyarrow", batch_size=None, zero_copy_batch=True)
        batches = _told(lambda: [*results.iter_batches(batch_format="pyarrow")])
        found = [pickle.loads(raw) for batch in batches for raw in batch["result"].to_pylist()]
        for each in found:
            if isinstance(each, Exception):
                raise each
        return found


def attribute_type(name: str, kind: Any) -> str:
    """Return the type of an attribute for a type of Arrow."""
    import pyarrow as pa  # type: ignore[import-untyped]

    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return f"list[{attribute_type(name, kind.value_type)}]"
    for made, tests in {
        "int64": (pa.types.is_integer,), "float64": (pa.types.is_floating,), "bool": (pa.types.is_boolean,),
        "str": (pa.types.is_string, pa.types.is_large_string), "datetime": (pa.types.is_timestamp, pa.types.is_date),
    }.items():  # fmt: skip
        if any(test(kind) for test in tests):
            return made
    raise TypeError(f"attribute {name!r} has the type {kind}: expected integers, floats, bools, text or datetimes")


def _packed(function: Any, table: Any) -> dict[str, list[bytes]]:
    """Return the result of a function of a table, or its error, which Ray Data would give as text."""
    try:
        result = function(table)
    except (ValueError, TypeError, OSError) as error:
        result = error
    return {"result": [pickle.dumps(result)]}


def _sample(
    columns: TableColumns, kind: IdKind, share: float, seed: int, table: Any
) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    ids = _ids(table, columns, kind)
    rows = sampled(ids, share, seed)
    with tempfile.TemporaryDirectory() as scratch, _opened(table, columns, scratch) as source:
        return source.take(rows), ids.values()[rows]


def _deal(
    columns: TableColumns, kind: IdKind, schema: dict[str, Any], cells: Cells, builders: Builders, table: Any
) -> tuple[npt.NDArray[np.int64], int]:
    ids = _ids(table, columns, kind)
    names, count = ids.values(), len(ids)
    given = as_columns({name: _plain(table[name]) for name in columns.attributes}, count)
    merge_schema(schema, given, count)
    values = as_objects(given, schema)
    rows = [dict(row) for row in table.select(columns.documents).to_pylist()] if columns.documents else None
    # The ids tell this table from others, also where a task that failed half way runs again.
    dealer = Dealer(hashlib.sha256(ids.numbers.tobytes()).hexdigest(), cells, builders)
    with tempfile.TemporaryDirectory() as scratch, _opened(table, columns, scratch) as source:
        for start, block in source.blocks() if count else ():
            part = slice(start, start + len(block))
            pieces = {name: column[part] for name, column in values.items()}
            dealer.send(block, names[part], pieces, None if rows is None else rows[part])
    following = int(names.max(initial=-1)) + 1 if kind == "int64" else 0
    return dealer.finish(), following


def _opened(table: Any, columns: TableColumns, scratch: str) -> VectorSource:
    """Return the vectors of a table, checked."""
    return open_source(_plain(table[columns.vectors]), Path(scratch))


def _ids(table: Any, columns: TableColumns, kind: IdKind | None) -> Any:
    return as_ids(_plain(table[columns.ids]), kind, columns.ids)


def _plain(column: Any) -> Any:
    """Return a column of a table; tensors of Ray as an array."""
    whole = column.combine_chunks()
    whole = whole.chunk(0) if hasattr(whole, "chunk") and whole.num_chunks else whole
    return whole.to_numpy_ndarray() if hasattr(whole, "to_numpy_ndarray") else column


def _told(call: Any) -> Any:
    """Return the result of a call of Ray Data; an error of our own in a task is raised as itself."""
    try:
        return call()
    except RayTaskError as error:
        raise _innermost(error) from None


def _innermost(error: BaseException) -> BaseException:
    cause = getattr(error, "cause", None) or error.__cause__
    return error if cause is None or cause is error else _innermost(cause)
