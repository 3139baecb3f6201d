"""The codes, ids and lists of a part in DRAM."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.zoom.filters.bitmaps import Words
from memhier.ann.zoom.preview.blocks import codes_of
from memhier.ann.zoom.preview.codes import UNKNOWN, CodeBook
from memhier.ann.zoom.preview.preview import Preview
from memhier.ann.zoom.preview.scan_arguments import CodedPart
from memhier.ann.zoom.preview.stored_codes import ListRows, block_bytes, written_lists
from memhier.errors import CorruptionError
from memhier.fields import stored_array
from memhier.io.read_arguments import Tallies
from memhier.rows.rank_request import PageRows
from memhier.store.store import SegmentInfo, Staging, Store, Transaction

__all__ = ["PartArrays", "Spread", "check_starts", "compact_dtype", "compact_ids", "part_entry"]

_SPREAD_ROWS = 1 << 12

Ints: TypeAlias = npt.NDArray[np.int64]
Spread: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True)
class PartArrays:
    """The arrays of a part in DRAM.

    Attributes
    ----------
    starts
        int64 ``[lists + 1]``: list ``l`` holds the rows ``starts[l]`` to ``starts[l + 1]``.
    codes
        uint8 ``[n, code_bytes]``; those with bounds in the order of `memhier.ann.zoom.preview.blocks`.
    numbers
        uint16 ``[2, n]`` of codes with bounds, ``[0, n]`` of others.
    ids
        uint32 or int64 ``[n]``: the id of each row.
    """

    starts: Ints
    codes: npt.NDArray[np.uint8]
    numbers: npt.NDArray[np.uint16]
    ids: npt.NDArray[Any]

    def __len__(self) -> int:
        return len(self.codes)

    @property
    def memory_bytes(self) -> int:
        """DRAM held, in bytes."""
        return self.starts.nbytes + self.codes.nbytes + self.numbers.nbytes + self.ids.nbytes

    @property
    def id_dtype(self) -> np.dtype[Any]:
        """The type of the ids."""
        return self.ids.dtype

    @cached_property
    def unbounded(self) -> int:
        """Codes of unknown errors: their vectors are unlike those that the code book was made for."""
        return int(np.count_nonzero(self.numbers[1] >= UNKNOWN << 8)) if len(self.numbers) else 0

    def held(self) -> Self:
        """Return the arrays in DRAM, where they are files mapped into memory."""
        codes, numbers, ids = (np.array(each) for each in (self.codes, self.numbers, self.ids))
        return replace(self, codes=codes, numbers=numbers, ids=ids)

    def ids_of(self, rows: Ints, tally: Tallies | None = None) -> npt.NDArray[Any]:
        """Return the ids of rows, in any order; `tally` counts no read."""
        return self.ids[rows]

    def take(self, rows: Ints, book: CodeBook) -> ListRows:
        """Return codes, numbers and ids of rows."""
        return ListRows(codes_of(self.codes, rows, book.dimensions), self.numbers[:, rows], self.ids[rows])

    def coded(self, allowed: Words | None) -> CodedPart:
        """Return the codes as a scan takes them."""
        return CodedPart(self.starts, self.codes, self.numbers, allowed)

    def page_rows(self, file: int, number: int, allowed: Words | None) -> PageRows:
        """Return the rows of the vectors in `file` as a ranking takes them; `number` is that of the part."""
        return PageRows(file, self.ids, allowed)

    def spread(self, preview: Preview) -> Spread:
        """Return the spread of the vectors around their centroids, removed ones included, ``[2, lists]``.

        It is the sum of their squared distances, and their number.
        """
        unit = getattr(preview.book, "unit", 1.0)
        lists = len(self.starts) - 1
        squared, low = np.zeros(lists), 0
        while low < lists:  # a few lists at a time
            high = max(low + 1, int(np.searchsorted(self.starts, self.starts[low] + _SPREAD_ROWS, side="right")) - 1)
            starts = self.starts[low : high + 1]
            away = self.numbers[0, starts[0] : starts[-1]].view(np.float16).astype(np.float64) * unit
            sums = np.concatenate([[0.0], np.cumsum(np.square(away))])
            squared[low:high] = np.diff(sums[starts - starts[0]])
            low = high
        return np.stack([squared, np.diff(self.starts)])

    def write(self, tx: Transaction | Staging, name: str, preview: Preview) -> None:
        """Write the arrays as segments ``name-...``: each by itself, or as blocks where codes stay on SSD."""
        book = preview.book
        if preview.on_ssd:
            _write(tx, f"{name}-starts", self.starts)
            _write(tx, f"{name}-spread", self.spread(preview)[0])
            assert isinstance(book, CodeBook)
            size, lists = block_bytes(book.code_bytes, self.ids.itemsize), tx.segment(f"{name}-lists")
            for raw in written_lists(
                self.starts, size, lambda low, high: self.take(np.arange(low, high), book), book.dimensions
            ):
                lists.append(raw)
            return
        arrays = ("starts", self.starts), ("codes", self.codes), ("numbers", self.numbers), ("ids", self.ids)
        for suffix, array in arrays:
            _write(tx, f"{name}-{suffix}", array)

    @staticmethod
    def segments(store: Store, name: str) -> list[SegmentInfo | None]:
        """Return the segments of the arrays of a part; None for one that the store lacks."""
        every = store.segments()
        return [every.get(f"{name}-{suffix}") for suffix in ("starts", "codes", "numbers", "ids")]

    def entry(self, name: str) -> dict[str, Any]:
        """Return the catalog's entry of a part without removed rows."""
        return part_entry(name, len(self), self.ids.dtype)

    @classmethod
    def load(cls, store: Store, entry: dict[str, Any], preview: Preview) -> Self:
        """Return the arrays of the part that `entry` of the catalog describes."""
        name, count, lists = entry["name"], int(entry["rows"]), preview.lists
        numbers = 2 if preview.coding == "rabitq" else 0
        arrays = cls(
            stored_array(store, f"{name}-starts", np.int64, (lists + 1,)),
            stored_array(store, f"{name}-codes", np.uint8, (count, preview.book.code_bytes)),
            stored_array(store, f"{name}-numbers", np.uint16, (numbers, count)),
            stored_array(store, f"{name}-ids", entry["ids"], (count,)),
        )
        check_starts(store, name, arrays.starts, count)
        return arrays


def check_starts(store: Store, name: str, starts: Ints, count: int) -> None:
    """Refuse starts that do not divide `count` rows into lists."""
    if starts[0] != 0 or starts[-1] != count or (starts[1:] < starts[:-1]).any():
        lists = len(starts) - 1
        raise CorruptionError(f"{store.path}: the starts of part {name} do not describe {lists} lists of {count} rows")


def part_entry(name: str, count: int, id_dtype: np.dtype[Any]) -> dict[str, Any]:
    """Return the catalog's entry of a part without removed rows."""
    return {"name": name, "rows": count, "ids": id_dtype.str, "alive": None}


def compact_dtype(*ids: Ints) -> np.dtype[Any]:
    """Return the dtype in which ids are held: uint32 where all of them fit, else int64."""
    fit = all(not len(each) or (int(each.min()) >= 0 and int(each.max()) < 2**32) for each in ids)
    return np.dtype(np.uint32 if fit else np.int64)


def compact_ids(ids: Ints) -> npt.NDArray[Any]:
    """Return ids as uint32 where all of them fit, else as int64."""
    return ids.astype(compact_dtype(ids), copy=False)


def _write(tx: Transaction | Staging, name: str, array: npt.NDArray[Any]) -> None:
    tx.segment(name).append(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
