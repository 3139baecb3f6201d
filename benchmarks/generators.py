"""Vectors of mixed difficulty, made from a seed and streamed: a data set for benchmarks without a real one."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["Mixed", "mixed"]

Floats: TypeAlias = npt.NDArray[np.float32]

# Rows are drawn in chunks of their own seed, so that neither the block size nor the start of a stream changes a row.
_CHUNK_ROWS = 65_536
_QUERY_STREAM = 2**32 - 1
_BETWEEN = 0.1
_SCALES = (0.3, 3.0)
_INTRINSIC = (4, 64)
_NOISE = 0.02


def mixed(n: int, d: int, seed: int, clusters: int | None = None) -> "Mixed":
    """Return `n` vectors of dimension `d` in clusters of unequal size, scale and intrinsic dimension.

    Plain Gaussian noise has no near neighbours, and equal clusters make every query as hard as the next; here
    intrinsic dimensions reach from 4 to 64 and scales a factor of ten, sizes are log-normal, and one row in ten lies
    between two clusters. Queries are drawn from the same distribution and are no rows of the set.

    Parameters
    ----------
    n, d
        Number and dimension of the vectors.
    seed
        Fixes every row and query, whatever the size of the blocks that are asked for.
    clusters
        Number of clusters; by default one for 170 vectors, between 8 and 2,000.

    Raises
    ------
    ValueError
        When a number is out of range.

    Examples
    --------
    >>> data = mixed(1000, 32, seed=0)
    >>> [block.shape for block in data.blocks(600)]
    [(600, 32), (400, 32)]
    >>> data.queries(5).dtype
    dtype('float32')
    """
    for name, value, low in (("n", n, 0), ("d", d, 1), ("seed", seed, 0)):
        if value < low:
            raise ValueError(f"{name}={value}: expected at least {low}")
    count = min(2000, max(8, n // 170)) if clusters is None else clusters
    if count < 1:
        raise ValueError(f"clusters={clusters}: expected at least 1")
    random = np.random.default_rng([seed, 0])
    low, high = (min(bound, d) for bound in _INTRINSIC)
    ranks = np.rint(np.exp(random.uniform(np.log(low), np.log(high), count))).astype(np.int64)
    scales = np.exp(random.uniform(np.log(_SCALES[0]), np.log(_SCALES[1]), count)).astype(np.float32)
    weights = random.lognormal(0.0, 1.0, count)
    return Mixed(
        n=n,
        d=d,
        seed=seed,
        centres=random.standard_normal((count, d), np.float32),
        bases=tuple(_basis(random, int(rank), d) * scale for rank, scale in zip(ranks, scales, strict=True)),
        scales=scales,
        shares=np.cumsum(weights / weights.sum()),
    )


def _basis(random: np.random.Generator, rank: int, d: int) -> Floats:
    """Return directions ``[rank, d]`` of about unit length."""
    return random.standard_normal((rank, d), np.float32) / np.float32(np.sqrt(d))


@dataclass(frozen=True, slots=True)
class Mixed:
    """The clusters that :func:`mixed` makes; rows are drawn from them on demand.

    Attributes
    ----------
    n, d, seed
        As given.
    centres, bases, scales
        Of each cluster: float32 ``[c, d]``, ``[rank, d]`` each, and ``[c]``.
    shares
        Cumulative share of the rows in each cluster, float64 ``[c]``.
    """

    n: int
    d: int
    seed: int
    centres: Floats
    bases: tuple[Floats, ...]
    scales: Floats
    shares: npt.NDArray[np.float64]

    def blocks(self, rows: int = _CHUNK_ROWS) -> Iterator[Floats]:
        """Yield all vectors in order, `rows` at a time: the last block may be shorter.

        No more than a block and a chunk of 65,536 rows are held.
        """
        if rows < 1:
            raise ValueError(f"rows={rows}: expected at least 1")
        block = np.empty((min(rows, self.n), self.d), np.float32)
        filled = 0
        for chunk in range(-(-self.n // _CHUNK_ROWS)):
            drawn = self._draw(chunk, min(_CHUNK_ROWS, self.n - chunk * _CHUNK_ROWS))
            at = 0
            while at < len(drawn):
                taken = min(len(drawn) - at, len(block) - filled)
                block[filled : filled + taken] = drawn[at : at + taken]
                at, filled = at + taken, filled + taken
                if filled == len(block):
                    yield block
                    left = self.n - (chunk * _CHUNK_ROWS + at)
                    block, filled = np.empty((min(rows, left), self.d), np.float32), 0

    def array(self) -> Floats:
        """Return all vectors at once, float32 ``[n, d]``."""
        out = np.empty((self.n, self.d), np.float32)
        for start, block in zip(range(0, self.n, _CHUNK_ROWS), self.blocks(), strict=True):
            out[start : start + len(block)] = block
        return out

    def queries(self, count: int) -> Floats:
        """Return held-out vectors of the same distribution, float32 ``[count, d]``, at most 65,536.

        The first queries are the same however many are asked for.
        """
        if not 0 <= count <= _CHUNK_ROWS:
            raise ValueError(f"count={count}: expected 0 to {_CHUNK_ROWS}")
        return self._draw(_QUERY_STREAM, _CHUNK_ROWS)[:count] if count else np.empty((0, self.d), np.float32)

    def _draw(self, chunk: int, count: int) -> Floats:
        # A chunk cut short by the end of the set is drawn whole: its rows do not depend on n.
        random = np.random.default_rng([self.seed, 1, chunk])
        first = self._points(random)
        between = np.flatnonzero(random.random(_CHUNK_ROWS) < _BETWEEN)
        partner = random.permutation(between)
        share = random.uniform(0.25, 0.75, (len(between), 1)).astype(np.float32)
        # Indexing on the right copies, so every partner is still a point of a cluster.
        first[between] = share * first[between] + (1 - share) * first[partner]
        return first[:count]

    def _points(self, random: np.random.Generator) -> Floats:
        """Return one chunk of points, each of one cluster."""
        label = np.minimum(np.searchsorted(self.shares, random.random(_CHUNK_ROWS)), len(self.centres) - 1)
        points = random.standard_normal((_CHUNK_ROWS, self.d), np.float32)
        points *= np.float32(_NOISE) * self.scales[label][:, None]
        points += self.centres[label]
        order = np.argsort(label, kind="stable")
        ends = np.searchsorted(label[order], np.arange(len(self.centres)), side="right")
        for cluster, (start, end) in enumerate(zip(np.append(0, ends[:-1]), ends, strict=True)):
            basis = self.bases[cluster]
            latent = random.standard_normal((end - start, len(basis)), np.float32)
            points[order[start:end]] += latent @ basis
        return points
