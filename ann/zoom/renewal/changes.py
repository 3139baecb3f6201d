"""Updates of attributes alone: new values of the columns that they name, of the rows that they change.

The values wait in DRAM as new vectors do, and are then written beside their part. A change is written together with
those before it that are at most twice as long, so that a column has few; and the whole column is written once an eighth
of its rows have changed. So the times that a value is written grow with the logarithm of the changes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.zoom.filters.attributes import Attributes, Schema, chain, write_attributes
from memhier.ann.zoom.filters.columns import NullColumn
from memhier.ann.zoom.preview.scan_arguments import split_positions
from memhier.ann.zoom.renewal.renewal import Made
from memhier.ann.zoom.storage.changed_attributes import ChangedAttributes
from memhier.ann.zoom.storage.changed_columns import changed_column
from memhier.ann.zoom.storage.changes import Change, change_rows, column_name, row_dtype, rows_name
from memhier.ann.zoom.storage.fresh import value_bytes
from memhier.ann.zoom.storage.ids import Located
from memhier.ann.zoom.storage.part import IndexPart, PartFiles
from memhier.ann.zoom.storage.snapshot import IndexSnapshot
from memhier.store.store import Transaction

__all__ = ["waiting_bytes", "whole_bytes", "with_values", "write_changes", "write_later_changes"]

Entries: TypeAlias = dict[str, list[list[int | None]]]

_WHOLE = 8  # times the changed rows of a column: so many rows are written as a whole
_JOIN = 2  # a change is written together with those before it of at most as many times its rows
_ORDER_BYTES = 8  # of a row, while its column is written as a whole


def waiting_bytes(state: IndexSnapshot) -> int:
    """Return the DRAM of the vectors and values that wait to be written."""
    changes = (change for part in state.parts for every in part.changes.values() for change in every)
    return state.fresh.memory_bytes + sum(change.memory_bytes for change in changes if change.values is not None)


def whole_bytes(attributes: Attributes | ChangedAttributes, count: int) -> int:
    """Return the DRAM that writing a column of `count` rows as a whole takes."""
    return _ORDER_BYTES * count + attributes.joined_bytes


def with_values(
    state: IndexSnapshot,
    files: PartFiles,
    places: Located,
    columns: Mapping[str, npt.NDArray[np.object_]],
    given: Mapping[str, npt.NDArray[np.bool_]],
) -> IndexSnapshot:
    """Return the snapshot with values that wait to be written.

    Parameters
    ----------
    places
        Of `n` vectors.
    columns
        Objects ``[n]`` by attribute.
    given
        bool ``[n]`` by attribute: the vectors that get the value.
    """
    numbers, rows = split_positions(places.positions)
    parts, fresh = [*state.parts], state.fresh
    for which, part in enumerate(state.parts):
        here = (numbers == which) & (places.positions >= 0)
        changes = dict(part.changes)
        for name, values in columns.items():
            some = np.flatnonzero(here & given[name])
            some = some[np.argsort(rows[some])]
            if len(some):
                beyond = int(value_bytes({name: values[some]}, len(some)).sum())
                later = Change(rows[some].astype(row_dtype(len(part))), values=values[some], beyond=beyond)
                changes[name] = _with_later(changes.get(name, ()), later)
        if here.any():
            parts[which] = files.changed(part, state.schema, changes)
    waits = places.fresh >= 0
    for name, values in columns.items() if waits.any() else ():
        here = waits & given[name]
        fresh = fresh.changed(name, places.fresh[here], values[here])
    return replace(state, parts=tuple(parts), fresh=fresh)


def _with_later(every: tuple[Change, ...], later: Change) -> tuple[Change, ...]:
    if every and every[-1].values is not None:
        return (*every[:-1], every[-1].joined(later))
    return (*every, later)


def write_changes(
    tx: Transaction, part: IndexPart, schema: Schema, generation: int, block_rows: int, room: int
) -> dict[str, Any]:
    """Write the values of a part that wait, and return its entry in the catalog with them.

    Parameters
    ----------
    generation
        Of the store after the transaction.
    block_rows
        Rows of a column written at a time.
    room
        DRAM beside these: without it no column is written as a whole.
    """
    made: Entries = {}
    assert part.attributes is not None
    for name, every in part.changes.items():
        some = [change for change in every if change.rows is not None]
        if every[-1].values is None:
            made[name] = [change.entry() for change in every]
            continue
        prefix, kind, count = column_name(part.name, "", generation), {name: schema[name]}, len(part)
        total = sum(len(change.rows) for change in some if change.rows is not None)
        if _WHOLE * total >= count and whole_bytes(part.attributes, count) <= room:
            column = part.attributes.column(name)
            write_attributes(tx, prefix, kind, {name: column}, np.arange(count, dtype=row_dtype(count)), block_rows)
            made[name] = [[generation, None]]
            continue
        first = _first_to_join(some)
        rows = change_rows(some[first:])
        column = changed_column(name, schema[name], NullColumn(count), some[first:])
        tx.segment(rows_name(part.name, name, generation)).append(rows)
        write_attributes(tx, prefix, kind, {name: column}, rows, block_rows)
        kept = [change.entry() for change in every[: len(every) - len(some) + first]]
        made[name] = [*kept, [generation, len(rows)]]
    return {**part.entry(), "changes": made}


def _first_to_join(changes: Sequence[Change]) -> int:
    """Return the change from which on all are written as one."""
    lengths = [0 if change.rows is None else len(change.rows) for change in changes]
    first = len(lengths) - 1
    while first and lengths[first - 1] <= _JOIN * sum(lengths[first:]):
        first -= 1
    return first


def write_later_changes(
    tx: Transaction, made: Made, parts: Sequence[IndexPart], schema: Schema, generation: int, block_rows: int
) -> Entries:
    """Write the changes in `parts` since `made` was begun, which replaces them; return the entries of `made`."""
    found: Entries = {}
    firsts = np.cumsum([0, *map(len, parts)])
    attributes = [part.attributes for part in parts if part.attributes is not None]
    for name, kind in schema.items():
        chosen = [np.empty(0, np.int64)]
        for part, known, first in zip(parts, made.known, firsts.tolist(), strict=False):
            rows = _later_rows(part, name, known)
            chosen.append(first + rows[part.is_alive(rows)])
        sources = np.concatenate(chosen)
        if not len(sources):
            continue
        places = made.places[sources]
        order, count = np.argsort(places), int(made.entry["rows"])
        tx.segment(rows_name(made.name, name, generation)).append(places[order].astype(row_dtype(count)))
        columns = chain(attributes, {name: kind})
        prefix = column_name(made.name, "", generation)
        write_attributes(tx, prefix, {name: kind}, columns, sources[order], block_rows)
        found[name] = [[generation, len(sources)]]
    return found


def _later_rows(part: IndexPart, name: str, known: frozenset[tuple[str, int | None]]) -> npt.NDArray[np.int64]:
    later = [change for change in part.changes.get(name, ()) if (name, change.generation) not in known]
    if any(change.rows is None for change in later):
        return np.arange(len(part))
    return change_rows(later).astype(np.int64)
