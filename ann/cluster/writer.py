"""ShardWriter: changes of an index over all its shards, and their commit on all or on none."""

import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from memhier.ann.cluster.cluster_map import ClusterMap
from memhier.ann.cluster.given import Columns, as_values, taken
from memhier.ann.cluster.group import Call, errors_of
from memhier.ann.cluster.open_shards import OpenShards
from memhier.ann.zoom.arguments import check_given, check_vectors
from memhier.ann.zoom.filters.attributes import merge_schema
from memhier.ann.zoom.filters.given import as_columns, as_objects
from memhier.ann.zoom.filters.where import parse_for
from memhier.ann.zoom.payload.given import GivenDocuments
from memhier.ann.zoom.renewal.kept import rows_lacking
from memhier.ann.zoom.storage.ids import as_ids
from memhier.errors import ShardLostError

__all__ = ["ShardWriter"]


class ShardWriter:
    """Makes changes at the shards of an index. The caller makes one call at a time.

    Attributes
    ----------
    count, fields
        The vectors, changes included, and the types of their fields by name, attributes first.
    dirty
        Whether changes wait for a commit.
    """

    def __init__(self, shards: OpenShards) -> None:
        self._shards = shards
        self.dirty: bool = False
        self._next_id, self._torn, self._unsure = shards.about.next_id, False, False
        self.count: int
        self.fields: dict[str, str]
        self.count, self.fields = shards.facts()

    def add(self, vectors: object, ids: object, attributes: Any, documents: Any) -> npt.NDArray[Any]:
        """Add vectors; see :meth:`ShardedIndex.add`."""
        self._refuse_torn()
        matrix = self._matrix(vectors)
        names = self._new_ids(len(matrix), ids)
        columns, schema = self._columns(attributes, len(matrix))
        rows = _rows_of(documents, len(matrix))
        self._change(self._additions(matrix, names, columns, schema, rows))
        self._know(schema, rows)
        self._count(names)
        return names

    def remove(self, ids: object) -> int:
        """Remove vectors; see :meth:`ShardedIndex.remove`."""
        self._refuse_torn()
        names = as_ids(ids, self._shards.about.id_kind).values()
        owners = self._shards.known_owners(names)
        self._change([Call(shard, "remove", (names[owners == shard],)) for shard in np.unique(owners).tolist()])
        self.count -= len(names)
        return len(names)

    def remove_selected(self, where: str) -> int:
        """Remove the vectors that fulfil a filter; see :meth:`ShardedIndex.remove`."""
        self._refuse_torn()
        parse_for(where, self.attributes)
        answers = self._change([Call(shard, "remove_selected", (where,)) for shard in range(self._shards.group.shards)])
        count = sum(int(found[0]) for found in answers)
        self.count -= count
        return count

    def update_selected(self, where: str, values: dict[str, list[Any]]) -> int:
        """Set attributes of the vectors that fulfil a filter; see :meth:`ShardedIndex.update`."""
        self._refuse_torn()
        parse_for(where, self.attributes)
        columns, schema = self._columns(values, 1)
        self._make_known(schema)
        every = [Call(shard, "update_selected", (where, columns, schema)) for shard in range(self._shards.group.shards)]
        return sum(int(found[0]) for found in self._change(every))

    def update(
        self, ids: object, vectors: object, attributes: Any, documents: Any, *, insert: bool = False
    ) -> tuple[int, int]:
        """Replace vectors, with `insert` add those of new ids, and return how many in all and new ones.

        See :meth:`ShardedIndex.update` and :meth:`ShardedIndex.upsert`.
        """
        self._refuse_torn()
        check_given(vectors, attributes, documents)
        names = as_ids(ids, self._shards.about.id_kind).values()
        matrix = None if vectors is None else self._matrix(vectors)
        if matrix is not None and len(names) != len(matrix):
            raise ValueError(f"ids has {len(names)} entries for {len(matrix)} vectors: expected one for each")
        columns, schema = self._columns(attributes, len(names))
        lacking = {name: rows_lacking(name, attributes, len(names)) for name in columns}
        given = _rows_of(documents, len(names))
        owners = self._shards.owners(names) if insert else self._shards.known_owners(names)
        following = owners if matrix is None else self._shards.about.cells.owner(matrix)
        new = np.flatnonzero(owners < 0)
        moved = np.flatnonzero((owners != following) & (owners >= 0))
        stay = np.flatnonzero(owners == following)
        fields = self._shards.fetch(names[moved], [*self.fields]) if len(moved) else {}
        self._make_known(schema)
        calls = []
        for shard in np.unique(owners[stay]).tolist():
            rows = stay[owners[stay] == shard]
            values = [{name: columns[name][row] for name in columns if not lacking[name][row]} for row in rows.tolist()]
            vectors_here = None if matrix is None else matrix[rows]
            arguments = names[rows], vectors_here, values if columns else None, _some(given, rows)
            calls.append(Call(shard, "update", arguments))
        left = np.unique(owners[moved]).tolist()
        calls += [Call(shard, "remove", (names[moved[owners[moved] == shard]],)) for shard in left]
        if matrix is not None and len(moved):
            replaced = {name: (values[moved], ~lacking[name][moved]) for name, values in columns.items()}
            known = self.attributes
            values_moved, texts = self._moved(fields, known, replaced, _some(given, moved))
            calls += self._additions(matrix[moved], names[moved], values_moved, known, texts)
        if matrix is not None and len(new):
            calls += self._additions(matrix[new], names[new], taken(columns, new), schema, _some(given, new))
        self._change(_in_turn(calls))
        self._know(schema, given)
        self._count(names[new])
        return len(names), len(new)

    def _make_known(self, schema: dict[str, Any]) -> None:
        """Make new attributes known to all shards, also where no vector gets a value."""
        if schema.keys() - self.fields.keys():
            about = self._shards.about
            none = np.empty(0, object if about.id_kind == "str" else np.int64)
            columns = {name: np.empty(0, object) for name in schema}
            self._change(self._additions(np.empty((0, about.dimension), about.dtype), none, columns, schema, None))
            self._know(schema, None)

    def commit(self) -> None:
        """Make all changes durable, on all shards or on none; see :meth:`ShardedIndex.commit`."""
        self._refuse_torn()
        if not self.dirty:
            return
        group, epoch, word = self._shards.group, self._shards.about.epoch + 1, secrets.token_hex(8)
        every = range(group.shards)
        prepared = group.tell([Call(shard, "prepare", (epoch,)) for shard in every])
        if errors := errors_of(prepared):
            self._withdraw()
            raise errors[0]
        if not all(prepared):
            self._withdraw()
            self._raise_torn("prepare", [shard for shard in every if not prepared[shard]])
        self._torn = self._unsure = True  # until the second half is done, also where an interrupt or an error ends it
        self._note(epoch=epoch, next_id=self._next_id, commit=word)
        group.epoch, group.changed, self.dirty = epoch, False, False
        for error in errors_of(group.tell([Call(shard, "publish") for shard in every])):
            raise error
        self._torn = self._unsure = False

    def note(self, **facts: Any) -> None:
        """Note facts of the whole at shard 0, in one step that makes them true."""
        self._torn = self._unsure = True
        self._note(**facts)
        self._torn = self._unsure = False

    def _note(self, **facts: Any) -> None:
        noted = self._shards.group.tell([Call(0, "note", (facts,))])
        if (errors := errors_of(noted)) or not noted[0]:
            raise ShardLostError(
                "shard 0 was lost while it noted a commit: rollback() returns to the last commit that it noted"
            ) from (errors[0] if errors else None)
        self._shards.about = replace(self._shards.about, **facts)

    def rollback(self) -> None:
        """Drop all changes since the last commit, the one that was cut short if shard 0 noted it."""
        if self._unsure:
            noted: list[ClusterMap] = self._shards.group.insist(Call(0, "noted"))
            if any(each.successor for each in noted):
                raise ShardLostError("the index was resharded: close it, and open it again")
            self._shards.about = max(noted, key=lambda each: each.epoch).of(0, 0)
            self._shards.group.epoch = self._shards.about.epoch
        self._unsure = False
        self._shards.group.reopen()
        self._next_id, self.dirty, self._torn = self._shards.about.next_id, False, False
        self.count, self.fields = self._shards.facts()

    def refuse_changes(self) -> None:
        """Raise when changes wait for a commit."""
        self._refuse_torn()
        if self.dirty:
            raise ValueError("changes wait: commit() or rollback() first")

    def _matrix(self, vectors: object) -> npt.NDArray[Any]:
        about = self._shards.about
        return check_vectors(vectors, about.dimension, np.dtype(about.dtype))

    def _new_ids(self, count: int, ids: object) -> npt.NDArray[Any]:
        """Return the ids of new vectors, none of which is in the index."""
        kind = self._shards.about.id_kind
        if ids is None:
            if kind == "str":
                raise ValueError("ids=None: this index has strings as ids, so expected one for each vector")
            if self._next_id + count > 2**63:
                raise ValueError(f"ids: none are free above {self._next_id - 1}; give ids of your own")
            return np.arange(self._next_id, self._next_id + count, dtype=np.int64)
        names = as_ids(ids, kind).values()
        if len(names) != count:
            raise ValueError(f"ids has {len(names)} entries for {count} vectors: expected one for each")
        if (known := self._shards.owners(names) >= 0).any():
            raise ValueError(f"ids holds {names[int(known.argmax())]!r}: a vector has this id already; use update()")
        return names

    def _columns(self, attributes: Any, count: int) -> tuple[Columns, dict[str, Any]]:
        """Return attributes as Python values, and the types of those given."""
        if attributes is None:
            return {}, {}
        given = as_columns(attributes, count)
        schema = merge_schema(self.attributes, given, count)
        return as_objects(given, schema), {name: schema[name] for name in given if name in schema}

    @property
    def attributes(self) -> dict[str, Any]:
        """The types of the attributes by name."""
        return {name: kind for name, kind in self.fields.items() if kind != "document"}

    def _additions(
        self, vectors: npt.NDArray[Any], ids: npt.NDArray[Any], columns: Columns, schema: dict[str, Any],
        rows: list[dict[str, Any]] | None,
    ) -> list[Call]:  # fmt: skip
        """Return the calls that add vectors to their shards; new attributes become known to all."""
        owners = self._shards.about.cells.owner(vectors)
        fresh = schema.keys() - self.fields.keys()
        calls = []
        for shard in range(self._shards.group.shards) if fresh else np.unique(owners).tolist():
            mine = np.flatnonzero(owners == shard)
            arguments = vectors[mine], ids[mine], taken(columns, mine), _some(rows, mine), schema
            calls.append(Call(shard, "add", arguments))
        return calls

    def _count(self, added: npt.NDArray[Any]) -> None:
        """Count vectors that were added."""
        self.count += len(added)
        if self._shards.about.id_kind == "int64":
            self._next_id = max(self._next_id, int(added.max(initial=-1)) + 1)

    def _know(self, schema: dict[str, Any], rows: list[dict[str, Any]] | None) -> None:
        """Take in the fields of vectors that were added or replaced."""
        self.fields |= schema
        for row in rows or ():
            self.fields |= dict.fromkeys(row, "document")

    def _moved(
        self, fields: Columns, known: dict[str, Any],
        replaced: dict[str, tuple[npt.NDArray[Any], npt.NDArray[np.bool_]]], given: list[dict[str, Any]] | None,
    ) -> tuple[Columns, list[dict[str, Any]] | None]:  # fmt: skip
        """Return the attributes and documents of vectors that leave their shard: those that they had, and those given.

        `replaced` has the values of each attribute given, and which rows take them.
        """
        count = len(next(iter(fields.values()), given or ()))
        values = as_values(fields, known, count)
        for name, (new, chosen) in replaced.items():
            values[name][chosen] = new[chosen]
        rows = None
        if (texts := [name for name in self.fields if name not in known]) or given is not None:
            rows = [{name: fields[name][row] for name in texts} for row in range(count)]
            for row, document in zip(rows, given or (), strict=given is not None):
                row |= document
        return values, rows

    def _change(self, calls: list[Call]) -> list[list[Any]]:
        """Make changes at all replicas of shards, and return the answers of each shard's replicas.

        A failure half way is one that only a rollback mends. So is an interrupt.
        """
        if not calls:
            return []
        self.dirty = self._shards.group.changed = self._torn = True
        answers = self._shards.group.tell(calls)
        if lost := [call.shard for call, of_shard in zip(calls, answers, strict=True) if not of_shard]:
            self._raise_torn(calls[0].method, lost)
        answers = [[_ended(each) for each in of_shard] for of_shard in answers]
        errors, every = errors_of(answers), [each for of_shard in answers for each in of_shard]
        self._torn = bool(errors) and (len(errors) < len(every) or any(isinstance(each, _Halved) for each in every))
        if errors:
            raise errors[0].cause if isinstance(errors[0], _Halved) else errors[0]
        return answers

    def _withdraw(self) -> None:
        """Take the first half of a commit back where it was taken."""
        self._shards.group.tell([Call(shard, "withdraw") for shard in range(self._shards.group.shards)])

    def _raise_torn(self, method: str, lost: Sequence[int]) -> NoReturn:
        self._torn = True
        raise ShardLostError(
            f"{method}: shards {[*lost]} were lost, with changes since the last commit; rollback() returns to that "
            f"commit"
        )

    def _refuse_torn(self) -> None:
        if self._torn:
            raise ShardLostError("changes since the last commit are incomplete: rollback() returns to that commit")


def _rows_of(documents: Any, count: int) -> list[dict[str, Any]] | None:
    """Return documents as a dict for each vector; None where none are given."""
    if documents is None:
        return None
    given = GivenDocuments(documents)
    given.check_length(count)
    rows = given.take(count)
    given.check_ended()
    return rows


class _Halved(Exception):
    """The error of a change of several steps, some of which were made."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__()
        self.cause: BaseException = cause


def _ended(answer: Any) -> Any:
    """Return the answer of `Shard.apply` as that of another change: its error, if there is one."""
    if not isinstance(answer, tuple):
        return answer
    made, error = answer
    return None if error is None else _Halved(error) if made else error


def _some(rows: list[dict[str, Any]] | None, chosen: npt.NDArray[np.int64]) -> list[dict[str, Any]] | None:
    """Return the documents of some rows; None where none are given."""
    return None if rows is None else [rows[row] for row in chosen.tolist()]


def _in_turn(calls: list[Call]) -> list[Call]:
    """Return one call for each shard, which makes the changes there in their order: an actor has several threads."""
    changes: dict[int, list[Call]] = {}
    for call in calls:
        changes.setdefault(call.shard, []).append(call)
    return [
        of_shard[0] if len(of_shard) == 1 else
        Call(shard, "apply", ([(call.method, call.arguments) for call in of_shard],))
        for shard, of_shard in changes.items()
    ]  # fmt: skip
