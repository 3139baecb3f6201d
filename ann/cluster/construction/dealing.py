"""Dealing: vectors go to the builders of their shards, from one process or from many at a time."""

from typing import Any

import numpy as np
import numpy.typing as npt

from memhier.ann.cluster.cells import Cells
from memhier.ann.cluster.given import Columns, Rows, taken
from memhier.ann.cluster.ray_extra import ray
from memhier.ann.zoom.storage.ids import Ids

__all__ = ["Builders", "Dealer", "sampled"]

Builders = list[list[Any]]
"""Handles of the actors of `ShardBuild`, ``[shards][replicas]``."""

_MIX = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


class Dealer:
    """Sends vectors to the builders of their shards. The blocks of one round are on their way while the next is read.

    Parameters
    ----------
    part
        A word or number for this dealer. Builders keep blocks in the order of it, and take a block once.

    Attributes
    ----------
    counts
        The vectors sent to each shard.
    """

    def __init__(self, part: Any, cells: Cells, builders: Builders) -> None:
        self.counts: npt.NDArray[np.int64] = np.zeros(len(builders), np.int64)
        self._part, self._cells, self._builders = part, cells, builders
        self._on_the_way: list[Any] = []
        self._blocks = 0

    def send(self, block: npt.NDArray[Any], ids: npt.NDArray[Any], columns: Columns, rows: Rows | None) -> None:
        """Send a block of vectors, with its ids, attributes as Python values, and documents."""
        owners = self._cells.owner(block)
        sent = []
        for shard in np.unique(owners).tolist():
            mine = np.flatnonzero(owners == shard)
            self.counts[shard] += len(mine)
            documents = None if rows is None else [rows[row] for row in mine.tolist()]
            piece = ray.put((block[mine], ids[mine], taken(columns, mine), documents))
            key = self._part, self._blocks
            sent += [builder.take.remote(key, piece) for builder in self._builders[shard]]
        self._blocks += 1
        ray.get(self._on_the_way)
        self._on_the_way = sent

    def finish(self) -> npt.NDArray[np.int64]:
        """Wait until all blocks have arrived; return the vectors sent to each shard."""
        ray.get(self._on_the_way)
        return self.counts


def sampled(ids: Ids, share: float, seed: int) -> npt.NDArray[np.int64]:
    """Return the rows of a sample of about this share, which depends on the ids and the seed alone."""
    with np.errstate(over="ignore"):
        key = ids.numbers.astype(np.uint64) + np.uint64(seed + 1) * _MIX[0]
        key = (key ^ (key >> np.uint64(30))) * _MIX[1]
        key = (key ^ (key >> np.uint64(27))) * _MIX[2]
    return np.flatnonzero((key >> np.uint64(11)).astype(np.float64) < share * 2.0**53)
