"""The plan of a replay buffer: machines, samples in DRAM and on SSD, and the reads and writes of a step."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from memhier.arguments import check_int, check_number
from memhier.budget import format_bytes
from memhier.io.page_file import PAGE_BYTES
from memhier.planning.node import Node
from memhier.recsys.plan.table_plan import Limit, fewest
from memhier.recsys.replay.placement.admit import Reservoir
from memhier.recsys.replay.policies import FixedRatio, RandomSwap, swaps
from memhier.recsys.replay.schema import Schema
from memhier.recsys.replay.settings import BufferSettings
from memhier.rows.rows import rows_per_page

__all__ = ["ReplayPlan", "ReplayWorkload", "plan_replay"]

_DRAM_SHARE = 0.85  # of a machine, for the buffer; the rest is for the system and the learner
_BUSY = 0.7  # of the drives' reads at most
_INDEX_BYTES = 100  # of DRAM for each stored sample, at most
_REWRITTEN = 2  # times that a byte is appended, compaction included


@dataclass(frozen=True, slots=True)
class ReplayWorkload:
    """A replay buffer and its use.

    Attributes
    ----------
    samples
        Samples on SSD, on all machines together.
    sample_bytes
        Bytes of one sample.
    batch
        Samples of one step.
    add_rate
        Samples a second that arrive.
    step_ms
        Milliseconds of a step; None sets no limit to its reads.
    ratio
        Share of the used samples that are swapped.
    """

    samples: int
    sample_bytes: int
    batch: int
    add_rate: float = 0.0
    step_ms: float | None = None
    ratio: float = 0.5

    def __post_init__(self) -> None:
        check_int("samples", self.samples, 1, 2**50)
        check_int("sample_bytes", self.sample_bytes, 1, 2**30)
        check_int("batch", self.batch, 1, 2**30)
        check_number("add_rate", self.add_rate, 0, 1e12)
        check_number("ratio", self.ratio, 0, 1)
        if self.step_ms is not None:
            check_number("step_ms", self.step_ms, 0, above=True)


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    """The plan of :func:`plan_replay`; all but `nodes` is of one machine.

    Attributes
    ----------
    workload, node
        The question.
    nodes, limit
        Machines, and the limit that decides their number.
    samples, memory_samples
        On SSD and in DRAM.
    index_bytes, dram_bytes, disk_bytes
        DRAM of the index of storage, the whole budget, and room on SSD.
    batch, reads, read_bytes
        Samples of a step, those that its swaps read, and their bytes.
    written_bytes_per_s
        Of samples that arrive, compaction included.
    io_ms
        Milliseconds that the drives take for the reads of a step.
    assumptions
        Sentences.
    """

    workload: ReplayWorkload
    node: Node
    nodes: int
    limit: Limit
    samples: int
    memory_samples: int
    index_bytes: int
    dram_bytes: int
    disk_bytes: int
    batch: int
    reads: int
    read_bytes: int
    written_bytes_per_s: float
    io_ms: float
    assumptions: tuple[str, ...]


def plan_replay(workload: ReplayWorkload, node: Node) -> ReplayPlan:
    """Plan a replay buffer, its samples spread evenly over machines.

    Raises
    ------
    ValueError, TypeError
        When an argument is out of its range, or no number of machines is enough.

    Examples
    --------
    >>> from memhier.planning.node import Node
    >>> from memhier.recsys.plan import ReplayWorkload, plan_replay
    >>> node = Node.parse("8 cores, 32 GiB, NVMe 500k IOPS 2 TB")
    >>> plan = plan_replay(ReplayWorkload(100_000_000, 3072, 256, add_rate=1000), node)
    >>> plan.nodes, plan.reads, plan.memory_samples < plan.samples
    (1, 128, True)
    """
    settings = BufferSettings(
        Schema({"sample": ("uint8", workload.sample_bytes)}), {}, Reservoir(), RandomSwap(workload.ratio), 0, 1, None
    )
    limits: list[tuple[Limit, Callable[[int], bool]]] = [
        ("DRAM", lambda nodes: _slots(settings, workload, node, nodes) > 0),
        ("disk", lambda nodes: _disk_bytes(settings, workload, node, nodes) <= node.disk_bytes),
        ("step time", lambda nodes: workload.step_ms is None or _io_ms(workload, node, nodes) <= workload.step_ms),
    ]  # fmt: skip
    nodes, limit = fewest(limits, f"node={node}: samples={workload.samples:,} of {workload.sample_bytes} bytes")
    samples, batch = -(-workload.samples // nodes), -(-workload.batch // nodes)
    slots, reads = _slots(settings, workload, node, nodes), swaps(FixedRatio(workload.ratio), batch)
    return ReplayPlan(
        workload=workload, node=node, nodes=nodes, limit=limit, samples=samples, memory_samples=min(slots, samples),
        index_bytes=_INDEX_BYTES * samples, dram_bytes=int(_DRAM_SHARE * node.dram),
        disk_bytes=_disk_bytes(settings, workload, node, nodes), batch=batch, reads=reads,
        read_bytes=reads * workload.sample_bytes,
        written_bytes_per_s=_REWRITTEN * workload.add_rate * workload.sample_bytes / nodes,
        io_ms=_io_ms(workload, node, nodes),
        assumptions=(
            "Samples have one length and keep their bytes on SSD; each arriving one is stored and replaces another.",
            f"{_DRAM_SHARE:.0%} of a node's DRAM ({format_bytes(_DRAM_SHARE * node.dram)}) is the buffer's budget; the "
            f"index of storage takes {_INDEX_BYTES} bytes a sample.",
            f"Each byte that arrives is appended {_REWRITTEN} times, compaction included; storage has room for each "
            "sample twice.",
            f"Drives serve {_BUSY:.0%} of their reads ({node}); writes do not slow reads down.",
            "A step's batch is drawn from DRAM; the reads of its swaps hide behind the next step.",
        ),
    )  # fmt: skip


def _slots(settings: BufferSettings, workload: ReplayWorkload, node: Node, nodes: int) -> int:
    """Return the samples that one machine's DRAM holds, 0 where it is too small."""
    left = int(_DRAM_SHARE * node.dram) - _INDEX_BYTES * -(-workload.samples // nodes)
    return settings.slots_within(left)


def _disk_bytes(settings: BufferSettings, workload: ReplayWorkload, node: Node, nodes: int) -> int:
    return settings.storage_bytes(-(-workload.samples // nodes), _slots(settings, workload, node, nodes))


def _io_ms(workload: ReplayWorkload, node: Node, nodes: int) -> float:
    pages = 1 if rows_per_page(workload.sample_bytes) else 1 + math.ceil(workload.sample_bytes / PAGE_BYTES)
    return 1e3 * swaps(FixedRatio(workload.ratio), -(-workload.batch // nodes)) * pages / (_BUSY * node.iops)
