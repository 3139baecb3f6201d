"""One column of one part on SSD: layout, writing and reading.

int64: i64 [n], then, where any row is null, u64 [ceil(n / 64)] with a bit for each that is. datetime: as int64,
microseconds since 1970 in UTC. float64: f64 [n], NaN where null. bool: i8 [n], -1 where null. str: i32 [n], the word's
rank in a vocabulary of the column's own, -1 where null.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.zoom.filters.bitmaps import Words, pack, unpack, word_count
from memhier.ann.zoom.filters.columns import DTYPES, Column
from memhier.ann.zoom.filters.conditions import AttributeType, Cells
from memhier.ann.zoom.filters.vocabulary import Vocabulary, write_vocabulary
from memhier.ann.zoom.pauses import pause
from memhier.errors import CorruptionError
from memhier.fields import stored_segment
from memhier.io.read_arguments import Tallies, empty_rows
from memhier.io.reader import Reader
from memhier.store.store import Staging, Store, Transaction

__all__ = ["Blocks", "NullColumn", "StoredColumn", "converted", "must_convert", "write_column"]

Ints: TypeAlias = npt.NDArray[np.int64]
_WITH_BITS = ("int64", "datetime")  # that say which rows are null
_IS_NULL: dict[str, Callable[[npt.NDArray[Any]], npt.NDArray[np.bool_]]] = {
    "float64": np.isnan, "bool": partial(np.greater, 0), "str": partial(np.greater, 0),
}  # fmt: skip


class StoredColumn:
    """A column in a segment: the values in order; after int64, bits that say which are null, where any is."""

    def __init__(self, store: Store, name: str, kind: AttributeType, count: int, reader: Reader) -> None:
        self.type: AttributeType | None = kind
        self._is_null = _IS_NULL.get(kind)
        self._count = count
        self._reader = reader
        self._dtype = np.dtype(DTYPES[kind]).newbyteorder("<")
        self.width: int = self._dtype.itemsize
        info = stored_segment(store, name)
        self._path = info.path
        plain = count * self.width
        has_bits = info.payload == plain + 8 * word_count(count) and kind in _WITH_BITS and count > 0
        if info.payload != plain and not has_bits:
            raise CorruptionError(f"{info.path}: {info.payload} bytes do not hold {count} values of {kind}")
        self._bits_at = plain if has_bits else None
        self._handle = store.attach(name, reader)
        self._vocabulary = Vocabulary(store, f"{name}-words", reader) if kind == "str" else None

    def __len__(self) -> int:
        return self._count

    def words(self) -> Iterator[bytes]:
        """Yield the words of a text column in the order of their codes."""
        assert self._vocabulary is not None
        return self._vocabulary.stream()

    def read(self, rows: Ints, tally: Tallies | None = None) -> Cells:
        """Return the cells of `rows`, in any order; `tally` as in a read."""
        raw = self._reader.read(self._handle, rows * self.width, self.width, tally=tally)
        values = raw.view(self._dtype)[:, 0]
        nulls = None if self._is_null is None else self._is_null(values)
        if self._bits_at is not None:
            bits = self._reader.read(self._handle, self._bits_at + rows // 8, 1, tally=tally)[:, 0]
            nulls = (bits >> (rows % 8).astype(np.uint8) & 1).view(np.bool_)
        return Cells(values, nulls)

    def block(self, start: int, count: int, buffer: npt.NDArray[np.uint8]) -> Cells:
        """Return the values of neighbouring rows in `buffer`; `start` is a multiple of 64."""
        out = buffer[: count * self.width]
        self._reader.read(self._handle, [start * self.width], len(out), out[None])
        values = out.view(self._dtype)
        nulls = None if self._is_null is None else self._is_null(values)
        if self._bits_at is not None:
            words = self._reader.read(self._handle, [self._bits_at + start // 8], 8 * word_count(count))
            nulls = unpack(words[0].view("<u8"), count)
        return Cells(values, nulls)

    def find(self, texts: list[str]) -> dict[str, tuple[int, bool]]:
        """Return the rank of each text, and whether it is in the column."""
        assert self._vocabulary is not None
        # No column holds text beyond UTF-8; its code points decide where it stands in the order.
        ranks, present = self._vocabulary.find([text.encode(errors="surrogatepass") for text in texts])
        return dict(zip(texts, zip(ranks.tolist(), present.tolist(), strict=True), strict=True))

    def texts(self, ranks: Ints, tally: Tallies | None = None) -> list[str]:
        """Return the words of ranks; `tally` as in a read."""
        assert self._vocabulary is not None
        if len(ranks) and not 0 <= ranks.min() <= ranks.max() < len(self._vocabulary):
            raise CorruptionError(f"{self._path}: a rank beyond the {len(self._vocabulary)} words of the column")
        try:
            return [word.decode() for word in self._vocabulary.words(ranks.astype(np.int64), tally)]
        except UnicodeDecodeError as error:
            raise CorruptionError(f"{self._path}: a word of the column is no UTF-8: {error}") from error

    def close(self) -> None:
        """Detach from the reader."""
        handle, self._handle = self._handle, -1  # which may be another file's from now on
        self._reader.remove(handle)
        if self._vocabulary is not None:
            self._vocabulary.close()


class Blocks:
    """Reads columns, by attribute, in blocks of at most `rows`: that of a column when it is first asked for."""

    def __init__(self, columns: Mapping[str, StoredColumn], rows: int) -> None:
        self._columns = columns
        self._buffers = {name: empty_rows(1, rows * column.width)[0] for name, column in columns.items()}
        self._start, self._read = -1, dict[str, Cells]()

    def cells(self, start: int, count: int, name: str) -> Cells | None:
        """Return the cells of neighbouring rows, which stay until another block is asked for; None for no column."""
        if start != self._start:
            self._start, self._read = start, {}
        if name in self._columns and name not in self._read:
            self._read[name] = self._columns[name].block(start, count, self._buffers[name])
        return self._read.get(name)


class NullColumn:
    """A column that a part does not have."""

    type: AttributeType | None = None

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def words(self) -> Iterator[bytes]:
        """Yield the words of a text column in the order of their codes."""
        return iter(())

    def read(self, rows: Ints) -> Cells:
        """Return the cells of `rows`."""
        return Cells(np.zeros(len(rows), np.int64), np.ones(len(rows), np.bool_))


def write_column(
    tx: Transaction | Staging,
    prefix: str,
    name: str,
    kind: AttributeType,
    column: Column,
    order: npt.NDArray[Any],
    step: int,
) -> None:
    """Write rows of a column in an order, `step` of them at a time, a multiple of 64."""
    if kind == "str":
        write_vocabulary(tx, f"{prefix}{name}-words", column.words())
    segment = tx.segment(prefix + name)
    bits: list[Words] = []
    for start in range(0, len(order), step):
        pause()
        rows = order[start : start + step].astype(np.int64)
        values, nulls = converted(name, column.read(rows), kind, rows)
        if nulls is not None:
            values[nulls] = {"int64": 0, "datetime": 0, "float64": np.nan, "bool": -1, "str": -1}[kind]
        segment.append(np.ascontiguousarray(values, np.dtype(DTYPES[kind]).newbyteorder("<")))
        bits.append(pack(np.zeros(len(rows), np.bool_) if nulls is None else nulls))
    if kind in _WITH_BITS and any(words.any() for words in bits):
        segment.append(np.concatenate(bits).astype("<u8"))


def must_convert(name: str, column: Column, kind: AttributeType) -> bool:
    """Return whether values are numbers of the other type; refuse values of any other kind."""
    if column.type in (None, kind):
        return False
    if {column.type, kind} != {"int64", "float64"}:
        raise TypeError(f"attribute {name!r} is {kind}, but {column.type} came: expected {kind}")
    return True


def converted(name: str, cells: Cells, kind: AttributeType, rows: Ints) -> Cells:
    """Return numbers in the attribute's type; refuse those that it cannot hold exactly."""
    values, nulls = cells
    if kind not in ("int64", "float64") or values.dtype == DTYPES[kind]:
        return cells
    valid = np.ones(len(values), np.bool_) if nulls is None else ~nulls
    made: npt.NDArray[Any]
    if kind == "float64":
        made = values.astype(np.float64)
        # Compared as integers: as floats both sides would be rounded alike.
        exact = _int64(made) == values
    else:
        made = _int64(values)
        # Larger floats were often rounded on their way here, by a library that makes room for NaN.
        exact = (np.abs(values) <= 2**53) & (made == values)
    wrong = np.flatnonzero(valid & ~exact)
    if len(wrong):
        value, row = values[wrong[0]], int(rows[wrong[0]])
        raise ValueError(f"attribute {name!r} is {kind}, which cannot hold {value} of row {row} exactly")
    return Cells(made, nulls)


def _int64(values: npt.NDArray[np.float64]) -> Ints:
    safe = np.isfinite(values) & (np.abs(values) < 2**63)
    return np.where(safe, values, 0).astype(np.int64)
