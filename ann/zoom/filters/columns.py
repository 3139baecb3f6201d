"""Columns of attributes from any source: a type, the words of text, and the values of any rows.

A column of text is read as ranks in the sorted list of its distinct words, so that every comparison with text becomes
one of integers.
"""

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import date
from heapq import merge
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt

from memhier.ann.zoom.filters.conditions import Cells, ItemType, ListType
from memhier.ann.zoom.filters.times import microseconds, moments

__all__ = [
    "BLOCK_ROWS", "DTYPES", "AnyColumn", "ArrayColumn", "Bounds", "ChainedColumn", "Column", "ListColumn",
    "NullColumn", "UsedWords", "is_missing",
]  # fmt: skip

Ints: TypeAlias = npt.NDArray[np.int64]

BLOCK_ROWS = 1 << 16
_INT64 = np.iinfo(np.int64)
# Types of missing values in libraries that are not imported here.
_MISSING_TYPES = frozenset({"NoneType", "NAType", "NaTType", "MaskedConstant"})


@runtime_checkable
class Column(Protocol):
    """Values of one attribute by row: int64 and float64 as such, bool as int8, text as int32 ranks of words."""

    @property
    def type(self) -> ItemType | None:
        """None where every row is null."""

    def __len__(self) -> int: ...

    def words(self) -> Iterator[bytes]:
        """Yield the distinct words of a column of text, UTF-8, in ascending order."""

    def read(self, rows: Ints) -> Cells:
        """Return the values of rows, int64 [m], in any order."""


class Bounds(NamedTuple):
    """The items of lists.

    Attributes
    ----------
    starts, stops
        int64 ``[n]``: the items of each list stand from one number to before the other.
    nulls
        bool ``[n]``: which rows are null, and so without items.
    """

    starts: Ints
    stops: Ints
    nulls: npt.NDArray[np.bool_]


@runtime_checkable
class ListColumn(Protocol):
    """Lists of one attribute by row: runs of a column of items, none of which is null."""

    @property
    def type(self) -> ListType | None:
        """None where every row is null."""

    @property
    def items(self) -> Column:
        """The items of all lists."""

    def __len__(self) -> int: ...

    def bounds(self, rows: Ints) -> Bounds:
        """Return the items of rows, int64 [m], in any order."""


AnyColumn: TypeAlias = Column | ListColumn


class NullColumn:
    """A column without values, such as one that a part does not have."""

    def __init__(self, count: int, kind: ItemType | None = None) -> None:
        self._count = count
        self.type: ItemType | None = kind

    def __len__(self) -> int:
        return self._count

    def words(self) -> Iterator[bytes]:
        """Yield no words."""
        return iter(())

    def read(self, rows: Ints) -> Cells:
        """Return the cells of `rows`."""
        nulls = -1 if self.type == "str" else 0
        return Cells(np.full(len(rows), nulls, DTYPES[self.type or "int64"]), np.ones(len(rows), np.bool_))


class ArrayColumn:
    """A column from an array.

    Parameters
    ----------
    name
        For errors.
    array
        ``[n]``; None, NaN, NaT and pandas.NA are null.
    mask
        bool ``[n]``: further nulls.
    place
        Words for the place of a value in an error, by its number.

    Raises
    ------
    ValueError, TypeError
        For values of more than one kind or of none that can be stored, integers beyond int64, and text that is no
        Unicode.
    """

    def __init__(
        self,
        name: str,
        array: npt.NDArray[Any],
        mask: npt.NDArray[np.bool_] | None = None,
        place: Callable[[int], str] = "row {}".format,
    ) -> None:
        self._name, self._place = name, place
        self._nulls: npt.NDArray[np.bool_] | None = mask if mask is not None and mask.any() else None
        self._array = array
        self._words: list[str] | None = None
        self._ranks: dict[Any, int] = {}
        self.type: ItemType | None = self._settle()

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

    def _settle(self) -> ItemType | None:
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

    def _settle_moments(self) -> ItemType | None:
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

    def _settle_objects(self) -> ItemType | None:
        nulls = np.zeros(len(self._array), np.bool_)
        kinds: dict[ItemType, int] = {}
        for start, block in self._blocks():
            for row, value in enumerate(block.tolist(), start):
                if self._nulls is not None and self._nulls[row]:
                    continue
                if is_missing(value):
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
                f"attribute {self._name!r} holds {one} in {self._place(first)} and {other} in "
                f"{self._place(second)}: expected one kind"
            )
        settled = next(iter(kinds))
        if settled == "str":
            self._check_unicode()
        else:
            self._array = self._convert({"float64": np.float64, "bool": np.bool_}.get(settled, np.int64))
        return settled

    def _kind(self, value: object, row: int) -> ItemType:
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
            f"attribute {self._name!r} holds a {type(value).__name__} in {self._place(row)}: "
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
                        raise self._too_fine(ValueError(f"{value} in {self._place(row)}")) from error
                    continue
                value = value.item() if isinstance(value, np.generic) else value
                if isinstance(value, int) and dtype is np.int64 and not _INT64.min <= value <= _INT64.max:
                    raise ValueError(f"attribute {self._name!r} holds {value} in {self._place(row)}: expected int64")
                if isinstance(value, int) and dtype is np.float64 and not _fits_float(value):
                    raise ValueError(
                        f"attribute {self._name!r} holds floats and, in {self._place(row)}, the integer {value}, which "
                        "float64 cannot hold exactly"
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
                            f"attribute {self._name!r} holds {value!r} in {self._place(row)}: expected text without "
                            f"surrogates"
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
        self.type: ItemType | None = next((column.type for column in columns if column.type is not None), None)
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


class UsedWords:
    """A column of text with the words of some rows alone, so that no word outlasts the rows that had it.

    Parameters
    ----------
    column
        Of text.
    blocks
        int64 ``[m]`` each: the rows.
    """

    def __init__(self, column: Column, blocks: Iterable[Ints]) -> None:
        self._column, used = column, np.zeros(0, np.bool_)
        self.type: ItemType | None = column.type
        for rows in blocks:
            ranks = column.read(rows).values
            if (highest := int(ranks.max(initial=-1))) >= len(used):
                used = np.concatenate([used, np.zeros(2 * (highest + 1) - len(used), np.bool_)])
            used[ranks[ranks >= 0]] = True
        self._used = used
        self._ranks = np.append(np.cumsum(used, dtype=np.int32) - 1, np.int32(-1)).astype(np.int32, copy=False)

    def __len__(self) -> int:
        return len(self._column)

    def words(self) -> Iterator[bytes]:
        for word, is_used in zip(self._column.words(), self._used, strict=False):
            if is_used:
                yield word

    def read(self, rows: Ints) -> Cells:
        cells = self._column.read(rows)
        return Cells(self._ranks[cells.values], cells.nulls)


DTYPES: Mapping[str, Any] = {
    "int64": np.int64,
    "float64": np.float64,
    "bool": np.int8,
    "str": np.int32,
    "datetime": np.int64,
}


def is_missing(value: object) -> bool:
    """Return whether a value stands for none: None, NaN, NaT and pandas.NA."""
    if isinstance(value, np.datetime64):
        return bool(np.isnat(value))
    if isinstance(value, float | np.floating):
        return bool(value != value)
    return type(value).__name__ in _MISSING_TYPES


def _stored_as(value: object) -> str:
    if isinstance(value, list | tuple | np.ndarray):
        return "; a column of lists holds lists of these, and documents= stores any lists"
    return "; documents= stores dicts and bytes, which filters do not read" if isinstance(value, dict | bytes) else ""


def _fits_float(value: int) -> bool:
    try:
        return int(float(value)) == value
    except OverflowError:
        return False


def _numbered(words: Iterator[bytes], number: int) -> Iterator[tuple[bytes, int]]:
    for word in words:
        yield word, number
