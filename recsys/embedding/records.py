"""The record of its tables in a checkpoint: their description, the progress of the training, and hyperparameters."""

import errno
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from memhier.errors import CorruptionError, FormatError
from memhier.fields import Refused, decode_json, integer, mapping, record, sequence
from memhier.recsys.embedding.initial import TableSpec
from memhier.recsys.embedding.optimizers import Group, check_group
from memhier.recsys.embedding.table_rules import TableRules
from memhier.store.store import Store

__all__ = [
    "EXTRA", "IDS", "KEY", "TableRecord", "as_json", "checkpoint_of", "decoded_extra", "groups_in", "nothing_there",
    "restored_groups", "stored_tables",
]  # fmt: skip

KEY = "recsys/tables"
"""The key of the record of the tables in a checkpoint."""
EXTRA = "recsys/extra"
"""The key of hyperparameters and values of the caller."""


IDS = "recsys/ids"
"""The key of the numbers of maps of ids; their records lie in the log beside the rows."""


def _anything(value: Any) -> None:
    """Accept any value: other code compares it, or it belongs to the caller."""


_CHECK = record({"made": mapping(_anything), "steps": sequence(integer(0, 2**53))}, {"checkpoint": integer(1)})
_GROUPS = sequence(integer(0, 2**20), 1)
_EXTRA_CHECK = record({name: mapping(_anything) for name in ("hyperparameters", "begun_with", "extra")})


class TableRecord:
    """The value ``recsys/tables`` of a store's catalog: JSON.

    Attributes
    ----------
    steps
        Updates of each table so far, which Adam's and Adagrad's rates depend on.
    checkpoint
        The number of the last checkpoint, from 1; 0 before the first.
    """

    def __init__(self, made: dict[str, Any], steps: list[int], checkpoint: int = 0) -> None:
        self._made = made
        self.steps = steps
        self.checkpoint: int = checkpoint

    @classmethod
    def read(
        cls,
        store: Store,
        specs: Sequence[TableSpec],
        rules: TableRules,
        seed: int,
        resume: bool,
        groups: list[int],
    ) -> "TableRecord":
        """Return the record of a store's last checkpoint, or a new one with these groups if there is none.

        Raises
        ------
        FileExistsError
            When there is a checkpoint and `resume` is False.
        FileNotFoundError
            When there is none and `resume` is True.
        FormatError
            When it belongs to other tables.
        """
        state = [rule.state_width(spec.dim) for spec, rule in zip(specs, rules.of, strict=True)]
        tables = [
            {"name": spec.name, "rows": spec.rows, "dim": spec.dim, "initial": _described(spec.initial)}
            | ({} if spec.id_space is None else {"id_space": "hash64", "sketch": spec.id_space.cells(spec.capacity)})
            for spec in specs
        ]
        names, firsts = [type(rule).__name__ for rule in rules.of], [rule.first_state() for rule in rules.of]
        made: dict[str, Any] = {"tables": tables, "seed": seed, "optimizer": names, "state": state}
        made["first_state"] = firsts
        if not rules.by_name:
            made |= {"optimizer": names[0], "first_state": firsts[0]}
        found = store.get(KEY)
        if (found is None) != (store.get(EXTRA) is None):
            beside, missing = (EXTRA, KEY) if found is None else (KEY, EXTRA)
            raise CorruptionError(f"{store.path}: value {missing!r} is missing, beside {beside!r}")
        if found is None:
            if resume:
                raise nothing_there(store.path)
            return cls(_in_groups(made, groups) if any(groups) else made, [0] * len(specs))
        there = _decoded(store, found)
        if not resume:
            raise FileExistsError(
                f"{store.path}: holds a checkpoint after {max(there['steps'], default=0)} updates; pass resume=True to "
                "go on from it, or another path"
            )
        for key, expected in (_in_groups(made, there["made"]["groups"]) if "groups" in there["made"] else made).items():
            if there["made"].get(key) != expected:
                raise FormatError(f"{store.path}: {key}={there['made'].get(key)!r} there, expected {expected!r}")
        if len(there["steps"]) != len(specs):
            raise CorruptionError(f"{store.path}: value {KEY!r} counts updates of {len(there['steps'])} tables")
        groups = groups_in(store, there["made"], len(specs))
        made = _in_groups(made, groups) if any(groups) else made
        return cls(made, there["steps"], there.get("checkpoint", 1))

    @property
    def groups(self) -> list[int]:
        """The group of each table, whose rows lie in one log."""
        groups: list[int] = self._made.get("groups", [0] * len(self.steps))
        return groups

    def of_tables(self, specs: Sequence[TableSpec]) -> "TableRecord":
        """Return the record of the same tables with other numbers of rows."""
        tables = [table | {"rows": spec.rows} for table, spec in zip(self._made["tables"], specs, strict=True)]
        return TableRecord(self._made | {"tables": tables}, self.steps, self.checkpoint)

    def values(self) -> dict[str, bytes]:
        """Return the values of the next checkpoint."""
        self.checkpoint += 1
        return self.as_values()

    def as_values(self) -> dict[str, bytes]:
        """Return the record as a value of the catalog, with its key."""
        return {KEY: as_json({"made": self._made, "steps": self.steps, "checkpoint": self.checkpoint})}


def _in_groups(made: dict[str, Any], groups: Any) -> dict[str, Any]:
    """Return the description of tables in groups; by its mark of each table versions without groups refuse it."""
    return made | {"tables": [table | {"grouped": True} for table in made["tables"]], "groups": groups}


def groups_in(store: Store, made: Mapping[str, Any], tables: int) -> list[int]:
    """Return the group of each table that the description of tables names."""
    groups = made.get("groups", [0] * tables)
    try:
        _GROUPS(groups)
        fits = len(groups) == tables and {*groups} == {*range(max(groups) + 1)}
    except Refused:
        fits = False
    if not fits:
        raise CorruptionError(f"{store.path}: value {KEY!r}: groups {str(groups)[:200]} of {tables} tables")
    return list(groups)


def stored_tables(store: Store) -> list[dict[str, Any]]:
    """Return the descriptions of tables in a store, unchecked; none where they are no such descriptions."""
    found = store.get(KEY)
    tables = [] if found is None else _decoded(store, found)["made"].get("tables")
    return tables if isinstance(tables, list) and all(isinstance(table, dict) for table in tables) else []


def nothing_there(path: Any) -> FileNotFoundError:
    """Return the error of a resume without a checkpoint."""
    return FileNotFoundError(
        errno.ENOENT, "resume=True, but no checkpoint is there to go on from; resume=False begins anew", str(path)
    )


def checkpoint_of(store: Store, record: bytes | None) -> int:
    """Return the number of the checkpoint with this record; 0 if there is no record."""
    # The first version wrote records without a number.
    return 0 if record is None else int(_decoded(store, record).get("checkpoint", 1))


def decoded_extra(store: Store, found: bytes | None) -> dict[str, Any]:
    """Return hyperparameters and the caller's values of a checkpoint; nothing if there is no checkpoint."""
    where = f"{store.path}: value {EXTRA!r}"
    return {} if found is None else decode_json(found, where, _EXTRA_CHECK)


def restored_groups(store: Store, rules: TableRules, are_given: bool) -> tuple[list[Group], list[Group]]:
    """Return the hyperparameters that each group began with, and those of a checkpoint; none where there is none.

    Raises
    ------
    ValueError
        When the training began with others than those of `rules`, and these are given.
    CorruptionError
        For values that an optimizer does not take.
    """
    given = [vars(rules.of[number]) for number in range(len(rules.groups()))]
    values = decoded_extra(store, store.get(EXTRA))
    if not values:
        return [_restored(json.loads(as_json(each)), each, store.path) for each in given], []
    begun = [_restored(*each, store.path) for each in zip(rules.parted(values["begun_with"]), given, strict=True)]
    saved = [_restored(*each, store.path) for each in zip(rules.parted(values["hyperparameters"]), given, strict=True)]
    for number, (first, last, mine) in enumerate(zip(begun, saved, given, strict=True)):
        try:
            type(rules.of[number])(**first)
            check_group(rules.of[number], last, number)
        except (TypeError, ValueError) as error:
            raise CorruptionError(f"{store.path}: value {EXTRA!r}: {error}") from error
        if are_given and first != mine:
            name = next(name for name, value in mine.items() if first[name] != value)
            raise ValueError(
                f"optimizer: {name}={mine[name]!r} beside resume=True, but the training began with {name}="
                f"{first[name]!r} and is at {last[name]!r}: pass {first[name]!r}; then set "
                f"module.optimizer.param_groups[{number}][{name!r}] if it is to change from here on"
            )
    return begun, saved


def _restored(stored: Any, known: dict[str, Any], path: object) -> dict[str, Any]:
    """Return stored hyperparameters as an optimizer takes them; those in `known` must have the same types."""
    if not isinstance(stored, dict):
        raise CorruptionError(f"{path}: value {EXTRA!r}: hyperparameters {stored!r}, expected those of an optimizer")
    restored = {name: tuple(value) if isinstance(value, list) else value for name, value in stored.items()}
    for name, kind in known.items():
        value = restored.get(name)
        wanted, found = (tuple(kind), value) if isinstance(kind, list | tuple) else ((kind,), (value,))
        if not isinstance(found, tuple) or len(found) != len(wanted) or not all(map(_is_like, found, wanted)):
            raise CorruptionError(f"{path}: value {EXTRA!r}: hyperparameter {name}={value!r}, where {kind!r} is usual")
    return restored


def _is_like(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, bool) or not isinstance(wanted, int | float):
        return True
    return isinstance(found, int | float) and not isinstance(found, bool) and -1e300 < found < 1e300


def _decoded(store: Store, found: bytes) -> dict[str, Any]:
    there: dict[str, Any] = decode_json(found, f"{store.path}: value {KEY!r}", _CHECK)
    return there


def as_json(value: Any) -> bytes:
    """Return a value as JSON, numbers of numpy and torch as Python's."""
    return json.dumps(value, default=_number).encode()


def _number(value: Any) -> Any:
    if not hasattr(value, "item"):
        raise TypeError(f"{value!r}: expected a value that JSON can hold")
    return value.item()


def _described(initial: Any) -> dict[str, Any]:
    return {"kind": type(initial).__name__, **asdict(initial)}
