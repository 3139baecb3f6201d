"""The build of a sharded index: cells from a sample, vectors dealt to the shards, shards built at a time, routing."""

import secrets
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from memhier.ann.cluster.cells import SAMPLE_OF_CELL, Cells
from memhier.ann.cluster.cluster_map import ClusterMap
from memhier.ann.cluster.construction.dealing import Builders
from memhier.ann.cluster.construction.shard_build import ShardBuild
from memhier.ann.cluster.construction.sources import Source
from memhier.ann.cluster.nodes import actor_on, cores_of_nodes, named_losses, remove_folders
from memhier.ann.cluster.ray_extra import ray
from memhier.ann.cluster.routing import MOST_NEIGHBOURS, Routing
from memhier.ann.zoom.preview.space import Metric

__all__ = ["ClusterOptions", "Plan", "build_shards"]

_CELLS_OF_SHARD, _CELLS_MOST = 64, 16384
_HELD_OUT = 1024  # vectors that play queries
_GROWTH = 1.25  # of a shard, times its share, as shards do not grow alike


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """The options of a build, checked; see :meth:`ShardedIndex.build`."""

    metric: Metric
    dram: int
    grow_to: int
    seed: int


@dataclass(frozen=True, slots=True)
class Plan:
    """The new shards of an index: their folder, their nodes, and the facts that are known before they are built.

    Attributes
    ----------
    path
        The folder of the index on each node.
    places
        Nodes, ``[shards][replicas]``.
    name, turn, before, epoch
        As in :class:`ClusterMap`; `epoch` is the commit with which these shards begin.
    """

    path: str
    places: list[list[str]]
    name: str = field(default_factory=lambda: secrets.token_hex(8))
    turn: int = 0
    before: str = ""
    epoch: int = 0


def build_shards(source: Source, plan: Plan, options: ClusterOptions) -> ClusterMap:
    """Build all replicas of all shards at their places; return the map of shard 0. Nothing is left after an error."""
    places, shards = plan.places, len(plan.places)
    cells, queries, names = _learn(source, shards, options)
    about = ClusterMap(
        plan.name, 0, shards, 0, len(places[0]), plan.epoch, 0, source.id_kind, source.dtype, source.dimension, cells,
        Routing({}, 0), secrets.token_hex(8), secrets.token_hex(8), plan.turn, plan.before,
    )  # fmt: skip
    place = about.place(plan.path)
    builders: Builders = []
    try:
        with named_losses(plan.path):
            for shard, of_shard in enumerate(places):
                builders.append([
                    actor_on(node, ShardBuild, place, shard, replica, source.dtype, source.dimension)
                    for replica, node in enumerate(of_shard)
                ])  # fmt: skip
            counts = source.deal(cells, builders)
            _refuse_repeats(builders)
            _build_all(builders, places, counts, source, options, plan.epoch)
            routing = Routing({}, 0)
            if shards > 1:
                answers = ray.get([of_shard[0].nearest.remote(queries, MOST_NEIGHBOURS) for of_shard in builders])
                routing = Routing.of_answers(answers, cells, queries, names)
            about = replace(about, routing=routing, next_id=source.next_id)
            for shard in reversed(range(shards)):  # the map of shard 0 goes last: with it the shards are there
                for replica, builder in reversed([*enumerate(builders[shard])]):
                    ray.get(builder.finish.remote(about.of(shard, replica)))
            return about
    except BaseException:
        _kill(builders)
        builders = []
        remove_folders(place, places)
        raise
    finally:
        _kill(builders)


def _kill(builders: Builders) -> None:
    for of_shard in builders:
        for builder in of_shard:
            ray.kill(builder)


def _learn(
    source: Source, shards: int, options: ClusterOptions
) -> tuple[Cells, npt.NDArray[np.float32], npt.NDArray[Any]]:
    """Return the cells, and the vectors that play queries with their ids."""
    wanted = min(_CELLS_OF_SHARD * shards, _CELLS_MOST)
    sample, ids = source.sample(wanted * SAMPLE_OF_CELL, options.seed)
    random = np.random.default_rng(options.seed)
    held = np.sort(random.choice(len(sample), min(len(sample), _HELD_OUT), replace=False))
    queries, names = sample[held].astype(np.float32), ids[held]
    if not len(sample):  # cells for vectors to come: none is nearer than others
        sample = random.normal(size=(shards, source.dimension)).astype(np.float32)
    return Cells.train(sample, options.metric, wanted, shards, options.seed), queries, names


def _refuse_repeats(builders: Builders) -> None:
    """Raise for an id that two shards have: each id is compared with those of the same remainder alone."""
    shards = len(builders)
    look = ray.remote(_repeated).options(num_cpus=0)
    found = ray.get([
        look.remote(*(of_shard[0].numbers.remote(rest, shards) for of_shard in builders)) for rest in range(shards)
    ])  # fmt: skip
    for number in found:
        if number is not None:
            raise ValueError(
                f"ids holds {number} more than once (of strings, the number is a hash); expected each once"
            )


def _repeated(*numbers: npt.NDArray[np.int64]) -> int | None:
    """Return a number that is there twice."""
    values, counts = np.unique(np.concatenate(numbers), return_counts=True)
    return int(values[counts > 1][0]) if (counts > 1).any() else None


def _build_all(
    builders: Builders, places: list[list[str]], counts: npt.NDArray[np.int64], source: Source,
    options: ClusterOptions, epoch: int,
) -> None:  # fmt: skip
    """Build the index of each shard; a node builds as many at a time as it has cores."""
    total, shards = max(1, int(counts.sum())), len(builders)
    grown = max(options.grow_to, total)
    cores = cores_of_nodes()
    busy: dict[str, list[Any]] = {}
    for shard, of_shard in enumerate(builders):
        share = float(counts[shard]) / total if counts[shard] else 1 / shards
        room = int(np.ceil(_GROWTH * grown * max(share, 0.5 / shards)))
        each = {
            "metric": options.metric, "dram": options.dram // shards, "seed": options.seed,
            "grow_to": room if options.grow_to or not counts[shard] else 0,
        }  # fmt: skip
        for node, builder in zip(places[shard], of_shard, strict=True):
            running = busy.setdefault(node, [])
            if len(running) >= cores[node]:
                _, busy[node] = ray.wait(running, num_returns=1)
                ray.get([one for one in running if one not in busy[node]])
                running = busy[node]
            running.append(builder.build.remote(source.schema, source.id_kind, epoch, each))
    ray.get([answer for running in busy.values() for answer in running])
    for shard, of_shard in enumerate(builders):
        if (built := ray.get(of_shard[0].count.remote())) != counts[shard]:
            raise ValueError(f"ids: {counts[shard] - built} vectors have those of others; expected each id once")
