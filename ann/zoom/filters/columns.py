"""Columns of attributes from any source: a type, the words of text, and the values of any rows.

A column of text is read as ranks in the sorted list of its distinct words, so that every comparison with text becomes
one of integers.
"""

import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from heapq import merge
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt

from memhier.ann.zoom.arguments import check_columns
from memhier.ann.zoom.filters.conditions import KEYWORDS, AttributeType, Cells
from memhier.ann.zoom.filters.times import as_moments, microseconds, moments

__all__ = ["ArrayColumn", "ChainedColumn", "Column", "as_columns", "as_objects"]

Ints: TypeAlias = npt.NDArray[np.int64]

NAME_PATTERN = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
BLOCK_ROWS = 1 << 16
_INT64 = np.iinfo(np.int64)
# Types of missing values in libraries that are not imported here.
_MISSING_TYPES = frozenset({"NoneType", "NAType", "NaTType"})


@runtime_checkable
class Column(Protocol):
    """Values of one attribute by row: int64 and float64 as such, bool as int8, text as int32 ranks of words."""

    @property
    def type(self) -> AttributeType | None:
        """None where every row is null."""

    def __len__(self) -> int: ...

    def words(self) -> Iterator[bytes]:
        """Yield the distinct words of a column of text, UTF-8, in ascending order."""

    def read(self, rows: Ints) -> Cells:
        """Return the values of rows, int64 [m], in any order."""


class ArrayColumn:
    """A column from an array, a list, a Series of pandas or polars, a pyarrow array or anything else that converts.

    Parameters
    ----------
    name
        For errors.
    data
        `count` values; None, NaN, pandas.NA and masked entries are null.

    Raises
    ------
    ValueError, TypeError
        For another length or shape, values of more than one kind or of none that can be stored, integers beyond int64,
        and text that is no Unicode.
    """

    def __init__(self, name: str, data: Any, count: int) -> None:
        self._name = name
        mask = np.ma.getmaskarray(data) if isinstance(data, np.ma.MaskedArray) else None
        array = _as_array(data)
        if array.ndim != 1:
            raise ValueError(
                f"attribute {name!r} has shape {array.shape}: expected [{count}]; documents= stores lists, which "
                f"filters do not read"
            )
        if len(array) != count:
            raise ValueError(f"attribute {name!r} has {len(array)} values: expected {count}, one for each row")
        self._nulls: npt.NDArray[np.bool_] | None = mask if mask is not None and mask.any() else None
        self._array = array
        self._words: list[str] | None = None
        self._ranks: dict[Any, int] = {}
        self.type: AttributeType | None = self._settle()

    def __len__(self) -> int:
        return len(self._array)

    @property
    def sorted_words(self) -> list[str]:
        """The distinct words in the order of their code points, which is that of their UTF-8, too."""
        if self._words is None:
            found: set[str] = set()
            for start, block in self._blocks():
                nulls = self._block_nulls(start, block)
                found.update(block.tolist() if nulls is None else block[~nulls].tolist())
            self._words = sorted(found)
            self._ranks = {word: rank for rank, word in enumerate(self._words)}
        return self._words

    def words(self) -> Iterator[bytes]:
        for word in self.sorted_words:
            yield word.encode()

    def read(self, rows: Ints) -> Cells:
        values = self._array[rows]
        nulls = None if self._nulls is None else self._nulls[rows]
        if self.type == "float64":
            values = values.astype(np.float64)
            if nulls is not None:
                values[nulls] = np.nan
            return Cells(values, np.isnan(values))
        if self.type == "str":
            _ = self.sorted_words
            ranks = np.array([self._ranks.get(word, -1) for word in values.tolist()], np.int32)
            if nulls is not None:
                ranks[nulls] = -1
            return Cells(ranks, ranks < 0)
        return Cells(values.astype(np.int8 if self.type == "bool" else np.int64), nulls)

    def _settle(self) -> AttributeType | None:
        """Return the type, with the array brought to it where it holds objects."""
        kind = self._array.dtype.kind
        if kind == "O":
            return self._settle_objects()
        if kind == "U":
            self._check_unicode()
            return "str"
        if kind == "b":
            return "bool"
        if kind == "M":
            return self._settle_moments()
        if kind == "u" and self._array.size and int(self._array.max()) > _INT64.max:
            raise ValueError(
                f"attribute {self._name!r} holds {int(self._array.max())}: expected integers that fit int64"
            )
        if kind in "iu":
            return "int64"
        if kind == "f" and self._array.itemsize <= 8:
            return "float64"
        hint = {"S": "; decode it to text", "m": "; convert it to int64"}.get(kind, "")
        raise TypeError(
            f"attribute {self._name!r} has dtype {self._array.dtype}: expected integers, floats, bool, text or "
            f"datetimes{hint}"
        )

    def _settle_moments(self) -> AttributeType | None:
        nulls = np.isnat(self._array)
        nulls = nulls if self._nulls is None else nulls | self._nulls
        self._nulls = nulls if nulls.any() else None
        if len(nulls) and nulls.all():
            return None
        try:
            self._array = moments(self._array)
        except ValueError as error:
            raise self._too_fine(error) from None
        return "datetime"

    def _too_fine(self, error: ValueError) -> ValueError:
        return ValueError(
            f"attribute {self._name!r} holds {error}: datetimes are kept as microseconds, of 64 bits; round it with "
            f".astype('datetime64[us]'), or keep nanoseconds as int64"
        )

    def _settle_objects(self) -> AttributeType | None:
        nulls = np.zeros(len(self._array), np.bool_)
        kinds: dict[AttributeType, int] = {}
        for start, block in self._blocks():
            for row, value in enumerate(block.tolist(), start):
                if self._nulls is not None and self._nulls[row]:
                    continue
                if _is_missing(value):
                    nulls[row] = True
                else:
                    kinds.setdefault(self._kind(value, row), row)
        if self._nulls is not None:
            nulls |= self._nulls
        self._nulls = nulls if nulls.any() else None
        if not kinds:
            return None
        if set(kinds) == {"int64", "float64"}:
            kinds = {"float64": 0}
        if len(kinds) > 1:
            (one, first), (other, second), *_ = kinds.items()
            raise TypeError(
                f"attribute {self._name!r} holds {one} in row {first} and {other} in row {second}: expected one kind"
            )
        settled = next(iter(kinds))
        if settled == "str":
            self._check_unicode()
        else:
            self._array = self._convert({"float64": np.float64, "bool": np.bool_}.get(settled, np.int64))
        return settled

    def _kind(self, value: object, row: int) -> AttributeType:
        if isinstance(value, str):
            return "str"
        if isinstance(value, bool | np.bool_):
            return "bool"
        if isinstance(value, int | np.integer):
            return "int64"
        if isinstance(value, float | np.floating):
            return "float64"
        if isinstance(value, date | np.datetime64):
            return "datetime"
        raise TypeError(
            f"attribute {self._name!r} holds a {type(value).__name__} in row {row}: "
            f"expected int, float, bool, str, datetime, or None where it is missing{_stored_as(value)}"
        )

    def _convert(self, dtype: Any) -> npt.NDArray[Any]:
        """Return an array of numbers from one of objects, with zeros where null."""
        converted = np.zeros(len(self._array), dtype)
        for start, block in self._blocks():
            nulls = self._block_nulls(start, block)
            for row, value in enumerate(block.tolist(), start):
                if nulls is not None and nulls[row - start]:
                    continue
                if isinstance(value, date | np.datetime64):
                    try:
                        converted[row] = microseconds(value)
                    except ValueError as error:
                        raise self._too_fine(ValueError(f"{value} in row {row}")) from error
                    continue
                value = value.item() if isinstance(value, np.generic) else value
                if isinstance(value, int) and dtype is np.int64 and not _INT64.min <= value <= _INT64.max:
                    raise ValueError(f"attribute {self._name!r} holds {value} in row {row}: expected int64")
                if isinstance(value, int) and dtype is np.float64 and not _fits_float(value):
                    raise ValueError(
                        f"attribute {self._name!r} holds floats and, in row {row}, the integer {value}, which float64 "
                        "cannot hold exactly"
                    )
                converted[row] = value
        return converted

    def _check_unicode(self) -> None:
        for start, block in self._blocks():
            for row, value in enumerate(block.tolist(), start):
                if isinstance(value, str):
                    try:
                        value.encode()
                    except UnicodeEncodeError:
                        raise ValueError(
                            f"attribute {self._name!r} holds {value!r} in row {row}: expected text without surrogates"
                        ) from None

    def _blocks(self) -> Iterator[tuple[int, npt.NDArray[Any]]]:
        for start in range(0, len(self._array), BLOCK_ROWS):
            yield start, self._array[start : start + BLOCK_ROWS]

    def _block_nulls(self, start: int, block: npt.NDArray[Any]) -> npt.NDArray[np.bool_] | None:
        return None if self._nulls is None else self._nulls[start : start + len(block)]


class ChainedColumn:
    """The rows of several columns of one type, one column after the other; for writing parts together."""

    def __init__(self, columns: Sequence[Column]) -> None:
        self._columns = columns
        self._starts = np.cumsum([0, *map(len, columns)])
        self.type: AttributeType | None = next((column.type for column in columns if column.type is not None), None)
        self._ranks: list[npt.NDArray[np.int32]] | None = None

    def __len__(self) -> int:
        return int(self._starts[-1])

    def words(self) -> Iterator[bytes]:
        last: bytes | None = None
        for word, _ in self._merged():
            if word != last:
                yield word
            last = word

    def read(self, rows: Ints) -> Cells:
        part = np.searchsorted(self._starts, rows, side="right") - 1
        nulls = np.zeros(len(rows), np.bool_)
        values = np.zeros(len(rows), DTYPES[self.type or "int64"])
        for number, column in enumerate(self._columns):
            where = np.flatnonzero(part == number)
            if not len(where):
                continue
            if column.type is None:
                nulls[where] = True
                continue
            cells = column.read(rows[where] - self._starts[number])
            if cells.nulls is not None:
                nulls[where] = cells.nulls
            values[where] = self._ranks_of(number)[cells.values] if self.type == "str" else cells.values
        return Cells(values, nulls)

    def _merged(self) -> Iterator[tuple[bytes, int]]:
        return merge(*(_numbered(column.words(), number) for number, column in enumerate(self._columns)))

    def _ranks_of(self, number: int) -> npt.NDArray[np.int32]:
        """Return int32 [words of one column + 1], its words' ranks among all; the last entry is that of null."""
        if self._ranks is None:
            found = [array("i") for _ in self._columns]
            rank, last = -1, None
            for word, source in self._merged():
                rank += word != last
                last = word
                found[source].append(rank)
            for ranks in found:
                ranks.append(-1)
            self._ranks = [np.frombuffer(ranks, np.int32) for ranks in found]
        return self._ranks[number]


DTYPES: Mapping[str, Any] = {
    "int64": np.int64,
    "float64": np.float64,
    "bool": np.int8,
    "str": np.int32,
    "datetime": np.int64,
}


def as_columns(attributes: Any, count: int) -> dict[str, Column]:
    """Return columns by name from a mapping or table of columns, or from a sequence of one mapping per row.

    Parameters
    ----------
    attributes
        ``{name: values}``, a DataFrame or pyarrow Table, or ``[{name: value}, ...]``; absent names are null.
    count
        Rows.

    Raises
    ------
    ValueError, TypeError
        For names that no expression could name, and as `ArrayColumn` does.
    """
    if isinstance(attributes, Mapping):
        columns = dict(attributes)
    else:
        # pyarrow's name for them, and that of pandas and polars.
        names = getattr(attributes, "column_names", getattr(attributes, "columns", None))
        if names is None:
            columns = _transposed(attributes, count)
        else:
            columns = {name: attributes[name] for name in check_columns(names, "attributes")}
    made: dict[str, Column] = {}
    for name, data in columns.items():
        _check_name(name)
        if not isinstance(data, Column):
            data = ArrayColumn(name, data, count)
        if len(data) != count:
            raise ValueError(f"attribute {name!r} has {len(data)} values: expected {count}, one for each row")
        made[name] = data
    return made


def as_objects(columns: Mapping[str, Column]) -> dict[str, npt.NDArray[Any]]:
    """Return columns as arrays of Python values, None for null."""
    found: dict[str, npt.NDArray[Any]] = {}
    for name, column in columns.items():
        if column.type is None:
            found[name] = np.full(len(column), None, object)
            continue
        cells = column.read(np.arange(len(column)))
        values = cells.values.astype(object)
        if column.type == "str":
            words = [word.decode() for word in column.words()]
            values[:] = [words[rank] if rank >= 0 else None for rank in cells.values.tolist()]
        elif column.type == "datetime":
            values = as_moments(cells.values)
        elif column.type == "bool":
            values[:] = cells.values.astype(np.bool_)
        if cells.nulls is not None:
            values[cells.nulls] = None
        found[name] = values
    return found


def _transposed(rows: Any, count: int) -> dict[str, list[Any]]:
    if not isinstance(rows, Sequence) or not all(isinstance(row, Mapping) for row in rows):
        raise TypeError(f"attributes={type(rows).__name__}: expected columns by name, or one dict for each row")
    if len(rows) != count:
        raise ValueError(f"attributes has {len(rows)} rows: expected {count}")
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}


def _check_name(name: object) -> None:
    if not isinstance(name, str) or not NAME_PATTERN.fullmatch(name):
        raise ValueError(
            f"attribute {name!r}: expected a name of 1 to 64 letters, digits or '_' that begins with no digit"
        )
    if name.lower() in KEYWORDS:
        raise ValueError(
            f"attribute {name!r}: filters have this word for something else (their words are "
            f"{', '.join(sorted(KEYWORDS))}); rename the column, to {name + '_'!r} for instance"
        )


def _as_array(data: Any) -> npt.NDArray[Any]:
    if isinstance(data, np.ndarray):
        return np.ma.getdata(data)
    # As arrays, columns of pandas' own types, of polars and of pyarrow round integers to make room for NaN.
    if not isinstance(getattr(data, "dtype", None), np.dtype) and getattr(data, "null_count", None) != 0:
        to_list = getattr(data, "to_pylist", getattr(data, "to_list", None))
        data = data if to_list is None else to_list()
    if isinstance(data, list | tuple):
        # numpy would guess a common type of unlike values, and cut zeros off the end of text.
        return np.fromiter(data, object, len(data))
    return np.asarray(data)


def _is_missing(value: object) -> bool:
    if isinstance(value, np.datetime64):
        return bool(np.isnat(value))
    if isinstance(value, float | np.floating):
        return bool(value != value)
    return type(value).__name__ in _MISSING_TYPES


def _stored_as(value: object) -> str:
    stored = isinstance(value, list | tuple | dict | set | bytes | np.ndarray)
    return "; documents= stores lists, dicts and bytes, which filters do not read" if stored else ""


def _fits_float(value: int) -> bool:
    try:
        return int(float(value)) == value
    except OverflowError:
        return False


def _numbered(words: Iterator[bytes], number: int) -> Iterator[tuple[bytes, int]]:
    for word in words:
        yield word, number
