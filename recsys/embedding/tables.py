"""Tables larger than DRAM, behind one tier: a row is its weights with the optimizer's state beside them.

All tables of a collection share a slab, a log and a plan, under the key (first key of the table) + (row): a step looks
up, reads, updates and evicts once, with any number of tables.
"""

import functools
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from memhier import backend
from memhier.arguments import check_here, check_int
from memhier.budget import parse_bytes
from memhier.errors import BudgetError, ClosedError, CorruptionError, FormatError
from memhier.log.parts import LogRecord
from memhier.policies import Belady, Policy
from memhier.recsys.embedding.device.link import check_device
from memhier.recsys.embedding.initial import FirstRows, TableSpec
from memhier.recsys.embedding.optimizers import SGD
from memhier.recsys.embedding.records import EXTRA, IDS, TableRecord, decoded_extra, nothing_there
from memhier.recsys.embedding.table_rules import Optimizers, TableRules, rules_in
from memhier.recsys.embedding.vocabularies import Added, Vocabularies
from memhier.shield import shielded_init
from memhier.store.store import Store, Transfer
from memhier.table.keep_all import KeepAll
from memhier.table.loans import Loan, Ticket
from memhier.table.shortage import Shortage
from memhier.table.sizes import TRAINING_ASIDE, rows_within
from memhier.table.table import store_bytes
from memhier.table.tiered import KIND, Tiered

__all__ = ["StepRows", "TableOptions", "Tables", "Update", "check_ids", "distinct_rows", "rows_in"]

Ints = NDArray[np.int64]
Places = NDArray[np.int32]
Floats = NDArray[np.float32]
Update = Literal["backward", "step"]

_NAME = "embedding"
_NOWHERE = np.empty(0, np.int32)
# torch may sort longer vectors with several threads, and then orders equal ids in another way.
_TORCH_SORTS_ALONE = 32768
_IDS_MAX = 2**31
_ROWS_MAX = 2**31 - 1
# Look-ups in a row that read no row from SSD, until they are taken for ones that need none.
_CALM_LOOK_UPS = 8
# About the buffers of log and reader that an index leaves in a small budget.
_BUFFERS_BYTES = 2**22


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
    """

    __slots__ = ("ends", "inverse", "keys", "loan", "order", "starts")

    def __init__(
        self,
        keys: Ints,
        starts: Ints,
        ends: Ints | None = None,
        inverse: Places = _NOWHERE,
        order: Places = _NOWHERE,
        loan: Loan | None = None,
    ) -> None:
        keys.flags.writeable = False
        self.starts: Ints
        self.order: Places
        self.keys: Ints
        self.inverse: Places
        self.keys, self.starts, self.inverse, self.order, self.loan = keys, starts, inverse, order, loan
        self.ends: NDArray[np.int64] = np.zeros(len(starts) - 1, np.int64) if ends is None else ends

    @property
    def nbytes(self) -> int:
        """The size of the ids and of the arrays, in bytes."""
        ids = 8 * len(self.inverse)
        return ids + self.keys.nbytes + self.inverse.nbytes + self.order.nbytes

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
        The tables. A row takes the room of the widest one.
    options
        The options of the module.
    first_rows
        Makes untrained rows by key; by default those of `specs`.
    asked
        The argument that holds the ids of a table, for messages; the table's name goes in for ``{!r}``.

    Attributes
    ----------
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
        total = int(self.bases[-1])
        self.path: str = os.fspath(options.path)
        self._asked = asked
        made = FirstRows(self.specs, rules.of, self.seed)
        self._first_rows, self._first_rows_of_ids = first_rows or made, made.of_ids
        self._pid = os.getpid()
        self.vocabularies: Vocabularies | None = None
        side = Vocabularies.side_log(self.specs)
        store = _open(self.path, options.resume)
        try:
            self.record: TableRecord = TableRecord.read(store, self.specs, rules, self.seed, options.resume)
            stored = rows_in(store)
            room = self._room(stored, parse_bytes(options.dram))
            self.touched: int = room if options.touched is None else int(options.touched)
            self._check_touched(stored)
            self._tier = Tiered(
                store,
                _NAME,
                np.float32,
                max(self.widths),
                rows=self.touched,
                dram=options.dram,
                policy=options.policy,
                initial=self._first_rows,
                codec=options.codec,
                key_space=total,
                batch=None if options.step_rows is None else int(options.step_rows),
                aside=TRAINING_ASIDE,
                side=side,
            )
        except BaseException:
            store.close()
            raise
        self.window_bytes: int = int(TRAINING_ASIDE / 2 * parse_bytes(options.dram))  # for batches known ahead
        policy = self._tier.policy
        self.planner = policy if isinstance(policy, Belady | KeepAll) else None  # None once closed
        self.capacity: int = self._tier.capacity  # rows in DRAM at most
        self.call_rows: int = self._tier.batch  # rows of one call at most
        self._store = store
        self._open = True
        self._scratch = np.empty(0, np.float32)
        self._refetches = self._calm = 0
        if side is not None:
            try:
                self.vocabularies = self._opened_vocabularies(store, options.resume)
            except BaseException:
                self.close()
                raise

    def _opened_vocabularies(self, store: Store, resume: bool) -> "Vocabularies":
        vocabularies = Vocabularies(self.specs)
        log = self._tier.side
        if resume and log is not None:
            vocabularies.read(log, store.get(IDS), self.path)
        return vocabularies

    @property
    def memory_bytes(self) -> int:
        """DRAM held, in bytes."""
        maps = 0 if self.vocabularies is None else self.vocabularies.memory_bytes
        return self._tier.memory_bytes + self._scratch.nbytes + maps + (store_bytes(self._store) if self._open else 0)

    @property
    def is_planned(self) -> bool:
        """Whether announced batches wait to be fetched, so that a call for other rows has to fail."""
        return self.planner is not None and self.planner.pending > 0

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

    def _room(self, stored: int, dram: int) -> int:
        """Return the rows that the index has room for: all, if that takes half of the budget at most.

        Otherwise it grows with the rows that are stored, as long as it leaves half of the budget and some buffers.
        """
        row_bytes, total = 4 * max(self.widths), int(self.bases[-1])
        if rows_within(dram // 2, row_bytes, total) == total:
            return total
        first, most = (rows_within(part, row_bytes, total) for part in (dram // 4, (dram - _BUFFERS_BYTES) // 2))
        return min(max(first, min(stored + stored // 2, most), stored), total, _ROWS_MAX)

    def _check_touched(self, stored: int) -> None:
        if stored > self.bases[-1]:
            raise CorruptionError(f"{self.path}: {stored} rows are stored, of tables of {self.bases[-1]}")
        if stored > self.touched:
            raise BudgetError(
                f"touched={self.touched}: {stored} rows of {self.path!r} were trained already; expected at least as "
                f"many, and at most the {self.bases[-1]} that there are"
            )

    @contextmanager
    def _in_own_words(self) -> Iterator[None]:
        """Word a shortage of the tier by the tables' arguments."""
        self.check_open()
        try:
            yield
        except Shortage as error:
            raise self._worded(error) from error

    def _worded(self, error: Shortage) -> BudgetError:
        if error.of == "rows" and self.options.touched is None:
            given = dram = parse_bytes(self.options.dram)
            wanted = min(error.held + error.needed, _ROWS_MAX)
            while self._room(error.held, dram) < wanted:
                dram *= 2
            more = "" if dram == given else f" and dram={dram}"
            return BudgetError(
                f"dram={self.options.dram}: the index of rows in use has room for {error.room} of them, of which "
                f"{error.held} were trained, and this step has {error.needed} more; take a checkpoint and open the "
                f"tables again with resume=True{more}, which gives the index more room. The step has changed nothing"
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
        beside = f", beside {error.held} of look-ups before it and of batches fetched ahead" if error.held else ""
        return BudgetError(
            f"a step needs {error.needed} distinct rows at once{beside}, but DRAM has room for {error.room}; "
            f"dram={error.enough} would be enough, or smaller batches"
        )

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

    def lend(self, rows: StepRows, ticket: Ticket | None = None) -> None:
        """Load the rows of a step and keep them in DRAM until they are released; `ticket` fetched them ahead."""
        needed = len(rows.keys)
        if needed > self.call_rows:
            raise BudgetError(
                f"a step needs {needed} distinct rows at once, but working memory is set aside for "
                f"step_rows={self.call_rows}; open the tables with step_rows={needed}, which would be enough, or make "
                "batches smaller"
            )
        with self._in_own_words():
            rows.loan = self._tier.lend(rows.keys, distinct=True, ticket=ticket)
        before, self._refetches = self._refetches, self._tier.refetches
        self._calm = self._calm + 1 if self._refetches == before else 0

    def lend_again(self, rows: StepRows) -> None:
        """Keep rows in DRAM that other steps hold already."""
        with self._in_own_words():
            rows.loan = self._tier.lend(rows.keys, again=True)

    @contextmanager
    def changing(self, rows: StepRows, floats: int = 0) -> Iterator[tuple[Floats, Floats]]:
        """Give all rows in DRAM, writable, and so many floats of working memory.

        The block may change the rows of the step; other calls wait until it ends.
        """
        assert rows.loan is not None
        with self._in_own_words(), rows.loan.changing() as slab:
            if len(self._scratch) < floats:
                self._scratch = np.empty(floats + floats // 8, np.float32)
            yield slab, self._scratch[:floats]

    def check_fits(self, rows: StepRows) -> None:
        """Raise BudgetError for a step that will never fit."""
        if len(rows.keys) > min(self.capacity, self.call_rows):
            self.lend(rows)  # fails, and says how much would be enough

    def announce(self, rows: StepRows) -> None:
        """Tell the planner of the step after those already announced."""
        self.check_open()
        assert self.planner is not None
        if len(rows.keys):  # a step without rows never comes to the planner
            self.planner.announce(rows.keys)

    def prefetch(self, rows: StepRows) -> Ticket:
        """Begin to fetch the rows of the oldest announced step that was not fetched yet."""
        with self._in_own_words():
            return self._tier.prefetch(rows.keys, distinct=True)

    def weights(self, rows: StepRows) -> list[Floats]:
        """Return the weights of a step's rows, of each table float32 [u, dim]; rows without a loan are only read."""
        found = self.whole(rows)
        return [np.ascontiguousarray(found[rows.of_table(table), : spec.dim]) for table, spec in enumerate(self.specs)]

    def whole(self, rows: StepRows) -> Floats:
        """Return a step's rows with their state, float32 [u, width of the widest]."""
        if rows.loan is None:
            return self._gathered(rows.keys)
        return np.take(rows.loan.rows, rows.loan.slots, axis=0, mode="clip")

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
        return self._gathered(rows + self.bases[table])[..., : self.widths[table]]

    def read_unknown(self, table: int) -> Floats:
        """Return the row of unknown ids of a table for any ids, float32 [1, width]."""
        return self._read_row(table, self.specs[table].unknown_row)

    def read_padding(self, table: int) -> Floats:
        """Return the row of the padding of a table for any ids, float32 [1, width]."""
        return self._read_row(table, self.specs[table].padding_row)

    def _read_row(self, table: int, row: int) -> Floats:
        return self._gathered(np.array([row]) + self.bases[table])[:, : self.widths[table]]

    def _gathered(self, keys: Ints) -> Floats:
        """Return rows with their state, float32 [..., width of the widest], by calls of the tier that have room."""
        with self._in_own_words():
            if keys.size <= self.call_rows:
                return self._tier.gather(keys, keep=False)
            found = np.empty((keys.size, max(self.widths)), np.float32)
            flat = keys.reshape(-1)
            for start in range(0, keys.size, self.call_rows):
                part = slice(start, start + self.call_rows)
                self._tier.gather(flat[part], found[part], keep=False)
            return found.reshape(*keys.shape, -1)

    def write(self, table: int, ids: Ints, weights: Floats) -> None:
        """Replace the weights of distinct rows, float32 [n, dim]; their state begins anew."""
        self.check_open()
        self.check_ids(table, ids)
        if self.is_planned:
            raise RuntimeError("weights cannot be replaced inside of a lookahead loop: leave it, and call its close()")
        rows = self._first_rows(ids + self.bases[table])
        rows[:, : self.specs[table].dim] = weights
        step = min(self.call_rows, self.capacity)
        for start in range(0, len(ids), step):
            part = slice(start, start + step)
            with self._in_own_words():
                self._tier.scatter(ids[part] + self.bases[table], rows[part])

    def begin_anew(self, rows: StepRows, added: Sequence[Added]) -> None:
        """Give rows, among those of a step that are lent, the first values of the ids that have them now."""
        if not added:
            return
        assert rows.loan is not None
        keys = np.concatenate([one.rows + self.bases[one.table] for one in added])
        first = np.concatenate([self._first_rows_of_ids(one.table, one.ids) for one in added])
        slots = rows.loan.slots[np.searchsorted(rows.keys, keys)]
        with self._in_own_words(), rows.loan.changing() as slab:
            slab[slots] = first

    def replace(self, keys: Ints, rows: Floats) -> None:
        """Replace rows with their state, float32 [n, width of the widest]."""
        self._tier.scatter(keys, rows)

    def stored(self) -> Iterator[Ints]:
        """Yield the keys whose rows are on SSD, in blocks; nothing may be written meanwhile."""
        yield from self._tier.stored_keys()

    def checkpoint(self, values: dict[str, bytes] | None = None) -> int:
        """Make everything durable; return the store's generation."""
        self.check_open()
        return self._tier.checkpoint({**self._values(), **(values or {})}, self._write_ids)

    def start_checkpoint(self, values: dict[str, bytes]) -> "Future[int]":
        """Make everything durable as it is now, on a thread; the result is the store's generation."""
        self.check_open()
        return self._tier.start_checkpoint({**self._values(), **values}, self._write_ids)

    def _values(self) -> dict[str, bytes]:
        return self.record.values() | ({} if self.vocabularies is None else self.vocabularies.values())

    def _write_ids(self) -> None:
        side = self._tier.side
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
        """Return the tier's counts."""
        self.check_open()
        return self._tier.stats()

    def close(self) -> None:
        """End the threads, and free memory and files; updates since the last checkpoint are lost."""
        self._open, self.planner = False, None
        self._tier.close()
        self._store.close()
        self._scratch = np.empty(0, np.float32)


def rows_in(store: Store) -> int:
    """Return the number of rows that a store holds."""
    value = store.get(f"log/{_NAME}")
    record = None if value is None else LogRecord.decode(value)
    return 0 if record is None else record.live


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
