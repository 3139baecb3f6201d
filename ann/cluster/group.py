"""The actors of all shards: a call goes to a replica, and to another one if that one is lost."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray

from memhier.ann.cluster.shard import Shard

__all__ = ["Call", "ShardGroup"]


@dataclass(frozen=True, slots=True)
class Call:
    """A call of one shard: the name of a method of `Shard`, and its arguments."""

    shard: int
    method: str
    arguments: tuple[Any, ...]


class ShardGroup:
    """Opens shards in actors on their nodes.

    Parameters
    ----------
    path
        The folder of the shards on each node.
    nodes
        The node id of each replica of each shard.
    writable
        Whether shards may be changed.
    """

    def __init__(self, path: str, nodes: Sequence[Sequence[str]], writable: bool) -> None:
        self._actors = [
            [
                _actor(Shard, node).remote(path, shard, replica, writable)
                for replica, node in enumerate(of_shard)
            ]
            for shard, of_shard in enumerate(nodes)
        ]
        self._turn = 0

    def ask(self, calls: Sequence[Call]) -> list[Any]:
        """Return the results of calls, which run at a time; each goes to one replica.

        A call whose result is an exception raises it.
        """
        self._turn += 1
        waiting = [self._submit(call, self._turn) for call in calls]
        return list(ray.get(waiting))

    def _submit(self, call: Call, turn: int) -> Any:
        replicas = self._actors[call.shard]
        return getattr(replicas[turn % len(replicas)], call.method).remote(*call.arguments)

    def close(self) -> None:
        """End the actors."""
        for replicas in self._actors:
            for actor in replicas:
                ray.kill(actor)
        self._actors = []


def _actor(kind: type, node: str) -> Any:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return ray.remote(kind).options(num_cpus=0, max_restarts=-1, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False))
