"""Miss-ratio curves: how many accesses miss, for many capacities, from one pass over a trace."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from memhier.planning.offline import StackDistances, belady_hits, next_uses
from memhier.planning.sampling import Sample, hash_keys, sample_keys, trace_blocks
from memhier.policies import LFU, S3FIFO
from memhier.policies._base import check_capacity

__all__ = ["CURVE_POLICIES", "MissRatioCurve", "miss_ratio_curve"]

Keys = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Trace = Keys | Iterable[Keys]

# A sample is cut into this many parts, whose curves' scatter tells the error of the whole.
_GROUPS = 8
_ROWS_MAX = 2**62
# Student's t for 95 % and _GROUPS - 1 degrees of freedom.
_T95 = 2.365


@dataclass(frozen=True, slots=True)
class MissRatioCurve:
    """Miss ratios of one policy on one trace, each access on its own, starting empty.

    Attributes
    ----------
    policy
        Its name.
    capacities
        int64 [c]: rows in DRAM.
    miss_ratio
        float64 [c]: misses per access.
    error
        float64 [c]: half the width of a 95 % confidence interval of `miss_ratio`, 0 for a curve of the whole trace.
        NaN where the capacity is too small for the sample to tell.
    accesses
        Length of the trace.
    sampled
        Accesses that were simulated.
    rate
        Share of the keys that were simulated.
    """

    policy: str
    capacities: Keys
    miss_ratio: Floats
    error: Floats
    accesses: int
    sampled: int
    rate: float


def miss_ratio_curve(
    trace: Trace,
    capacities: npt.ArrayLike,
    *,
    policy: str = "lru",
    rate: float | None = None,
    keys: int | None = None,
    seed: int = 0,
) -> MissRatioCurve:
    """Return the miss ratios of a policy at many capacities.

    Without sampling the curve is exact. LRU costs one pass for all capacities (stack distances), Belady one pass over
    the keys and a short one for each capacity, the others one cache for each capacity.

    Parameters
    ----------
    trace
        int64 [n], or an iterable of such blocks, read once. Belady gathers them, the others do not keep them.
    capacities
        int [c]: rows in DRAM, from 1 to 2**62 each.
    policy
        ``"lru"``, ``"lfu"``, ``"s3fifo"`` or ``"belady"``.
    rate, keys
        Sample the trace at a fixed rate, or down to a number of distinct keys (see
        :func:`memhier.planning.sampling.sample_keys`). The result then states its error. Not for LFU, which does not
        scale.
    seed
        Of the sample.

    Returns
    -------
    MissRatioCurve
        ``miss_ratio`` and ``error`` at each capacity, float64 [c]: misses per access, and half the width of a 95 %
        confidence interval.

    Raises
    ------
    ValueError, TypeError
        An argument is out of its range, or the trace is empty.

    Examples
    --------
    >>> import numpy as np
    >>> from memhier import miss_ratio_curve
    >>> loop = np.arange(100_000) % 1_000
    >>> miss_ratio_curve(loop, [999, 1_000]).miss_ratio.round(3).tolist()
    [1.0, 0.01]
    >>> miss_ratio_curve(loop, [500], policy="belady").miss_ratio.round(3).tolist()
    [0.505]
    """
    if policy not in CURVE_POLICIES:
        raise ValueError(f"policy={policy!r}: expected one of {', '.join(CURVE_POLICIES)}")
    if policy == "lfu" and (rate is not None or keys is not None):
        # Measured: up to 0.15 off, in one direction, where the other policies keep to their intervals. Counts of uses
        # grow with the trace's length and not with the cache, so that a small LFU cache is no image of a large one.
        raise ValueError("policy='lfu': its curve cannot be told from a sample; leave out rate and keys")
    sizes = np.array(
        [check_capacity(each, "capacities", _ROWS_MAX) for each in np.asarray(capacities).reshape(-1).tolist()],
        np.int64,
    )
    count = CURVE_POLICIES[policy]
    if rate is None and keys is None:
        needed = _needed(sizes, len(trace)) if isinstance(trace, np.ndarray) else sizes
        misses, accesses = count(trace_blocks(trace), needed)
        return _curve(policy, sizes, misses / max(accesses, 1), np.zeros(len(sizes)), accesses, accesses, 1.0)
    sample = sample_keys(trace, rate=rate, keys=keys, seed=seed)
    estimate = _estimate(count, sample.keys, sizes, sample.rate, sample.expected)
    error = _error(count, sample, sizes, seed)
    return _curve(policy, sizes, estimate, error, sample.accesses, len(sample.keys), sample.rate)


def _curve(
    policy: str, sizes: Keys, ratio: Floats, error: Floats, accesses: int, sampled: int, rate: float
) -> MissRatioCurve:
    if accesses == 0:
        raise ValueError("trace: no accesses; expected at least one")
    return MissRatioCurve(policy, sizes, np.minimum(ratio, 1.0), error, accesses, sampled, rate)


def _estimate(count: "Count", keys: Keys, sizes: Keys, rate: float, expected: float) -> Floats:
    scaled = np.maximum(np.rint(sizes * rate), 1).astype(np.int64)
    misses, _ = count([keys], _needed(scaled, len(keys)))
    ratio: Floats = misses / expected if expected else np.zeros(len(sizes))
    return ratio


def _needed(sizes: Keys, accesses: int) -> Keys:
    """Return what is enough of each capacity: with room for a whole trace nothing is evicted, however much more."""
    return np.minimum(sizes, max(1, accesses))


def _error(count: "Count", sample: Sample, sizes: Keys, seed: int) -> Floats:
    """Return the error of the mean of the parts' curves: each part is a sample of its own, with other keys."""
    group = hash_keys(sample.keys, seed + 1) % np.uint64(_GROUPS)
    rate = sample.rate / _GROUPS
    curves = [
        _estimate(count, sample.keys[group == part], sizes, rate, rate * sample.accesses) for part in range(_GROUPS)
    ]
    error: Floats = _T95 * np.std(curves, axis=0, ddof=1) / np.sqrt(_GROUPS)
    error[sizes * rate < 1] = np.nan
    return error


# Blocks of a trace and capacities in, misses at each capacity and the number of accesses out.
Count = Callable[[Iterable[Keys], Keys], tuple[Keys, int]]


def _count_lru(blocks: Iterable[Keys], sizes: Keys) -> tuple[Keys, int]:
    stack = StackDistances()
    order = np.sort(sizes)
    # hits[i]: accesses whose distance is above the capacities before order[i], and not above it.
    hits = np.zeros(len(sizes) + 1, np.int64)
    accesses = 0
    for block in blocks:
        distance = stack.access(block)
        accesses += len(block)
        hits += np.bincount(np.searchsorted(order, distance[distance > 0]), minlength=len(hits))
    total = np.cumsum(hits)[np.searchsorted(order, sizes)]
    return accesses - total, accesses


def _count_belady(blocks: Iterable[Keys], sizes: Keys) -> tuple[Keys, int]:
    parts = list(blocks)
    following = next_uses(np.concatenate(parts) if parts else np.empty(0, np.int64))
    hits = [int(np.count_nonzero(belady_hits(following, int(size)))) for size in sizes]
    return len(following) - np.array(hits, np.int64), len(following)


def _count_by_running(policy: type[LFU] | type[S3FIFO]) -> Count:
    def count(blocks: Iterable[Keys], sizes: Keys) -> tuple[Keys, int]:
        caches = [policy(int(size)) for size in sizes]
        misses = np.zeros(len(sizes), np.int64)
        accesses = 0
        for block in blocks:
            accesses += len(block)
            misses += [len(block) - int(np.count_nonzero(cache.replay(block))) for cache in caches]
        return misses, accesses

    return count


CURVE_POLICIES: dict[str, Count] = {
    "lru": _count_lru,
    "lfu": _count_by_running(LFU),
    "s3fifo": _count_by_running(S3FIFO),
    "belady": _count_belady,
}
"""The policies that have curves, by name."""
