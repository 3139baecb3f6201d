"""ShardedIndex: one vector index over shards on several machines, in Ray actors."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from os import PathLike
from threading import RLock
from typing import Any, Self, TypeVar

import numpy as np
import numpy.typing as npt

from memhier.ann.cluster.backup import ClusterBackup, push_shards, restore_replicas
from memhier.ann.cluster.cluster_map import ClusterMap
from memhier.ann.cluster.construction.build import ClusterOptions, Plan, build_shards
from memhier.ann.cluster.construction.shard_source import ShardSource
from memhier.ann.cluster.construction.sources import source_of
from memhier.ann.cluster.given import Columns
from memhier.ann.cluster.group import Call, ShardGroup, errors_of
from memhier.ann.cluster.layouts import FoundShards, found_shards
from memhier.ann.cluster.nodes import alive_nodes, find_maps, find_marks, remove_folders, remove_other_layouts, spread
from memhier.ann.cluster.open_shards import OpenShards
from memhier.ann.cluster.routing import MOST_NEIGHBOURS, Routing
from memhier.ann.cluster.waves import Wanted, range_shards, search_shards
from memhier.ann.cluster.writer import ShardWriter
from memhier.ann.zoom import Explanation, RangeResult, SearchResult
from memhier.ann.zoom.arguments import (
    SearchOptions,
    check_either,
    check_fields,
    check_queries,
    check_query,
    check_radius,
    check_values_of_all,
)
from memhier.ann.zoom.calibration.calibration import TARGET
from memhier.ann.zoom.filters.where import parse, parse_for
from memhier.ann.zoom.ids.collection import collected
from memhier.ann.zoom.preview.space import METRICS, Metric
from memhier.ann.zoom.storage.ids import with_repeats
from memhier.arguments import check_int, check_number
from memhier.budget import parse_bytes
from memhier.closing import Closing
from memhier.errors import ClosedError, LockedError, ShardLostError
from memhier.store.transfer import Transfer

__all__ = ["ShardedIndex"]

T = TypeVar("T")
Found = TypeVar("Found", SearchResult, RangeResult)

FLOAT32_MAX = float(np.finfo(np.float32).max)
_TUNE_LEAST = 64
_TRIES, _PAUSE_SECONDS = 20, 0.1  # to open all shards at one commit beside a writer


class ShardedIndex(Closing):
    """A vector index over several machines: shards in Ray actors, each a :class:`ZoomIndex` on the disk of its node.

    Vectors near each other lie in one shard, so a search asks few shards. It asks the nearest first, then those that
    may hold neighbours as near as the k-th found; these read only what may be nearer. Changes are committed on all
    shards or on none.

    Every process that opens the index has actors of its own. One may write, any number may search.

    Examples
    --------
    >>> import numpy as np, tempfile
    >>> from memhier.ann.cluster import ShardedIndex
    >>> vectors = np.random.default_rng(0).normal(size=(2000, 32)).astype("float32")
    >>> path = tempfile.mkdtemp() + "/index"
    >>> with ShardedIndex.build(path, vectors, shards=2, dram="8MiB") as index:
    ...     int(index.search(vectors[7], k=3, recall=0.95).ids[0])
    7
    """

    def __init__(self, path: str, shards: OpenShards, writer: ShardWriter, writable: bool) -> None:
        self._path, self._shards, self._writer, self._writable = path, shards, writer, writable
        self._changing = RLock()
        self._closed = False

    @classmethod
    def build(
        cls,
        path: str | PathLike[str],
        vectors: object,
        *,
        shards: int,
        replicas: int = 1,
        ids: object = None,
        attributes: Any = None,
        documents: Any = None,
        metric: Metric = "l2",
        dram: int | str = "64MiB",
        grow_to: int = 0,
        seed: int = 0,
        column: str | None = None,
    ) -> Self:
        """Build an index and return it open for writing.

        This process reads the vectors once or twice, in blocks, and sends each to its shard, which spools it to the
        disk of its node. Files and Ray Datasets are read by tasks on all nodes instead, which send the vectors to their
        shards; this process then holds a sample alone. A node builds as many shards at a time as it has cores.

        Parameters
        ----------
        path
            A folder on the disk of each node, which holds no shard yet; the folder above it exists. It may name
            environment variables, such as ``"$SSD/index"``, which each node replaces by its own.
        vectors, ids, attributes, documents, metric, seed
            As in :meth:`ZoomIndex.build`. Ids and attributes lie in the DRAM of this process meanwhile. Or `vectors` is
            a ``ray.data.Dataset``, or a list of ``.npy`` or Parquet files, as paths on all nodes or URLs that fsspec
            knows. Then `ids` is the name of a column, `attributes` and `documents` are lists of names. A Dataset needs
            ids; the rows of files are counted from 0 without.
        shards
            Their number.
        replicas
            Copies of each shard, on different nodes as far as there are. A search asks one of them, a change all.
        dram
            The DRAM of one replica of all shards together.
        grow_to
            The number of vectors that all shards together are to hold later.
        column
            The column of vectors in a Ray Dataset or in Parquet files; ``"vectors"`` by default.

        Raises
        ------
        FileExistsError
            When a node has shards at `path`.
        ShardLostError
            When a node is lost meanwhile.
        BudgetError, ValueError, TypeError
            As in :meth:`ZoomIndex.build`. Nothing is left behind.
        """
        if metric not in METRICS:
            raise ValueError(f"metric={metric!r}: expected one of {', '.join(METRICS)}")
        counts = check_int("shards", shards, 1, 4096), check_int("replicas", replicas, 1, 16)
        options = ClusterOptions(
            metric, parse_bytes(dram, "dram"), check_int("grow_to", grow_to, 0), check_int("seed", seed, 0, 2**31 - 2)
        )
        place, nodes = str(path), alive_nodes()
        if found := find_maps(place, nodes):
            raise FileExistsError(f"{place}: node {found[0][0]} has shards there; remove them first")
        with source_of(vectors, ids, attributes, documents, column) as source:
            build_shards(source, Plan(place, spread(nodes, *counts)), options)
        return cls.open(place, writable=True)

    @classmethod
    def open(
        cls, path: str | PathLike[str], *, writable: bool = False, patience: float = 20.0, backup: str | None = None
    ) -> Self:
        """Open an index: find its shards on the nodes of the Ray cluster, and start an actor for each.

        Parameters
        ----------
        path
            As given to :meth:`build`.
        writable
            Whether it may be changed, by one process at a time. A commit that a dead writer left half made is then
            completed or dropped.
        patience
            Seconds to wait for the answer of a shard before another replica is asked, and for a shard to come back.
        backup
            The URL of a backup (:meth:`push`) from which shards that no node has are restored. It has to be that of the
            last commit.

        Raises
        ------
        FileNotFoundError
            When no node has shards there.
        ShardLostError
            When no node has any replica of a shard, or the backup is that of another commit.
        FormatError
            When the shards belong to several indexes.
        LockedError
            When another process has it open for writing, or a commit was left half made and `writable` is false.
        """
        place, nodes = str(path), alive_nodes()
        wait = check_number("patience", patience, 0, above=True)

        def group_of(found: FoundShards) -> ShardGroup:
            return ShardGroup(found.about.place(place), found.places, found.about.epoch, writable, wait)

        return cls(place, *_opened(place, nodes, writable, lambda: _found(place, nodes, backup), group_of), writable)

    def refresh(self) -> bool:
        """Take over the newest commit of another process; return whether there was one.

        For an index that is open for reading; see :meth:`ZoomIndex.refresh`. Other actors open the shards at that
        commit, also after :meth:`reshard`; then the actors of the state before end. Meanwhile the shards take twice
        their DRAM.

        Raises
        ------
        FileNotFoundError, ShardLostError, LockedError
            As :meth:`open`; the index stays as it was.
        """
        with self._changing:
            self._check_open()
            old, nodes = self._shards, alive_nodes()
            if self._writable or _commit_of(_found(self._path, nodes, None).about) == _commit_of(old.about):
                return False

            def group_of(found: FoundShards) -> ShardGroup:
                return old.group.beside(found.about.place(self._path), found.places, found.about.epoch)

            self._shards, self._writer = _opened(
                self._path, nodes, False, lambda: _found(self._path, nodes, None), group_of
            )
            old.group.close()
            return True

    def search(
        self,
        queries: object,
        k: int,
        *,
        recall: float | None = None,
        where: str | None = None,
        max_reads: int | None = None,
        deadline_ms: float | None = None,
        fields: bool | Sequence[str] | None = None,
        radius: float | npt.ArrayLike | None = None,
        allow: object = None,
        deny: object = None,
        partial: bool = False,
    ) -> SearchResult:
        """Return the `k` nearest vectors of each query; see :meth:`ZoomIndex.search`.

        Parameters
        ----------
        queries, k, where, fields, radius, allow, deny
            As in :meth:`ZoomIndex.search`.
        recall
            The mean share of the true neighbours to find, among all shards. At most half of the loss is left to shards
            that are not asked, as measured at build, the rest to the searches of shards. At 1 all shards are asked.
        max_reads
            The most pages read for one query, in all shards: one half by the nearest shard, the rest by the others in
            equal shares. Shards beyond the pages left are not asked.
        deadline_ms
            As in :meth:`ZoomIndex.search`, for each of the two rounds.
        partial
            Return the neighbours that other shards have where a shard is lost with all its replicas.
            ``stats["lost_shards"]`` lists such shards.

        Warns
        -----
        RecallWarning
            When limits keep the search from the recall asked for; ``stats["recall"]`` is that which is known to be
            kept, 0 where shards that matter were not asked.

        Raises
        ------
        ShardLostError
            When a shard that matters does not answer, and `partial` is false.
        ValueError, TypeError
            As in :meth:`ZoomIndex.search`.

        Notes
        -----
        ``candidates`` and ``nprobe`` are efforts of one index. How many of them each shard needs is not known, so this
        search has a recall only.
        """
        self._check_open()
        matrix, single = check_queries(queries, self.dimension)
        asked = SearchOptions(k, recall, where, None, None, max_reads, deadline_ms, fields, radius, allow, deny)
        share = TARGET if recall is None else float(recall)
        more = {"deadline_ms": deadline_ms, "radius": check_radius(radius, len(matrix))}
        wanted = Wanted(
            k, share, self._chosen(fields), asked.filtered, self._filters(where, allow, deny) | more, max_reads
        )
        found: SearchResult = self._searched(lambda shards: search_shards(shards, matrix, wanted), partial)
        if not single:
            return found
        columns = {name: column[0] for name, column in found.fields.items()}
        return SearchResult(found.ids[0], found.distances[0], found.stats, columns)

    def range_search(
        self,
        queries: object,
        radius: float,
        *,
        recall: float | None = None,
        where: str | None = None,
        fields: bool | Sequence[str] | None = None,
        allow: object = None,
        deny: object = None,
        partial: bool = False,
    ) -> RangeResult:
        """Return all vectors within `radius` of each query; see :meth:`ZoomIndex.range_search`.

        All shards are asked, as the routing is measured for numbers of neighbours, not for distances. Each keeps the
        recall.

        Parameters
        ----------
        queries, radius, recall, where, fields, allow, deny
            As in :meth:`ZoomIndex.range_search`.
        partial
            As in :meth:`search`.

        Raises
        ------
        ShardLostError
            When a shard does not answer, and `partial` is false.
        ValueError, TypeError
            As in :meth:`ZoomIndex.range_search`.
        """
        self._check_open()
        matrix, _ = check_queries(queries, self.dimension)
        asked = SearchOptions(1, recall, where, fields=fields, allow=allow, deny=deny)
        share = TARGET if recall is None else float(recall)
        wanted = Wanted(1, share, self._chosen(fields), asked.filtered, self._filters(where, allow, deny))
        far = check_number("radius", radius, -FLOAT32_MAX, FLOAT32_MAX)
        found: RangeResult = self._searched(lambda shards: range_shards(shards, matrix, far, wanted), partial)
        return found

    def explain(
        self, query: object, k: int = 10, *, recall: float | None = None, where: str | None = None,
        allow: object = None, deny: object = None,
    ) -> dict[int, Explanation]:  # fmt: skip
        """Search for one query, and tell the steps of each shard that was asked, by its number.

        The account of a shard is that of a search of it alone, so it may read more than a search of all, which tells
        the others how far the nearest shard found the k-th neighbour. See :meth:`ZoomIndex.explain`.

        Parameters
        ----------
        query
            ``[d]``.
        k, recall, where, allow, deny
            As in :meth:`search`.
        """
        vector = check_query(query, self.dimension)
        options = self._filters(where, allow, deny) | {"recall": recall}
        asked = self.search(vector, k, **options).stats["asked_shards"]
        told = self._answered(lambda shards: shards.answers([
            Call(shard, "explain", (vector, k, options)) for shard in asked
        ]))  # fmt: skip
        return dict(zip(asked, told, strict=True))

    def tune(self, queries: object) -> None:
        """Calibrate recall for queries like these, in shards and in the choice of shards; see :meth:`ZoomIndex.tune`.

        Parameters
        ----------
        queries
            ``[q, d]``, at least 64; a thousand are enough. Every shard compares them with all of its vectors.

        Raises
        ------
        ValueError
            For fewer than 64 queries, or while changes wait for a commit.
        """
        matrix, _ = check_queries(queries, self.dimension)
        if len(matrix) < _TUNE_LEAST:
            raise ValueError(f"queries has {len(matrix)} rows: expected at least {_TUNE_LEAST} to learn from")
        with self._changing:
            writer, shards = self._check_writable(), self._shards
            writer.refuse_changes()
            for error in errors_of(shards.group.tell([Call(n, "tune", (matrix,)) for n in range(shards.about.shards)])):
                raise error
            if shards.about.shards > 1:
                answers = shards.every("nearest", matrix, MOST_NEIGHBOURS, patient=True)
                writer.note(routing=Routing.of_answers(answers, shards.about.cells, matrix, None))

    def contains(self, ids: object) -> npt.NDArray[np.bool_]:
        """Return whether a vector has each of these ids, bool ``[n]``; see :meth:`ZoomIndex.contains`."""
        self._check_open()
        return self._answered(lambda shards: shards.owners(np.asarray(ids)) >= 0)

    def fetch(self, ids: object, fields: bool | Sequence[str] = True) -> Columns:
        """Return attributes and documents of ids; see :meth:`ZoomIndex.fetch`.

        Raises
        ------
        KeyError
            For an id that is not in the index.
        """
        self._check_open()
        check_fields(fields)
        return self._answered(lambda shards: shards.fetch(np.asarray(ids), self._chosen(fields)))

    def ids(self, where: str | None = None) -> Iterator[npt.NDArray[Any]]:
        """Return all ids, those of a shard at a time; see :meth:`ZoomIndex.ids`.

        Vectors that another thread moves to another shard meanwhile may be left out, or come twice.
        """
        self._check_open()
        if where is not None:
            parse_for(where, self._writer.attributes)

        def ids_of(shard: int) -> npt.NDArray[Any]:
            found: npt.NDArray[Any] = self._answered(lambda shards: shards.answers([Call(shard, "ids", (where,))])[0])
            return found

        return map(ids_of, range(self._shards.group.shards))

    def reconstruct(self, ids: object) -> npt.NDArray[Any]:
        """Return the vectors of these ids, ``[n, d]``; see :meth:`ZoomIndex.reconstruct`."""
        self._check_open()
        return self._answered(lambda shards: shards.reconstruct(np.asarray(ids)))

    def add(
        self, vectors: object, ids: object = None, attributes: Any = None, documents: Any = None
    ) -> npt.NDArray[Any]:
        """Add vectors, each to the shard of its cell; see :meth:`ZoomIndex.add`. :meth:`commit` makes them durable."""
        with self._changing:
            return self._check_writable().add(vectors, ids, attributes, documents)

    def remove(self, ids: object = None, *, where: str | None = None) -> int:
        """Remove vectors by id or by a filter, and return how many; see :meth:`ZoomIndex.remove`."""
        with self._changing:
            writer = self._check_writable()
            check_either(ids, where)
            return writer.remove(ids) if where is None else writer.remove_selected(where)

    def update(
        self, ids: object = None, vectors: object = None, attributes: Any = None, documents: Any = None, *,
        where: str | None = None,
    ) -> int:  # fmt: skip
        """Replace vectors, fields, or some of these, in one step, and return of how many; see :meth:`ZoomIndex.update`.

        A vector whose new cell belongs to another shard moves there with all its fields.
        """
        with self._changing:
            writer = self._check_writable()
            check_either(ids, where)
            if where is not None:
                return writer.update_selected(where, check_values_of_all(vectors, attributes, documents))
            return writer.update(ids, vectors, attributes, documents)[0]

    def upsert(self, ids: object, vectors: object, attributes: Any = None, documents: Any = None) -> int:
        """Replace the vectors that the index has, and add the others, in one step; return how many were added.

        See :meth:`ZoomIndex.upsert`, and :meth:`update` for vectors that move.
        """
        with self._changing:
            writer = self._check_writable()
            if vectors is None:
                raise ValueError("vectors=None: expected a vector for each id; update() changes fields alone")
            return writer.update(ids, vectors, attributes, documents, insert=True)[1]

    def commit(self) -> None:
        """Make all changes durable, on all shards or on none.

        Every shard writes its changes first. Then shard 0 notes the number of the commit, which makes it. Then every
        shard publishes its changes. A process that dies in between leaves a commit that the next writer completes or
        drops.

        Raises
        ------
        ShardLostError
            When changes were lost with a shard; :meth:`rollback` returns to the last commit.
        OSError
            When a shard cannot write; nothing was committed. The call may be repeated; where it raises ClosedError, the
            store of that shard is closed, and :meth:`rollback` opens it again at the last commit.
        """
        with self._changing:
            self._check_writable().commit()

    def heal(self, backup: str | None = None) -> None:
        """Bring replicas that lack commits, or whose node is gone, back: from their folder, or from a good replica.

        ``stats()["stale"]`` lists such replicas. Searches go on meanwhile.

        Parameters
        ----------
        backup
            The URL of a backup of the last commit, for shards without a good replica.

        Raises
        ------
        ValueError
            When changes wait for a commit.
        ShardLostError
            When the backup is that of another commit.
        """
        with self._changing:
            self._check_writable().refuse_changes()
            shards = self._shards
            restore: Callable[[ClusterMap, str], None] | None = None
            if backup is not None:
                source = ClusterBackup.read(backup)
                source.refuse_other_commit(shards.about)

                def restore(about: ClusterMap, node: str) -> None:
                    restore_replicas(source, self._path, [(about.shard, about.replica, node)])

            shards.group.heal(shards.about, restore)

    def reshard(
        self, shards: int, *, replicas: int | None = None, dram: int | str | None = None, grow_to: int = 0,
        seed: int = 0,
    ) -> None:  # fmt: skip
        """Deal the vectors to another number of shards, as a new build would, while searches go on.

        The old shards send their vectors to the new ones, which lie beside them. Then one step puts the new ones in the
        place of the old, as a commit of its own. Interrupted before it, the old shards stay; the next writer removes
        the rest. Changes wait meanwhile. Other processes that have the index open are to open it again.

        Parameters
        ----------
        shards, replicas, dram, grow_to, seed
            As in :meth:`build`. Replicas and DRAM stay by default.

        Raises
        ------
        ValueError
            When changes wait for a commit.
        BudgetError
            When `dram` is too small.
        ShardLostError
            When a shard is lost meanwhile; the old shards stay.
        """
        number = check_int("shards", shards, 1, 4096)
        with self._changing:
            self._check_writable().refuse_changes()
            old = self._shards
            copies = old.about.replicas if replicas is None else check_int("replicas", replicas, 1, 16)
            room = self.stats()["dram"] if dram is None else parse_bytes(dram, "dram")
            options = ClusterOptions(
                self.metric, room, check_int("grow_to", grow_to, 0), check_int("seed", seed, 0, 2**31 - 2)
            )
            nodes, about = alive_nodes(), old.about
            plan = Plan(self._path, spread(nodes, number, copies), about.name, about.turn + 1, about.layout,
                        about.epoch + 1)  # fmt: skip
            made = build_shards(ShardSource(old), plan, options)
            group: ShardGroup | None = None
            try:
                group = old.group.beside(made.place(self._path), plan.places, made.epoch)
                new = OpenShards(made, group)
                writer = ShardWriter(new)
            except BaseException:
                if group is not None:
                    group.close()
                remove_folders(made.place(self._path), plan.places)
                raise
            self._writer.note(successor=made.layout)
            self._shards, self._writer = new, writer
            _settle(self._path, new, writer, nodes)
            old.group.close()

    def rollback(self) -> None:
        """Drop all changes since the last commit."""
        with self._changing:
            self._check_open()
            self._writer.rollback()

    def push(self, url: str, *, keep: int | None = None) -> Transfer:
        """Back the last commit up to a URL that fsspec knows, from all shards at a time.

        Each shard pushes the pieces that its folder there lacks, as :meth:`ZoomIndex.push` does. A catalog that names
        the commit of each shard is the last object written. A push that is cut short leaves the backup before it as it
        was. Changes wait meanwhile; searches go on.

        Parameters
        ----------
        keep
            Backups that stay there; None keeps all.

        Raises
        ------
        FormatError
            When the backup there is of another index.
        FileExistsError
            When it is newer, or of another commit of the same number.
        ShardLostError
            When no replica of a shard answers.
        """
        number = None if keep is None else check_int("keep", keep, 1, unit="backups")
        with self._changing:
            self._check_open()
            return push_shards(self._shards, url, number)

    @staticmethod
    def pull(
        url: str, path: str | PathLike[str], *, number: int | None = None, replicas: int | None = None
    ) -> Transfer:
        """Restore a backup: every shard on a node of the Ray cluster, below `path`.

        The index is there with the last step. A pull that was cut short goes on when it is called again.

        Parameters
        ----------
        path
            As in :meth:`build`.
        number
            Which of the backups there, from 1 in the order of the pushes; None takes the newest.
        replicas
            Copies of each shard; as many as the index had by default.

        Raises
        ------
        FileNotFoundError
            When there is no such backup.
        FileExistsError
            When a node has an index at `path`.
        ShardLostError
            When a node is lost meanwhile.
        CorruptionError
            When an object of the backup is missing or damaged.
        """
        place, nodes, backup = str(path), alive_nodes(), ClusterBackup.read(url, number)
        about = backup.about
        if replicas is not None:
            about = replace(about, replicas=check_int("replicas", replicas, 1, 16))
            backup = replace(backup, about=about)
        for node, each in find_maps(place, nodes):
            if each.shard == 0 or each.name != about.name:
                raise FileExistsError(f"{place}: node {node} has an index there; pull into another folder")
        everywhere = _everywhere(range(about.shards), spread(nodes, about.shards, about.replicas))
        return restore_replicas(backup, place, everywhere)

    def simulate_fault(self, shard: int, replica: int = 0) -> None:
        """End the process of a replica at once, as a fault would, to try how an application bears it."""
        self._check_open()
        self._shards.group.kill(shard, replica)

    def stats(self) -> dict[str, Any]:
        """Return plain numbers: sizes of all shards together, and those of each."""
        self._check_open()
        shards = self._shards
        facts = shards.every("facts")
        summed = ("vectors", "memory_bytes", "planned_bytes", "dram", "vector_bytes", "file_bytes", "lists")
        sums = {name: sum(each[name] for each in facts) for name in summed}
        return sums | {
            "shards": shards.about.shards, "replicas": shards.about.replicas, "epoch": shards.about.epoch,
            "stale": sorted(shards.group.stale), "vectors_of_shards": [each["vectors"] for each in facts],
            "processes": [each["process"] for each in facts], "id_kind": shards.about.id_kind,
        }  # fmt: skip

    def check(self) -> list[str]:
        """Read all shards and return every inconsistency found, empty when there is none."""
        self._check_open()
        found = self._shards.group.tell([Call(shard, "check") for shard in range(self._shards.about.shards)])
        for error in errors_of(found):
            raise error
        return [f"shard {n}: {each}" for n, replicas in enumerate(found) for lines in replicas for each in lines]

    def __len__(self) -> int:
        return self._writer.count

    @property
    def dimension(self) -> int:
        """Dimension of a vector."""
        return self._shards.about.dimension

    @property
    def metric(self) -> Metric:
        """The metric chosen at build."""
        return self._shards.about.cells.metric

    @property
    def fields(self) -> dict[str, str]:
        """Types of attributes by name, then documents, as ``"document"``."""
        return dict(self._writer.fields)

    def close(self) -> None:
        """End the actors; changes since the last commit are dropped. May be called twice."""
        with self._changing:
            if not self._closed:
                self._closed = True
                self._shards.group.close()

    def _answered(self, question: Callable[[OpenShards], T]) -> T:
        """Return the answer of the shards, asked once more where others took their place meanwhile."""
        while True:
            shards = self._shards
            try:
                return question(shards)
            except ShardLostError:
                if shards is self._shards:
                    raise

    def _searched(self, search: Callable[[OpenShards], tuple[Found, npt.NDArray[np.bool_]]], partial: bool) -> Found:
        """Return the result of a search; ShardLostError where shards are lost, unless it may be partial."""

        def whole(shards: OpenShards) -> Found:
            found, lost = search(shards)
            if lost.any() and not (partial and shards is self._shards):
                raise ShardLostError(
                    f"shards {np.flatnonzero(lost).tolist()} do not answer, nor do their replicas; partial=True "
                    f"returns the neighbours that others have"
                )
            return found

        return self._answered(whole)

    def _chosen(self, fields: bool | Sequence[str] | None) -> tuple[str, ...]:
        known = self._writer.fields
        if not fields:
            return ()
        if fields is True:
            return (*known,)
        for name in fields:
            if name not in known:
                raise ValueError(f"fields holds {name!r}: expected fields of this index, which has {[*known]}")
        return tuple(dict.fromkeys(fields))

    def _filters(self, where: str | None, allow: object, deny: object) -> dict[str, Any]:
        """Return filters as options of the searches of shards, refused here where they are none."""
        if where is not None:
            parse(where)
        kind, lists = self._shards.about.id_kind, {"allow": allow, "deny": deny}
        return {"where": where} | {
            name: None if ids is None else with_repeats(collected(ids, name), kind, name)[0].values()
            for name, ids in lists.items()
        }

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this ShardedIndex is closed: open it again with ShardedIndex.open")

    def _check_writable(self) -> ShardWriter:
        self._check_open()
        if not self._writable:
            raise OSError(30, "the index is open for searching; pass writable=True to ShardedIndex.open", self._path)
        return self._writer


def _commit_of(about: ClusterMap) -> tuple[object, ...]:
    """Return the facts that tell a commit from others."""
    return about.name, about.layout, about.epoch, about.commit


def _opened(
    place: str, nodes: Sequence[str], writable: bool, found: Callable[[], FoundShards],
    group_of: Callable[[FoundShards], ShardGroup],
) -> tuple[OpenShards, ShardWriter]:  # fmt: skip
    """Open all shards at one commit, beside a writer if there is one.

    Raises
    ------
    LockedError
        When a commit was left half made.
    """
    for turn in range(_TRIES):
        state = found()
        group = group_of(state)
        try:
            behind = [shard for shard in range(group.shards) if not group.replicas(shard)]
            if not behind:
                shards = OpenShards(state.about, group)
                writer = ShardWriter(shards)
                if writable:
                    _settle(place, shards, writer, nodes)
                return shards, writer
        except BaseException:
            group.close()
            raise
        group.close()
        if writable:
            break
        time.sleep(_PAUSE_SECONDS * (turn + 1) / 2)  # between the halves of a commit
    raise LockedError(
        f"{place}: shards {behind} are not at commit {state.about.epoch}: a commit was left half made; open the index "
        f"once with writable=True"
    )


def _settle(path: str, shards: OpenShards, writer: ShardWriter, nodes: Sequence[str]) -> None:
    """Complete a resharding that was cut short once it was decided, and remove the rest of one that was not."""
    if shards.about.before:
        writer.note(before="")
    remove_other_layouts(path, shards.about, nodes)


def _found(path: str, nodes: Sequence[str], backup: str | None) -> FoundShards:
    """Return the shards on the nodes, after lost ones were restored from a backup."""
    source = None if backup is None else ClusterBackup.read(backup)
    found = found_shards(path, find_maps(path, nodes), None if source is None else source.about)
    if found.lost and source is not None:
        latest = max(find_marks(found.about.place(path), nodes), default=0)
        source.refuse_other_commit(found.about, latest)
        places = spread(nodes, found.about.shards, found.about.replicas)
        restore_replicas(source, path, _everywhere(found.lost, places))
        found = found_shards(path, find_maps(path, nodes))
    if found.lost:
        raise ShardLostError(f"{path}: no node has a replica of shards {found.lost}")
    return found


def _everywhere(shards: Iterable[int], places: Sequence[Sequence[str]]) -> list[tuple[int, int, str]]:
    """Return shard, replica and node of all replicas of shards."""
    return [(shard, replica, node) for shard in shards for replica, node in enumerate(places[shard])]
