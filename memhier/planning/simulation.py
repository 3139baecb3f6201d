"""How much DRAM is enough: a policy's hits, reads, writes and waits on a trace, before anything is built."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from memhier.budget import format_bytes, parse_bytes
from memhier.errors import BudgetError
from memhier.io.device_profile import DeviceProfile
from memhier.io.page_file import PAGE_BYTES
from memhier.planning.cost import CostModel, Forecast
from memhier.planning.offline import belady_hits, next_uses
from memhier.planning.plan import plan
from memhier.policies import LFU, LRU, S3FIFO, Belady, Policy, Static
from memhier.policies._base import CAPACITY_MAX, as_keys, check_capacity, check_lookahead
from memhier.rows.rows import rows_per_page

__all__ = ["SIMULATED_POLICIES", "Simulation", "simulate"]

Keys = npt.NDArray[np.int64]
Trace = Keys | Iterable[npt.ArrayLike]

_REACTIVE: dict[str, type[LRU] | type[LFU] | type[S3FIFO]] = {"lru": LRU, "lfu": LFU, "s3fifo": S3FIFO}

SIMULATED_POLICIES = ("belady", *_REACTIVE, "static")
"""Names of policies. ``"static"`` keeps the trace's most frequent keys, with hindsight."""


@dataclass(frozen=True, slots=True)
class Simulation:
    """The result of :func:`simulate`.

    Attributes
    ----------
    policy
        Its name.
    capacity
        Rows in DRAM.
    accesses, steps
        Accesses in the trace, and batches they came in.
    hits
        Accesses that found their row in DRAM, a batch's repeats among them.
    reads
        Rows read: accesses less hits.
    writes
        Rows written when they left DRAM. Those still there at the end are not counted.
    pages
        Pages of 4096 bytes read, each once in a batch, with keys as row numbers in a file of rows.
    forecast
        Predicted times, where a device was given.
    """

    policy: str
    capacity: int
    accesses: int
    steps: int
    hits: int
    reads: int
    writes: int
    pages: int
    forecast: Forecast | None

    @property
    def hit_ratio(self) -> float:
        """Hits per access; 0 for an empty trace."""
        return self.hits / self.accesses if self.accesses else 0.0


def simulate(
    trace: Trace,
    *,
    dram: int | str,
    row_bytes: int,
    policy: str = "belady",
    batch: int = 1,
    lookahead: int | None = None,
    dirty: bool = False,
    device: str | DeviceProfile | CostModel | None = None,
    compute_s: float = 0.0,
    ahead: int | None = None,
) -> Simulation:
    """Run a trace through a cache that starts empty.

    Parameters
    ----------
    trace
        int64 [n], cut into batches of `batch` accesses; or an iterable of batches, int64 [b] each.
    dram
        Bytes for rows, such as ``"1GiB"``. For an array any amount will do. For an iterable, whose length is not known,
        a policy's tables are made for all rows beforehand: 36 to 82 bytes each, at most 2**29 rows.
    row_bytes
        Bytes of one row, with the bytes kept beside it.
    policy
        One of :data:`SIMULATED_POLICIES`.
    batch
        Accesses that need their rows together.
    lookahead
        Batches that Belady knows ahead; by default all of them.
    dirty
        Whether accesses change rows, so that evicted rows have to be written.
    device
        The device to predict times for; see :meth:`memhier.planning.cost.CostModel.of`.
    compute_s
        Seconds of computation in each batch.
    ahead
        Batches that reads may run ahead of computation; by default 1 for Belady, which knows later batches, and
        0 for the others, which read at a miss.

    Returns
    -------
    Simulation
        ``hits``, ``reads``, ``writes`` and ``pages``, ``capacity`` in rows, ``hit_ratio``, and ``forecast``, the
        predicted times, if a device was given.

    Raises
    ------
    BudgetError
        When `dram` holds no row, or fewer than one batch needs; the message names a size that is enough.
    ValueError, TypeError
        An argument is out of its range.

    Examples
    --------
    >>> import numpy as np
    >>> from memhier import simulate
    >>> loop = np.arange(100_000) % 1_000
    >>> for policy in ("lru", "belady"):
    ...     result = simulate(loop, dram="64KiB", row_bytes=128, policy=policy)
    ...     print(policy, result.capacity, result.reads)
    lru 512 100000
    belady 512 49312
    """
    if policy not in SIMULATED_POLICIES:
        raise ValueError(f"policy={policy!r}: expected one of {', '.join(SIMULATED_POLICIES)}")
    batch = check_capacity(batch, "batch")
    row_bytes = check_capacity(row_bytes, "row_bytes")
    if lookahead is not None and policy != "belady":
        raise ValueError(f"lookahead={lookahead}: policy={policy!r} does not look ahead")
    check_lookahead(lookahead, "batches")
    capacity = parse_bytes(dram) // row_bytes
    if capacity == 0:
        raise BudgetError(f"dram={dram!r} holds no row of {row_bytes} bytes; {format_bytes(row_bytes)} would be enough")
    model = None if device is None else CostModel.of(device)
    if ahead is None:
        ahead = 1 if policy == "belady" else 0
    if model is not None:
        model.forecast([], compute_s=compute_s, ahead=ahead)  # refuses them now rather than after the run
    if isinstance(trace, np.ndarray):
        trace = as_keys(trace, "trace")
    rows = _rows_needed(trace, capacity, policy)
    if isinstance(trace, np.ndarray) and batch == 1:
        run = _run_single(trace, rows, policy, lookahead, row_bytes)
    else:
        run = _run_batches(_batches(trace, batch), rows, policy, lookahead, row_bytes)
    forecast = None
    if model is not None:
        written = run.evicted * row_bytes if dirty else 0
        read_bytes = run.pages * PAGE_BYTES / np.maximum(run.operations, 1)
        forecast = model.forecast(
            run.operations, compute_s=compute_s, ahead=ahead, written_bytes=written, read_bytes=read_bytes
        )
    return Simulation(
        policy=policy,
        capacity=capacity,
        accesses=run.accesses,
        steps=len(run.loads),
        hits=run.accesses - int(run.loads.sum()),
        reads=int(run.loads.sum()),
        writes=int(run.evicted.sum()) if dirty else 0,
        pages=int(run.pages.sum()),
        forecast=forecast,
    )


def _rows_needed(trace: Trace, capacity: int, policy: str) -> int:
    """Return a capacity at which a policy does the same, whose tables this machine can hold, too.

    With room for the whole trace nothing is evicted, however much more there is. "static" needs it twice: it keeps as
    many rows free for others as one batch has.
    """
    if isinstance(trace, np.ndarray):
        return min(capacity, max(1, len(trace)) * (2 if policy == "static" else 1))
    if capacity > CAPACITY_MAX:
        raise ValueError(
            f"dram: it holds {capacity} rows, and the tables of an iterable's policy are made beforehand: expected at "
            f"most {CAPACITY_MAX} rows, or a trace that is one array, for which any dram will do"
        )
    return capacity


@dataclass(frozen=True, slots=True)
class _Run:
    """int64 [steps] each: rows loaded and evicted, pages and reads of neighbouring pages that the loads take."""

    accesses: int
    loads: Keys
    evicted: Keys
    pages: Keys
    operations: Keys


def _run_single(trace: Keys, capacity: int, policy: str, lookahead: int | None, row_bytes: int) -> _Run:
    """Access keys one at a time."""
    if policy == "belady" and lookahead is None:
        hit = belady_hits(next_uses(trace), capacity)
        resident = min(capacity, len(trace) - int(np.count_nonzero(hit)))
    elif policy == "belady":
        belady = Belady(capacity)
        hit = belady.replay(trace, lookahead=lookahead)
        resident = len(belady)
    else:
        cache: Policy = _static([trace], capacity, 1) if policy == "static" else _REACTIVE[policy](capacity)
        hit = cache.replay(trace)
        resident = len(cache)
    missed = (~hit).astype(np.int64)
    # Which access a victim leaves at does not matter here: the first misses fill the cache, each later one evicts.
    evicted = missed.copy()
    evicted[np.flatnonzero(missed)[:resident]] = 0
    return _Run(len(trace), missed, evicted, missed * _pages_each(trace, row_bytes), missed)


def _run_batches(batches: Iterable[Keys], capacity: int, policy: str, lookahead: int | None, row_bytes: int) -> _Run:
    accesses = 0
    rows: list[tuple[int, int, int, int]] = []

    def counted() -> Iterator[Keys]:
        nonlocal accesses
        for keys in batches:
            accesses += len(keys)
            yield keys

    moves: Iterable[tuple[Keys, int]]
    if policy == "belady":
        moves = ((step.load, len(step.evict)) for step in plan(counted(), capacity, lookahead=lookahead))
    else:
        moves = _moves(counted(), capacity, policy)
    for load, evicted in moves:
        rows.append((len(load), evicted, *_pages_and_reads(load, row_bytes)))
    columns = np.array(rows, np.int64).reshape(-1, 4).T
    return _Run(accesses, *columns)


def _moves(batches: Iterable[Keys], capacity: int, policy: str) -> Iterator[tuple[Keys, int]]:
    """Yield what each batch loads, and how many rows it evicts, under a policy that does not look ahead."""
    cache: Policy
    if policy == "static":
        batches = list(batches)
        # The keys that pass through are at most all of the batch that has the most.
        cache = _static(batches, capacity, max((len(np.unique(keys)) for keys in batches), default=1))
    else:
        cache = _REACTIVE[policy](capacity)
    for keys in batches:
        hit, evicted = cache.access(keys)
        yield keys[~hit], len(evicted)


def _static(parts: list[Keys], capacity: int, room: int) -> Static:
    """Return a cache that keeps the most frequent keys, with `room` left for others."""
    keys, uses = np.unique(np.concatenate(parts) if parts else np.empty(0, np.int64), return_counts=True)
    most_frequent = np.argsort(-uses, kind="stable")[: max(0, capacity - max(1, room))]
    return Static(capacity, keys[most_frequent])


def _batches(trace: Trace, batch: int) -> Iterator[Keys]:
    if isinstance(trace, np.ndarray):
        keys = as_keys(trace, "trace")
        yield from (keys[start : start + batch] for start in range(0, len(keys), batch))
    else:
        yield from (as_keys(each, "trace") for each in trace)


def _ends(keys: Keys, row_bytes: int) -> tuple[Keys, Keys]:
    """Return where in a page a row begins, and where it ends counted from there.

    Keys may be hashes, and nothing may overflow: the last bits of a row's number tell.
    """
    start = (keys & (PAGE_BYTES - 1)) * (row_bytes % PAGE_BYTES) & (PAGE_BYTES - 1)
    return start, start + (row_bytes - 1)


def _pages_each(keys: Keys, row_bytes: int) -> Keys:
    """Return on how many pages each row lies, by its number, as :mod:`memhier.rows.rows` lays them out."""
    if rows_per_page(row_bytes) is not None:
        return np.ones(len(keys), np.int64)
    return _ends(keys, row_bytes)[1] // PAGE_BYTES + 1


def _pages_and_reads(keys: Keys, row_bytes: int) -> tuple[int, int]:
    """Return how many different pages a batch of rows lies on, and how many reads they take where pages touch."""
    keys = np.sort(keys)
    packed = rows_per_page(row_bytes)
    if packed is not None:
        shared = np.diff(keys // packed) == 0
    else:
        start, end = _ends(keys[:-1], row_bytes)
        # Rows this far apart share no page; the difference of two keys may need all 64 bits.
        apart = np.minimum(np.diff(keys).view(np.uint64), np.uint64(2 * PAGE_BYTES)).astype(np.int64)
        shared = (start + apart * row_bytes) // PAGE_BYTES == end // PAGE_BYTES
    joined = int(np.count_nonzero(shared))
    return int(_pages_each(keys, row_bytes).sum()) - joined, len(keys) - joined
