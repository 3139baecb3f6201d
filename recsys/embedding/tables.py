"""Tables larger than DRAM, behind one tier: a row is its weights with the optimizer's state beside them.

All tables of a collection share a slab, a log and a plan, by the key (where the table begins) + (row): a step looks up,
reads, updates and evicts once, however many tables it needs.
"""

import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memhier.arguments import check_int
from memhier.budget import parse_bytes
from memhier.errors import BudgetError, ClosedError, CorruptionError, FormatError
from memhier.log.parts import LogRecord
from memhier.policies import Belady, Policy
from memhier.recsys.embedding.initial import Initial, Normal
from memhier.recsys.embedding.kernels import Places, distinct_rows
from memhier.recsys.embedding.optimizers import SGD, SparseOptimizer
from memhier.recsys.embedding.records import EXTRA, TableRecord, decoded_extra, nothing_there
from memhier.shield import shielded_init
from memhier.store.store import Store
from memhier.table.loans import Loan, Ticket
from memhier.table.shortage import Shortage
from memhier.table.table import store_bytes
from memhier.table.tiered import KIND, Tiered

__all__ = ["Rows", "TableSpec", "Tables", "check_ids"]

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]

_NAME = "embedding"
# This share of the budget is not the tier's: half of it is for the batches that lookahead knows, and half for what a
# step works with.
_ASIDE = 1 / 8
_NONE = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class TableSpec:
    """One table.

    Attributes
    ----------
    name
        Unique among the tables of a collection.
    rows, dim
        Number of rows, and of weights in each.
    initial
        Weights of rows before they are first trained.
    """

    name: str
    rows: int
    dim: int
    initial: Initial = field(default_factory=Normal)


def check_ids(spec: TableSpec, ids: Ints, name: str = "input") -> None:
    """Raise IndexError for a row that a table does not have; `name` is the argument that has it."""
    if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= spec.rows):
        flat = ids.reshape(-1)
        at = int(np.flatnonzero((flat < 0) | (flat >= spec.rows))[0])
        raise IndexError(f"{name}[{at}]={flat[at]}: expected a row of table {spec.name!r}, 0 to {spec.rows - 1}")


@dataclass(slots=True)
class Rows:
    """The distinct rows of one step, table by table.

    Attributes
    ----------
    keys
        int64 [u]: all of them, rising. Cannot be changed, so that a ticket for them knows them again at once.
    starts
        int64 [tables + 1]: where the rows of each table begin in `keys`, and where the last ones end.
    ends
        int64 [tables]: where the ids of each table end.
    inverse
        int32 [n]: for every id, which of `keys` it is.
    order
        int32 [n]: the places of each table's ids, sorted as torch sorts them; empty where nobody asks for that.
    loan
        Where they lie; None once they have gone back, or where they were only read.
    """

    keys: Ints
    starts: Ints
    ends: Ints
    inverse: Places
    order: Places
    loan: Loan | None = None

    def __post_init__(self) -> None:
        self.keys.flags.writeable = False

    def of_table(self, table: int) -> slice:
        """Return which of `keys` are a table's."""
        return slice(int(self.starts[table]), int(self.starts[table + 1]))

    def places(self, table: int) -> Ints:
        """Return, for every id of a table, which of the table's rows it is."""
        begin = int(self.ends[table - 1]) if table else 0
        places: Ints = self.inverse[begin : int(self.ends[table])].astype(np.int64)
        places -= self.starts[table]
        return places

    def share(self) -> "Rows":
        """Return the same rows, held by themselves."""
        return replace(self, loan=None if self.loan is None else self.loan.share())

    def release(self) -> None:
        """Let the rows go."""
        # Where a forward pass's outputs are dropped before the backward pass, the loan goes with them.
        loan = self.loan
        if loan is not None:
            loan.release()
        self.loan = None


class Tables:
    """Rows of several tables by (table, row), trained through a DRAM budget.

    Attributes
    ----------
    asked
        The argument that has the ids of a table, whose name goes in for ``{!r}``: for messages.

    Parameters
    ----------
    specs
        The tables. A row takes the room of the widest one.
    optimizer
        Of all tables; None for descent, or as the checkpoint has it.
    dram
        Bytes for everything that is held here.
    path
        A folder on SSD.
    seed
        Of first values.
    resume
        Whether to go on from the checkpoint in `path`, which must be there; without, there must be none.
    policy, codec, touched
        As `policy`, `codec` and `rows` in :class:`memhier.table.tiered.Tiered`.
    step_rows
        Most distinct rows of one step.
    """

    asked = "input"

    @shielded_init
    def __init__(
        self,
        specs: Sequence[TableSpec],
        optimizer: SparseOptimizer | None,
        *,
        dram: int | str,
        path: str | os.PathLike[str],
        seed: int = 0,
        resume: bool = False,
        policy: str | Policy = "belady",
        codec: str = "none",
        touched: int | None = None,
        step_rows: int | None = None,
    ) -> None:
        self.specs = tuple(specs)
        self.is_chosen = optimizer is not None  # whether the caller has said how rows are updated
        optimizer = SGD() if optimizer is None else optimizer
        self.optimizer = optimizer
        self.seed = check_int("seed", seed, -(2**63), 2**64 - 1)
        self.widths = [spec.dim + optimizer.state_width(spec.dim) for spec in self.specs]
        if codec != "none" and any(width > spec.dim for width, spec in zip(self.widths, self.specs, strict=True)):
            raise ValueError(
                f"codec={codec!r}: it would round the state of {type(optimizer).__name__} as well, where a little "
                'made nothing moves a weight far; use codec="none", or SGD without momentum, which has no state'
            )
        if codec == "int8":
            raise ValueError(
                'codec="int8": it would lose what a step adds to a row that leaves, and cannot hold a row with a NaN; '
                'use "int8ef", which keeps the errors, or "fp16"'
            )
        # Plain descent applies gradients one after the other, as they come: the order of sums is of no account to it.
        self._adds_up = not isinstance(optimizer, SGD)
        self.bases = np.cumsum([0, *(spec.rows for spec in self.specs)])
        total = int(self.bases[-1])
        self.path = os.fspath(path)
        if touched is not None:
            touched = check_int("touched", touched, 1, 2**31 - 1, "rows")
        if step_rows is not None:
            step_rows = check_int("step_rows", step_rows, 1, 2**31 - 1, "rows")
        self.touched = min(total, 2**31 - 1) if touched is None else touched
        self._pid = os.getpid()
        store = _open(self.path, resume)
        try:
            self.record = TableRecord.read(store, self.specs, optimizer, self.seed, resume)
            self._check_touched(_rows_in(store))
            self._tier = Tiered(
                store,
                _NAME,
                np.float32,
                max(self.widths),
                rows=self.touched,
                dram=dram,
                policy=policy,
                initial=partial(_first_rows, weakref.WeakMethod(self._first_rows)),  # the tier's threads have it
                codec=codec,
                key_space=total,
                batch=step_rows,
                aside=_ASIDE,
            )
        except BaseException:
            store.close()
            raise
        self.window_bytes = int(_ASIDE / 2 * parse_bytes(dram))  # what batches known ahead may take
        self._store = store
        self._open = True
        self._scratch = np.empty(0, np.float32)

    @property
    def capacity(self) -> int:
        """Rows that may be in DRAM at once."""
        return self._tier.capacity

    @property
    def call_rows(self) -> int:
        """Most rows of one call."""
        return self._tier.batch

    @property
    def memory_bytes(self) -> int:
        """DRAM held, in bytes."""
        return self._tier.memory_bytes + self._scratch.nbytes + (store_bytes(self._store) if self._open else 0)

    @property
    def planner(self) -> Belady | None:
        """The policy, where it can be told what comes."""
        policy = self._tier.policy
        return policy if isinstance(policy, Belady) else None

    @property
    def planner_if_open(self) -> Belady | None:
        """The same; None once closed."""
        # At the end of the interpreter the tier closes by itself.
        return self.planner if self._open and not self._tier.closed else None

    @property
    def is_planned(self) -> bool:
        """Whether batches have been announced, which must come next."""
        planner = self.planner
        return planner is not None and planner.pending > 0

    def check_ids(self, table: int, ids: Ints, name: str = "rows") -> None:
        """Raise IndexError for a row that a table does not have; `name` is the argument that has it."""
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
        """Say what a tier lacks in words of the tables' arguments."""
        self.check_open()
        try:
            yield
        except Shortage as error:
            raise self._worded(error) from error

    def _worded(self, error: Shortage) -> BudgetError:
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

    def distinct(self, ids: Sequence[Ints | None]) -> Rows:
        """Return the distinct rows of a step.

        Parameters
        ----------
        ids
            Of each table, int64 [n]; None or empty where it is not needed.

        Raises
        ------
        IndexError
            For a row that a table does not have.
        """
        self.check_open()
        some = [_NONE if wanted is None else wanted for wanted in ids]
        for table, wanted in enumerate(some):
            self.check_ids(table, wanted, self.asked.format(self.specs[table].name))
        flat = np.concatenate(some, dtype=np.int64)
        ends = np.cumsum([len(wanted) for wanted in some])
        return Rows(*distinct_rows(flat, ends, self.bases, in_order=self._adds_up))

    def lend_again(self, rows: Rows) -> None:
        """Keep rows resident that other steps hold already."""
        with self._in_own_words():
            rows.loan = self._tier.lend(rows.keys, again=True)

    @contextmanager
    def changing(self, rows: Rows) -> Iterator[Floats]:
        """Give all rows in DRAM, writable: those of a step may be changed inside the block."""
        assert rows.loan is not None
        with self._in_own_words(), rows.loan.changing() as slab:
            yield slab

    def lend(self, rows: Rows, ticket: Ticket | None = None) -> None:
        """Make the rows of a step resident, and keep them so until they are released; `ticket` fetched them ahead."""
        needed = len(rows.keys)
        if needed > self.call_rows:
            raise BudgetError(
                f"a step needs {needed} distinct rows at once, but working memory is set aside for "
                f"step_rows={self.call_rows}; open the tables with step_rows={needed}, which would be enough, or make "
                "batches smaller"
            )
        with self._in_own_words():
            rows.loan = self._tier.lend(rows.keys, ticket=ticket)

    def check_fits(self, rows: Rows) -> None:
        """Raise BudgetError for a step that will never fit."""
        if len(rows.keys) > min(self.capacity, self.call_rows):
            # Says what would be enough.
            self.lend(rows)

    def announce(self, rows: Rows) -> None:
        """Tell the planner of the step after those already announced."""
        planner = self.planner
        assert planner is not None
        planner.announce(rows.keys)

    def prefetch(self, rows: Rows) -> Ticket:
        """Begin to fetch the rows of the oldest announced step that was not fetched yet."""
        with self._in_own_words():
            return self._tier.prefetch(rows.keys)

    def weights(self, rows: Rows) -> list[Floats]:
        """Return the weights of a step's rows, of each table float32 [u, dim]; without a loan they are only read."""
        found = self.whole(rows)
        return [np.ascontiguousarray(found[rows.of_table(table), : spec.dim]) for table, spec in enumerate(self.specs)]

    def whole(self, rows: Rows) -> Floats:
        """Return a step's rows with their state, float32 [u, width of the widest]."""
        if rows.loan is None:
            return self._gathered(rows.keys)
        return np.take(rows.loan.rows, rows.loan.slots, axis=0, mode="clip")

    def read(self, table: int, ids: Ints) -> Floats:
        """Return rows as they are now, weights and state, float32 [n, width]; nothing becomes resident."""
        self.check_ids(table, ids)
        return self._gathered(ids + self.bases[table])[..., : self.widths[table]]

    def _gathered(self, keys: Ints) -> Floats:
        """Return rows with their state, float32 [..., width of the widest], as many at a time as a call takes."""
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

    def replace(self, keys: Ints, rows: Floats) -> None:
        """Replace rows with their state, float32 [n, width of the widest]."""
        self._tier.scatter(keys, rows)

    def stored(self) -> Iterator[Ints]:
        """Yield the keys whose rows are on SSD, in blocks; nothing may be written meanwhile."""
        yield from self._tier.stored_keys()

    def scratch(self, count: int) -> Floats:
        """Return so many floats to work with inside of a change of rows, until the next call."""
        if len(self._scratch) < count:
            self._scratch = np.empty(count + count // 8, np.float32)
        return self._scratch[:count]

    def checkpoint(self, values: dict[str, bytes] | None = None) -> int:
        """Make everything durable; return the store's generation."""
        self.check_open()
        return self._tier.checkpoint({**self.record.values(), **(values or {})})

    def start_checkpoint(self, values: dict[str, bytes]) -> "Future[int]":
        """Make everything durable as it is now, on a thread; the result is the store's generation."""
        self.check_open()
        return self._tier.start_checkpoint({**self.record.values(), **values})

    def value(self, key: str) -> bytes | None:
        """Return a value of the last checkpoint."""
        return self._store.get(key)

    def extra(self) -> dict[str, Any]:
        """Return hyperparameters and values of the caller's that the last checkpoint has."""
        return decoded_extra(self._store, self._store.get(EXTRA))

    def stats(self) -> dict[str, Any]:
        """Return the tier's counts."""
        self.check_open()
        return self._tier.stats()

    def close(self) -> None:
        """Let go of threads, memory and files; what was trained since the last checkpoint is lost."""
        self._open = False
        self._tier.close()
        self._store.close()
        self._scratch = np.empty(0, np.float32)

    def _first_rows(self, keys: Ints) -> Floats:
        tables = np.searchsorted(self.bases, keys, side="right") - 1
        return self._made(len(keys), tables, keys - self.bases[tables], self.specs)

    def _made(self, count: int, tables: Ints, ids: Ints, specs: Sequence[TableSpec]) -> Floats:
        """Return rows as they are before they are trained; `specs` say how many there are of each table in all."""
        rows = np.zeros((count, max(self.widths)), np.float32)
        for table in np.unique(tables).tolist():
            spec, mine = specs[table], tables == table
            made = np.full((np.count_nonzero(mine), rows.shape[1]), self.optimizer.first_state(), np.float32)
            made[:, : spec.dim] = spec.initial.weights(self.seed, table, ids[mine], spec.dim, spec.rows)
            made[:, self.widths[table] :] = 0
            rows[mine] = made
        return rows


def _first_rows(made: weakref.WeakMethod[Callable[[Ints], Floats]], keys: Ints) -> Floats:
    first_rows = made()
    assert first_rows is not None, "the tier is used by its tables alone"
    return first_rows(keys)


def _rows_in(store: Store) -> int:
    """Return how many rows a store holds."""
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
