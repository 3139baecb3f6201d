"""A graph over the centroids of lists, walked towards queries in one call for a batch."""

from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier import backend
from memhier.ann.zoom.preview.routing import python_graph

__all__ = ["DEGREE", "LAYER", "NONE", "ListGraph", "link_bytes"]

DEGREE = 24
LAYER = 4  # one in so many lists has links to others of these, too
NONE = -1

Floats: TypeAlias = npt.NDArray[np.float32]
Halves: TypeAlias = npt.NDArray[np.float16]
Ints: TypeAlias = npt.NDArray[np.int64]
Links: TypeAlias = npt.NDArray[np.int32]


def link_bytes() -> int:
    """Return the DRAM bytes of the links of one list, and of its share of the seeds."""
    return 4 * DEGREE + 1


@dataclass(frozen=True, slots=True)
class ListGraph:
    """Links between lists, one node for each distinct centroid.

    Attributes
    ----------
    centroids
        float16 ``[lists, d]``.
    links
        int32 ``[lists, degree]``: lists near each, then -1. The last may be ``-2 - c``: the list ``c`` has the same
        centroid and a higher number. Nothing else leads to ``c``, and it leads to nothing but the next such list.
    seeds
        int32: the lists that a walk starts from, some square root of all, at even distances by number.
    """

    centroids: Halves
    links: Links
    seeds: Links = field(init=False)

    def __post_init__(self) -> None:
        nodes = np.flatnonzero(~self.copies())
        seeds = nodes[:: LAYER * max(1, int(len(nodes) ** 0.5) // LAYER)]
        object.__setattr__(self, "seeds", seeds.astype(np.int32))

    @property
    def memory_bytes(self) -> int:
        """DRAM of links and seeds, in bytes."""
        return self.links.nbytes + self.seeds.nbytes

    def copies(self) -> npt.NDArray[np.bool_]:
        """Return whether each list has the centroid of a list before it, bool ``[lists]``."""
        last = self.links[:, -1]
        copies = np.zeros(len(last), np.bool_)
        copies[NONE - 1 - last[last < NONE]] = True
        return copies

    def walk(self, queries: Floats, wanted: int, sight: int) -> Ints:
        """Return the `wanted` lists nearest to each query, int64 ``[q, wanted]``, by distance; then -1.

        Lists of one centroid follow one another, by number. The distances are those of a comparison with all.

        Parameters
        ----------
        queries
            float32 ``[q, d]``.
        sight
            A walk goes on from the nearest list that it has not gone on from; it ends so many steps after it met the
            nearest of all. It takes some ``degree d sight / 4`` operations, and 16 bytes for each list that it sees.
        """
        nearest = np.empty((len(queries), wanted), np.int64)
        walk: Any = python_graph.walk_lists if backend.core is None else backend.core.walk_lists
        rows = self.centroids.view(np.uint16)
        walk(queries=queries, rows=rows, links=self.links, seeds=self.seeds, sight=sight, nearest=nearest)
        return nearest

    def reached(self) -> npt.NDArray[np.bool_]:
        """Return whether the seeds lead to each list, bool ``[lists]``."""
        reached = np.zeros(len(self.links), np.uint8)
        reached[self.seeds] = 1
        reach: Any = python_graph.reach_lists if backend.core is None else backend.core.reach_lists
        reach(links=self.links, reached=reached)
        return reached.view(np.bool_)

    @classmethod
    def fault(cls, centroids: Halves, links: Links) -> str | None:
        """Return why these are no links of lists with these centroids, or None; it takes one pass over the links."""
        lists = len(centroids)
        last, others = links[:, -1], links[:, :-1]
        if links.max() >= lists or others.min(initial=NONE) < NONE or last.min() < NONE - lists:
            return "a link leads beyond the lists"
        before = np.flatnonzero(last < NONE)
        after = NONE - 1 - last[before]
        if (after <= before).any() or len(np.unique(after)) != len(after):
            return "copies of a centroid do not follow one another"
        bits = centroids.view(np.uint16)
        if (bits[before] != bits[after]).any():
            return "a list is no copy of another"
        graph = cls(centroids, links)
        copies = graph.copies()
        if (others[copies] != NONE).any() or (last[copies] > NONE).any() or copies[links[links > NONE]].any():
            return "a link leads to or from a copy"
        if not graph.reached().all():
            return "a list is out of reach"
        return None
