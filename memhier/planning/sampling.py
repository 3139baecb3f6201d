"""Spatial sampling of traces: all accesses to a random few of the keys, a short trace in place of a long one.

SHARDS: Waldspurger, Park, Garthwaite, Ahmad, "Efficient MRC construction with SHARDS", FAST 2015. A key is in the
sample when its hash is below a threshold, so either every access to it is there or none. At a rate R a cache of C rows
behaves like one of R C rows on the sample; the same holds for policies other than LRU (Waldspurger, Saemundsson, Ahmad,
Park, "Cache modeling and optimization using miniature simulations", USENIX ATC 2017).
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from memhier.arguments import check_int, check_number
from memhier.policies._base import as_keys

__all__ = ["Sample", "sample_keys", "trace_blocks"]

Keys = npt.NDArray[np.int64]
Hashes = npt.NDArray[np.uint64]

_SPAN = 2**64


@dataclass(frozen=True, slots=True)
class Sample:
    """A sampled trace.

    Attributes
    ----------
    keys
        int64 [m]: the accesses to the sampled keys, in order.
    rate
        The share of keys that a hash picks, 0 to 1.
    accesses
        Length of the whole trace.
    """

    keys: Keys
    rate: float
    accesses: int

    @property
    def expected(self) -> float:
        """Accesses that a sample of this rate has on average.

        Miss ratios are per expected and not per sampled access (SHARDS-adj): which very hot keys a sample happens to
        hold changes its length much, and its misses little.
        """
        return self.rate * self.accesses


def trace_blocks(trace: Keys | Iterable[Keys]) -> Iterable[Keys]:
    """Return a trace as blocks, whether it came as one array or as an iterable of them."""
    return [as_keys(trace, "trace")] if isinstance(trace, np.ndarray) else (as_keys(block, "trace") for block in trace)


def sample_keys(
    trace: Keys | Iterable[Keys], *, rate: float | None = None, keys: int | None = None, seed: int = 0
) -> Sample:
    """Sample a trace at a fixed rate, or at the rate that keeps a fixed number of keys, in one pass.

    Parameters
    ----------
    trace
        int64 [n], or an iterable of such blocks, which are read once and not kept.
    rate
        Share of the keys to take, above 0 and at most 1.
    keys
        Number of distinct keys to take at most, if `rate` is not given. The rate falls as more keys come into view.
    seed
        Of the hash.

    Raises
    ------
    ValueError, TypeError
        Unless exactly one of `rate` and `keys` is given, and in its range.

    Examples
    --------
    >>> import numpy as np
    >>> from memhier.planning.sampling import sample_keys
    >>> trace = np.arange(100_000) % 5_000
    >>> sample = sample_keys(trace, keys=100)
    >>> len(np.unique(sample.keys)), len(sample.keys)
    (100, 2000)
    """
    threshold = _threshold(rate, keys)
    seed = check_int("seed", seed, -_SPAN, _SPAN)
    kept: list[tuple[Keys, Hashes]] = []
    seen = np.empty(0, np.uint64)  # hashes of the distinct keys, sorted; a hash stands for one key
    accesses = kept_accesses = filtered_at = 0
    for block in trace_blocks(trace):
        hashes = hash_keys(block, seed)
        accesses += len(block)
        inside = hashes < threshold if threshold < _SPAN else np.ones(len(block), np.bool_)
        kept.append((block[inside], hashes[inside]))
        kept_accesses += len(kept[-1][0])
        if keys is None:
            continue
        seen = np.union1d(seen, kept[-1][1])
        if len(seen) > keys:
            threshold = int(seen[keys])
            seen = seen[:keys].copy()
            if kept_accesses > 2 * filtered_at:
                kept = _below(kept, threshold)
                kept_accesses = filtered_at = sum(len(part) for part, _ in kept)
    parts = [part for part, _ in _below(kept, threshold)]
    return Sample(np.concatenate(parts) if parts else np.empty(0, np.int64), threshold / _SPAN, accesses)


def hash_keys(keys: Keys, seed: int) -> Hashes:
    """Return a hash of each key that differs for any two keys (SplitMix64's finaliser, which is invertible)."""
    bits = keys.view(np.uint64) + np.uint64((seed + 1) * 0x9E3779B97F4A7C15 % _SPAN)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


def _below(kept: list[tuple[Keys, Hashes]], threshold: int) -> list[tuple[Keys, Hashes]]:
    if threshold == _SPAN:
        return kept
    insides = (hashes < threshold for _, hashes in kept)
    return [(keys[inside], hashes[inside]) for (keys, hashes), inside in zip(kept, insides, strict=True)]


def _threshold(rate: float | None, keys: int | None) -> int:
    if (rate is None) == (keys is None):
        raise ValueError(f"rate={rate!r}, keys={keys!r}: expected one of the two")
    if keys is not None:
        check_int("keys", keys, 1)
        return _SPAN
    return max(1, round(check_number("rate", rate, 0, 1, above=True) * _SPAN))
