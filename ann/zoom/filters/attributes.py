"""Attributes of rows, stored column by column: filters over all rows, and the values of a few.

Rows come in parts, each written once and in one transaction. An attribute that a part does not have is null there.
Columns stay on SSD. A filter reads the columns that it names, block by block, and makes a bitmap.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.zoom.filters.bitmaps import BitmapCache, Words, bitmap_bytes, pack, word_count
from memhier.ann.zoom.filters.blocks import Blocks, StoredAny
from memhier.ann.zoom.filters.columns import BLOCK_ROWS, DTYPES, AnyColumn, ChainedColumn, ListColumn, NullColumn
from memhier.ann.zoom.filters.conditions import (
    AttributeType,
    ColumnWords,
    Contains,
    Expression,
    Leaf,
    Pair,
    Value,
    check_name,
    check_types,
    conjuncts,
    is_list,
    item_type,
    leaves,
    names_of,
    on_columns,
    row_bytes,
    select,
)
from memhier.ann.zoom.filters.given import as_columns
from memhier.ann.zoom.filters.item_filter import ASKING, ItemFilter, Posted
from memhier.ann.zoom.filters.lists import ChainedListColumn
from memhier.ann.zoom.filters.patterns import Pattern
from memhier.ann.zoom.filters.postings import BLOCK_ITEMS, LOOK_UP_BYTES, POSTED_BYTES, POSTINGS, Postings
from memhier.ann.zoom.filters.stored_column import StoredColumn, converted, must_convert, write_column
from memhier.ann.zoom.filters.stored_lists import StoredListColumn, write_lists
from memhier.ann.zoom.filters.where import parse
from memhier.io.ranges import CountedReads, Reading, read_together
from memhier.io.reader import Reader
from memhier.store.store import Staging, Store, Transaction

__all__ = [
    "Attributes", "Schema", "as_columns", "chain", "item_bytes", "merge_schema", "merged_schema",
    "null_values", "write_attributes",
]  # fmt: skip

Schema: TypeAlias = dict[str, AttributeType]
Ints: TypeAlias = npt.NDArray[np.int64]
Asked: TypeAlias = Sequence[tuple[Value, ...]]
"""Groups of items: a list that is looked for holds one of each."""

WORKSPACE_BYTES = 4 << 20
COLUMN_BYTES = 512
_ASKED_TOGETHER = 2  # items of a filter that is evaluated with others: as many bitmaps


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


def merged_schema(schema: Mapping[str, AttributeType], columns: Mapping[str, AnyColumn], count: int) -> Schema:
    """Return the schema with the types of new columns added; see :func:`merge_schema`."""
    merged = dict(schema)
    for name, column in columns.items():
        if name in merged:
            if must_convert(name, column, merged[name]):
                _check_convertible(name, column, merged[name])
        elif column.type is None and not count:
            continue  # an empty column has no type
        elif column.type is None or column.type == "list[]":
            every = "null" if column.type is None else "null or an empty list"
            raise ValueError(f"attribute {name!r} is {every} in every row: its type cannot be told; leave it out")
        else:
            merged[name] = column.type
    return merged


def item_bytes(columns: Mapping[str, AnyColumn]) -> int:
    """Return the most bytes on SSD of the items of all lists, with the words of text and the postings."""
    total = 0
    for column in columns.values():
        if isinstance(column, ListColumn) and column.items.type is not None:
            total += (np.dtype(DTYPES[column.items.type]).itemsize + POSTED_BYTES) * len(column.items)
            total += sum(len(word) + 8 for word in column.items.words()) if column.type == "list[str]" else 0
    return total


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
        The transaction. It holds a buffer for every segment until it ends; text takes a further segment, and so do
        lists.
    prefix
        Letters, digits, ``-`` or ``_``; the part's own.
    schema
        From :func:`merge_schema` with the same attributes.
    attributes
        ``{name: values}``, a DataFrame of pandas or polars, a pyarrow Table, or a dict per row. Values are integers,
        floats, bool, text or datetimes (`memhier.ann.zoom.filters.times`), or lists of one of these; None, NaN, NaT,
        pandas.NA and masked entries are null. `chain` gives the columns of stored parts.
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
    step = max(64, min(block_rows, BLOCK_ROWS) // 64 * 64)
    blocks = partial(_blocks, rows, step)
    for name, column in columns.items():
        kind = item_type(schema[name])
        if column.type is None:
            continue
        assert kind is not None  # of a list that was empty everywhere no schema is made
        if isinstance(column, ListColumn):
            posted = BLOCK_ITEMS if block_rows >= BLOCK_ROWS else step
            write_lists(tx, prefix + name, name, kind, column, blocks, step, posted=posted)
        else:
            write_column(tx, prefix + name, name, kind, column, blocks)


class Columns(Protocol):
    """Attributes of a part, column by column."""

    def column(self, name: str) -> AnyColumn:
        """Return a column for :func:`chain`."""


def chain(parts: Sequence[Columns], schema: Schema) -> dict[str, AnyColumn]:
    """Return the columns of parts, one part after the other, as attributes for :func:`write_attributes`.

    Rows are read as they are written, so no column is held; text takes 4 bytes of DRAM per distinct word and part.
    """
    return {name: _chained([part.column(name) for part in parts], kind) for name, kind in schema.items()}


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
    segments
        Names of the segments of columns that are not `prefix` + attribute.

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

    word_bytes: int = 40  # of a word that is numbered anew, twice

    def __init__(
        self,
        store: Store,
        prefix: str,
        schema: Schema,
        count: int,
        reader: Reader,
        cache: BitmapCache | None = None,
        work_bytes: int = WORKSPACE_BYTES,
        *,
        segments: Mapping[str, str] | None = None,
    ) -> None:
        self._schema = dict(schema)
        self._count, self._words = count, word_count(count)
        self._cache = cache
        self._work_bytes = work_bytes
        self._owner = object()  # Keys of the cache: a part to come may have this one's prefix.
        self._columns: dict[str, StoredAny] = {}
        self._reader = reader
        every, others = store.segments(), segments or {}
        self._checksums = 0
        for name, kind in schema.items():
            if (segment := others.get(name, prefix + name)) not in every:
                continue
            item, stored = item_type(kind), StoredListColumn if is_list(kind) else StoredColumn
            assert item is not None
            self._columns[name] = stored(store, segment, item, count, reader)
            names = [segment + suffix for suffix in ("", "-items", "-words", "-items-words", POSTINGS)]
            self._checksums += sum(every[each].memory_bytes for each in names if each in every)

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

    @property
    def joined_bytes(self) -> int:
        """DRAM that a join takes for the columns: checksums, in arrays that grow, and the new numbers of words."""
        return 2 * self._checksums + self.word_bytes * sum(column.word_count for column in self._columns.values())

    def bitmap(self, where: str | Expression) -> Words:
        """Return the rows for which a filter is true, uint64 ``[ceil(n / 64)]``; writable if it is the caller's.

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
        key, cache = (self._owner, expression), self._cache
        found = None if cache is None else cache.get(key)
        if found is None:
            found, is_fast = self._select(expression)
            if cache is not None and (not is_fast or cache.asked_again(key)):
                cache.put(key, found)
        return found

    def bitmaps(self, expressions: Sequence[Expression]) -> list[Words]:
        """Return the rows for which each of some filters is true, whose types are checked; see :meth:`bitmap`.

        Filters that ask for items of one list read its postings together; each takes up to two bitmaps.
        """
        found: dict[int, Words] = {}
        together: dict[str, list[tuple[int, Asked]]] = {}
        for number, expression in enumerate(expressions):
            key = self._owner, expression
            if (known := None if self._cache is None else self._cache.get(key)) is not None:
                found[number] = known
            elif (asked := self._asked_items(expression)) is not None and not (
                self._cache is not None and self._cache.asked_again(key)
            ):
                together.setdefault(asked[0], []).append((number, asked[1]))
            else:
                found[number] = self.bitmap(expression)
        for name, every in together.items():
            found.update(
                zip([each[0] for each in every], self._holding(name, [each[1] for each in every]), strict=True)
            )
        return [found[number] for number in range(len(expressions))]

    def _holding(self, name: str, filters: Sequence[Asked]) -> Words:
        """Return the rows of filters that ask for items of a list as :meth:`_asked_items` says, one after another."""
        column = self._columns[name]
        assert isinstance(column, StoredListColumn)
        assert column.postings is not None
        return column.holding(0, self._count, filters, self._directory(name, column.postings))

    def _asked_items(self, expression: Expression) -> tuple[str, Asked] | None:
        """Return the list of numbers of which a filter asks for one or two items, and these; None if it does not."""
        name, asked = None, list[tuple[Value, ...]]()
        for each in conjuncts(expression):
            if not isinstance(each, Contains) or name not in (None, each.name) or len(asked) == _ASKED_TOGETHER:
                return None
            name = each.name
            asked.append(each.values)
        if name is None or self._schema[name] not in ("list[int64]", "list[float64]", "list[bool]"):
            return None
        column = self._columns.get(name)
        is_posted = isinstance(column, StoredListColumn) and column.postings is not None
        return (name, asked) if is_posted else None

    def take(self, rows: npt.ArrayLike, names: Sequence[str] | None = None) -> dict[str, npt.NDArray[Any]]:
        """Return attributes of rows; one submission reads the values of all columns, another the words of text.

        Parameters
        ----------
        rows
            int64 ``[m]``, in any order and with repetitions.
        names
            Which attributes; None takes all.

        Returns
        -------
        dict of numpy.ndarray
            ``[m]`` each: float64 with NaN where null; datetime64[us] with NaT; str as objects with None; int64 and bool
            as masked arrays; lists as objects with None, of int, float, bool, str or datetime64[us].

        Raises
        ------
        IndexError
            For a row out of range.
        CorruptionError
            When a page does not match its checksum.
        """
        found = read_together(CountedReads(self._reader), self.readings(rows, names))
        names = self.names if names is None else names
        return {name: found.get(name, null_values(self._schema[name], np.size(rows))) for name in names}

    def readings(self, rows: npt.ArrayLike, names: Sequence[str] | None = None) -> dict[str, Reading[npt.NDArray[Any]]]:
        """Return the reads of :meth:`take` as readings, by attribute; those that the part lacks are not among them.

        See `memhier.io.ranges`.
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
        places = wanted.astype(np.int64)
        return {name: self._columns[name].take(places) for name in names if name in self._columns}

    def column(self, name: str) -> AnyColumn:
        """Return a column for :func:`chain`."""
        return self._columns.get(name) or NullColumn(self._count)

    def misposted(self) -> list[str]:
        """Return the attributes whose postings do not tell the items of their lists; reads all lists."""
        lists = {name: column for name, column in self._columns.items() if isinstance(column, StoredListColumn)}
        return [name for name, column in lists.items() if not column.posted_right()]

    def close(self) -> None:
        """Detach from the reader and forget the bitmaps."""
        if self._cache is not None:
            self._cache.drop(self._owner)
        for column in self._columns.values():
            column.close()
        self._columns.clear()

    def _select(self, expression: Expression) -> tuple[Words, bool]:
        """Return the rows of a filter, and whether postings alone told them."""
        together = _ASKED_TOGETHER * bitmap_bytes(self._count) + LOOK_UP_BYTES
        if together <= self._work_bytes and (asked := self._asked_items(expression)) is not None:
            return self._holding(asked[0], [asked[1]])[0], True
        every = leaves(expression)
        used = {name: self._columns[name] for leaf in every for name in names_of(leaf) if name in self._columns}
        room = self._work_bytes
        for_words = room // 4 if any(isinstance(leaf, Pair) for leaf in every) else 0
        room -= for_words

        def like(column: StoredColumn, pattern: Pattern, low: int, high: int) -> npt.NDArray[np.uint8]:
            nonlocal room
            bits = column.like(pattern, low, high, room)
            room -= len(bits)
            return bits

        texts = {}
        for name, column in used.items():
            if column.type in ("str", "list[str]"):
                single = column if isinstance(column, StoredColumn) else column.items
                texts[name] = ColumnWords(single.find, partial(like, single), single.word_reads(for_words))
        expression = on_columns(expression, self._schema, texts)
        posted = self._posted(every, used)
        if len(posted) == len(used) and ItemFilter.takes(every):
            return ItemFilter(posted, self._count).select(expression, room), True
        directories = {name: each.directory for name, each in posted.items()}
        blocks = Blocks(used, self._count, room, row_bytes(expression), directories)
        words = np.zeros(self._words, np.uint64)
        for start in range(0, self._count, blocks.rows):
            count = min(blocks.rows, self._count - start)
            rows = select(expression, partial(blocks.cells, start, count), count)
            words[start // 64 : word_count(start + count)] = pack(rows)
        return words, False

    def _posted(self, every: Sequence[Leaf], used: Mapping[str, StoredAny]) -> dict[str, Posted]:
        """Return the columns of lists whose rows postings tell: those of which a filter asks for items alone."""
        others = {name for leaf in every if not isinstance(leaf, ASKING) for name in names_of(leaf)}
        posted = {}
        for name, column in used.items():
            if name not in others and isinstance(column, StoredListColumn) and column.postings is not None:
                posted[name] = Posted(column, self._directory(name, column.postings))
        return posted

    def _directory(self, name: str, postings: Postings) -> Words:
        key = (self._owner, "postings", name)
        found = None if self._cache is None else self._cache.get(key)
        if found is None:
            found = postings.directory()
            if self._cache is not None:
                self._cache.put(key, found)
        return found


def null_values(kind: AttributeType, count: int) -> npt.NDArray[Any]:
    """Return nulls as :meth:`Attributes.take` has them."""
    if kind == "float64":
        return np.full(count, np.nan)
    if kind == "datetime":
        return np.full(count, np.datetime64("NaT", "us"))
    if kind in ("int64", "bool"):
        return np.ma.MaskedArray(np.zeros(count, np.bool_ if kind == "bool" else np.int64), True)
    return np.full(count, None, object)


def _blocks(rows: npt.NDArray[Any], step: int) -> Iterator[Ints]:
    for start in range(0, len(rows), step):
        yield rows[start : start + step].astype(np.int64)


def _check_convertible(name: str, column: AnyColumn, kind: AttributeType) -> None:
    """Refuse numbers that a type cannot hold exactly."""
    item = item_type(kind)
    assert item is not None
    for rows in _blocks(np.arange(len(column)), BLOCK_ROWS):
        if isinstance(column, ListColumn):
            bounds = column.bounds(rows)
            of = np.repeat(rows, bounds.stops - bounds.starts)
            items = np.arange(bounds.starts[0], bounds.stops[-1])
            converted(name, column.items.read(items), item, of)
        else:
            converted(name, column.read(rows), item, rows)


def _chained(columns: Sequence[AnyColumn], kind: AttributeType) -> AnyColumn:
    if is_list(kind):
        return ChainedListColumn(columns)
    return ChainedColumn([column for column in columns if not isinstance(column, ListColumn)])


def _count(attributes: Any) -> int:
    """Return the rows of attributes of any kind."""
    if isinstance(attributes, Mapping):
        return len(next(iter(attributes.values()), ()))
    return len(attributes)
