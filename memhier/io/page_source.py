"""A file that holds only some of its extents: a cache of one that lies elsewhere, which brings the others on demand."""

from collections.abc import Sequence
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

__all__ = ["PageSource"]


class PageSource(Protocol):
    """Brings the absent extents of a file before a reader reads them."""

    extent_bytes: int
    """Bytes of an extent, whole pages; the last one may be shorter."""

    marks: NDArray[np.uint8]
    """uint8 [extents]: 0 where one is absent, 1 where it is present, 2 where a reader used it since it was 1."""

    def fetch(self, wanted: Sequence[tuple[Self, int]]) -> None:
        """Return once these extents, of this source and others like it, were present."""

    def forget(self, page: int) -> None:
        """Mark the extent of a page as absent, since the page did not match its checksum."""

    def gone(self) -> OSError:
        """Return the error of a call whose pages did not stay there until they were read, however often it began."""
