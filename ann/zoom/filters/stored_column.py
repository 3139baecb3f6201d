"""One column of one part on SSD: layout, writing and reading.

int64: i64 [n], then, where any row is null, u64 [ceil(n / 64)] with a bit for each that is. datetime: as int64,
microseconds since 1970 in UTC. float64: f64 [n], NaN where null. bool: i8 [n], -1 where null. str: i32 [n], the word's
rank in a vocabulary of the column's own, -1 where null. Lists: `memhier.ann.zoom.filters.stored_lists`.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.zoom.filters.bitmaps import Words, pack, unpack, word_count
from memhier.ann.zoom.filters.columns import DTYPES, AnyColumn, ArrayColumn, Column, UsedWords
from memhier.ann.zoom.filters.conditions import AttributeType, Cells, ItemType, is_list
from memhier.ann.zoom.filters.pairs import WordReads
from memhier.ann.zoom.filters.patterns import Pattern
from memhier.ann.zoom.filters.vocabulary import Vocabulary, write_vocabulary
from memhier.ann.zoom.pauses import pause
from memhier.errors import BudgetError, CorruptionError
from memhier.fields import stored_segment
from memhier.io.ranges import Ranges, Reading
from memhier.io.reader import Reader
from memhier.store.store import Staging, Store, Transaction

__all__ = ["StoredColumn", "converted", "joined_bits", "must_convert", "write_column"]

Ints: TypeAlias = npt.NDArray[np.int64]
_WITH_BITS = ("int64", "datetime")  # that say which rows are null
_IS_NULL: dict[str, Callable[[npt.NDArray[Any]], npt.NDArray[np.bool_]]] = {
    "float64": np.isnan, "bool": partial(np.greater, 0), "str": partial(np.greater, 0),
}  # fmt: skip


class StoredColumn:
    """A column in a segment: the values in order; after int64, bits that say which are null, where any is."""

    def __init__(self, store: Store, name: str, kind: ItemType, count: int, reader: Reader) -> None:
        self.type: ItemType | None = kind
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

    @property
    def word_count(self) -> int:
        """Distinct words of a text column."""
        return 0 if self._vocabulary is None else len(self._vocabulary)

    def words(self) -> Iterator[bytes]:
        """Yield the words of a text column in the order of their codes."""
        assert self._vocabulary is not None
        return self._vocabulary.stream()

    def read(self, rows: Ints) -> Cells:
        """Return the cells of `rows`, in any order."""
        values = self._reader.read(self._handle, rows * self.width, self.width).view(self._dtype)[:, 0]
        bits = None
        if self._bits_at is not None:
            bits = self._reader.read(self._handle, self._bits_at + rows // 8, 1)[:, 0]
        if self._vocabulary is not None:
            self._check(values[values != -1])  # which is null
        return self._cells(rows, values, bits)

    def take(self, rows: Ints, counts: Ints | None = None) -> Reading[npt.NDArray[Any]]:
        """Read the values of `rows`, in any order, or with `counts` of as many rows from each of them on.

        They are as :meth:`memhier.ann.zoom.filters.attributes.Attributes.take` has them.
        """
        lengths = np.ones_like(rows) if counts is None else counts
        asked = [Ranges(self._handle, rows * self.width, lengths * self.width)]
        if self._bits_at is not None:
            assert counts is None  # which is for the items of lists: none of them is null
            asked.append(Ranges.of(self._handle, self._bits_at + rows // 8, 1))
        raw = yield asked
        values, nulls = self._cells(rows, raw[0].view(self._dtype), raw[1] if len(raw) > 1 else None)
        nulls = np.zeros(len(values), np.bool_) if nulls is None else nulls
        if self.type == "float64":
            return np.where(nulls, np.nan, values)
        if self.type == "datetime":
            return np.where(nulls, np.datetime64("NaT", "us"), values.astype(np.int64).view("M8[us]"))
        if self._vocabulary is None:
            return np.ma.MaskedArray(values.astype(np.bool_ if self.type == "bool" else np.int64), nulls)
        ranks, inverse = np.unique(values[~nulls], return_inverse=True)
        self._check(ranks)
        words = yield from self._vocabulary.words(ranks.astype(np.int64))
        texts = np.full(len(values), None, object)
        texts[~nulls] = np.array([_decoded(word, self._path) for word in words], object)[inverse]
        return texts

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

    def like(self, pattern: Pattern, low: int, high: int, most: int) -> npt.NDArray[np.uint8]:
        """Return a bit for each word from one rank up to another (-1: the last): whether it is of a pattern.

        Parameters
        ----------
        most
            DRAM for the bits, and for the words under way, in bytes.

        Raises
        ------
        BudgetError
            When the bits take more than half of it.
        """
        assert self._vocabulary is not None
        high = len(self._vocabulary) if high < 0 else high
        if high - low > 4 * most:
            raise BudgetError(
                f"like: {high - low:,} different texts begin with {pattern.prefix!r}, and a bit for each takes more "
                f"than half of the {most:,} bytes that dram= leaves for a filter; begin the pattern with more letters"
            )
        bits = np.zeros(-(-max(0, high - low) // 8), np.uint8)
        for first, words in self._vocabulary.runs(low, high, most // 2):
            flags = [pattern.matches(_decoded(word, self._path)) for word in words]
            places = first - low + np.flatnonzero(flags)
            np.bitwise_or.at(bits, places >> 3, (1 << (places & 7)).astype(np.uint8))
        return bits

    def word_reads(self, room: int) -> WordReads:
        """Return the reads of words by rank, with `room` bytes of DRAM for a comparison."""
        vocabulary = self._vocabulary
        assert vocabulary is not None

        def lengths(ranks: Ints) -> Ints:
            self._check(ranks)
            return vocabulary.lengths(ranks)

        return WordReads(lengths, vocabulary.take, room)

    def close(self) -> None:
        """Detach from the reader."""
        handle, self._handle = self._handle, -1  # which may be another file's from now on
        self._reader.remove(handle)
        if self._vocabulary is not None:
            self._vocabulary.close()

    def _check(self, ranks: npt.NDArray[Any]) -> None:
        if len(ranks) and not 0 <= int(ranks.min()) <= int(ranks.max()) < self.word_count:
            raise CorruptionError(f"{self._path}: a rank beyond the {self.word_count} words of the column")

    def _cells(self, rows: Ints, values: npt.NDArray[Any], bits: npt.NDArray[np.uint8] | None) -> Cells:
        """Return values, and which are null; `bits` are the bytes of the bitmap that tell of `rows`."""
        if bits is not None:
            return Cells(values, (bits >> (rows % 8).astype(np.uint8) & 1).view(np.bool_))
        return Cells(values, None if self._is_null is None else self._is_null(values))


def _decoded(word: bytes, path: Path) -> str:
    try:
        return word.decode()
    except UnicodeDecodeError as error:
        raise CorruptionError(f"{path}: a word of the column is no UTF-8: {error}") from error


def write_column(
    tx: Transaction | Staging,
    segment_name: str,
    name: str,
    kind: ItemType,
    column: Column,
    blocks: Callable[[], Iterable[Ints]],
) -> Column:
    """Write rows of a column into a segment, block by block; return the column with the ranks of text as written.

    Parameters
    ----------
    name
        Of the attribute, for errors.
    blocks
        Gives int64 ``[m]`` each: rows; m is a multiple of 64, but for the last one and where no row is null.
    """
    if kind == "str" and not isinstance(column, ArrayColumn):
        column = UsedWords(column, blocks())
    if kind == "str":
        write_vocabulary(tx, f"{segment_name}-words", column.words())
    segment, count = tx.segment(segment_name), 0
    bits: list[tuple[int, Words]] = []
    for rows in blocks():
        pause()
        values, nulls = converted(name, column.read(rows), kind, rows)
        if nulls is not None:
            values[nulls] = {"int64": 0, "datetime": 0, "float64": np.nan, "bool": -1, "str": -1}[kind]
        segment.append(np.ascontiguousarray(values, np.dtype(DTYPES[kind]).newbyteorder("<")))
        if kind in _WITH_BITS and nulls is not None and nulls.any():
            bits.append((count // 64, pack(nulls)))
        count += len(rows)
    if bits:
        segment.append(joined_bits(bits, count))
    return column


def joined_bits(bits: Iterable[tuple[int, Words]], count: int) -> Words:
    """Return the bitmap of `count` rows as stored, from runs of words with the number of their first."""
    words = np.zeros(word_count(count), "<u8")
    for first, run in bits:
        words[first : first + len(run)] = run
    return words


def must_convert(name: str, column: AnyColumn, kind: AttributeType) -> bool:
    """Return whether values are numbers of the other type; refuse values of any other kind."""
    came = column.type
    if came in (None, kind) or (came == "list[]" and is_list(kind)):
        return False
    if {came, kind} not in ({"int64", "float64"}, {"list[int64]", "list[float64]"}):
        raise TypeError(f"attribute {name!r} is {kind}, but {came} came: expected {kind}")
    return True


def converted(name: str, cells: Cells, kind: ItemType, rows: Ints) -> Cells:
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
