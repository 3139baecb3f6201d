"""Tables for any ids that get more rows than their checkpoint has: the rows behind them move up, in one commit."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from memhier.errors import CorruptionError
from memhier.io.reader import Reader
from memhier.log.replay import committed_record
from memhier.log.row_log import RowLog
from memhier.recsys.embedding.groups.row_groups import RowGroups
from memhier.recsys.embedding.groups.tiers import log_name
from memhier.recsys.embedding.ids.hash64 import CELLS_BLOCK
from memhier.recsys.embedding.ids.id_map import GROUP, IdMap
from memhier.recsys.embedding.initial import TableSpec
from memhier.recsys.embedding.records import IDS, TableRecord, stored_tables
from memhier.recsys.embedding.vocabularies import decoded_ids
from memhier.shield import check_interrupt
from memhier.store.store import Store

__all__ = ["as_stored", "grow"]

Ints = NDArray[np.int64]
_Move = tuple[int, int, int]
"""The first key of some rows, their number, and the first key that they get, which is no lower."""

_BLOCK_BYTES = 2**20


def as_stored(store: Store, specs: Sequence[TableSpec]) -> tuple[tuple[TableSpec, ...], tuple[TableSpec, ...]]:
    """Return tables with the sketches that a store has where none are given, and the same with the rows there if fewer.

    Other differences are left to :class:`TableRecord`.
    """
    tables = stored_tables(store)
    if len(tables) != len(specs):
        return tuple(specs), tuple(specs)
    found, there = list[TableSpec](), list[TableSpec]()
    for spec, table in zip(specs, tables, strict=True):
        rules = spec.id_space
        if rules is not None:
            cells, rows = table.get("sketch"), table.get("rows")
            if rules.sketch is None and rules.admit_after > 1 and isinstance(cells, int) and 0 < cells <= 2**34:
                spec = replace(spec, id_space=replace(rules, sketch=-(-cells // CELLS_BLOCK) * CELLS_BLOCK))
            there.append(replace(spec, rows=rows) if isinstance(rows, int) and 2 < rows < spec.rows else spec)
        else:
            there.append(spec)
        found.append(spec)
    return tuple(found), tuple(there)


def grow(
    store: Store, record: TableRecord, before: Sequence[TableSpec], specs: Sequence[TableSpec], widths: Sequence[int]
) -> TableRecord:
    """Give the tables of a checkpoint more rows, and return their record; nothing changes unless all does.

    It takes the DRAM of the index of the rows stored, less than the tables need, and 24 bytes for each row that moves.

    Parameters
    ----------
    record, before
        Of the tables in the store.
    specs
        The same tables with their new numbers of rows.
    widths
        Floats of a row, of each table.
    """
    where = f"{store.path}: value {IDS!r}"
    numbers = decoded_ids(store.get(IDS), where)
    for spec in before:
        if spec.id_space is not None and (spec.name not in numbers or numbers[spec.name]["fresh"] > spec.capacity):
            raise CorruptionError(f"{where}: does not belong to table {spec.name!r} of {spec.capacity} ids")
    larger = record.of_tables(specs)
    moves = _moves_of_rows(record.groups, widths, before, specs) | {"ids": _moves_of_ids(before, specs)}
    with Reader() as reader:
        logs: list[RowLog] = []
        try:
            for name, mine in moves.items():
                there = committed_record(store, name)
                if there is not None:
                    beside = logs[0] if logs else None
                    room = there.live + _block_rows(there.record_bytes)  # a block is there twice while it moves
                    log = RowLog(store, name, there.record_bytes, reader, room, beside=beside)
                    logs.append(log)
                    for move in reversed(mine):
                        _move(log, *move)
            logs[0].commit(larger.as_values())
        finally:
            for log in reversed(logs):
                log.close()
    return larger


def _moves_of_rows(
    groups: list[int], widths: Sequence[int], before: Sequence[TableSpec], specs: Sequence[TableSpec]
) -> dict[str, list[_Move]]:
    """Return the moves of the rows of each group, by the name of its log, in the order of keys."""
    old, new = (RowGroups(groups, widths, [spec.rows for spec in each]) for each in (before, specs))
    found: dict[str, list[_Move]] = {}
    for group, tables in enumerate(old.tables):
        mine = found[log_name(group)] = []
        for table in tables:
            one, other = before[table], specs[table]
            starts = [(0, one.capacity, 0), (one.capacity, one.rows - one.capacity, other.capacity)]
            for first, count, target in starts:
                here, there = old.key(table, np.array([first])), new.key(table, np.array([target]))
                mine.append((int(here[0]), count, int(there[0])))
    return found


def _moves_of_ids(before: Sequence[TableSpec], specs: Sequence[TableSpec]) -> list[_Move]:
    """Return the moves of the records of maps, in the order of keys."""
    found: list[_Move] = []
    old = new = 0
    for one, other in zip(before, specs, strict=True):
        if one.id_space is None or other.id_space is None:
            continue
        slots, target = -(-one.capacity // GROUP), -(-other.capacity // GROUP)
        records = IdMap.records_for(one.capacity, one.id_space)
        found += [(old, slots, new), (old + slots, records - slots, new + target)]
        old, new = old + records, new + IdMap.records_for(other.capacity, other.id_space)
    return found


def _move(log: RowLog, first: int, count: int, target: int) -> None:
    """Move rows up, the last first, so that none is written over that has still to move."""
    if target == first:
        return
    for keys in _blocks(log, first, first + count):
        check_interrupt()
        rows, _ = log.read(keys)
        moved = keys + (target - first)
        log.append(moved, rows)
        log.delete(np.setdiff1d(keys, moved))


def _block_rows(row_bytes: int) -> int:
    return max(1, _BLOCK_BYTES // row_bytes)


def _blocks(log: RowLog, first: int, stop: int) -> Iterator[Ints]:
    """Yield the keys from `first` to `stop` that have a row, in blocks of rising keys, the last block first."""
    stored = log.keys()
    mine = [block[(block >= first) & (block < stop)] for block in stored]
    keys = np.sort(np.concatenate([np.empty(0, np.int64), *mine]))
    step = _block_rows(log.row_bytes)
    for end in range(len(keys), 0, -step):
        yield keys[max(0, end - step) : end]
