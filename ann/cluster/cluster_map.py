"""ClusterMap: the facts that every shard keeps of the whole, in a store beside its index."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from memhier.ann.cluster.cells import Cells
from memhier.ann.cluster.routing import Routing
from memhier.ann.zoom.storage.ids import IdKind
from memhier.fields import decode_json, integer, mapping, one_of, real, record, text
from memhier.store.store import Store

__all__ = ["LAYOUT", "ClusterMap"]

LAYOUT = "layout-"
"""The names of folders of shards begin so after a resharding."""

_KIND, _FOLDER = "cluster-map", "map"
_CHECK = record({
    "name": text(r"[0-9a-f]{16}"), "shard": integer(0, 2**20), "shards": integer(1, 2**20),
    "replica": integer(0, 2**10), "replicas": integer(1, 2**10), "epoch": integer(), "next_id": integer(0, 2**63),
    "id_kind": one_of("int64", "str"), "dtype": one_of("float32", "float16", "int8", "uint8"),
    "dimension": integer(1, 2**20), "metric": one_of("l2", "ip", "cosine"), "reach": real(0), "routing": mapping(
        lambda _: None), "commit": text(r"[0-9a-f]{16}"), "layout": text(r"[0-9a-f]{16}"), "turn": integer(0, 2**31),
    "before": text(r"([0-9a-f]{16})?"), "successor": text(r"([0-9a-f]{16})?"),
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class ClusterMap:
    """The facts that every shard keeps of the whole.

    Attributes
    ----------
    name
        Of the index, a random word that tells its folders from those of others.
    shard, replica
        Which one keeps it.
    shards, replicas
        The number of shards, and of the replicas of each.
    epoch
        The number of the last commit over all shards; that of shard 0 decides.
    next_id
        The next free id.
    id_kind, dtype, dimension
        Of the ids, and of the vectors as stored.
    cells, routing
        Where vectors lie, and which shards a query asks.
    commit
        A random word that tells this commit from another of the same number.
    layout, turn
        Of these shards: a random word, and how often the index was resharded before.
    before
        The layout that these shards are to follow, as long as that is not decided.
    successor
        The layout that follows: these shards no longer count.
    """

    name: str
    shard: int
    shards: int
    replica: int
    replicas: int
    epoch: int
    next_id: int
    id_kind: IdKind
    dtype: str
    dimension: int
    cells: Cells
    routing: Routing
    commit: str
    layout: str
    turn: int = 0
    before: str = ""
    successor: str = ""

    def create(self, folder: Path) -> None:
        """Write it into a new store below the folder of the shard."""
        with Store.create(folder / _FOLDER, _KIND) as store, store.begin() as tx:
            tx.segment("centroids").append(np.ascontiguousarray(self.cells.centroids))
            tx.segment("owners").append(np.ascontiguousarray(self.cells.owners))
            tx.put("about", self.encode())
            tx.commit()

    def renew(self, folder: Path) -> None:
        """Make it durable in place of the one before, cells apart, in one step."""
        with Store.open(folder / _FOLDER, _KIND, writable=True) as store, store.begin() as tx:
            tx.put("about", self.encode())
            tx.commit()

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Return the map of the shard in a folder.

        Raises
        ------
        FileNotFoundError, FormatError, CorruptionError
            When there is none, or it is damaged.
        """
        with Store.open(folder / _FOLDER, _KIND) as store:
            owners, centroids = store.read_segment("owners"), store.read_segment("centroids")
            return cls.decode(store.get("about") or b"", owners, centroids, f"{folder}: the value 'about'")

    @classmethod
    def decode(cls, about: bytes, owners: npt.NDArray[np.uint8], centroids: npt.NDArray[np.uint8], where: str) -> Self:
        """Return a map from the text of :meth:`encode`, and the bytes of owners and centroids."""
        values = decode_json(about, where, _CHECK)
        metric, reach, routing = (values.pop(name) for name in ("metric", "reach", "routing"))
        whose = owners.view(np.int64)
        places = centroids.view(np.float32).reshape(len(whose), -1)
        return cls(**values, cells=Cells(metric, places, whose, reach), routing=Routing.from_json(routing))

    def place(self, path: str) -> str:
        """Return the folder of these shards on each node, for the `path` of the index."""
        return path if self.turn == 0 else f"{path}/{LAYOUT}{self.layout}"

    def of(self, shard: int, replica: int) -> Self:
        """Return the map for another shard or replica."""
        return replace(self, shard=shard, replica=replica)

    def encode(self) -> bytes:
        """Return all but centroids and owners of cells, as JSON."""
        plain: dict[str, Any] = {name: getattr(self, name) for name in self.__slots__}
        del plain["cells"]
        plain |= {"metric": self.cells.metric, "reach": self.cells.reach, "routing": self.routing.to_json()}
        return json.dumps(plain).encode()
