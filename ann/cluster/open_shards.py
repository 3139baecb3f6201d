"""OpenShards: the open shards of an index, and answers that need all of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from memhier.ann.cluster.cluster_map import ClusterMap
from memhier.ann.cluster.given import Columns, filled, joined
from memhier.ann.cluster.group import MISSING, Call, ShardGroup
from memhier.errors import ShardLostError

__all__ = ["OpenShards"]


@dataclass(slots=True)
class OpenShards:
    """The open shards of an index.

    Attributes
    ----------
    about
        The facts of the whole at the last commit; the writer replaces them.
    group
        The actors.
    """

    about: ClusterMap
    group: ShardGroup

    def every(self, method: str, *arguments: Any, patient: bool = False) -> list[Any]:
        """Return the answer of every shard; a `patient` call waits however long a replica takes.

        Raises
        ------
        ShardLostError
            When no replica of a shard answers.
        """
        calls = [Call(shard, method, arguments) for shard in range(self.group.shards)]
        return self.answers(calls, patient=patient)

    def answers(self, calls: Sequence[Call], *, patient: bool = False) -> list[Any]:
        """Return the answers of shards, as :meth:`every` does."""
        found = self.group.ask(calls, patient=patient)
        lost = [call.shard for call, answer in zip(calls, found, strict=True) if answer is MISSING]
        if lost:
            raise ShardLostError(f"shards {lost} do not answer, nor do their replicas")
        return found

    def facts(self) -> tuple[int, dict[str, str]]:
        """Return the number of vectors, and the types of all fields, attributes first."""
        facts = self.every("facts")
        every = [(name, kind) for each in facts for name, kind in each["fields"].items()]
        fields = dict(sorted(dict(every).items(), key=lambda field: field[1] == "document"))
        return sum(each["vectors"] for each in facts), fields

    def owners(self, ids: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """Return the shard of each id, -1 where there is none."""
        owners = np.full(len(ids), -1, np.int64)
        for shard, here in enumerate(self.every("contains", ids) if len(ids) else ()):
            owners[here] = shard
        return owners

    def known_owners(self, ids: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """Return the shard of each id; KeyError for one that is not in the index."""
        owners = self.owners(ids)
        if (owners < 0).any():
            raise KeyError(f"ids holds {ids[int(np.argmin(owners))]!r}: no vector has this id")
        return owners

    def fetch(self, ids: npt.NDArray[Any], names: Sequence[str]) -> Columns:
        """Return fields of ids, in their order."""
        pieces, order = self._of_owners(ids, "fetch", names)
        full = [filled(piece, names, (len(rows),)) for piece, rows in zip(pieces, order, strict=True)]
        back = np.argsort(np.concatenate([np.empty(0, np.int64), *order]), kind="stable")
        return {name: joined([each[name] for each in full])[back] for name in names} if full else {}

    def reconstruct(self, ids: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the vectors of ids, in their order."""
        pieces, order = self._of_owners(ids, "reconstruct")
        out = np.empty((sum(map(len, order)), self.about.dimension), self.about.dtype)
        for rows, piece in zip(order, pieces, strict=True):
            out[rows] = piece
        return out

    def _of_owners(
        self, ids: npt.NDArray[Any], method: str, *arguments: Any
    ) -> tuple[list[Any], list[npt.NDArray[np.int64]]]:
        """Ask each shard for its ids; return the answers, and the rows of `ids` that each is for."""
        owners = self.known_owners(ids)
        shards = np.unique(owners).tolist()
        order = [np.flatnonzero(owners == shard) for shard in shards]
        calls = [Call(shard, method, (ids[rows], *arguments)) for shard, rows in zip(shards, order, strict=True)]
        return self.answers(calls), order
