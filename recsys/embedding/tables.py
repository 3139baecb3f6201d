"""Tables larger than DRAM, behind one tier: a row is its weights with the optimizer's state beside them.

All tables of one width share a slab, a log and a plan, under the key (first key of the table) + (row): a step looks up,
reads, updates and evicts once for each width, with any number of tables. One checkpoint makes all of them durable.
"""

import functools
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from memhier import backend
from memhier.arguments import check_here, check_int
from memhier.budget import parse_bytes
from memhier.errors import BudgetError, ClosedError, CorruptionError, FormatError
from memhier.policies import Belady, Policy
from memhier.recsys.embedding.device.link import check_device
from memhier.recsys.embedding.groups.row_groups import Part, RowGroups, groups_by_width
from memhier.recsys.embedding.groups.step_loan import StepLoan, StepTicket
from memhier.recsys.embedding.groups.tiers import TierArguments, live_records, open_tiers, rows_in, stats_of
from memhier.recsys.embedding.growing import as_stored, grow
from memhier.recsys.embedding.ids.id_room import IdRoom
from memhier.recsys.embedding.initial import FirstRows, TableSpec
from memhier.recsys.embedding.optimizers import SGD, Group
from memhier.recsys.embedding.records import EXTRA, IDS, TableRecord, decoded_extra, nothing_there, restored_groups
from memhier.recsys.embedding.table_rules import Optimizers, TableRules, rules_in
from memhier.recsys.embedding.vocabularies import Added, Mapped, Vocabularies, decoded_ids
from memhier.shield import shielded_init
from memhier.store.store import Store, Transfer
from memhier.table.keep_all import KeepAll
from memhier.table.shortage import Shortage
from memhier.table.sizes import TRAINING_ASIDE
from memhier.table.table import store_bytes
from memhier.table.tiered import KIND

__all__ = ["StepRows", "TableOptions", "Tables", "Update", "check_ids", "distinct_rows"]

Ints = NDArray[np.int64]
Places = NDArray[np.int32]
Floats = NDArray[np.float32]
Update = Literal["backward", "step"]

_NOWHERE = np.empty(0, np.int32)
# torch may sort longer vectors with several threads, and then orders equal ids in another way.
_TORCH_SORTS_ALONE = 32768
_IDS_MAX = 2**31
_ROWS_MAX = 2**31 - 1
# Look-ups in a row that read no row from SSD, until they are taken for ones that need none.
_CALM_LOOK_UPS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class TableOptions:
    """The options of all modules of tables; see :class:`memhier.recsys.EmbeddingBag`."""

    optimizer: Optimizers | None = None
    dram: int | str
    path: str | os.PathLike[str]
    seed: int = 0
    resume: bool = False
    update: Update = "backward"
    policy: str | Policy = "belady"
    codec: str = "none"
    touched: int | None = None
    step_rows: int | None = None
    device: str | torch.device = "cpu"

    def __post_init__(self) -> None:
        check_here(self.path, "pull a backup into a folder, and open that")
        check_device(torch.device(self.device), f"device={str(self.device)!r}")
        torch.empty(0, device=self.device)  # raises where there is no such device
        check_int("seed", self.seed, -(2**63), 2**64 - 1)
        for name, value in (("touched", self.touched), ("step_rows", self.step_rows)):
            if value is not None:
                check_int(name, value, 1, _ROWS_MAX, "rows")
        if self.update not in get_args(Update):
            raise ValueError(f"update={self.update!r}: expected 'backward' or 'step'")
        rounded = [rule for rule in rules_in(self.optimizer) if rule.state_width(1)]
        if self.codec != "none" and rounded:
            raise ValueError(
                f"codec={self.codec!r}: it would round the state of {type(rounded[0]).__name__} as well, where a "
                'little made nothing moves a weight far; use codec="none", or SGD without momentum, which has no state'
            )
        if self.codec == "int8":
            raise ValueError(
                'codec="int8": it would lose the change of a step in a row that leaves, and cannot hold a row with a '
                'NaN; use "int8ef", which keeps the errors, or "fp16"'
            )


def check_ids(spec: TableSpec, ids: Ints, name: str = "input") -> None:
    """Raise IndexError for a row that a table does not have; `name` is the argument with the rows."""
    if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= spec.rows):
        flat = ids.reshape(-1)
        at = int(np.flatnonzero((flat < 0) | (flat >= spec.rows))[0])
        raise IndexError(f"{name}[{at}]={flat[at]}: expected a row of table {spec.name!r}, 0 to {spec.rows - 1}")


class StepRows:
    """The distinct rows of one step, table by table.

    Attributes
    ----------
    keys
        int64 [u], rising. Not writeable, so that a ticket of these keys recognises them at once.
    starts
        int64 [tables + 1]: the place in `keys` where the rows of each table begin, and the end of the last ones.
    ends
        int64 [tables]: the place where the ids of each table end.
    inverse
        int32 [n]: the place in `keys` of every id.
    order
        int32 [n]: the places of each table's ids, sorted as torch sorts them; empty where no sum needs that order.
    loan
        The rows in DRAM; None after they were given back, and for rows that are only read.
    coming
        The rows on their way to DRAM, as long as some group had no room for its part.
    """

    __slots__ = ("_parts", "coming", "ends", "inverse", "keys", "loan", "order", "starts")

    def __init__(
        self,
        keys: Ints,
        starts: Ints,
        ends: Ints | None = None,
        inverse: Places = _NOWHERE,
        order: Places = _NOWHERE,
        loan: StepLoan | None = None,
    ) -> None:
        keys.flags.writeable = False
        self.starts: Ints
        self.order: Places
        self.keys: Ints
        self.inverse: Places
        self.keys, self.starts, self.inverse, self.order, self.loan = keys, starts, inverse, order, loan
        self.ends: NDArray[np.int64] = np.zeros(len(starts) - 1, np.int64) if ends is None else ends
        self.coming: StepTicket | None = None
        self._parts: list[Part] | None = None

    @property
    def nbytes(self) -> int:
        """The size of the ids and of the arrays, in bytes."""
        ids = 8 * len(self.inverse)
        parts = 0 if self._parts is None or len(self._parts) == 1 else 2 * self.keys.nbytes
        return ids + self.keys.nbytes + self.inverse.nbytes + self.order.nbytes + parts

    def parts(self, groups: RowGroups) -> list[Part]:
        """Return the part of each group; always the same arrays."""
        if self._parts is None:
            self._parts = groups.split(self.keys, self.starts)
        return self._parts

    def of_table(self, table: int) -> slice:
        """Return the part of `keys` that a table has."""
        return slice(int(self.starts[table]), int(self.starts[table + 1]))

    def places(self, table: int) -> Ints:
        """Return the number among the table's rows of every id of a table."""
        begin = int(self.ends[table - 1]) if table else 0
        places: Ints = self.inverse[begin : int(self.ends[table])].astype(np.int64)
        places -= self.starts[table]
        return places

    def share(self) -> "StepRows":
        """Return the same rows with a loan of their own."""
        loan = None if self.loan is None else self.loan.share()
        return StepRows(self.keys, self.starts, self.ends, self.inverse, self.order, loan)

    def lend(self, others: "StepRows") -> bool:
        """Give other rows a loan if all are among these, which have one; return whether they are."""
        places = np.searchsorted(self.keys, others.keys)
        if self.loan is None or not len(self.keys) or places.max(initial=0) == len(self.keys):
            return False
        if not np.array_equal(self.keys[places], others.keys):
            return False
        others.loan = self.loan.share(places)
        return True

    def release(self) -> None:
        """Give the rows back. The loan of an output that is forgotten before its backward pass ends by itself."""
        loan, self.loan = self.loan, None
        if loan is not None:
            loan.release()


def distinct_rows(ids: Sequence[Ints], bases: Ints, *, in_order: bool = True) -> StepRows:
    """Return the distinct rows of a step.

    Parameters
    ----------
    ids
        int64 [n] of each table.
    bases
        int64 [tables or more]: the first key of each table.
    in_order
        Whether gradients of a row are added up, in torch's order. Otherwise `order` stays empty.
    """
    flat = np.concatenate(ids, dtype=np.int64)
    ends = np.cumsum([len(some) for some in ids])
    if len(flat) >= _IDS_MAX:
        raise ValueError(f"ids: {len(flat)} in one step, expected fewer than {_IDS_MAX}")
    longest = int(np.diff(ends, prepend=0).max(initial=0))
    inverse, order = np.empty(len(flat), np.int32), np.empty(len(flat) if in_order else 0, np.int32)
    starts = np.zeros(len(ends) + 1, np.int64)
    if backend.core is not None and (not in_order or (longest < _TORCH_SORTS_ALONE and _sorts_like_torch())):
        keys = np.empty(len(flat), np.int64)
        count = backend.core.embedding_distinct(
            ids=flat,
            ends=ends,
            bases=bases,
            like_torch=in_order,
            keys=keys,
            starts=starts,
            inverse=inverse,
            order=order,
        )
        return StepRows(keys[:count].copy(), starts, ends, inverse, order)
    found, begin = [], 0
    for table, end in enumerate(ends.tolist()):
        mine = flat[begin:end]
        distinct, places = np.unique(mine, return_inverse=True)
        found.append(distinct + bases[table])
        inverse[begin:end] = places.reshape(-1) + starts[table]
        if in_order:
            order[begin:end] = torch.sort(torch.from_numpy(mine))[1].numpy() + begin
        starts[table + 1] = starts[table] + len(distinct)
        begin = end
    return StepRows(np.concatenate(found), starts, ends, inverse, order)


@functools.cache
def _sorts_like_torch() -> bool:
    """Whether the core leaves equal ids in the order that this version of torch gives them."""
    assert backend.core is not None
    rng = np.random.default_rng(0)
    for count, distinct in ((17, 3), (100, 7), (5000, 50), (5000, 4000)):
        ids, ends, bases = rng.integers(0, distinct, count), np.array([count]), np.zeros(1, np.int64)
        keys, inverse, order = np.empty(count, np.int64), np.empty(count, np.int32), np.empty(count, np.int32)
        starts = np.empty(2, np.int64)
        backend.core.embedding_distinct(
            ids=ids, ends=ends, bases=bases, like_torch=True, keys=keys, starts=starts, inverse=inverse, order=order
        )
        if not np.array_equal(order, torch.sort(torch.from_numpy(ids))[1].numpy()):
            return False
    return True


class Tables:
    """Rows of several tables by (table, row), trained through a DRAM budget.

    Parameters
    ----------
    specs
        The tables.
    options
        The options of the module.
    first_rows
        Makes untrained rows by key; by default those of `specs`.
    asked
        The argument that holds the ids of a table, for messages; the table's name goes in for ``{!r}``.

    Attributes
    ----------
    groups
        The tables that share a tier.
    hyperparameters
        Those that each group of the optimizer began with, and those of the checkpoint, if there is one.
    planners
        Of the groups, for batches known ahead; none if the policy takes no announcements, and once closed.
    capacity, call_rows
        Rows, of any tables, that DRAM has room for at once, and that a call may have.
    adds_by_row
        Whether the gradients of several look-ups add up by row. Otherwise torch's order also depends on other rows.
    """

    adds_by_row = False

    @shielded_init
    def __init__(
        self,
        specs: Sequence[TableSpec],
        options: TableOptions,
        first_rows: FirstRows | None = None,
        asked: str = "input",
    ) -> None:
        self.specs: tuple[TableSpec, ...] = tuple(specs)
        self.options = options
        self.rules: TableRules
        self.rules = rules = TableRules(options.optimizer, [spec.name for spec in self.specs])
        self.seed: int = int(options.seed)
        self.widths: list[int] = [
            spec.dim + rule.state_width(spec.dim) for spec, rule in zip(self.specs, rules.of, strict=True)
        ]
        # Plain descent applies gradients one by one, in the order of ids.
        self._adds_up = not all(isinstance(rule, SGD) for rule in rules.of)
        self.bases: NDArray[Any] = np.cumsum([0, *(spec.rows for spec in self.specs)])
        self.path: str = os.fspath(options.path)
        self._asked = asked
        made = FirstRows(self.specs, rules.of, self.seed)
        self._first_rows, self._first_rows_of_ids = first_rows or made, made.of_ids
        self._pid = os.getpid()
        self.vocabularies: Vocabularies | None = None
        self.record: TableRecord
        store = _open(self.path, options.resume)
        try:
            before = self._read_record(store)
            dram = parse_bytes(options.dram)
            maps = [(spec.capacity, spec.id_space) for spec in self.specs if spec.id_space is not None]
            self._arguments = TierArguments(
                self.groups, dram, options.policy, options.codec, options.touched, options.step_rows, maps
            )
            if maps:
                self._check_ids_there(store)
            stored = [rows_in(store, group) for group in range(len(self.groups))]
            index_rows = self._arguments.index_rows(stored)
            self.touched: int = sum(index_rows)
            self._check_touched(stored, index_rows)
            self.hyperparameters: tuple[list[Group], list[Group]] = restored_groups(
                store, rules, options.optimizer is not None
            )
            if maps:
                self._arguments.check(store, stored)
            if before != self.specs:
                self.record = grow(store, self.record, before, self.specs, self.widths)
            initial = [partial(_first_rows_of, self.groups, self._first_rows, group) for group in range(len(stored))]
            self._tiers = open_tiers(store, self._arguments, index_rows, initial)
        except BaseException:
            store.close()
            raise
        self.window_bytes: int = int(TRAINING_ASIDE / 2 * parse_bytes(options.dram))  # for batches known ahead
        self.planners = tuple(tier.policy for tier in self._tiers if isinstance(tier.policy, Belady | KeepAll))
        self.capacity: int = self._least([tier.capacity for tier in self._tiers])
        self.call_rows: int = self._least([tier.batch for tier in self._tiers])
        self._store = store
        self._open = True
        self._scratch = np.empty(0, np.float32)
        self._refetches = self._calm = 0
        if maps:
            try:
                self.vocabularies = self._opened_vocabularies(store, options.resume)
            except BaseException:
                self.close()
                raise

    def _read_record(self, store: Store) -> tuple[TableSpec, ...]:
        """Read the record, and set the groups; return the tables in the store, which may have fewer rows."""
        options, before = self.options, self.specs
        if options.resume:
            self.specs, before = as_stored(store, self.specs)
        rows = [spec.rows for spec in self.specs]
        # A policy of the caller's is one for all rows.
        groups = groups_by_width(self.widths, rows) if isinstance(options.policy, str) else [0] * len(rows)
        self.record = TableRecord.read(store, before, self.rules, self.seed, options.resume, groups)
        self.groups: RowGroups = RowGroups(self.record.groups, self.widths, rows)
        if len(self.groups) > 1 and not isinstance(options.policy, str):
            raise ValueError(
                f"policy: the rows of {self.path!r} have {len(self.groups)} widths, each with a cache of its own; "
                "expected the name of a policy"
            )
        return before

    def _least(self, sizes: list[int]) -> int:
        """Return the least of sizes; groups whose rows all fit count only if they are the only one."""
        bounds = [size for size, rows in zip(sizes, self.groups.rows, strict=True) if size < rows or len(sizes) == 1]
        return min(bounds, default=int(self.bases[-1]))

    def _opened_vocabularies(self, store: Store, resume: bool) -> "Vocabularies":
        vocabularies = Vocabularies(self.specs, self._id_room)
        log = self._tiers[0].side
        if resume and log is not None:
            vocabularies.read(log, store.get(IDS), self.path)
        return vocabularies

    def _check_ids_there(self, store: Store) -> None:
        """Raise BudgetError if the maps have no room for the ids of a checkpoint, FormatError for another padding."""
        side, room = self._arguments.side, self._id_room
        assert side is not None
        value = store.get(IDS)
        numbers = {} if value is None else decoded_ids(value, f"{self.path}: value {IDS!r}")
        for spec in self.specs:
            padding = numbers.get(spec.name, {}).get("padding", spec.padding_id)
            if padding != spec.padding_id:
                raise FormatError(
                    f"{self.path}: padding_idx={padding} of table {spec.name!r} there, expected {spec.padding_id}"
                )
        ids = sum(each["fresh"] for each in numbers.values())
        if ids > room.slots or live_records(store, side.name) > side.rows:
            raise BudgetError(
                f"dram={self.options.dram}: too little for the map of the {ids} ids that have rows in {self.path!r}; "
                f"dram={self._dram_for_ids(ids)} would be enough"
            )

    @property
    def _id_room(self) -> IdRoom:
        room = self._arguments.id_room
        assert room is not None
        return room

    def _dram_for_ids(self, ids: int) -> int:
        return self._id_room.enough_for(ids, parse_bytes(self.options.dram))

    @property
    def memory_bytes(self) -> int:
        """DRAM held, in bytes."""
        maps = 0 if self.vocabularies is None else self.vocabularies.memory_bytes
        tiers = sum(tier.memory_bytes for tier in self._tiers)
        return tiers + self._scratch.nbytes + maps + (store_bytes(self._store) if self._open else 0)

    @property
    def is_planned(self) -> bool:
        """Whether announced batches wait to be fetched, so that a call for other rows has to fail."""
        return any(planner.pending for planner in self.planners)

    @property
    def has_all(self) -> bool:
        """Whether for a while no look-up had to read a row from SSD."""
        return self._calm >= _CALM_LOOK_UPS

    def check_ids(self, table: int, ids: Ints, name: str = "rows") -> None:
        """Raise IndexError for a row that a table does not have; `name` is the argument with the rows."""
        check_ids(self.specs[table], ids, name)

    def check_open(self) -> None:
        """Raise ClosedError after `close`, and in a forked child."""
        if not self._open:
            raise ClosedError("the tables were closed")
        if self._pid != os.getpid():
            raise ClosedError(
                f"the tables of {self.path!r} belong to process {self._pid}, which forked this one: use them there; a "
                "loader's workers need not look up"
            )

    def _check_touched(self, stored: list[int], index_rows: list[int]) -> None:
        for some, room, rows in zip(stored, index_rows, self.groups.rows, strict=True):
            if some > rows:
                raise CorruptionError(f"{self.path}: {some} rows are stored, of tables of {rows}")
            if some > room:
                raise BudgetError(
                    f"touched={room}: {some} rows of {self.path!r} were trained already; expected at least as many, "
                    f"and at most the {rows} that there are"
                )

    @contextmanager
    def _in_own_words(self, group: int = 0) -> Iterator[None]:
        """Word a shortage of the tier of a group by the tables' arguments."""
        self.check_open()
        try:
            yield
        except Shortage as error:
            raise self._worded(error, group) from error

    def _worded(self, error: Shortage, group: int) -> BudgetError:
        if error.of == "rows" and self.options.touched is None:
            given = dram = self._arguments.dram
            wanted = min(error.held + error.needed, _ROWS_MAX)
            while self._arguments.with_dram(dram).index_rows_of(group, error.held) < wanted:
                dram *= 2
            more = "" if dram == given else f" and dram={dram}"
            return BudgetError(
                f"dram={self.options.dram}: the index of rows in use has room for {error.room} of them, of which "
                f"{error.held} were trained, and this step has {error.needed} more; take a checkpoint and open the "
                f"tables again with resume=True{more}, which gives the index more room. The step has changed nothing"
            )
        if error.of == "ids":
            return BudgetError(
                f"dram={self.options.dram}: the map of ids has room for {self._id_room.slots} with a row, and this "
                "step has new ones beyond these; take a checkpoint and open the tables again with resume=True and "
                f"dram={self._dram_for_ids(self._id_room.slots + error.needed)}. The step has changed nothing"
            )
        if error.of == "rows":
            return BudgetError(
                f"touched={error.room}: {error.needed} rows of this step were never trained before, beside "
                f"{error.held} that were; open the tables with touched={error.enough} or more, at most the "
                f"{self.bases[-1]} rows that there are. The step has changed nothing"
            )
        if error.of == "batch":
            return BudgetError(
                f"step_rows={error.room}: {error.needed} rows at once; step_rows={error.enough} is enough"
            )
        enough = self._arguments.dram_for(group, error.enough)
        beside = f", beside {error.held} of look-ups before it and of batches fetched ahead" if error.held else ""
        return BudgetError(
            f"a step needs {error.needed} distinct rows at once{beside}, but DRAM has room for {error.room}; "
            f"dram={enough} would be enough, or smaller batches"
        )

    def map_ids(self, look_ups: Sequence[Sequence[Ints]]) -> Mapped:
        """Map a batch of training; each look-up has the ids of each table, of which some are for any ids."""
        assert self.vocabularies is not None
        with self._in_own_words():
            return self.vocabularies.map(look_ups)

    def distinct(self, ids: Sequence[Ints]) -> StepRows:
        """Return the distinct rows of a step, of the int64 [n] ids of each table.

        Raises
        ------
        IndexError
            For a row that a table does not have.
        """
        self.check_open()
        for spec, wanted in zip(self.specs, ids, strict=True):
            check_ids(spec, wanted, self._asked.format(spec.name))
        return distinct_rows(ids, self.bases, in_order=self._adds_up)

    def lend(self, rows: StepRows, ticket: StepTicket | None = None) -> None:
        """Load the rows of a step and keep them in DRAM until they are released; `ticket` fetched them ahead.

        After an error the same call with a ticket goes on.
        """
        parts = rows.parts(self.groups)
        for tier, (_, keys) in zip(self._tiers, parts, strict=True):
            if len(keys) > tier.batch:
                raise BudgetError(
                    f"a step needs {len(keys)} distinct rows at once, but working memory is set aside for "
                    f"step_rows={tier.batch}; open the tables with step_rows={len(keys)}, which would be enough, or "
                    "make batches smaller"
                )
        loans = StepTicket() if ticket is None else ticket
        try:
            self._lend(parts, loans)
        except BaseException:
            if ticket is None:
                loans.release()
            raise
        rows.loan = StepLoan.of(loans.loans, parts)
        before, self._refetches = self._refetches, sum(tier.refetches for tier in self._tiers)
        self._calm = self._calm + 1 if self._refetches == before else 0

    def _lend(self, parts: list[Part], ticket: StepTicket) -> None:
        """Add a loan of the rows of each group that has none yet."""
        for group in range(len(ticket.loans), len(parts)):
            under_way = ticket.tickets[group] if ticket.tickets else None
            with self._in_own_words(group):
                loan = self._tiers[group].lend(parts[group][1], distinct=True, ticket=under_way)
            ticket.loans.append(loan)

    def lend_again(self, rows: StepRows) -> None:
        """Keep rows in DRAM that other steps hold already."""
        parts, loans = rows.parts(self.groups), []
        for group, (_, keys) in enumerate(parts):
            with self._in_own_words(group):
                loans.append(self._tiers[group].lend(keys, again=True))
        rows.loan = StepLoan.of(loans, parts)

    @contextmanager
    def changing(self, rows: StepRows, floats: int = 0) -> Iterator[tuple[list[Floats], Floats]]:
        """Give all rows in DRAM of each group, writable, and so many floats of working memory.

        The block may change the rows of the step; other calls wait until it ends.
        """
        assert rows.loan is not None
        with self._in_own_words(), rows.loan.changing() as slabs:
            if len(self._scratch) < floats:
                self._scratch = np.empty(floats + floats // 8, np.float32)
            yield slabs, self._scratch[:floats]

    def check_fits(self, rows: StepRows) -> None:
        """Raise BudgetError for a step that will never fit."""
        for tier, (_, keys) in zip(self._tiers, rows.parts(self.groups), strict=True):
            if len(keys) > min(tier.capacity, tier.batch):
                self.lend(rows)  # fails, and says how much would be enough

    def check_new(self, rows: StepRows) -> None:
        """Raise BudgetError for a step that trains more new rows than the index has room for."""
        for group, (_, keys) in enumerate(rows.parts(self.groups)):
            with self._in_own_words(group):
                self._tiers[group].check_new(keys)

    def announce(self, rows: StepRows) -> None:
        """Tell the planners of the step after those already announced."""
        self.check_open()
        for planner, (_, keys) in zip(self.planners, rows.parts(self.groups), strict=True):
            if len(keys):  # a step without rows never comes to the planner
                planner.announce(keys)

    def withdraw(self) -> None:
        """Take all announced steps back."""
        for planner in self.planners:
            planner.withdraw()

    def prefetch(self, rows: StepRows) -> StepTicket:
        """Begin to fetch the rows of the oldest announced step that was not fetched yet; after an error go on with it.

        The groups that had room hold their rows meanwhile.
        """
        ticket = rows.coming = rows.coming or StepTicket()
        for group, (_, keys) in enumerate(rows.parts(self.groups)):
            if group == len(ticket.tickets):
                with self._in_own_words(group):
                    ticket.tickets.append(self._tiers[group].prefetch(keys, distinct=True))
        rows.coming = None
        return ticket

    def weights(self, rows: StepRows) -> list[Floats]:
        """Return the weights of a step's rows, of each table float32 [u, dim]; rows without a loan are only read."""
        found: list[Floats] = []
        for table, spec in enumerate(self.specs):
            mine, group = rows.of_table(table), int(self.groups.of[table])
            if rows.loan is None:
                held = self._gathered(group, self.groups.key(table, rows.keys[mine] - self.bases[table]))
            else:
                held = np.take(rows.loan.slabs[group], rows.loan.slots[mine], axis=0, mode="clip")
            found.append(np.ascontiguousarray(held[:, : spec.dim]))
        return found

    def whole(self, rows: StepRows) -> Floats:
        """Return a step's rows with their state, float32 [u, width of the widest]."""
        found = np.zeros((len(rows.keys), max(self.widths)), np.float32)
        for group, (places, keys) in enumerate(rows.parts(self.groups)):
            if rows.loan is None:
                held = self._gathered(group, keys)
            else:
                held = np.take(rows.loan.slabs[group], rows.loan.slots[places], axis=0, mode="clip")
            if len(self.groups) == 1:
                return held
            found[places, : held.shape[1]] = held
        return found

    def rows_of_ids(self, table: int, ids: Ints) -> Ints:
        """Return the rows of ids of a table, of the same shape; IndexError for a row that it does not have."""
        if self.vocabularies is not None and self.vocabularies.has(table):
            self.check_open()
            return self.vocabularies.find_in(table, ids.reshape(-1)).reshape(ids.shape)
        self.check_ids(table, ids)
        return ids

    def read(self, table: int, ids: Ints) -> Floats:
        """Return rows as they are now, weights and state, float32 [n, width]; nothing becomes resident."""
        rows = self.rows_of_ids(table, ids)
        return self._of_table(table, rows)

    def read_unknown(self, table: int) -> Floats:
        """Return the row of unknown ids of a table for any ids, float32 [1, width]."""
        return self._read_row(table, self.specs[table].unknown_row)

    def read_padding(self, table: int) -> Floats:
        """Return the row of the padding of a table for any ids, float32 [1, width]."""
        return self._read_row(table, self.specs[table].padding_row)

    def _read_row(self, table: int, row: int) -> Floats:
        return self._of_table(table, np.array([row]))

    def _of_table(self, table: int, rows: Ints) -> Floats:
        return self._gathered(int(self.groups.of[table]), self.groups.key(table, rows))[..., : self.widths[table]]

    def _gathered(self, group: int, keys: Ints) -> Floats:
        """Return rows of a group with their state, float32 [..., its width], by calls of the tier that have room."""
        tier = self._tiers[group]
        with self._in_own_words(group):
            if keys.size <= tier.batch:
                return tier.gather(keys, keep=False)
            found = np.empty((keys.size, self.groups.widths[group]), np.float32)
            flat = keys.reshape(-1)
            for start in range(0, keys.size, tier.batch):
                part = slice(start, start + tier.batch)
                tier.gather(flat[part], found[part], keep=False)
            return found.reshape(*keys.shape, -1)

    def write(self, table: int, ids: Ints, weights: Floats) -> None:
        """Replace the weights of distinct rows, float32 [n, dim]; their state begins anew."""
        self.check_open()
        self.check_ids(table, ids)
        if self.is_planned:
            raise RuntimeError("weights cannot be replaced inside of a lookahead loop: leave it, and call its close()")
        group = int(self.groups.of[table])
        rows = self._first_rows(ids + self.bases[table], self.groups.widths[group])
        rows[:, : self.specs[table].dim] = weights
        self._scatter(group, self.groups.key(table, ids), rows)

    def _scatter(self, group: int, keys: Ints, rows: Floats) -> None:
        tier = self._tiers[group]
        step = min(tier.batch, tier.capacity)
        for start in range(0, len(keys), step):
            part = slice(start, start + step)
            with self._in_own_words(group):
                tier.scatter(keys[part], rows[part])

    def begin_anew(self, rows: StepRows, added: Sequence[Added]) -> None:
        """Give rows, among those of a step that are lent, the first values of the ids that have them now."""
        if not added:
            return
        assert rows.loan is not None
        first = [self._first_rows_of_ids(one.table, one.ids) for one in added]
        with self._in_own_words(), rows.loan.changing() as slabs:
            for one, new in zip(added, first, strict=True):
                slots = rows.loan.slots[np.searchsorted(rows.keys, one.rows + self.bases[one.table])]
                slabs[self.groups.of[one.table]][slots, : new.shape[1]] = new

    def replace(self, keys: Ints, rows: Floats) -> None:
        """Replace rows with their state, float32 [n, width of the widest]."""
        for group, (places, mine) in enumerate(self.groups.split_any(keys)):
            self._scatter(group, mine, rows[places, : self.groups.widths[group]])

    def stored(self) -> Iterator[Ints]:
        """Yield the keys whose rows are on SSD, in blocks; nothing may be written meanwhile."""
        for group, tier in enumerate(self._tiers):
            for block in tier.stored_keys():
                yield self.groups.everywhere(group, block)

    def checkpoint(self, values: dict[str, bytes] | None = None) -> int:
        """Make everything durable; return the store's generation."""
        self.check_open()
        return self._tiers[0].checkpoint({**self._values(), **(values or {})}, self._write_ids)

    def start_checkpoint(self, values: dict[str, bytes]) -> "Future[int]":
        """Make everything durable as it is now, on a thread; the result is the store's generation."""
        self.check_open()
        return self._tiers[0].start_checkpoint({**self._values(), **values}, self._write_ids)

    def _values(self) -> dict[str, bytes]:
        return self.record.values() | ({} if self.vocabularies is None else self.vocabularies.values())

    def _write_ids(self) -> None:
        side = self._tiers[0].side
        if self.vocabularies is not None and side is not None:
            self.vocabularies.write(side)

    def extra(self) -> dict[str, Any]:
        """Return hyperparameters and the caller's values of the last checkpoint."""
        return decoded_extra(self._store, self._store.get(EXTRA))

    def push(self, url: str, keep: int | None, verify: bool) -> Transfer:
        """Back up the last checkpoint."""
        self.check_open()
        return self._store.push(url, keep=keep, verify=verify)

    def stats(self) -> dict[str, Any]:
        """Return the counts of the tiers, together."""
        self.check_open()
        return stats_of(self._tiers)

    def close(self) -> None:
        """End the threads, and free memory and files; updates since the last checkpoint are lost."""
        self._open, self.planners = False, ()
        self._tiers[0].close()
        self._store.close()
        self._scratch = np.empty(0, np.float32)


def _first_rows_of(groups: RowGroups, first_rows: FirstRows, group: int, numbers: Ints) -> Floats:
    """Return the first values of rows by their keys in a group; it does not know the tables, which hold the tier."""
    return first_rows(groups.everywhere(group, numbers), groups.widths[group])


def _open(path: str, resume: bool) -> Store:
    try:
        if resume and not (os.path.isdir(path) and os.listdir(path)):
            raise nothing_there(path)
        return Store.create(path, KIND)
    except FileExistsError:
        pass
    try:
        return Store.open(path, KIND, writable=True)
    except FormatError as error:
        raise FormatError(f"path={path!r}: {error}") from error
