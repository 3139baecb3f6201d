"""ShardSource: the vectors of open shards, for a build of other shards. Every shard deals its own."""

from typing import Any

import numpy as np
import numpy.typing as npt

from memhier.ann.cluster.cells import Cells
from memhier.ann.cluster.construction.dealing import Builders
from memhier.ann.cluster.open_shards import OpenShards
from memhier.ann.zoom.storage.ids import IdKind

__all__ = ["ShardSource"]


class ShardSource:
    """The vectors of an open index without changes that wait."""

    def __init__(self, shards: OpenShards) -> None:
        about = shards.about
        self._shards = shards
        self._count, fields = shards.facts()
        self.dtype: str = about.dtype
        self.dimension: int = about.dimension
        self.id_kind: IdKind = about.id_kind
        self.next_id: int = about.next_id
        self.schema: dict[str, Any] = {name: kind for name, kind in fields.items() if kind != "document"}

    def sample(self, count: int, seed: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Return random vectors and their ids."""
        share = min(1.0, count / max(1, self._count))
        found = self._shards.every("sample", share, seed, patient=True)
        vectors, ids = (np.concatenate(each) for each in zip(*found, strict=True))
        return vectors, ids

    def deal(self, cells: Cells, builders: Builders) -> npt.NDArray[np.int64]:
        """Send all vectors to their new shards."""
        counts: list[npt.NDArray[np.int64]] = self._shards.every("deal", cells, builders, self.schema, patient=True)
        total: npt.NDArray[np.int64] = np.stack(counts).sum(axis=0)
        return total
