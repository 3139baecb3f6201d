"""One shard: an index in a folder of its node, with the map of all shards beside it. It runs in an actor."""

import json
import os
import pickle
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from memhier.ann.cluster.cells import Cells
from memhier.ann.cluster.routing import Routing
from memhier.ann.zoom import SearchResult, ZoomIndex
from memhier.store.store import Store

__all__ = ["ClusterMap", "Shard", "ShardBuild", "shard_folder"]

KIND = "cluster"

Rows = list[dict[str, Any]]


def shard_folder(path: str, shard: int, replica: int) -> Path:
    """Return the folder of a replica of a shard on this node; `path` may name environment variables."""
    return Path(os.path.expandvars(path)).expanduser().absolute() / f"shard-{shard:04}-{replica}"


@dataclass(frozen=True, slots=True)
class ClusterMap:
    """The facts that every shard keeps of the whole.

    Attributes
    ----------
    name
        Of the cluster, a random word: folders of another one are told apart by it.
    shard, replica, replicas
        Which one keeps it, and the replicas of each shard.
    epoch
        The number of the last commit over all shards.
    next_id
        The next free id.
    id_kind, dtype
        Of the ids, and of the vectors as stored.
    cells, routing
        Where vectors lie, and which shards a query asks.
    """

    name: str
    shard: int
    replica: int
    replicas: int
    epoch: int
    next_id: int
    id_kind: str
    dtype: str
    cells: Cells
    routing: Routing

    def write(self, folder: Path) -> None:
        """Write it into a new store."""
        with Store.create(folder / "map", KIND) as store, store.begin() as tx:
            tx.segment("centroids").append(np.ascontiguousarray(self.cells.centroids))
            tx.segment("owners").append(self.cells.owners)
            tx.put("about", json.dumps(self._about()).encode())
            tx.commit()

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Return the map of a folder."""
        with Store.open(folder / "map", KIND) as store:
            raw = store.get("about")
            assert raw is not None
            about = json.loads(raw)
            owners = store.read_segment("owners").view(np.int64)
            centroids = store.read_segment("centroids").view(np.float32).reshape(len(owners), -1)
        metric, reach = about.pop("metric"), about.pop("reach")
        routing = Routing.from_json(about.pop("routing"))
        return cls(**about, cells=Cells(metric, centroids, owners, reach), routing=routing)

    def _about(self) -> dict[str, Any]:
        plain = {name: getattr(self, name) for name in self.__slots__ if name not in ("cells", "routing")}
        return plain | {"metric": self.cells.metric, "reach": self.cells.reach, "routing": self.routing.to_json()}


class ShardBuild:
    """Takes the vectors of a shard, block by block, and builds its index from them.

    Parameters
    ----------
    path, shard, replica
        See :func:`shard_folder`; nothing may be there yet.
    """

    def __init__(self, path: str, shard: int, replica: int) -> None:
        self.folder = shard_folder(path, shard, replica)
        self.folder.parent.mkdir(exist_ok=True)
        self.folder.mkdir()
        self._spool = self.folder / "spool"
        self._spool.mkdir()
        self._shapes: list[tuple[int, int]] = []
        self._ids: list[npt.NDArray[Any]] = []
        self._attributes: list[dict[str, npt.NDArray[Any]]] = []
        self._documents = False
        self._dtype = np.dtype(np.float32)

    def take(
        self, vectors: npt.NDArray[Any], ids: npt.NDArray[Any], attributes: dict[str, Any], documents: Rows | None
    ) -> None:
        """Keep a block on disk; its ids and attributes stay in DRAM."""
        number = len(self._shapes)
        vectors.tofile(self._spool / f"{number}.vectors")
        if documents is not None:
            (self._spool / f"{number}.documents").write_bytes(pickle.dumps(documents))
            self._documents = True
        self._shapes.append((vectors.shape[0], vectors.shape[1]))
        self._dtype = vectors.dtype
        self._ids.append(ids)
        self._attributes.append(attributes)

    def build(self, empty: npt.NDArray[Any], options: dict[str, Any]) -> int:
        """Build the index and return the number of its vectors; `empty` is a block of no vectors."""
        place, count = self.folder / "index", sum(rows for rows, _ in self._shapes)
        ids = np.concatenate(self._ids) if self._ids else None
        names = self._attributes[0] if self._attributes else {}
        attributes = {name: np.ma.concatenate([each[name] for each in self._attributes]) for name in names}
        documents = self._rows() if self._documents else None
        vectors: Any = self._blocks() if count else empty
        ZoomIndex.build(
            place, vectors, ids=ids, attributes=attributes or None, documents=documents, **options
        ).close()
        shutil.rmtree(self._spool)
        return count

    def finish(self, about: ClusterMap) -> None:
        """Write the map: the shard can be opened from now on."""
        about.write(self.folder)

    def discard(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _blocks(self) -> Iterator[npt.NDArray[Any]]:
        for number, shape in enumerate(self._shapes):
            yield np.fromfile(self._spool / f"{number}.vectors", self._dtype).reshape(shape)

    def _rows(self) -> Iterator[dict[str, Any]]:
        for number in range(len(self._shapes)):
            yield from pickle.loads((self._spool / f"{number}.documents").read_bytes())


class Shard:
    """A shard that is open.

    Parameters
    ----------
    path, shard, replica
        See :func:`shard_folder`.
    writable
        Whether it may be changed.
    """

    def __init__(self, path: str, shard: int, replica: int, writable: bool) -> None:
        self._folder = shard_folder(path, shard, replica)
        self._index = ZoomIndex.open(self._folder / "index", writable=writable)

    def about(self) -> ClusterMap:
        """Return the map."""
        return ClusterMap.read(self._folder)

    def facts(self) -> dict[str, Any]:
        """Return `ZoomIndex.stats`, with ``fields``."""
        return self._index.stats() | {"fields": self._index.fields}

    def search(self, queries: npt.NDArray[np.float32], k: int, options: dict[str, Any]) -> SearchResult:
        """Search the index."""
        return self._index.search(queries, k, **options)
