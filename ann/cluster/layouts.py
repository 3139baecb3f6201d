"""Which of the shards found on the nodes are the index: after a resharding cut short there are two layouts."""

from collections.abc import Sequence
from dataclasses import dataclass

from memhier.ann.cluster.cluster_map import ClusterMap
from memhier.errors import FormatError, ShardLostError

__all__ = ["FoundShards", "found_shards"]


@dataclass(frozen=True, slots=True)
class FoundShards:
    """The shards of an index as they were found.

    Attributes
    ----------
    about
        The map that decides.
    places
        The node of each replica of each shard, ``[shards][replicas]``; None where it is missing.
    """

    about: ClusterMap
    places: list[list[str | None]]

    @property
    def lost(self) -> list[int]:
        """The shards of which no node has a replica."""
        return [shard for shard, nodes in enumerate(self.places) if all(node is None for node in nodes)]


def found_shards(path: str, maps: Sequence[tuple[str, ClusterMap]], of_backup: ClusterMap | None = None) -> FoundShards:
    """Return the shards of the layout that counts.

    A new layout counts once shard 0 of the old one names it as its successor, or once it is marked as decided.

    Parameters
    ----------
    maps
        Node and map of all shards found.
    of_backup
        The map of a backup, which stands for that of shard 0 where no node has one.

    Raises
    ------
    FileNotFoundError
        When there are none.
    FormatError
        When they belong to several indexes.
    ShardLostError
        When shard 0 of the layout that counts is lost.
    """
    if not maps and of_backup is None:
        raise FileNotFoundError(f"{path}: no node of the Ray cluster has shards there")
    name = of_backup.name if of_backup else maps[0][1].name
    if strangers := [node for node, each in maps if each.name != name]:
        raise FormatError(f"{path}: shards of another index lie on node {strangers[0]}; remove them")
    about = _deciding(path, [each for _, each in maps if each.shard == 0], of_backup)
    places: list[list[str | None]] = [[None] * about.replicas for _ in range(about.shards)]
    for node, each in maps:
        if each.layout == about.layout and places[each.shard][each.replica] is None:
            places[each.shard][each.replica] = node
    return FoundShards(about, places)


def _deciding(path: str, firsts: Sequence[ClusterMap], of_backup: ClusterMap | None) -> ClusterMap:
    """Return the map of shard 0 of the layout that counts, at its last commit."""
    named = {each.successor for each in firsts if each.successor}
    counting = [each for each in firsts if not each.successor and (not each.before or each.layout in named)]
    best = max(counting, key=lambda each: (each.turn, each.epoch), default=None)
    if best is None and of_backup is not None and not firsts:
        return of_backup
    if best is None or any(each.successor and each.turn >= best.turn for each in firsts):
        raise ShardLostError(f"{path}: no node has a replica of shard 0")
    return best
