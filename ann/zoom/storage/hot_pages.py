"""Pages held in DRAM: their keys, and reading them. A key is the file's handle, then 40 bits of page number."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.io.page_file import PAGE_BYTES
from memhier.io.reader import Reader
from memhier.rows.ranking import HotPages

__all__ = ["files_of", "hot_in", "load_hot", "page_keys", "pages_of"]

_SHIFT = 40  # as `memhier.rows.ranking.HotPages` has it

Ints: TypeAlias = npt.NDArray[np.int64]


def page_keys(files: Sequence[int] | npt.NDArray[Any], pages: Sequence[int] | Ints) -> Ints:
    """Return the keys of pages, int64 ``[n]``."""
    return np.asarray(files, np.int64) << _SHIFT | np.asarray(pages, np.int64)


def files_of(keys: Ints) -> Ints:
    """Return the handles of the files that pages lie in."""
    return keys >> _SHIFT


def pages_of(keys: Ints) -> Ints:
    """Return the numbers of pages in their files."""
    return keys & ((1 << _SHIFT) - 1)


def load_hot(reader: Reader, keys: Ints) -> HotPages:
    """Read the pages of ascending keys into DRAM."""
    return HotPages(keys, reader.read(files_of(keys).astype(np.int32), pages_of(keys) * PAGE_BYTES, PAGE_BYTES))


def hot_in(hot: HotPages, files: Sequence[int]) -> HotPages:
    """Return the hot pages that lie in some files."""
    kept = np.isin(files_of(hot.keys), files)
    return hot if kept.all() else HotPages(hot.keys[kept], hot.pages[kept])
