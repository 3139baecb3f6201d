"""The nodes of a Ray cluster: where shards are placed, and where their folders are found again."""

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from memhier.ann.cluster.cluster_map import LAYOUT, ClusterMap
from memhier.ann.cluster.ray_extra import GONE, NodeAffinitySchedulingStrategy, RayTaskError, ray
from memhier.ann.zoom.storage.catalog import KIND
from memhier.ann.zoom.storage.prepared import published_mark
from memhier.errors import MemhierError, ShardLostError
from memhier.store.store import Store

__all__ = [
    "actor_on", "alive_nodes", "cores_of_nodes", "find_maps", "find_marks", "named_losses", "on_nodes",
    "remove_folders", "remove_other_layouts", "shard_folder", "spread",
]  # fmt: skip

_PREFIX = "shard-"


def shard_folder(path: str, shard: int, replica: int) -> Path:
    """Return the folder of a replica of a shard on this node; `path` may name environment variables of the node."""
    return _root(path) / f"{_PREFIX}{shard:04}-{replica}"


def alive_nodes() -> list[str]:
    """Return the ids of the nodes of the Ray cluster, in a fixed order; starts Ray on this machine if there is none."""
    if not ray.is_initialized():
        ray.init(include_dashboard=False, log_to_driver=False)
    return sorted(node["NodeID"] for node in _nodes() if node["Alive"])


def cores_of_nodes() -> dict[str, int]:
    """Return the cores of each node, as Ray counts them, at least 1."""
    return {node["NodeID"]: max(1, int(node["Resources"].get("CPU", 1))) for node in _nodes()}


def spread(nodes: Sequence[str], shards: int, replicas: int) -> list[list[str]]:
    """Return a node for each replica of each shard, ``[shards][replicas]``; replicas on different ones if there are."""
    return [[nodes[(shard + replica) % len(nodes)] for replica in range(replicas)] for shard in range(shards)]


def actor_on(node: str, kind: type, *arguments: Any, threads: int = 1, **options: Any) -> Any:
    """Start an actor on a node, or wait for that node; it takes no share of the node's cores as Ray counts them."""
    made: Any = ray.remote(kind).options(num_cpus=0, max_concurrency=threads, scheduling_strategy=_on(node), **options)
    return made.remote(*arguments)


def find_maps(path: str, nodes: Sequence[str]) -> list[tuple[str, ClusterMap]]:
    """Return the node and the map of every shard whose folder a node has, those of other layouts as well."""
    return [(node, each) for node, maps in on_nodes(nodes, _maps, path) for each in maps]


def find_marks(path: str, nodes: Sequence[str]) -> list[int]:
    """Return the commit of the index in each shard of a folder of the nodes; none of those that are damaged."""
    return [mark for _, marks in on_nodes(nodes, _marks, path) for mark in marks]


def on_nodes(nodes: Sequence[str], function: Callable[..., Any], *arguments: Any) -> list[tuple[str, Any]]:
    """Return nodes and the results of a function, called on all at the same time; nodes lost meanwhile are left out."""
    remote = ray.remote(function)
    sent = [remote.options(num_cpus=0, scheduling_strategy=_on(node)).remote(*arguments) for node in nodes]
    found = []
    for node, answer in zip(nodes, sent, strict=True):
        with suppress(*GONE):
            found.append((node, ray.get(answer)))
    return found


@contextmanager
def named_losses(path: str) -> Iterator[None]:
    """Raise the error of a task itself, and ShardLostError where a node or a process is lost."""
    try:
        yield
    except (RayTaskError, *GONE) as error:
        cause = error.cause if isinstance(error, RayTaskError) else error
        if isinstance(cause, GONE):
            raise ShardLostError(
                f"{path}: a node or a process of the Ray cluster was lost meanwhile; call again"
            ) from error
        raise cause from None


def remove_folders(path: str, places: Sequence[Sequence[str]]) -> None:
    """Remove the folders of shards from their nodes, and the folder around them where nothing else is in it."""
    by_node: dict[str, list[tuple[int, int]]] = {}
    for shard, of_shard in enumerate(places):
        for replica, node in enumerate(of_shard):
            by_node.setdefault(node, []).append((shard, replica))
    for node, mine in by_node.items():
        on_nodes([node], _remove, path, mine)


def remove_other_layouts(path: str, about: ClusterMap, nodes: Sequence[str]) -> None:
    """Remove the folders of all layouts but one from their nodes."""
    on_nodes(nodes, _remove_layouts, path, _root(about.place(path)).name if about.turn else "")


def _remove(path: str, replicas: Sequence[tuple[int, int]]) -> None:
    for shard, replica in replicas:
        shutil.rmtree(shard_folder(path, shard, replica), ignore_errors=True)
    with suppress(OSError):
        _root(path).rmdir()


def _remove_layouts(path: str, kept: str) -> None:
    others = [folder for folder in _root(path).glob(f"{LAYOUT}*") if folder.name != kept]
    for folder in [*others, *(_root(path).glob(f"{_PREFIX}*") if kept else ())]:
        shutil.rmtree(folder, ignore_errors=True)


def _maps(path: str) -> list[ClusterMap]:
    """Return the maps of all shards below a path of this node; a shard that is damaged, or half built, has none."""
    found = []
    root = _root(path)
    for folder in sorted([*root.glob(f"{_PREFIX}*"), *root.glob(f"{LAYOUT}*/{_PREFIX}*")]):
        try:
            found.append(ClusterMap.read(folder))
        except (MemhierError, OSError):
            continue
    return found


def _marks(path: str) -> list[int]:
    found = []
    for folder in _root(path).glob(f"{_PREFIX}*"):
        with suppress(MemhierError, OSError), Store.open(folder / "index", kind=KIND) as store:
            found.append(published_mark(store))
    return found


def _on(node: str) -> NodeAffinitySchedulingStrategy:
    return NodeAffinitySchedulingStrategy(node, soft=False)


def _nodes() -> list[dict[str, Any]]:
    nodes: Any = ray.nodes
    found: list[dict[str, Any]] = nodes()
    return found


def _root(path: str) -> Path:
    return Path(os.path.expandvars(path)).expanduser().absolute()
