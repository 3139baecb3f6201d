"""ShardBuild: takes the vectors of one shard block by block, and builds its index. It runs in an actor."""

import pickle
import shutil
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.cluster.cluster_map import LAYOUT, ClusterMap
from memhier.ann.cluster.given import Columns, Rows, typed
from memhier.ann.cluster.nodes import shard_folder
from memhier.ann.zoom import ZoomIndex
from memhier.ann.zoom.filters.attributes import Schema
from memhier.ann.zoom.storage.ids import as_ids

__all__ = ["ShardBuild"]

Key: TypeAlias = tuple[Any, int]


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
        root = self._folder.parent
        if root.name.startswith(LAYOUT):
            root.parent.mkdir(exist_ok=True)
        root.mkdir(exist_ok=True)
        self._folder.mkdir()
        self._spool = self._folder / "spool"
        self._spool.mkdir()
        self._dtype, self._dimension = np.dtype(dtype), dimension
        self._taken: dict[Key, tuple[int, npt.NDArray[Any], Columns]] = {}
        self._documents = False

    def take(
        self, key: tuple[Any, int], piece: tuple[npt.NDArray[Any], npt.NDArray[Any], Columns, Rows | None]
    ) -> None:
        """Keep a block: vectors and documents on disk, ids and attributes in DRAM.

        Parameters
        ----------
        key
            The dealer, and the number of its block. Blocks lie in this order; one that comes again is left out.
        piece
            Vectors, ids, attributes as Python values, documents.
        """
        if key in self._taken:
            return
        vectors, ids, attributes, documents = piece
        number = len(self._taken)
        vectors.tofile(self._spool / f"{number}.vectors")
        if documents is not None:
            (self._spool / f"{number}.documents").write_bytes(pickle.dumps(documents))
            self._documents = True
        self._taken[key] = number, ids, attributes

    def numbers(self, rest: int, divisor: int) -> npt.NDArray[np.int64]:
        """Return ids, or hashes of strings, whose remainder is `rest`."""
        found = [as_ids(ids, None).numbers for _, ids, _ in self._taken.values() if len(ids)]
        every = np.concatenate([np.empty(0, np.int64), *found])
        chosen: npt.NDArray[np.int64] = every[every % divisor == rest]
        return chosen

    def count(self) -> int:
        """Return the number of vectors taken."""
        return sum(len(ids) for _, ids, _ in self._taken.values())

    def build(self, schema: Schema, id_kind: str, mark: int, options: Mapping[str, Any]) -> int:
        """Build the index with attributes of these types, at a commit; return the number of its vectors."""
        blocks = self._ordered()
        count = self.count()
        empty = np.empty(0, np.int64 if id_kind == "int64" else object)
        vectors: Any = self._blocks() if count else np.empty((0, self._dimension), self._dtype)
        attributes = {
            name: typed(name, [value for _, _, columns in blocks for value in columns[name]], kind)
            for name, kind in schema.items()
        }
        ids = np.concatenate([empty, *(ids for _, ids, _ in blocks)])
        place = self._folder / "index"
        made = ZoomIndex.build(
            place, vectors, ids=ids if count or id_kind == "int64" else [""][:0], attributes=attributes or None,
            documents=self._rows() if self._documents else None, **options,
        )  # fmt: skip
        with made:
            if mark:
                made.prepare(mark)
                made.publish()
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

    def _ordered(self) -> list[tuple[int, npt.NDArray[Any], Columns]]:
        return [self._taken[key] for key in sorted(self._taken)]

    def _blocks(self) -> Iterator[npt.NDArray[Any]]:
        for number, ids, _ in self._ordered():
            yield np.fromfile(self._spool / f"{number}.vectors", self._dtype).reshape(len(ids), self._dimension)

    def _rows(self) -> Iterator[dict[str, Any]]:
        for number, _, _ in self._ordered():
            yield from pickle.loads((self._spool / f"{number}.documents").read_bytes())
