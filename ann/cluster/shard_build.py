"""ShardBuild: takes the vectors of one shard block by block, and builds its index. It runs in an actor."""

import pickle
import shutil
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from memhier.ann.cluster.cluster_map import ClusterMap
from memhier.ann.cluster.given import Columns, Rows, typed
from memhier.ann.cluster.nodes import shard_folder
from memhier.ann.zoom import ZoomIndex

__all__ = ["ShardBuild"]


class ShardBuild:
    """Takes vectors, spools them to disk, and builds an index from them.

    Parameters
    ----------
    path, shard, replica
        See :func:`shard_folder`; nothing may be in that folder.
    dtype, dimension
        Of the vectors.
    """

    def __init__(self, path: str, shard: int, replica: int, dtype: str, dimension: int) -> None:
        self._folder = shard_folder(path, shard, replica)
        self._folder.parent.mkdir(exist_ok=True)
        self._folder.mkdir()
        self._spool = self._folder / "spool"
        self._spool.mkdir()
        self._dtype, self._dimension = np.dtype(dtype), dimension
        self._counts: list[int] = []
        self._ids: list[npt.NDArray[Any]] = []
        self._attributes: list[Columns] = []
        self._documents = False

    def take(
        self, vectors: npt.NDArray[Any], ids: npt.NDArray[Any], attributes: Columns, documents: Rows | None
    ) -> None:
        """Keep a block: vectors and documents on disk, ids and attributes in DRAM."""
        number = len(self._counts)
        vectors.tofile(self._spool / f"{number}.vectors")
        if documents is not None:
            (self._spool / f"{number}.documents").write_bytes(pickle.dumps(documents))
            self._documents = True
        self._counts.append(len(vectors))
        self._ids.append(ids)
        self._attributes.append(attributes)

    def build(self, schema: Mapping[str, str], id_kind: str, options: Mapping[str, Any]) -> int:
        """Build the index with attributes of these types, and return the number of its vectors."""
        count = sum(self._counts)
        empty = np.empty(0, np.int64 if id_kind == "int64" else object)
        vectors: Any = self._blocks() if count else np.empty((0, self._dimension), self._dtype)
        attributes = {
            name: typed([value for block in self._attributes for value in block[name]], kind)
            for name, kind in schema.items()
        }
        ids = np.concatenate([empty, *self._ids])
        place = self._folder / "index"
        made = ZoomIndex.build(
            place, vectors, ids=ids if count or id_kind == "int64" else [""][:0], attributes=attributes or None,
            documents=self._rows() if self._documents else None, **options,
        )  # fmt: skip
        made.close()
        shutil.rmtree(self._spool)
        return count

    def nearest(self, queries: npt.NDArray[np.float32], k: int) -> tuple[npt.NDArray[Any], npt.NDArray[np.float32]]:
        """Return ids and distances of the true neighbours of queries in the index built, ``[q, k]``."""
        with ZoomIndex.open(self._folder / "index") as index:
            found = index.search(queries, k, recall=1.0)
        return found.ids, found.distances

    def finish(self, about: ClusterMap) -> None:
        """Write the map; with that of shard 0 the cluster is there."""
        about.create(self._folder)

    def _blocks(self) -> Iterator[npt.NDArray[Any]]:
        for number, count in enumerate(self._counts):
            yield np.fromfile(self._spool / f"{number}.vectors", self._dtype).reshape(count, self._dimension)

    def _rows(self) -> Iterator[dict[str, Any]]:
        for number in range(len(self._counts)):
            yield from pickle.loads((self._spool / f"{number}.documents").read_bytes())
