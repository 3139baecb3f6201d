"""Tables as one checkpoint has them."""

import ast
import re
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memhier.codecs import Codec, get_codec
from memhier.errors import CorruptionError, FormatError
from memhier.fields import decode_json, described, integer, mapping, one_of, optional, real, record, sequence, text
from memhier.io.reader import Reader
from memhier.log.committed_rows import CommittedRows
from memhier.recsys.embedding.groups.row_groups import RowGroups
from memhier.recsys.embedding.groups.tiers import live_records, log_name, rows_in
from memhier.recsys.embedding.ids.hash64 import CELLS_BLOCK, Hash64
from memhier.recsys.embedding.ids.id_map import ENTRY, GROUP, RECORD_BYTES, in_use
from memhier.recsys.embedding.initial import Initial, Normal, TableSpec, Uniform
from memhier.recsys.embedding.records import IDS, KEY, groups_in
from memhier.recsys.embedding.serving.row_cache import RowCache
from memhier.recsys.embedding.serving.row_source import OpenedRows
from memhier.recsys.embedding.serving.served_ids import ServedIds
from memhier.recsys.embedding.tables import Floats, Ints
from memhier.store.store import Store

__all__ = ["TableDescription", "TableGeneration"]

_PART = re.compile(r": part \d+ of \d+ of \d+ rows$")
_NUMBER = optional(real())
_INITIAL = record(
    {"kind": one_of("Uniform", "Normal")}, {"low": _NUMBER, "high": _NUMBER, "mean": real(), "std": real(0)}
)
_BLOCK = 1024  # records of ids read at a time, 256 KiB
_TABLE = record({"name": text(), "rows": integer(1, 2**62), "dim": integer(1, 2**20), "initial": _INITIAL}, {
    "id_space": text(), "sketch": integer(0, 2**40),
})  # fmt: skip
_KNOWN = {"tables", "seed", "optimizer", "state", "first_state", "groups"}


def _anything(value: Any) -> None:
    """Accept any value."""


_CHECK = record({"made": record({
    "tables": sequence(_TABLE, 1), "seed": integer(-(2**63), 2**64), "state": sequence(integer(0, 2**24), 1),
})})  # fmt: skip


_IDS_CHECK = mapping(record({
    "batches": integer(0, 2**32), "live": integer(0, 2**31), "fresh": integer(0, 2**31),
}, {
    "padding": optional(integer(-(2**63), 2**63)), "expire_after": optional(integer(1, 2**32)),
    **dict.fromkeys(("free", "hand"), _anything),
}))  # fmt: skip


class TableDescription:
    """The tables in a store, as their trainer described them.

    Attributes
    ----------
    specs, seed
        Of the tables.
    kept
        All that their trainer said of them, but for the rows of tables that may grow.
    groups
        The tables that share a log. The width of a row includes the optimizer's state.
    maps
        The numbers of the maps of tables for any ids, by name.
    codec
        Of rows on SSD.
    dims, row_bytes
        Of each group: most weights of a row, and bytes of one on SSD.
    """

    def __init__(self, store: Store) -> None:
        raw = store.get(KEY)
        if raw is None:
            raise FormatError(f"{store.path}: a tier without tables; expected the folder of an EmbeddingBag or others")
        self.made: dict[str, Any] = decode_json(raw, f"{store.path}: value {KEY!r}", _CHECK)["made"]
        tables = [table | {"rows": 0} if "id_space" in table else table for table in self.made["tables"]]
        self.kept: dict[str, Any] = self.made | {"tables": tables}
        unknown = sorted({*self.made} - _KNOWN)
        if unknown:
            raise FormatError(f"{store.path}: tables with {unknown[0]!r}, which TableReader does not serve")
        self.maps: dict[str, dict[str, Any]] = _maps(store, self.made["tables"])
        self.seed: int = self.made["seed"]
        with described(f"{store.path}: value {KEY!r}"):
            self.specs = tuple(_spec(table, self.maps.get(table["name"])) for table in self.made["tables"])
        if len(self.made["state"]) != len(self.specs):
            raise CorruptionError(f"{store.path}: value {KEY!r} has the state of other tables")
        divided = [spec.name for spec in self.specs if _PART.search(spec.name)]
        if divided:
            raise FormatError(f"{store.path}: holds {divided[0]!r}; expected whole tables: export those of ranks")
        widths = [spec.dim + state for spec, state in zip(self.specs, self.made["state"], strict=True)]
        of, rows = groups_in(store, self.made, len(self.specs)), [spec.rows for spec in self.specs]
        self.groups: RowGroups = RowGroups(of, widths, rows)
        self.dims: list[int] = [max(self.specs[table].dim for table in mine) for mine in self.groups.tables]
        names = [_codec_name(store, log_name(group), width) for group, width in enumerate(self.groups.widths)]
        if len({*names}) > 1:
            raise CorruptionError(f"{store.path}: rows have several codecs, {names}")
        self.codec: Codec = get_codec(names[0])
        self.row_bytes: list[int] = [self.codec.encoded_bytes(np.float32, width) for width in self.groups.widths]


class TableGeneration:
    """The rows of a checkpoint, for any number of threads.

    Parameters
    ----------
    store
        Open for reading.
    reader
        Does the reads.

    Attributes
    ----------
    committed
        The rows on SSD, of each group.
    ids
        The ids of tables for any ids, by number.
    """

    def __init__(self, store: Store, about: TableDescription, reader: Reader) -> None:
        self.store = store
        self.about = about
        self.committed: list[CommittedRows] = [
            CommittedRows(store, log_name(group), row_bytes, reader, rows)
            for group, (row_bytes, rows) in enumerate(zip(about.row_bytes, about.groups.rows, strict=True))
        ]
        self.ids: dict[int, ServedIds] = _read_ids(store, about, reader) if about.maps else {}

    @staticmethod
    def room_for(store: Store, about: TableDescription) -> int:
        """Return the DRAM to set aside for a generation, which grows by doubling, so that few refreshes change it."""
        index = 0
        for group, total in enumerate(about.groups.rows):
            live = min(rows_in(store, group), total)
            # Once every row was trained there are no more.
            most = CommittedRows.bytes_for(min(total, 2**31 - 1), total)
            index += min(_doubled(CommittedRows.bytes_for(live, total)), most)
        ids = sum(ServedIds.bytes_for(numbers["live"]) for numbers in about.maps.values())
        if about.maps:
            ids += CommittedRows.bytes_for(live_records(store, "ids"), _records(about))
        return index + _doubled(store.memory_bytes) + (_doubled(ids) if ids else 0)

    @property
    def memory_bytes(self) -> int:
        """DRAM held, in bytes."""
        ids = sum(one.memory_bytes for one in self.ids.values())
        return sum(rows.memory_bytes for rows in self.committed) + self.store.memory_bytes + ids

    @property
    def trained_rows(self) -> int:
        """Rows that were trained."""
        return sum(map(len, self.committed))

    def follows(self, before: "TableGeneration") -> bool:
        """Whether these are the same tables, so that a row's number in `before` still is that row's alone."""
        return all(mine.follows(theirs) for mine, theirs in zip(self.committed, before.committed, strict=True))

    def _places(self, table: int, rows: Ints) -> Ints:
        groups = self.about.groups
        places: Ints = self.committed[groups.of[table]].places(groups.key(table, rows))
        return places

    def trained(self, table: int, rows: Ints) -> NDArray[np.bool_]:
        """Return which rows of a table were trained, of a table for any ids those that ids have of their own."""
        found: NDArray[np.bool_] = self._places(table, rows) >= 0
        if table in self.ids:
            found &= rows < self.about.specs[table].capacity
        return found

    def opened(self, caches: list[RowCache]) -> OpenedRows:
        """Return the rows for a call, by the cache of each group."""
        return OpenedRows(self.about.specs, self.ids, partial(self._rows, caches))

    def _rows(self, caches: list[RowCache], table: int, ids: Ints) -> Floats:
        """Return distinct rows of a table, float32 [n, dim]."""
        spec = self.about.specs[table]
        group, places = int(self.about.groups.of[table]), self._places(table, ids)
        trained = places >= 0
        if trained.all():
            return np.ascontiguousarray(self._trained(group, places, caches[group])[:, : spec.dim])
        found = np.empty((len(ids), spec.dim), np.float32)
        found[trained] = self._trained(group, places[trained], caches[group])[:, : spec.dim]
        if table in self.ids:
            found[~trained] = 0  # an id that gets a row trains it
        else:
            found[~trained] = spec.initial.weights(self.about.seed, table, ids[~trained], spec.dim, spec.rows)
        return found

    def _trained(self, group: int, places: Ints, cache: RowCache) -> Floats:
        about, committed = self.about, self.committed[group]

        def read(missing: Ints) -> Floats:
            rows: Floats = about.codec.decode(committed.read(places[missing]))
            return rows[:, : about.dims[group]]

        return cache.rows(committed.numbers(places), read)


def _doubled(size: int) -> int:
    """Return the next power of two."""
    return 1 << max(12, (size - 1).bit_length())


def _maps(store: Store, tables: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the numbers of the maps of tables for any ids, by name."""
    wanted = {table["name"] for table in tables if "id_space" in table}
    if not wanted:
        return {}
    where = f"{store.path}: value {IDS!r}"
    value = store.get(IDS)
    if value is None:
        raise CorruptionError(f"{where}: is missing")
    maps: dict[str, dict[str, Any]] = decode_json(value, where, _IDS_CHECK)
    if {*maps} != wanted:
        raise CorruptionError(f"{where}: belongs to other tables")
    if not all("padding" in numbers for numbers in maps.values()):
        raise FormatError(f"{where}: says nothing of the padding; open the tables, and take a checkpoint")
    return maps


def _records(about: TableDescription) -> int:
    """Return the number of records of all maps of ids."""
    return sum(sum(_record_counts(table)) for table in about.made["tables"] if "id_space" in table)


def _record_counts(table: dict[str, Any]) -> tuple[int, int]:
    """Return the number of records of slots, and of the sketch, of a table for any ids."""
    return -(-(table["rows"] - 2) // GROUP), table["sketch"] // CELLS_BLOCK


def _read_ids(store: Store, about: TableDescription, reader: Reader) -> dict[int, ServedIds]:
    log = CommittedRows(store, "ids", RECORD_BYTES, reader, _records(about))
    found, first = {}, 0
    for number, (spec, table) in enumerate(zip(about.specs, about.made["tables"], strict=True)):
        if spec.id_space is None:
            continue
        slots, sketch = _record_counts(table)
        numbers, parts = about.maps[spec.name], []
        there = min(slots, -(-numbers["fresh"] // GROUP))
        for start in range(0, max(1, there), _BLOCK):
            stop = min(start + _BLOCK, there)
            places = log.places(np.arange(first + start, first + stop))
            entries = np.zeros((stop - start, GROUP), ENTRY)
            entries[places >= 0] = log.read(places[places >= 0]).view(ENTRY)
            used = in_use(entries.reshape(-1), numbers["batches"], spec.id_space.expire_after)
            parts.append((entries.reshape(-1)["id"][used], used + GROUP * start))
        ids, rows = (np.concatenate(some) for some in zip(*parts, strict=True))
        if len(rows) > numbers["live"] or (len(rows) and rows[-1] >= spec.capacity):
            raise CorruptionError(f"{store.path}: the slots of table {spec.name!r} do not match its counts")
        found[number] = ServedIds(spec, ids, rows, store.path)
        first += slots + sketch
    return found


def _spec(table: dict[str, Any], numbers: dict[str, Any] | None) -> TableSpec:
    options = {name: value for name, value in table["initial"].items() if name != "kind"}
    initial: Initial = Uniform(**options) if table["initial"]["kind"] == "Uniform" else Normal(**options)
    if numbers is None:
        return TableSpec(table["name"], table["rows"], table["dim"], initial)
    rules = Hash64(expire_after=numbers["expire_after"], pending=1)
    return TableSpec(table["name"], table["rows"], table["dim"], initial, rules, numbers["padding"])


def _codec_name(store: Store, name: str, width: int) -> str:
    """Return the codec that the rows of a tier have."""
    found = store.get(f"tiered/{name}")
    if found is None:
        return "none"
    try:
        fields = ast.literal_eval(found[:1000].decode())
        codec = fields["codec"]
        if (fields["dtype"], fields["shape"]) == ("<f4", (width,)) and isinstance(codec, str):
            get_codec(codec)
            return codec
    except (ValueError, SyntaxError, TypeError, KeyError, RecursionError, MemoryError):
        pass
    raise CorruptionError(f"{store.path}: value 'tiered/{name}' describes no rows of {width} float32: {found[:200]!r}")
