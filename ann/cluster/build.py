"""The build of a sharded index: cells from a sample, vectors dealt to the shards, shards built at a time, routing."""

import secrets
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from memhier.ann.cluster.cells import SAMPLE_OF_CELL, Cells
from memhier.ann.cluster.cluster_map import ClusterMap
from memhier.ann.cluster.given import Columns, taken
from memhier.ann.cluster.nodes import actor_on, cores_of_nodes, remove_folders
from memhier.ann.cluster.ray_extra import ray
from memhier.ann.cluster.routing import NEIGHBOURS, Routing, gaps
from memhier.ann.cluster.shard_build import ShardBuild
from memhier.ann.zoom.filters.attributes import merge_schema
from memhier.ann.zoom.filters.given import as_columns, as_objects
from memhier.ann.zoom.payload.given import GivenDocuments
from memhier.ann.zoom.preview.space import Metric
from memhier.ann.zoom.source import VectorSource, open_source
from memhier.ann.zoom.storage.ids import IdKind, Ids

__all__ = ["ClusterOptions", "build_shards"]

_CELLS_OF_SHARD, _CELLS_MOST = 64, 16384
_HELD_OUT = 1024  # vectors that play queries
_GROWTH = 1.25  # of a shard, times its share, as shards do not grow alike

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """The options of a build, checked; see :meth:`ShardedIndex.build`."""

    metric: Metric
    dram: int
    grow_to: int
    seed: int


class _Given:
    """Ids, attributes and documents, block by block beside the vectors."""

    def __init__(self, ids: Ids | None, attributes: Any, documents: Any, count: int) -> None:
        if ids is not None and len(ids) != count:
            raise ValueError(f"ids has {len(ids)} entries for {count} vectors: expected one for each")
        self._ids = np.arange(count, dtype=np.int64) if ids is None else ids.values()
        self.id_kind: IdKind = "int64" if ids is None or ids.texts is None else "str"
        self.next_id = 0 if self.id_kind == "str" else int(self._ids.max(initial=-1)) + 1
        self._columns: Columns = {}
        self.schema: dict[str, Any] = {}
        if attributes is not None:
            given = as_columns(attributes, count)
            self.schema = merge_schema({}, given, count)
            self._columns = as_objects(given, self.schema)
        self._documents = None if documents is None else GivenDocuments(documents)
        if self._documents is not None:
            self._documents.check_length(count)

    def block(self, start: int, stop: int) -> tuple[npt.NDArray[Any], Columns, list[dict[str, Any]] | None]:
        """Return ids, attributes and documents of rows; blocks come in order."""
        rows = None if self._documents is None else self._documents.take(stop - start)
        return self._ids[start:stop], taken(self._columns, np.arange(start, stop)), rows

    def check_ended(self) -> None:
        """Refuse documents beyond the vectors."""
        if self._documents is not None:
            self._documents.check_ended()


def build_shards(
    path: str, vectors: object, ids: Ids | None, attributes: Any, documents: Any, places: list[list[str]],
    options: ClusterOptions,
) -> None:  # fmt: skip
    """Build all replicas of all shards at their places; see :meth:`ShardedIndex.build`."""
    builders: list[list[Any]] = []
    try:
        with tempfile.TemporaryDirectory() as scratch, open_source(vectors, Path(scratch)) as source:
            given = _Given(ids, attributes, documents, source.count)
            cells, held = _learn(source, len(places), options)
            queries, names = source.take(held).astype(np.float32), given.block(0, 0)[0]
            about = ClusterMap(
                secrets.token_hex(8), 0, len(places), 0, len(places[0]), 0, given.next_id, given.id_kind,
                source.dtype.name, source.dimension, cells, Routing({}, 0),
            )  # fmt: skip
            builders = _builders(path, places, source)
            counts, names = _deal(builders, source, cells, given, held)
        _build_all(builders, places, counts, given, options)
        routing = _routing(builders, cells, queries, names) if len(places) > 1 else Routing({}, 0)
        about = ClusterMap(**{name: getattr(about, name) for name in about.__slots__} | {"routing": routing})
        for shard in reversed(range(len(places))):  # the map of shard 0 goes last: with it the cluster is there
            for replica, builder in reversed([*enumerate(builders[shard])]):
                ray.get(builder.finish.remote(about.of(shard, replica)))
    except BaseException:
        _kill(builders)
        if builders:
            remove_folders(path, places)
        raise
    _kill(builders)


def _kill(builders: list[list[Any]]) -> None:
    for of_shard in builders:
        for builder in of_shard:
            ray.kill(builder)


def _learn(source: VectorSource, shards: int, options: ClusterOptions) -> tuple[Cells, npt.NDArray[np.int64]]:
    """Return the cells, and the rows of the vectors that play queries, ascending."""
    random = np.random.default_rng(options.seed)
    wanted = min(_CELLS_OF_SHARD * shards, _CELLS_MOST)
    rows = np.sort(random.choice(source.count, min(source.count, wanted * SAMPLE_OF_CELL), replace=False))
    sample = source.take(rows)
    if not len(sample):  # cells for vectors to come: none is nearer than others
        sample = random.normal(size=(shards, source.dimension)).astype(np.float32)
    cells = Cells.train(sample, options.metric, wanted, shards, options.seed)
    held = np.sort(random.choice(len(rows), min(len(rows), _HELD_OUT), replace=False))
    return cells, rows[held]


def _builders(path: str, places: list[list[str]], source: VectorSource) -> list[list[Any]]:
    made: list[list[Any]] = []
    for shard, of_shard in enumerate(places):
        made.append([
            actor_on(node, ShardBuild, path, shard, replica, source.dtype.name, source.dimension)
            for replica, node in enumerate(of_shard)
        ])  # fmt: skip
    return made


def _deal(
    builders: list[list[Any]], source: VectorSource, cells: Cells, given: _Given, held: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[Any]]:
    """Send every vector to its shard; return the sizes of shards, and the ids of the held-out vectors.

    The blocks of one round are on their way while the next is read.
    """
    counts, on_the_way, names = np.zeros(len(builders), np.int64), list[Any](), []
    for start, block in source.blocks():
        stop = start + len(block)
        ids, columns, rows = given.block(start, stop)
        names.append(ids[held[(held >= start) & (held < stop)] - start])
        owners = cells.owner(block)
        sent = []
        for shard in np.unique(owners).tolist():
            mine = np.flatnonzero(owners == shard)
            counts[shard] += len(mine)
            documents = None if rows is None else [rows[row] for row in mine.tolist()]
            piece = block[mine], ids[mine], taken(columns, mine), documents
            sent += [builder.take.remote(*piece) for builder in builders[shard]]
        ray.get(on_the_way)
        on_the_way = sent
    ray.get(on_the_way)
    given.check_ended()
    return counts, np.concatenate([given.block(0, 0)[0], *names])


def _build_all(
    builders: list[list[Any]], places: list[list[str]], counts: npt.NDArray[np.int64], given: _Given,
    options: ClusterOptions,
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
            running.append(builder.build.remote(given.schema, given.id_kind, each))
    ray.get([answer for running in busy.values() for answer in running])


def _routing(builders: list[list[Any]], cells: Cells, queries: Floats, names: npt.NDArray[Any]) -> Routing:
    """Compare held-out vectors with all shards, and return the limits on gaps that their neighbours need."""
    most = max(NEIGHBOURS) + 1  # itself
    answers = ray.get([of_shard[0].nearest.remote(queries, most) for of_shard in builders])
    ids, distances = (np.hstack(each) for each in zip(*answers, strict=True))
    distances[ids == names[:, None]] = np.inf  # itself
    shard = np.repeat(np.arange(len(builders)), most)[None]
    remoteness = cells.remoteness(queries)
    nearest = remoteness.argmin(axis=1)[:, None]
    order = np.argsort(distances, axis=1, kind="stable")
    inside = np.sort(np.where(shard == nearest, distances, np.inf), axis=1)
    needs: dict[int, Floats] = {}
    for k in NEIGHBOURS:
        needed = gaps(remoteness, cells.squared(inside[:, k - 1], queries))
        owner = shard[0, order[:, :k]]
        there = np.isfinite(np.take_along_axis(distances, order[:, :k], 1))
        needs[k] = np.where(there, np.take_along_axis(needed, owner, 1), 0)
    return Routing.measured(needs)
