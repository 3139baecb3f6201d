"""The graph over the rows' codes, and the seeds that a walk starts from."""

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["NO_ROW", "Graph"]

NO_ROW = 0xFFFFFFFF

Words: TypeAlias = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class Graph:
    """Links, and seeds by group of contexts.

    Attributes
    ----------
    links
        uint32 ``[V, degree]``, :data:`NO_ROW` where a row has fewer; degree 0 for seeds alone.
    centres
        float32 ``[groups, width]``: of the groups of contexts, in the coordinates of the codes.
    halves
        float32 ``[groups]``: half the squared norms of the centres.
    starts, seeds
        int64 ``[groups + 1]`` and uint32: which rows were among the largest of the contexts of each group.
    """

    links: Words
    centres: npt.NDArray[np.float32]
    halves: npt.NDArray[np.float32]
    starts: npt.NDArray[np.int64]
    seeds: Words

    @property
    def memory_bytes(self) -> int:
        """DRAM held, in bytes."""
        return sum(part.nbytes for part in (self.links, self.centres, self.halves, self.starts, self.seeds))
