"""The plan of embedding tables: how many machines hold them, and how long a step waits for its rows."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.arguments import check_int, check_number
from memhier.budget import format_bytes
from memhier.cache.slab_memory import SlabLayout
from memhier.errors import BudgetError
from memhier.io.page_file import PAGE_BYTES
from memhier.io.reader import Reader
from memhier.log.compaction import rewriting_bytes
from memhier.log.parts import ENTRY
from memhier.planning.node import Node
from memhier.recsys.plan.zipf import Zipf
from memhier.rows.rows import rows_per_page
from memhier.table.sizes import TRAINING_ASIDE, Sizes, TierNeeds, log_bytes, policy_bytes

__all__ = ["TablePlan", "TableWorkload", "fewest", "plan_tables"]

_DRAM_SHARE = 0.85  # of a machine, for the tables; the rest is for the system, torch and the dense model
_BUSY = 0.7  # of the drives' reads at most
_LOG_SHARE = 0.5  # of a log is living rows, at least
_NODES_MOST = 1 << 24
_ROWS_MOST = 2**31 - 1  # that one machine's tables write

Ints = npt.NDArray[np.int64]
Limit: TypeAlias = Literal["DRAM", "disk", "rows a machine", "step time"]


@dataclass(frozen=True, slots=True)
class TableWorkload:
    """Tables and their training.

    Attributes
    ----------
    rows
        Rows of all tables that training touches.
    row_bytes
        Bytes of one row with the optimizer's state.
    batch
        Rows that a step looks up on all machines together, repeats among them.
    exponent
        Of the power law of accesses; see :class:`memhier.recsys.plan.Zipf`.
    step_ms
        Milliseconds that a step computes; reads are to hide behind it. None sets no limit.
    """

    rows: int
    row_bytes: int
    batch: int
    exponent: float = 1.05
    step_ms: float | None = None

    def __post_init__(self) -> None:
        check_int("rows", self.rows, 1, 2**50)
        check_int("row_bytes", self.row_bytes, 1, 2**24)
        check_int("batch", self.batch, 1, 2**40)
        check_number("exponent", self.exponent, 0, 3)
        if self.step_ms is not None:
            check_number("step_ms", self.step_ms, 0, above=True)


@dataclass(frozen=True, slots=True)
class TablePlan:
    """The plan of :func:`plan_tables`; bytes, rows and reads are those of one machine.

    Attributes
    ----------
    workload, node
        The question.
    nodes
        Machines.
    limit
        The limit that decides their number.
    rows, resident
        Rows that a machine owns, and rows in its DRAM at a time.
    index_bytes, dram_bytes
        DRAM of the log's index and buffers, and the whole budget.
    disk_bytes
        Of the log, half of it dead rows at most.
    hit_ratio
        Share of all accesses that find their row in DRAM.
    distinct, reads
        Distinct rows that a step needs, and rows that it reads from SSD.
    written_bytes
        Bytes that a step appends, compaction included.
    io_ms
        Milliseconds that the drives take for the reads of a step: steps cannot be faster.
    step_ms
        The step with `workload.step_ms` of computing, reads hidden; None where that is not given.
    assumptions
        Sentences.
    """

    workload: TableWorkload
    node: Node
    nodes: int
    limit: Limit
    rows: int
    resident: int
    index_bytes: int
    dram_bytes: int
    disk_bytes: int
    hit_ratio: float
    distinct: float
    reads: float
    written_bytes: float
    io_ms: float
    step_ms: float | None
    assumptions: tuple[str, ...]


def plan_tables(workload: TableWorkload, node: Node, *, sample: npt.ArrayLike | None = None) -> TablePlan:
    """Plan tables in training, each row owned by one machine.

    Parameters
    ----------
    workload
        Rows, batch and computing time.
    node
        One machine.
    sample
        int64 [n]: ids in the order of training, each id of its own row. The exponent is fitted to them, in place of the
        workload's.

    Raises
    ------
    ValueError, TypeError
        When an argument is out of its range, or no number of machines is enough.

    Examples
    --------
    >>> from memhier.planning.node import Node
    >>> from memhier.recsys.plan import TableWorkload, plan_tables
    >>> plan = plan_tables(TableWorkload(10**9, 128, 65536), Node.parse("16 cores, 64 GiB, NVMe 800k IOPS 2 TB"))
    >>> plan.nodes, 0.5 < plan.hit_ratio < 1
    (1, True)
    """
    law, words = Zipf(workload.rows, workload.exponent), "given, not measured"
    if sample is not None:
        law, words = _fitted(np.asarray(sample), workload)
    with Reader() as reader:
        buffers = reader.planned_bytes
    limits: list[tuple[Limit, Callable[[int], bool]]] = [
        ("rows a machine", lambda nodes: -(-workload.rows // nodes) <= _ROWS_MOST),
        ("DRAM", lambda nodes: _resident(workload, node, nodes, buffers)[0] > 0),
        ("disk", lambda nodes: _disk_bytes(-(-workload.rows // nodes), workload.row_bytes) <= node.disk_bytes),
        ("step time", lambda nodes: _keeps_step(workload, node, law, nodes, buffers)),
    ]  # fmt: skip
    nodes, limit = fewest(limits, f"node={node}: rows={workload.rows:,}, row_bytes={workload.row_bytes}")
    rows, row_bytes = -(-workload.rows // nodes), workload.row_bytes
    resident, index_bytes = _resident(workload, node, nodes, buffers)
    missed = law.missed(workload.batch, resident * nodes) / nodes
    io_ms = 1e3 * _io_s(missed, row_bytes, node)
    return TablePlan(
        workload=workload, node=node, nodes=nodes, limit=limit, rows=rows, resident=resident, index_bytes=index_bytes,
        dram_bytes=int(_DRAM_SHARE * node.dram), disk_bytes=_disk_bytes(rows, row_bytes),
        hit_ratio=law.hit_ratio(resident * nodes), distinct=law.distinct(workload.batch) / nodes, reads=missed,
        written_bytes=missed * (row_bytes + ENTRY.itemsize) / _LOG_SHARE, io_ms=io_ms,
        step_ms=None if workload.step_ms is None else max(workload.step_ms, io_ms),
        assumptions=(
            f"Accesses follow a power law of exponent {law.exponent:.3f} ({words}), each independent of the others.",
            "DRAM holds the most popular rows; lookahead by Belady's rule reads no more than that.",
            f"{_DRAM_SHARE:.0%} of a node's DRAM ({format_bytes(_DRAM_SHARE * node.dram)}) is the tables' budget, an "
            "eighth of which is left to batches ahead.",
            "Every row is written sooner or later, every row that leaves DRAM has changed, and half of the log may be "
            "dead rows.",
            f"Drives serve {_BUSY:.0%} of their reads ({node}); writes do not slow reads down.",
            "Rows lie evenly on the machines. Processor time, and the exchange of rows and gradients, are not counted.",
        ),
    )  # fmt: skip


def fewest(limits: list[tuple[Limit, Callable[[int], bool]]], question: str) -> tuple[int, Limit]:
    """Return the fewest machines with which every limit holds, and the limit that asks for the most.

    Raises
    ------
    ValueError
        When no number is enough; the message names the limit.
    """
    best, limit = 1, limits[-1][0]
    for name, holds in limits:
        high = best  # a limit may ask only what holds with as many machines as those before it need
        while not holds(high):
            if high > _NODES_MOST:
                raise ValueError(f"{question}: {_NODES_MOST:,} machines do not meet the limit of {name}")
            high *= 2
        low = best - 1 if high == best else high // 2
        while high - low > 1 and high > best:
            middle = (low + high) // 2
            low, high = (low, middle) if holds(middle) else (middle, high)
        if high > best:
            best, limit = high, name
    return best, limit


def _fitted(ids: npt.NDArray[np.int64], workload: TableWorkload) -> tuple[Zipf, str]:
    """Return the law of a sample, and words on how well it tells a half of them."""
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or len(ids) < 2:
        raise ValueError(f"sample: {ids.dtype} of shape {list(ids.shape)}: expected two ids or more, int64 [n]")
    ids = ids.astype(np.int64)
    distinct = len(np.unique(ids))
    if distinct > workload.rows:
        raise ValueError(f"sample: {distinct:,} distinct ids, rows={workload.rows:,}: expected at least as many rows")
    law = Zipf.fit(workload.rows, len(ids), distinct)
    half = ids[: len(ids) // 2]
    words = (
        f"fitted to {len(ids):,} ids of {distinct:,} rows; by it the first half has {law.distinct(len(half)):,.0f} "
        f"rows, and it has {len(np.unique(half)):,}"
    )
    return law, words


def _resident(workload: TableWorkload, node: Node, nodes: int, buffers: int) -> tuple[int, int]:
    """Return the rows that one machine's DRAM holds, 0 where the budget is too small, and the bytes beside them."""
    rows, row_bytes = -(-workload.rows // nodes), workload.row_bytes
    fixed = log_bytes(rows, row_bytes, rows) + rewriting_bytes(row_bytes) + buffers
    layout = SlabLayout(1, np.dtype(np.uint8), (row_bytes,))
    batch = -(-workload.batch // nodes)
    needs = TierNeeds(layout, row_bytes, True, rows, batch, policy_bytes("belady"), fixed, TRAINING_ASIDE)
    try:
        return min(rows, Sizes(needs, int(_DRAM_SHARE * node.dram)).solve("belady")), fixed
    except BudgetError:
        return 0, fixed


def _disk_bytes(rows: int, row_bytes: int) -> int:
    packed = rows_per_page(row_bytes)
    each = PAGE_BYTES / packed if packed else float(row_bytes)
    return math.ceil(rows * (each + ENTRY.itemsize) / _LOG_SHARE)


def _io_s(missed: float, row_bytes: int, node: Node) -> float:
    pages = 1 if rows_per_page(row_bytes) else 1 + math.ceil(row_bytes / PAGE_BYTES)
    return missed * pages / (_BUSY * node.iops)


def _keeps_step(workload: TableWorkload, node: Node, law: Zipf, nodes: int, buffers: int) -> bool:
    if workload.step_ms is None:
        return True
    resident = _resident(workload, node, nodes, buffers)[0]
    missed = law.missed(workload.batch, resident * nodes) / nodes
    return 1e3 * _io_s(missed, workload.row_bytes, node) <= workload.step_ms
