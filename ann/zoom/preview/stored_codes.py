"""Codes on SSD: blocks of 16 rows with codes, numbers and ids, list after list.

A block is laid out as one in DRAM (`memhier.ann.zoom.preview.blocks`), then has the two numbers and the id of each of
its rows. A list begins with a block of its own, and lies on no more pages than its bytes need: where it would straddle
one more, it begins with the next page. DRAM holds where lists start, and a checksum for each page.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier import backend
from memhier.ann.zoom.filters.bitmaps import Words
from memhier.ann.zoom.preview.blocks import BLOCK_ROWS, interleave
from memhier.errors import ClosedError
from memhier.io.page_file import PAGE_BYTES
from memhier.io.read_arguments import Tallies
from memhier.io.reader import Reader

__all__ = ["ListRows", "StoredCodes", "block_bytes", "list_offsets", "pages_of_lists", "written_lists"]

_NUMBER_BYTES = 2  # of each of the two numbers of a row
_WRITTEN_BYTES = 4 << 20  # of lists that are put together at a time

Ints: TypeAlias = npt.NDArray[np.int64]
Bytes: TypeAlias = npt.NDArray[np.uint8]
Shorts: TypeAlias = npt.NDArray[np.uint16]
Dimensions: TypeAlias = tuple[int, int, int, int]


class ListRows(NamedTuple):
    """Rows of codes: plain codes uint8 ``[n, code_bytes]``, numbers uint16 ``[2, n]`` and ids ``[n]``."""

    codes: Bytes
    numbers: Shorts
    ids: npt.NDArray[Any]


Rows: TypeAlias = Callable[[int, int], ListRows]


def block_bytes(code_bytes: int, id_bytes: int) -> int:
    """Return the bytes of a block of rows."""
    return BLOCK_ROWS * (code_bytes + 2 * _NUMBER_BYTES + id_bytes)


def list_offsets(starts: Ints, size: int) -> Ints:
    """Return the byte where each list begins, int64 ``[lists + 1]``; the last is the end, a whole page.

    Parameters
    ----------
    starts
        int64 ``[lists + 1]``: of the lists' rows.
    size
        Bytes of a block.
    """
    offsets = np.empty(len(starts), np.int64)
    at = 0
    for number, length in enumerate((-(-np.diff(starts) // BLOCK_ROWS) * size).tolist()):
        within = at % PAGE_BYTES
        if within + length > -(-length // PAGE_BYTES) * PAGE_BYTES:
            at += PAGE_BYTES - within
        offsets[number] = at
        at += length
    offsets[-1] = -(-at // PAGE_BYTES) * PAGE_BYTES
    return offsets


def pages_of_lists(starts: Ints, size: int) -> Ints:
    """Return the pages that each list lies on, int64 ``[lists]``; `starts` and `size` as of :func:`list_offsets`."""
    return np.asarray(-(-(-(-np.diff(starts) // BLOCK_ROWS) * size) // PAGE_BYTES), np.int64)


def written_lists(starts: Ints, size: int, rows: Rows, dimensions: Dimensions) -> Iterator[Bytes]:
    """Yield the bytes of all lists in order, some MiB at a time, with the zeros between them.

    Parameters
    ----------
    starts, size
        As of :func:`list_offsets`.
    rows
        Returns the :class:`ListRows` from one row to another.
    dimensions
        Of the code book.
    """
    offsets, low = list_offsets(starts, size), 0
    while low < len(starts) - 1:
        high = max(low + 1, int(np.searchsorted(offsets, offsets[low] + _WRITTEN_BYTES, side="right")) - 1)
        found: ListRows = rows(int(starts[low]), int(starts[high]))
        lengths = np.diff(starts[low : high + 1])
        blocks = -(-lengths // BLOCK_ROWS)
        first = np.cumsum(blocks) - blocks
        at = np.repeat(first * BLOCK_ROWS - (starts[low:high] - starts[low]), lengths) + np.arange(len(found.ids))
        out = np.zeros(int(offsets[high] - offsets[low]), np.uint8)
        made = _blocks(found, at, int(blocks.sum()), dimensions)
        begin = np.repeat(offsets[low:high] - offsets[low] - first * size, blocks) + np.arange(len(made)) * size
        if len(made):
            np.lib.stride_tricks.sliding_window_view(out, size, writeable=True)[begin] = made
        yield out
        low = high


def _blocks(rows: ListRows, at: Ints, count: int, dimensions: Dimensions) -> Bytes:
    """Return rows put at their places in `count` blocks, uint8 ``[count, size]``."""
    room = count * BLOCK_ROWS
    codes = np.zeros((room, rows.codes.shape[1]), np.uint8)
    codes[at] = rows.codes
    interleave(codes, dimensions)
    columns: list[npt.NDArray[Any]] = [codes.reshape(count, -1)]
    for each in (*rows.numbers, rows.ids):
        column = np.zeros(room, each.dtype)
        column[at] = each
        columns.append(column.view(np.uint8).reshape(count, -1))
    return np.hstack(columns)


class StoredCodes:
    """The codes, numbers and ids of a part that stay on SSD. For many threads.

    Parameters
    ----------
    starts
        int64 ``[lists + 1]``: list ``l`` holds the rows ``starts[l]`` to ``starts[l + 1]``.
    reader, file
        Reads the blocks.
    code_bytes
        Of a code.
    id_dtype
        Of the ids.
    """

    def __init__(self, starts: Ints, reader: Reader, file: int, code_bytes: int, id_dtype: np.dtype[Any]) -> None:
        self.starts: Ints = starts
        self.id_dtype: np.dtype[Any] = id_dtype
        self.block_bytes: int = block_bytes(code_bytes, id_dtype.itemsize)
        self._reader, self._file, self._code_bytes = reader, file, code_bytes
        self._offsets = list_offsets(starts, self.block_bytes)

    def __len__(self) -> int:
        return int(self.starts[-1])

    def read_by(self, reader: Reader, file: int) -> "StoredCodes":
        """Return them as another reader reads the same blocks."""
        return StoredCodes(self.starts, reader, file, self._code_bytes, self.id_dtype)

    def close(self) -> None:
        """Close the file, of a reader that may be closed itself."""
        with suppress(ClosedError):
            self._reader.remove(self._file)

    @property
    def memory_bytes(self) -> int:
        """DRAM held, in bytes."""
        return self.starts.nbytes + self._offsets.nbytes

    def compiled(self, allowed: Words | None) -> Any:
        """Return them as the native core takes them, with a bit for each row that may be found; None for all."""
        assert backend.core is not None
        return backend.core.StoredLists(
            file=self._file, starts=self.starts, offsets=self._offsets, block_bytes=self.block_bytes,
            id_bytes=self.id_dtype.itemsize, allowed=allowed,
        )  # fmt: skip

    def blocks_of(self, lists: Ints) -> Ints:
        """Return the number of blocks of each list."""
        return np.asarray(-(-(self.starts[lists + 1] - self.starts[lists]) // BLOCK_ROWS), np.int64)

    def bytes_of(self, lists: Ints) -> Ints:
        """Return the bytes of the blocks of each list."""
        return self.blocks_of(lists) * self.block_bytes

    def lists(self, lists: Ints, tally: Tallies) -> ListRows:
        """Read whole lists, one after the other; the codes stay in the order of blocks. `tally` as in a read."""
        blocks = self.blocks_of(lists)
        within = np.arange(int(blocks.sum())) - np.repeat(np.cumsum(blocks) - blocks, blocks)
        return self._read(np.repeat(self._offsets[lists], blocks) + within * self.block_bytes, tally)

    def rows(self, rows: Ints, tally: Tallies | None = None) -> tuple[Ints, ListRows]:
        """Read the blocks of rows; return the place of each row in them, and them in the order of blocks."""
        lists = np.searchsorted(self.starts, rows, side="right") - 1
        within = rows - self.starts[lists]
        offsets, inverse = np.unique(
            self._offsets[lists] + within // BLOCK_ROWS * self.block_bytes, return_inverse=True
        )
        return inverse * BLOCK_ROWS + within % BLOCK_ROWS, self._read(offsets, tally)

    def _read(self, offsets: Ints, tally: Tallies | None) -> ListRows:
        raw = self._reader.read(self._file, offsets, self.block_bytes, tally=tally)
        at, columns = 0, []
        for width in (self._code_bytes, _NUMBER_BYTES, _NUMBER_BYTES, self.id_dtype.itemsize):
            columns.append(np.ascontiguousarray(raw[:, at : at + BLOCK_ROWS * width]).reshape(-1))
            at += BLOCK_ROWS * width
        codes, radii, ratios, ids = columns
        numbers = np.stack([radii.view(np.uint16), ratios.view(np.uint16)])
        return ListRows(codes.reshape(-1, self._code_bytes), numbers, ids.view(self.id_dtype))
