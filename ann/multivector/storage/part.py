"""A part of an index: items that were written together. Only its marks of removed items ever change."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.multivector.coding.book import LEVELS, UNKNOWN, Coded
from memhier.ann.multivector.coding.postings import Postings
from memhier.ann.zoom.filters.attributes import Attributes, Schema
from memhier.ann.zoom.filters.bitmaps import BitmapCache, Words, pack, popcount, unpack, word_count
from memhier.ann.zoom.filters.blocks import StoredAny
from memhier.ann.zoom.ids.stored_texts import StoredTexts
from memhier.ann.zoom.payload.stored import StoredRecords
from memhier.ann.zoom.storage.rows import open_fields
from memhier.errors import ClosedError, CorruptionError
from memhier.fields import described, stored_array, stored_segment
from memhier.io.ranges import CountedReads, Ranges, Reading, read_together
from memhier.io.reader import Reader
from memhier.shield import when_gone
from memhier.store.store import Staging, Store, Transaction

__all__ = ["ItemArrays", "ItemPart", "PartOpener"]

Ints: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True)
class ItemArrays:
    """The arrays of a part in DRAM.

    Attributes
    ----------
    starts
        uint32 or int64 ``[n + 1]``: item ``i`` has the tokens ``starts[i]`` to ``starts[i + 1]``.
    ids
        uint32 or int64 ``[n]``.
    coded
        Lists, codes, scales and errors of all tokens.
    postings
        The items of each list.
    """

    starts: npt.NDArray[Any]
    ids: npt.NDArray[Any]
    coded: Coded
    postings: Postings

    @classmethod
    def of(cls, lengths: Ints, ids: Ints, coded: Coded, lists: int) -> Self:
        """Return the arrays of items with so many tokens each."""
        starts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64)
        return cls(compact(starts), compact(ids), coded, Postings.of(coded.lists, starts, lists))

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def memory_bytes(self) -> int:
        """DRAM held, in bytes."""
        return sum(int(array.nbytes) for array in self.named().values())

    def ids_of(self, rows: Ints) -> npt.NDArray[Any]:
        """Return the ids of items, in any order."""
        return self.ids[rows]

    def bounds(self, items: Ints) -> tuple[Ints, Ints]:
        """Return where the tokens of items begin and end, int64 ``[m]`` each."""
        return self.starts[items].astype(np.int64), self.starts[items + 1].astype(np.int64)

    def mean_errors(self) -> npt.NDArray[np.float64]:
        """Return the mean error of the tokens of each item, in the unit of residuals, float64 ``[n]``."""
        sums = np.concatenate([[0], np.cumsum(LEVELS[np.minimum(self.coded.errors, UNKNOWN - 1)], dtype=np.float64)])
        unknown = np.concatenate([[0], np.cumsum(self.coded.errors == UNKNOWN)])
        lows, highs = self.bounds(np.arange(len(self)))
        means: npt.NDArray[np.float64] = (sums[highs] - sums[lows]) / (highs - lows)
        means[unknown[highs] > unknown[lows]] = np.inf
        return means

    def named(self) -> dict[str, npt.NDArray[Any]]:
        """Return the arrays by the suffix of their segments."""
        coded, postings = self.coded, self.postings
        return {
            "starts": self.starts, "ids": self.ids, "lists": coded.lists, "codes": coded.codes, "scales": coded.scales,
            "errors": coded.errors, "list-starts": postings.starts, "list-items": postings.gaps,
        }  # fmt: skip

    def write(self, tx: Transaction | Staging, name: str) -> None:
        """Write every array as a segment ``name-...``."""
        for suffix, array in self.named().items():
            tx.segment(f"{name}-{suffix}").append(np.ascontiguousarray(array).reshape(-1).view(np.uint8))

    @classmethod
    def load(cls, store: Store, entry: dict[str, Any], lists: int, code_bytes: int) -> Self:
        """Return the arrays of the part that `entry` of the catalog describes."""
        name, count, tokens = entry["name"], int(entry["items"]), int(entry["tokens"])
        found = cls(
            stored_array(store, f"{name}-starts", entry["starts"], (count + 1,)),
            stored_array(store, f"{name}-ids", entry["ids"], (count,)),
            Coded(
                stored_array(store, f"{name}-lists", np.uint16, (tokens,)),
                stored_array(store, f"{name}-codes", np.uint8, (tokens, code_bytes)),
                stored_array(store, f"{name}-scales", np.uint8, (tokens,)),
                stored_array(store, f"{name}-errors", np.uint8, (tokens,)),
            ),
            Postings(
                stored_array(store, f"{name}-list-starts", np.int64, (lists + 1,)),
                stored_array(store, f"{name}-list-items", entry["gaps"], (-1,)),
            ),
        )
        gaps = found.postings
        for starts, end, least in ((found.starts, tokens, 1), (gaps.starts, len(gaps.gaps), 0)):
            if starts[0] != 0 or starts[-1] != end or (np.diff(starts.astype(np.int64)) < least).any():
                raise CorruptionError(f"{store.path}: the starts of part {name} do not describe {end} entries")
        if (found.coded.lists >= lists).any():
            raise CorruptionError(f"{store.path}: part {name} names lists that there are not")
        with described(f"{store.path}: the items of the lists of part {name}"):
            gaps.mark(np.arange(lists), np.zeros(count, np.bool_))
        return found


def compact(numbers: Ints) -> npt.NDArray[Any]:
    """Return numbers as uint32 where they fit."""
    small = not len(numbers) or (numbers.min() >= 0 and numbers.max() < 2**32)
    return numbers.astype(np.uint32) if small else numbers


@dataclass(frozen=True)
class ItemPart:
    """Items on SSD with their codes.

    Attributes
    ----------
    name
        Prefix of its segments.
    arrays
        Codes, starts and ids.
    file
        The reader's handle of the file of tokens, which lie end to end.
    dimension, dtype
        Of a token.
    alive
        A bit for each item that was not removed; None while all are there.
    alive_name
        Segment that holds `alive`; None until it is written.
    attributes
        None where the index has none.
    lease
        Keeps the file with the reader.
    foreign
        int64: items unlike those that the efforts of searches were learnt from.
    texts
        The strings that the ids are hashes of; None where ids are integers.
    records
        The documents of the items; None where no item has any.
    """

    name: str
    arrays: ItemArrays
    file: int
    dimension: int
    dtype: np.dtype[Any]
    alive: Words | None = None
    alive_name: str | None = None
    attributes: Attributes | None = None
    lease: object = None
    foreign: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    texts: StoredTexts | None = None
    records: StoredRecords | None = None

    def __len__(self) -> int:
        return len(self.arrays)

    @cached_property
    def count(self) -> int:
        """Items that were not removed."""
        return len(self) if self.alive is None else popcount(self.alive)

    @property
    def lengths(self) -> Ints:
        """Tokens of each item, int64 ``[n]``."""
        lows, highs = self.arrays.bounds(np.arange(len(self)))
        return highs - lows

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest item."""
        return int(self.lengths.max())

    @property
    def token_bytes(self) -> int:
        """Bytes of a token on SSD."""
        return self.dimension * self.dtype.itemsize

    @cached_property
    def tokens_alive(self) -> int:
        """Tokens of the items that were not removed."""
        lows, highs = self.arrays.bounds(np.flatnonzero(self.alive_flags()))
        return int((highs - lows).sum())

    @property
    def memory_bytes(self) -> int:
        """DRAM held, in bytes."""
        held = self.arrays.memory_bytes + self.foreign.nbytes + (0 if self.alive is None else self.alive.nbytes)
        more = (self.attributes, self.texts, self.records)
        return held + sum(each.memory_bytes for each in more if each is not None)

    def alive_flags(self) -> npt.NDArray[np.bool_]:
        """Return which items were not removed, bool ``[n]``."""
        return np.ones(len(self), np.bool_) if self.alive is None else unpack(self.alive, len(self))

    def is_alive(self, rows: Ints) -> npt.NDArray[np.bool_]:
        """Return which of some items were not removed, bool ``[m]``."""
        if self.alive is None:
            return np.ones(len(rows), np.bool_)
        found: npt.NDArray[np.bool_] = (self.alive[rows >> 6] >> (rows & 63).astype(np.uint64) & np.uint64(1)) > 0
        return found

    def without(self, items: Ints) -> "ItemPart":
        """Return the part with these items removed as well."""
        alive = self.alive_flags().copy()
        alive[items] = False
        return replace(self, alive=pack(alive), alive_name=None)

    def reading(self, items: Ints) -> Reading[npt.NDArray[Any]]:
        """Return the tokens of items, end to end, as a reading; see `memhier.io.ranges`.

        Items that follow one another are read as one range.
        """
        lows, highs = self.arrays.bounds(items)
        apart = np.flatnonzero(lows[1:] != highs[:-1])
        lows, highs = lows[np.insert(apart + 1, 0, 0)], highs[np.append(apart, len(highs) - 1)]
        (raw,) = yield [Ranges(self.file, lows * self.token_bytes, (highs - lows) * self.token_bytes)]
        return self._tokens(raw)

    def run(self, reads: CountedReads, first: int, last: int) -> npt.NDArray[Any]:
        """Return the tokens from `first` to `last` by one read, ``[last - first, d]``."""
        offsets = np.array([first * self.token_bytes], np.int64)
        return self._tokens(reads.read(self.file, offsets, (last - first) * self.token_bytes))

    def _tokens(self, raw: npt.NDArray[np.uint8]) -> npt.NDArray[Any]:
        stored = np.ascontiguousarray(raw).view(self.dtype.newbyteorder("<"))
        return stored.reshape(-1, self.dimension).astype(self.dtype, copy=False)

    def read(self, reader: Reader, items: Ints) -> npt.NDArray[Any]:
        """Return the tokens of items, end to end, ``[t, d]``."""
        return read_together(CountedReads(reader), {0: self.reading(items)})[0]

    def entry(self) -> dict[str, Any]:
        """Return its entry in the catalog."""
        return self.entry_of(self.name, self.arrays) | {"alive": self.alive_name}

    @staticmethod
    def entry_of(name: str, arrays: ItemArrays) -> dict[str, Any]:
        """Return the entry of a part from which nothing was removed."""
        dtypes = {
            "ids": arrays.ids.dtype.str,
            "starts": arrays.starts.dtype.str,
            "gaps": arrays.postings.gaps.dtype.str,
        }
        return {"name": name, "items": len(arrays), "tokens": len(arrays.coded.lists), "alive": None} | dtypes


class _Lease:
    """Held by all that read a file; when the last of them is gone, so is the file."""


class PartOpener:
    """Opens parts; a file is closed once no part of any snapshot has it.

    Parameters
    ----------
    store, reader
        Of the index.
    cache
        Keeps the bitmaps of filters.
    dimension, dtype
        Of a token.
    work_bytes
        DRAM that a running filter may hold.
    texts
        Whether ids are strings.
    """

    def __init__(
        self,
        store: Store,
        reader: Reader,
        cache: BitmapCache,
        dimension: int,
        dtype: np.dtype[Any],
        work_bytes: int,
        *,
        texts: bool,
    ) -> None:
        self._store, self._reader, self._cache, self._texts = store, reader, cache, texts
        self._dimension, self._dtype, self._work_bytes = dimension, dtype, work_bytes

    def open(
        self, name: str, arrays: ItemArrays, schema: Schema, limit: float, alive_name: str | None = None
    ) -> ItemPart:
        """Return a committed part whose arrays are known.

        `limit` is the mean error of an item beyond which it is foreign; 0 where that is not known.
        """
        count, alive = len(arrays), None
        if alive_name is not None:
            alive = stored_array(self._store, alive_name, np.uint64, (word_count(count),))
        tokens = stored_segment(self._store, f"{name}-tokens")
        size = int(arrays.starts[-1]) * self._dimension * self._dtype.itemsize
        if tokens.payload != size:
            raise CorruptionError(f"{tokens.path}: {tokens.payload} bytes of tokens, expected {size}")
        lease = _Lease()
        file = self._store.attach(f"{name}-tokens", self._reader)
        when_gone(lease, partial(_close, self._reader, [file]))
        texts, records = open_fields(self._store, name, count, self._reader, texts=self._texts)
        when_gone(lease, partial(_close, self._reader, [each.file for each in (texts, records) if each is not None]))
        foreign = np.flatnonzero(arrays.mean_errors() > limit) if limit else np.empty(0, np.int64)
        part = ItemPart(
            name, arrays, file, self._dimension, self._dtype, alive, alive_name, None, lease, foreign, texts, records
        )
        return self.widened(part, schema)

    def widened(self, part: ItemPart, schema: Schema) -> ItemPart:
        """Return the part with the attributes of another schema, null where the part does not have them."""
        if not schema:
            return part
        attributes = Attributes(
            self._store, f"{part.name}-a-", schema, len(part), self._reader, self._cache, self._work_bytes
        )
        columns = [attributes.column(name) for name in schema]
        when_gone(attributes, partial(_close, self._reader, [each for each in columns if isinstance(each, StoredAny)]))
        return replace(part, attributes=attributes)

    def load(self, entry: dict[str, Any], schema: Schema, lists: int, code_bytes: int, limit: float) -> ItemPart:
        """Return the part that `entry` of the catalog describes; see :meth:`open`."""
        arrays = ItemArrays.load(self._store, entry, lists, code_bytes)
        return self.open(entry["name"], arrays, schema, limit, entry["alive"])


def _close(reader: Reader, files: Sequence[int | StoredAny]) -> None:
    for file in files:
        with suppress(ClosedError):
            reader.remove(file) if isinstance(file, int) else file.close()
