"""The string ids of a part on SSD, in list order, packed into pages: the results of a query share few pages.

A page holds u16 [c + 1], the bytes at which its strings begin and the last one ends, counted from the start of the
page; their letters; zeros. DRAM holds the first row of each page, so one read finds a string.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.zoom.ids.texts import TEXT_MOST, Texts
from memhier.errors import CorruptionError
from memhier.fields import stored_array, stored_segment
from memhier.io.page_file import PAGE_BYTES
from memhier.io.read_arguments import Tallies
from memhier.io.reader import Reader
from memhier.store.store import Staging, Store, Transaction

__all__ = ["PAGE_DRAM", "StoredTexts", "in_order", "text_pages", "write_texts"]

PAGE_DRAM = 12  # bytes held for each page: its first row and its checksum
_BOUND_BYTES = 2  # of a string, beside its letters
_PAGE_TEXTS_LIMIT = PAGE_BYTES // _BOUND_BYTES  # a page has fewer, and one bound more than texts
_ROOM = PAGE_BYTES - _BOUND_BYTES
_READ_PAGES = 64  # of one submission: 256 KiB
_BLOCK_ROWS = 1 << 12  # on their way to another order

Ints: TypeAlias = npt.NDArray[np.int64]


def text_pages(count: int, letters: int, longest: int) -> int:
    """Return the most pages of `count` strings of so many bytes in all."""
    return -(-(letters + _BOUND_BYTES * count) // (_ROOM - min(longest, TEXT_MOST) - _BOUND_BYTES)) + 1 if count else 0


def write_texts(tx: Transaction | Staging, name: str, blocks: Iterable[Texts]) -> None:
    """Write strings, block by block, into the segments `name`, their pages, and `name` + ``-rows``, their rows."""
    segment = tx.segment(name)
    first, rest = [0], Texts.none()
    for block in blocks:
        rest = Texts.joined([rest, block])
        # Strings of less than a page wait for the next block.
        sizes = np.cumsum(rest.lengths + _BOUND_BYTES)
        start = 0
        while start < len(rest):
            before = int(sizes[start - 1]) if start else 0
            stop = int(np.searchsorted(sizes, before + _ROOM, side="right"))
            if stop == len(rest):
                break
            segment.append(_page(rest.part(start, stop)))
            first.append(first[-1] + stop - start)
            start = stop
        rest = rest.part(start, len(rest))
    if len(rest):
        segment.append(_page(rest))
        first.append(first[-1] + len(rest))
    tx.segment(f"{name}-rows").append(np.array(first, "<i8").view(np.uint8))


def in_order(take: Callable[[Ints], Texts], rows: Ints) -> Iterator[Texts]:
    """Yield the strings of rows, block by block, from `take`.

    Neighbours in a list were mostly neighbours before, so a block lies on few of the old pages.
    """
    for start in range(0, len(rows), _BLOCK_ROWS):
        yield take(rows[start : start + _BLOCK_ROWS])


def _page(texts: Texts) -> npt.NDArray[np.uint8]:
    page = np.zeros(PAGE_BYTES, np.uint8)
    head = _BOUND_BYTES * len(texts.bounds)
    bounds = texts.bounds - texts.bounds[0] + head
    page[:head] = bounds.astype("<u2").view(np.uint8)
    page[head : bounds[-1]] = texts.letters[texts.bounds[0] : texts.bounds[-1]]
    return page


class StoredTexts:
    """Reads strings by row. For many threads.

    Parameters
    ----------
    store, name
        Where :func:`write_texts` put them.
    count
        The number expected.
    reader
        Does the reads; `file` is its handle, which the caller removes.

    Raises
    ------
    CorruptionError
        When they do not fit the description.
    """

    def __init__(self, store: Store, name: str, count: int, reader: Reader) -> None:
        info = stored_segment(store, name)
        self._name = str(info.path)
        pages = info.payload // PAGE_BYTES
        self._first: Ints = stored_array(store, f"{name}-rows", "<i8", (pages + 1,)).astype(np.int64)
        each = np.diff(self._first)
        if self._first[0] != 0 or self._first[-1] != count or not ((each > 0) & (each < _PAGE_TEXTS_LIMIT)).all():
            raise CorruptionError(f"{info.path}: its pages do not hold the ids of {count} rows")
        self._reader = reader
        self.file: int = store.attach(name, reader, held=True)

    def __len__(self) -> int:
        return int(self._first[-1])

    @property
    def memory_bytes(self) -> int:
        """DRAM held besides that of the store, in bytes."""
        return self._first.nbytes

    def read(self, rows: Ints, tally: Tallies | None = None) -> Texts:
        """Return the strings of rows in any order; each page is read once, 64 of them in a submission.

        Parameters
        ----------
        tally
            As :meth:`memhier.Reader.read` takes it.

        Raises
        ------
        CorruptionError
            When a page differs from the page written.
        """
        page_of = np.searchsorted(self._first, rows, side="right") - 1
        order = np.argsort(page_of, kind="stable")
        pages, starts = np.unique(page_of[order], return_index=True)
        edges = np.append(starts, len(rows))
        pieces = []
        for low in range(0, len(pages), _READ_PAGES):
            some = pages[low : low + _READ_PAGES]
            here = order[edges[low] : edges[low + len(some)]]
            raw = self._reader.read(self.file, some * PAGE_BYTES, PAGE_BYTES, tally=tally)
            place = np.searchsorted(some, page_of[here])
            pieces.append(self._cut(raw, place, rows[here] - self._first[page_of[here]]))
        back = np.empty_like(order)
        back[order] = np.arange(len(order))
        return Texts.joined(pieces).take(back)

    def pieces(self) -> Iterator[tuple[slice, Texts]]:
        """Yield all strings in order, block by block, with their rows."""
        for start in range(0, len(self), _BLOCK_ROWS):
            rows = slice(start, min(start + _BLOCK_ROWS, len(self)))
            yield rows, self.read(np.arange(rows.start, rows.stop))

    def _cut(self, pages: npt.NDArray[np.uint8], place: Ints, number: Ints) -> Texts:
        bounds = pages.view("<u2")
        low = bounds[place, number].astype(np.int64)
        high = bounds[place, number + 1].astype(np.int64)
        if ((low >= high) | (high > PAGE_BYTES)).any():  # damage that no checksum was checked for
            raise CorruptionError(f"{self._name}: a page does not hold the ids that it should")
        return Texts.cut(pages.reshape(-1), place * PAGE_BYTES + low, high - low)
