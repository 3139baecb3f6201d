"""ShardedIndex: one vector index over shards on several machines, in Ray actors."""

import time
from collections.abc import Sequence
from dataclasses import replace
from os import PathLike
from threading import RLock
from typing import Any, NoReturn, Self

import numpy as np
import numpy.typing as npt

from memhier.ann.cluster.build import ClusterOptions, build_shards
from memhier.ann.cluster.cluster_map import ClusterMap
from memhier.ann.cluster.given import Columns, filled, joined, taken
from memhier.ann.cluster.group import MISSING, Call, ShardGroup
from memhier.ann.cluster.nodes import alive_nodes, find_maps, spread
from memhier.ann.cluster.waves import Wanted, search_shards
from memhier.ann.zoom import SearchResult
from memhier.ann.zoom.arguments import check_fields, check_queries, check_radius, check_vectors
from memhier.ann.zoom.calibration.calibrate import TARGET
from memhier.ann.zoom.filters.attributes import merge_schema
from memhier.ann.zoom.filters.given import as_columns, as_objects
from memhier.ann.zoom.filters.where import parse
from memhier.ann.zoom.payload.given import GivenDocuments
from memhier.ann.zoom.preview.space import METRICS, Metric
from memhier.ann.zoom.storage.ids import as_ids, refuse_clashes
from memhier.arguments import check_int, check_number
from memhier.budget import parse_bytes
from memhier.closing import Closing
from memhier.errors import ClosedError, FormatError, LockedError, ShardLostError

__all__ = ["ShardedIndex"]

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

    def __init__(self, path: str, about: ClusterMap, group: ShardGroup, writable: bool) -> None:
        self._path, self._about, self._group, self._writable = path, about, group, writable
        self._changing = RLock()
        self._next_id, self._dirty, self._torn, self._closed = about.next_id, False, False, False
        self._count, self._fields = self._facts()

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
    ) -> Self:
        """Build an index and return it open for writing.

        This process reads the vectors once or twice, in blocks, and sends each to its shard, which spools it to the
        disk of its node. A node builds as many shards at a time as it has cores.

        Parameters
        ----------
        path
            A folder on the disk of each node, which holds no shard yet; the folder above it exists. It may name
            environment variables, such as ``"$SSD/index"``, which each node replaces by its own.
        vectors, ids, attributes, documents, metric, seed
            As in :meth:`ZoomIndex.build`. Ids and attributes lie in the DRAM of this process meanwhile.
        shards
            Their number.
        replicas
            Copies of each shard, on different nodes as far as there are. A search asks one of them, a change all.
        dram
            The DRAM of one replica of all shards together.
        grow_to
            The number of vectors that all shards together are to hold later.

        Raises
        ------
        FileExistsError
            When a node has shards at `path`.
        BudgetError, ValueError, TypeError
            As in :meth:`ZoomIndex.build`. Nothing is left behind.
        """
        if metric not in METRICS:
            raise ValueError(f"metric={metric!r}: expected one of {', '.join(METRICS)}")
        counts = check_int("shards", shards, 1, 4096), check_int("replicas", replicas, 1, 16)
        names = None if ids is None else as_ids(ids, None)
        if names is not None:
            refuse_clashes(names)
        options = ClusterOptions(
            metric, parse_bytes(dram, "dram"), check_int("grow_to", grow_to, 0), check_int("seed", seed, 0, 2**31 - 2)
        )
        place, nodes = str(path), alive_nodes()
        if found := find_maps(place, nodes):
            raise FileExistsError(f"{place}: node {next(iter(found.values()))[0]} has shards there; remove them first")
        build_shards(place, vectors, names, attributes, documents, spread(nodes, *counts), options)
        return cls.open(place, writable=True)

    @classmethod
    def open(cls, path: str | PathLike[str], *, writable: bool = False, patience: float = 20.0) -> Self:
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

        Raises
        ------
        FileNotFoundError
            When no node has shards there.
        ShardLostError
            When no node has any replica of a shard.
        FormatError
            When the shards belong to several indexes.
        LockedError
            When another process has it open for writing, or a commit was left half made and `writable` is false.
        """
        place, nodes = str(path), alive_nodes()
        wait = check_number("patience", patience, 0, above=True)
        for turn in range(_TRIES):
            about, places = _found(place, find_maps(place, nodes))
            group = ShardGroup(place, places, about.epoch, writable, wait)
            behind = [shard for shard in range(group.shards) if not group.replicas(shard)]
            if not behind:
                return cls(place, about, group, writable)
            group.close()
            if writable:
                break
            time.sleep(_PAUSE_SECONDS * (turn + 1) / 2)  # beside a writer, between the halves of a commit
        missing = [shard for shard in behind if all(node is None for node in places[shard])]
        if missing:
            raise ShardLostError(f"{place}: no node has a replica of shards {missing}")
        raise LockedError(
            f"{place}: shards {behind} are not at commit {about.epoch}: a commit was left half made; open the index "
            f"once with writable=True"
        )

    def search(
        self,
        queries: object,
        k: int,
        *,
        recall: float | None = None,
        where: str | None = None,
        deadline_ms: float | None = None,
        fields: bool | Sequence[str] | None = None,
        radius: float | npt.ArrayLike | None = None,
        partial: bool = False,
    ) -> SearchResult:
        """Return the `k` nearest vectors of each query; see :meth:`ZoomIndex.search`.

        Parameters
        ----------
        queries, k, where, fields, radius
            As in :meth:`ZoomIndex.search`.
        recall
            The mean share of the true neighbours to find, among all shards. One half of the loss is left to shards that
            are not asked, as measured at build, the other to the searches of shards. At 1 all shards are asked.
        deadline_ms
            As in :meth:`ZoomIndex.search`, for each of the two rounds.
        partial
            Return the neighbours that other shards have where a shard is lost with all its replicas.
            ``stats["lost_shards"]`` lists such shards.

        Raises
        ------
        ShardLostError
            When a shard that matters does not answer, and `partial` is false.
        ValueError, TypeError
            As in :meth:`ZoomIndex.search`.
        """
        self._check_open()
        matrix, single = check_queries(queries, self.dimension)
        check_fields(fields)
        if where is not None:
            parse(where)
        share = TARGET if recall is None else check_number("recall", recall, 0, 1, above=True)
        wanted = Wanted(
            check_int("k", k, 1), share, self._chosen(fields), where is not None,
            {"where": where, "deadline_ms": deadline_ms, "radius": check_radius(radius, len(matrix))},
        )  # fmt: skip
        cells, routing = self._about.cells, self._about.routing
        found, lost = search_shards(self._group, cells, routing, matrix, wanted, text=self._about.id_kind == "str")
        if lost.any() and not partial:
            raise ShardLostError(
                f"shards {found.stats['lost_shards']} do not answer, nor do their replicas; partial=True returns the "
                f"neighbours that others have"
            )
        if not single:
            return found
        columns = {name: column[0] for name, column in found.fields.items()}
        return SearchResult(found.ids[0], found.distances[0], found.stats, columns)

    def contains(self, ids: object) -> npt.NDArray[np.bool_]:
        """Return whether a vector has each of these ids, bool ``[n]``; see :meth:`ZoomIndex.contains`."""
        self._check_open()
        return self._owners(np.asarray(ids)) >= 0

    def fetch(self, ids: object, fields: bool | Sequence[str] = True) -> Columns:
        """Return attributes and documents of ids; see :meth:`ZoomIndex.fetch`.

        Raises
        ------
        KeyError
            For an id that is not in the index.
        """
        self._check_open()
        check_fields(fields)
        chosen, names = self._chosen(fields), np.asarray(ids)
        pieces, order = self._of_owners(names, "fetch", chosen)
        shapes = [len(rows) for rows in order]
        full = [filled(piece, chosen, (count,)) for piece, count in zip(pieces, shapes, strict=True)]
        back = np.argsort(np.concatenate([np.empty(0, np.int64), *order]), kind="stable")
        return {name: joined([each[name] for each in full])[back] for name in chosen} if full else {}

    def reconstruct(self, ids: object) -> npt.NDArray[Any]:
        """Return the vectors of these ids, ``[n, d]``; see :meth:`ZoomIndex.reconstruct`."""
        self._check_open()
        pieces, order = self._of_owners(np.asarray(ids), "reconstruct")
        out = np.empty((sum(map(len, order)), self.dimension), self._about.dtype)
        for rows, piece in zip(order, pieces, strict=True):
            out[rows] = piece
        return out

    def add(
        self, vectors: object, ids: object = None, attributes: Any = None, documents: Any = None
    ) -> npt.NDArray[Any]:
        """Add vectors, each to the shard of its cell; see :meth:`ZoomIndex.add`. :meth:`commit` makes them durable."""
        with self._changing:
            self._check_writable()
            matrix = check_vectors(vectors, self.dimension, np.dtype(self._about.dtype))
            names = self._new_ids(len(matrix), ids)
            columns, schema = self._columns(attributes, len(matrix))
            rows = None
            if documents is not None:
                given = GivenDocuments(documents)
                given.check_length(len(matrix))
                rows = given.block(0, len(matrix))
            self._put(matrix, names, columns, schema, rows)
            self._count += len(matrix)
            if self._about.id_kind == "int64":
                self._next_id = max(self._next_id, int(names.max(initial=-1)) + 1)
            return names

    def remove(self, ids: object) -> None:
        """Remove vectors; see :meth:`ZoomIndex.remove`."""
        with self._changing:
            self._check_writable()
            names = as_ids(ids, self._about.id_kind).values()
            owners = self._known_owners(names)
            self._change([
                Call(shard, "remove", (names[owners == shard],)) for shard in np.unique(owners).tolist()
            ])  # fmt: skip
            self._count -= len(names)

    def update(self, ids: object, vectors: object, attributes: Any = None, documents: Any = None) -> None:
        """Replace vectors, and the fields given, in one step; see :meth:`ZoomIndex.update`.

        A vector whose new cell belongs to another shard moves there with all its fields.
        """
        with self._changing:
            self._check_writable()
            names = as_ids(ids, self._about.id_kind).values()
            matrix = check_vectors(vectors, self.dimension, np.dtype(self._about.dtype))
            if len(names) != len(matrix):
                raise ValueError(f"ids has {len(names)} entries for {len(matrix)} vectors: expected one for each")
            columns, _ = self._columns(attributes, len(matrix))
            given = None if documents is None else GivenDocuments(documents).block(0, len(matrix))
            owners, following = self._known_owners(names), self._about.cells.owner(matrix)
            moved = np.flatnonzero(owners != following)
            stay = np.flatnonzero(owners == following)
            fields = self.fetch(names[moved]) if len(moved) else {}
            calls = []
            for shard in np.unique(owners[stay]).tolist():
                rows = stay[owners[stay] == shard]
                values = [{name: columns[name][row] for name in columns} for row in rows.tolist()] if columns else None
                texts = None if given is None else [given[row] for row in rows.tolist()]
                calls.append(Call(shard, "update", (names[rows], matrix[rows], values, texts)))
            left = np.unique(owners[moved]).tolist()
            calls += [Call(shard, "remove", (names[moved[owners[moved] == shard]],)) for shard in left]
            self._change(calls)
            if len(moved):
                self._put_moved(matrix[moved], names[moved], fields, taken(columns, moved), moved, given)

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
            When a shard cannot write; nothing was committed, and the call may be repeated.
        """
        with self._changing:
            self._check_writable()
            if not self._dirty:
                return
            group, epoch = self._group, self._about.epoch + 1
            every = range(group.shards)
            prepared = group.tell([Call(shard, "prepare", (epoch,)) for shard in every])
            if errors := _errors(prepared):
                self._withdraw()
                raise errors[0]
            if not all(prepared):
                self._withdraw()
                self._raise_torn("prepare", [shard for shard in every if not prepared[shard]])
            noted = group.tell([Call(0, "note", (epoch, self._next_id))])
            if (errors := _errors(noted)) or not noted[0]:
                self._torn = True  # the note may be there or not
                raise ShardLostError(f"{self._path}: shard 0 was lost during the commit: close, and open again") from (
                    errors[0] if errors else None
                )
            self._about = replace(self._about, epoch=epoch, next_id=self._next_id)
            group.epoch, group.changed, self._dirty = epoch, False, False
            for error in _errors(group.tell([Call(shard, "publish") for shard in every])):
                raise error

    def heal(self) -> None:
        """Bring replicas that lack commits, or whose node is gone, back: from their folder, or from a good replica.

        ``stats()["stale"]`` lists such replicas. Searches go on meanwhile.

        Raises
        ------
        ValueError
            When changes wait for a commit.
        """
        with self._changing:
            self._check_writable()
            if self._dirty:
                raise ValueError("changes wait: commit() or rollback() first")
            self._group.heal(self._about, alive_nodes())

    def rollback(self) -> None:
        """Drop all changes since the last commit."""
        with self._changing:
            self._check_open()
            self._group.reopen()
            self._next_id, self._dirty, self._torn = self._about.next_id, False, False
            self._count, self._fields = self._facts()

    def simulate_fault(self, shard: int, replica: int = 0) -> None:
        """End the process of a replica at once, as a fault would, to try how an application bears it."""
        self._check_open()
        self._group.kill(shard, replica)

    def stats(self) -> dict[str, Any]:
        """Return plain numbers: sizes of all shards together, and those of each."""
        self._check_open()
        facts = self._ask_every("facts")
        summed = ("vectors", "memory_bytes", "planned_bytes", "dram", "vector_bytes", "file_bytes", "lists")
        sums = {name: sum(each[name] for each in facts) for name in summed}
        return sums | {
            "shards": self._group.shards, "replicas": self._about.replicas, "epoch": self._about.epoch,
            "stale": sorted(self._group.stale), "vectors_of_shards": [each["vectors"] for each in facts],
        }  # fmt: skip

    def check(self) -> list[str]:
        """Read all shards and return every inconsistency found, empty when there is none."""
        self._check_open()
        found = self._group.tell([Call(shard, "check") for shard in range(self._group.shards)])
        for error in _errors(found):
            raise error
        return [f"shard {n}: {each}" for n, replicas in enumerate(found) for lines in replicas for each in lines]

    def __len__(self) -> int:
        return self._count

    @property
    def dimension(self) -> int:
        """Dimension of a vector."""
        return self._about.dimension

    @property
    def metric(self) -> Metric:
        """The metric chosen at build."""
        return self._about.cells.metric

    @property
    def fields(self) -> dict[str, str]:
        """Types of attributes by name, then documents, as ``"document"``."""
        return dict(self._fields)

    def close(self) -> None:
        """End the actors; changes since the last commit are dropped. May be called twice."""
        with self._changing:
            if not self._closed:
                self._closed = True
                self._group.close()

    def _facts(self) -> tuple[int, dict[str, str]]:
        """Return the number of vectors, and the types of all fields, attributes first."""
        facts = self._ask_every("facts")
        every = [(name, kind) for each in facts for name, kind in each["fields"].items()]
        fields = dict(sorted(dict(every).items(), key=lambda field: field[1] == "document"))
        return sum(each["vectors"] for each in facts), fields

    def _chosen(self, fields: bool | Sequence[str] | None) -> tuple[str, ...]:
        if not fields:
            return ()
        if fields is True:
            return (*self._fields,)
        for name in fields:
            if name not in self._fields:
                raise ValueError(f"fields holds {name!r}: expected fields of this index, which has {[*self._fields]}")
        return tuple(dict.fromkeys(fields))

    def _ask_every(self, method: str, *arguments: Any) -> list[Any]:
        """Return the answer of every shard."""
        found = self._group.ask([Call(shard, method, arguments) for shard in range(self._group.shards)])
        lost = [shard for shard, answer in enumerate(found) if answer is MISSING]
        if lost:
            raise ShardLostError(f"shards {lost} do not answer, nor do their replicas")
        return found

    def _owners(self, ids: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """Return the shard of each id, -1 where there is none."""
        owners = np.full(len(ids), -1, np.int64)
        for shard, here in enumerate(self._ask_every("contains", ids)):
            owners[here] = shard
        return owners

    def _known_owners(self, ids: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        owners = self._owners(ids) if len(ids) else np.empty(0, np.int64)
        if (owners < 0).any():
            raise KeyError(f"ids holds {ids[int(np.argmin(owners))]!r}: no vector has this id")
        return owners

    def _of_owners(
        self, ids: npt.NDArray[Any], method: str, *arguments: Any
    ) -> tuple[list[Any], list[npt.NDArray[np.int64]]]:
        """Ask each shard for its ids; return the answers, and the rows of `ids` that each is for."""
        owners = self._known_owners(ids)
        shards = np.unique(owners).tolist()
        order = [np.flatnonzero(owners == shard) for shard in shards]
        calls = [Call(shard, method, (ids[rows], *arguments)) for shard, rows in zip(shards, order, strict=True)]
        answers = self._group.ask(calls)
        if any(answer is MISSING for answer in answers):
            raise ShardLostError(f"a shard of {shards} does not answer, nor do its replicas")
        return answers, order

    def _new_ids(self, count: int, ids: object) -> npt.NDArray[Any]:
        """Return the ids of new vectors, none of which is in the index."""
        if ids is None:
            if self._about.id_kind == "str":
                raise ValueError("ids=None: this index has strings as ids, so expected one for each vector")
            return np.arange(self._next_id, self._next_id + count, dtype=np.int64)
        names = as_ids(ids, self._about.id_kind).values()
        if len(names) != count:
            raise ValueError(f"ids has {len(names)} entries for {count} vectors: expected one for each")
        if len(names) and (known := self._owners(names) >= 0).any():
            raise ValueError(f"ids holds {names[int(known.argmax())]!r}: a vector has this id already; use update()")
        return names

    def _columns(self, attributes: Any, count: int) -> tuple[Columns, dict[str, Any]]:
        """Return attributes as Python values, and the types of those given."""
        if attributes is None:
            return {}, {}
        given = as_columns(attributes, count)
        known: dict[str, Any] = {name: kind for name, kind in self._fields.items() if kind != "document"}
        schema = merge_schema(known, given, count)
        return as_objects(given, schema), {name: schema[name] for name in given if name in schema}

    def _put(
        self, vectors: npt.NDArray[Any], ids: npt.NDArray[Any], columns: Columns, schema: dict[str, Any],
        rows: list[dict[str, Any]] | None,
    ) -> None:  # fmt: skip
        """Add vectors to their shards; new attributes become known to all."""
        owners = self._about.cells.owner(vectors)
        fresh = schema.keys() - self._fields.keys()
        every = range(self._group.shards) if fresh else np.unique(owners).tolist()
        calls = []
        for shard in every:
            mine = np.flatnonzero(owners == shard)
            documents = None if rows is None else [rows[row] for row in mine.tolist()]
            calls.append(Call(shard, "add", (vectors[mine], ids[mine], taken(columns, mine), documents, schema)))
        self._change(calls)
        self._fields |= schema
        for row in rows or ():
            self._fields |= dict.fromkeys(row, "document")

    def _put_moved(
        self, vectors: npt.NDArray[Any], ids: npt.NDArray[Any], fields: Columns, columns: Columns,
        moved: npt.NDArray[np.int64], given: list[dict[str, Any]] | None,
    ) -> None:  # fmt: skip
        """Add vectors that left their shard, with the fields that they had, and those given over them."""
        schema: dict[str, Any] = {name: kind for name, kind in self._fields.items() if kind != "document"}
        values: Columns = {}
        for name in schema:
            before = as_objects(as_columns({name: fields[name]}, len(ids)), schema)[name]
            values[name] = columns.get(name, before)
        rows = None
        if texts := [name for name in self._fields if name not in schema]:
            rows = [{name: fields[name][row] for name in texts} for row in range(len(ids))]
            for row, place in zip(rows, moved.tolist(), strict=True):
                row |= {} if given is None else given[place]
        self._put(vectors, ids, values, schema, rows)

    def _change(self, calls: list[Call]) -> None:
        """Make changes at all replicas of shards; a failure half way is one that only a rollback mends."""
        if not calls:
            return
        self._dirty = self._group.changed = True
        answers = self._group.tell(calls)
        errors, made = _errors(answers), sum(map(len, answers))
        if lost := [call.shard for call, of_shard in zip(calls, answers, strict=True) if not of_shard]:
            self._raise_torn(calls[0].method, lost)
        if errors:
            self._torn = len(errors) < made
            raise errors[0]

    def _withdraw(self) -> None:
        """Take the first half of a commit back where it was taken."""
        self._group.tell([Call(shard, "withdraw") for shard in range(self._group.shards)])

    def _raise_torn(self, method: str, lost: Sequence[int]) -> NoReturn:
        self._torn = True
        raise ShardLostError(
            f"{method}: shards {[*lost]} were lost, with changes since the last commit; rollback() returns to that "
            f"commit"
        )

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this ShardedIndex is closed: open it again with ShardedIndex.open")

    def _check_writable(self) -> None:
        self._check_open()
        if not self._writable:
            raise OSError(30, "the index is open for searching; pass writable=True to ShardedIndex.open", self._path)
        if self._torn:
            raise ShardLostError("changes since the last commit are incomplete: rollback() returns to that commit")


def _found(path: str, maps: dict[tuple[int, int], tuple[str, ClusterMap]]) -> tuple[ClusterMap, list[list[str | None]]]:
    """Return the map that decides, and the node of each replica of each shard."""
    of_first = [about for (shard, _), (_, about) in maps.items() if shard == 0]
    if not maps:
        raise FileNotFoundError(f"{path}: no node of the Ray cluster has shards there")
    if not of_first:
        raise ShardLostError(f"{path}: no node has a replica of shard 0")
    about = max(of_first, key=lambda each: each.epoch)
    if strangers := [node for node, each in maps.values() if each.name != about.name]:
        raise FormatError(f"{path}: shards of another index lie on node {strangers[0]}; remove them")
    places: list[list[str | None]] = [
        [maps[shard, replica][0] if (shard, replica) in maps else None for replica in range(about.replicas)]
        for shard in range(about.shards)
    ]
    return about, places


def _errors(answers: list[list[Any]]) -> list[BaseException]:
    return [each for of_shard in answers for each in of_shard if isinstance(each, BaseException)]
