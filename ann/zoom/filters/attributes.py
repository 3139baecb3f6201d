"""Attributes of rows, stored column by column: filters over all rows, and the values of a few.

Rows come in parts, each written once and in one transaction. An attribute that a part does not have is null there.
Columns stay on SSD. A filter reads the columns that it names, block by block, and makes a bitmap.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.zoom.filters.bitmaps import BitmapCache, Words, pack, word_count
from memhier.ann.zoom.filters.columns import BLOCK_ROWS, ChainedColumn, Column, as_columns
from memhier.ann.zoom.filters.conditions import (
    AttributeType,
    Expression,
    check_name,
    check_types,
    on_columns,
    row_bytes,
    select,
)
from memhier.ann.zoom.filters.stored_column import (
    Blocks,
    NullColumn,
    StoredColumn,
    converted,
    must_convert,
    write_column,
)
from memhier.ann.zoom.filters.where import parse
from memhier.io.page_file import PAGE_BYTES
from memhier.io.read_arguments import Tallies
from memhier.io.reader import Reader
from memhier.store.store import Staging, Store, Transaction

__all__ = ["Attributes", "Schema", "as_columns", "chain", "merge_schema", "merged_schema", "write_attributes"]

Schema: TypeAlias = dict[str, AttributeType]
Ints: TypeAlias = npt.NDArray[np.int64]

WORKSPACE_BYTES = 4 << 20
COLUMN_BYTES = 512


def merge_schema(schema: Mapping[str, AttributeType], attributes: Any, count: int) -> Schema:
    """Return the schema with the types of new attributes added; check the values of known ones.

    Parameters
    ----------
    schema
        Types by name, empty for the first attributes; JSON can hold it.
    attributes
        Columns by name, a table, or a dict per row (see :func:`write_attributes`).
    count
        Rows.

    Raises
    ------
    ValueError
        For names or values that cannot be stored, for a new attribute without a single value, and for numbers that the
        known type cannot hold exactly.
    TypeError
        When an attribute is of another type than before.

    Examples
    --------
    >>> from memhier.ann.zoom.filters.attributes import merge_schema
    >>> merge_schema({}, {"price": [3, None], "lang": ["en", "de"]}, 2)
    {'price': 'int64', 'lang': 'str'}
    """
    return merged_schema(schema, as_columns(attributes, count), count)


def merged_schema(schema: Mapping[str, AttributeType], columns: Mapping[str, Column], count: int) -> Schema:
    """Return the schema with the types of new columns added; see :func:`merge_schema`."""
    merged = dict(schema)
    for name, column in columns.items():
        if name in merged:
            for start in range(0, count if must_convert(name, column, merged[name]) else 0, BLOCK_ROWS):
                rows = np.arange(start, min(start + BLOCK_ROWS, count))
                converted(name, column.read(rows), merged[name], rows)
        elif column.type is None and not count:
            continue  # an empty column has no type
        elif column.type is None:
            raise ValueError(f"attribute {name!r} is null in every row: its type cannot be told; leave it out")
        else:
            merged[name] = column.type
    return merged


def write_attributes(
    tx: Transaction | Staging,
    prefix: str,
    schema: Schema,
    attributes: Any,
    order: npt.ArrayLike,
    block_rows: int = BLOCK_ROWS,
) -> None:
    """Write the attributes of one part into segments named `prefix` + attribute.

    Parameters
    ----------
    tx
        The transaction. It holds a buffer for every segment until it ends; text takes two segments.
    prefix
        Letters, digits, ``-`` or ``_``; the part's own.
    schema
        From :func:`merge_schema` with the same attributes.
    attributes
        ``{name: values}``, a DataFrame of pandas or polars, a pyarrow Table, or a dict per row. Values are integers,
        floats, bool, text or datetimes (`memhier.ann.zoom.filters.times`); None, NaN, NaT, pandas.NA and masked entries
        are null. `chain` gives the columns of stored parts.
    order
        int64 ``[n]``: row ``i`` of the part gets the values of row ``order[i]`` of `attributes`.
    block_rows
        Rows written at a time, at most 65,536.
    """
    rows = np.asarray(order)
    if rows.ndim != 1 or (rows.size and rows.dtype.kind not in "iu"):
        raise TypeError(f"order has dtype {rows.dtype} and shape {rows.shape}: expected integers of shape [n]")
    columns = as_columns(attributes, _count(attributes))
    for name, column in columns.items():
        check_name(name, schema)
        must_convert(name, column, schema[name])
        if rows.size and (int(rows.min()) < 0 or int(rows.max()) >= len(column)):
            raise ValueError(f"order holds {int(rows.min())} to {int(rows.max())}: expected 0 to {len(column) - 1}")
    for name, column in columns.items():
        if column.type is not None:
            write_column(tx, prefix, name, schema[name], column, rows, max(64, min(block_rows, BLOCK_ROWS) // 64 * 64))


def chain(parts: Sequence["Attributes"], schema: Schema) -> dict[str, Column]:
    """Return the columns of parts, one part after the other, as attributes for :func:`write_attributes`.

    Rows are read as they are written, so no column is held; text takes 4 bytes of DRAM per distinct word and part.
    """
    return {name: ChainedColumn([part.column(name) for part in parts]) for name in schema}


class Attributes:
    """The attributes of one part. For many threads.

    Parameters
    ----------
    store
        Open store that holds the part.
    prefix
        As :func:`write_attributes` was given it.
    schema
        Types by name; attributes that the part does not have are null in all its rows.
    count
        Its rows.
    reader
        Does the reads; stays the caller's.
    cache
        Keeps bitmaps; may be shared with other parts.
    work_bytes
        DRAM for a running filter, beside its bitmap: blocks of the columns, and arrays of the evaluation.

    Raises
    ------
    CorruptionError
        When a column has not `count` rows.

    Examples
    --------
    >>> import tempfile
    >>> from memhier import Reader, Store
    >>> from memhier.ann.zoom.filters.attributes import Attributes, merge_schema, write_attributes
    >>> place = tempfile.mkdtemp() + "/store"
    >>> items = {"price": [5, 20, None], "lang": ["en", "en", "de"]}
    >>> schema = merge_schema({}, items, 3)
    >>> with Store.create(place, kind="example") as store, store.begin() as tx:
    ...     write_attributes(tx, "part0-", schema, items, [2, 1, 0])
    ...     generation = tx.commit()
    >>> with Store.open(place, kind="example") as store, Reader() as reader:
    ...     attributes = Attributes(store, "part0-", schema, 3, reader)
    ...     attributes.bitmap("price < 10 and lang == 'en'").tolist(), attributes.take([0, 2], ["lang"])
    ([4], {'lang': array(['de', 'en'], dtype=object)})
    """

    def __init__(
        self,
        store: Store,
        prefix: str,
        schema: Schema,
        count: int,
        reader: Reader,
        cache: BitmapCache | None = None,
        work_bytes: int = WORKSPACE_BYTES,
    ) -> None:
        self._schema = dict(schema)
        self._count, self._words = count, word_count(count)
        self._cache = cache
        self._work_bytes = work_bytes
        self._owner = object()  # Keys of the cache: a part to come may have this one's prefix.
        self._columns: dict[str, StoredColumn] = {}
        segments = store.segments()
        for name, kind in schema.items():
            if prefix + name in segments:
                self._columns[name] = StoredColumn(store, prefix + name, kind, count, reader)

    def __len__(self) -> int:
        """Rows."""
        return self._count

    @property
    def names(self) -> tuple[str, ...]:
        """The attributes of the schema."""
        return tuple(self._schema)

    @property
    def memory_bytes(self) -> int:
        """DRAM held, in bytes, besides that of store, reader and cache; a running filter holds `work_bytes`."""
        return COLUMN_BYTES * len(self._schema)

    def bitmap(self, where: str | Expression) -> Words:
        """Return the rows for which a filter is true, uint64 ``[ceil(n / 64)]``, read-only.

        Parameters
        ----------
        where
            Text, or the expression that :func:`~memhier.ann.zoom.filters.where.parse` made of it, its types checked.

        Raises
        ------
        ValueError, TypeError
            When it is no filter, names an unknown attribute, or compares one with a value of another type.
        CorruptionError
            When a page of a column does not match its checksum.
        """
        expression = where if isinstance(where, Expression) else parse(where)
        if expression is not where:
            check_types(expression, self._schema)
        key = (self._owner, str(expression))
        found = None if self._cache is None else self._cache.get(key)
        if found is None:
            found = self._select(expression)
            if self._cache is not None:
                self._cache.put(key, found)
        return found

    def take(
        self, rows: npt.ArrayLike, names: Sequence[str] | None = None, tally: Tallies | None = None
    ) -> dict[str, npt.NDArray[Any]]:
        """Return attributes of rows.

        Parameters
        ----------
        rows
            int64 ``[m]``, in any order and with repetitions.
        names
            Which attributes; None takes all.
        tally
            `memhier.io.read_arguments.READ_TALLY` ``[1]``, to which the I/Os, pages and bytes read are added.

        Returns
        -------
        dict of numpy.ndarray
            ``[m]`` each: float64 with NaN where null; datetime64[us] with NaT; str as objects with None; int64 and bool
            as masked arrays.

        Raises
        ------
        IndexError
            For a row out of range.
        CorruptionError
            When a page does not match its checksum.
        """
        wanted = np.asarray(rows)
        if wanted.ndim != 1 or (wanted.size and wanted.dtype.kind not in "iu"):
            raise TypeError(f"rows has dtype {wanted.dtype} and shape {wanted.shape}: expected integers of shape [m]")
        if wanted.size and (int(wanted.min()) < 0 or int(wanted.max()) >= self._count):
            index = int(np.flatnonzero((wanted < 0) | (wanted >= self._count))[0])
            raise IndexError(f"rows[{index}]={int(wanted[index])}: expected 0 to {self._count - 1}")
        names = self.names if names is None else names
        for name in names:
            check_name(name, self._schema)
        return {name: self._take(name, wanted.astype(np.int64), tally) for name in names}

    def column(self, name: str) -> Column:
        """Return a column for :func:`chain`."""
        return self._columns.get(name) or NullColumn(self._count)

    def close(self) -> None:
        """Detach from the reader and forget the bitmaps."""
        if self._cache is not None:
            self._cache.drop(self._owner)
        for column in self._columns.values():
            column.close()
        self._columns.clear()

    def _select(self, expression: Expression) -> Words:
        find = {name: column.find for name, column in self._columns.items() if column.type == "str"}
        expression = on_columns(expression, self._schema, find)
        each, names = row_bytes(expression), expression.names
        used = {name: self._columns[name] for name in names if name in self._columns}
        each += sum(column.width + 2 for column in used.values())
        step = _block_rows((self._work_bytes - len(used) * PAGE_BYTES) // each)
        blocks = Blocks(used, min(step, self._count))
        words = np.zeros(self._words, np.uint64)
        for start in range(0, self._count, step):
            count = min(step, self._count - start)
            rows = select(expression, partial(blocks.cells, start, count), count)
            words[start // 64 : word_count(start + count)] = pack(rows)
        return words

    def _take(self, name: str, rows: Ints, tally: Tallies | None) -> npt.NDArray[Any]:
        kind = self._schema[name]
        column = self._columns.get(name)
        cells = NullColumn(self._count).read(rows) if column is None else column.read(rows, tally)
        nulls = np.zeros(len(rows), np.bool_) if cells.nulls is None else cells.nulls
        if kind == "float64":
            return np.where(nulls, np.nan, cells.values)
        if kind == "datetime":
            moments = cells.values.astype(np.int64).view("M8[us]")
            return np.where(nulls, np.datetime64("NaT", "us"), moments)
        if kind != "str":
            values = cells.values.astype(np.bool_ if kind == "bool" else np.int64)
            return np.ma.MaskedArray(values, nulls)
        texts = np.full(len(rows), None, object)
        if column is not None and not nulls.all():
            ranks, inverse = np.unique(cells.values[~nulls], return_inverse=True)
            texts[~nulls] = np.array(column.texts(ranks, tally), object)[inverse]
        return texts


def _count(attributes: Any) -> int:
    """Return the rows of attributes of any kind."""
    if isinstance(attributes, Mapping):
        return len(next(iter(attributes.values()), ()))
    return len(attributes)


def _block_rows(most: int) -> int:
    """Return the rows of a block, at most `most` and at least 64; whole pages of every column if it has a page."""
    rows = max(64, min(BLOCK_ROWS, most))
    return rows - rows % (PAGE_BYTES if rows >= PAGE_BYTES else 64)
