"""Vectors sought by inner product as recommenders have them: norms that vary, and queries that are no vectors.

Factors of real logs are those of a truncated singular value decomposition; made ones have its shape: a spectrum that
falls, norms log-normal beside their directions, and users that are sums of the items they chose.
"""

import lzma
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.benchmarks.datasets import data_folder
from memhier.benchmarks.workloads.embedding.common import gowalla

__all__ = ["LOGS", "Factors", "log_factors", "made_factors"]

_AXES = 64
_ROUNDS = 3
_OVERSAMPLED = 16
_PAIRS = 1 << 18  # whose rows are summed at a time

Floats: TypeAlias = npt.NDArray[np.float32]
Points: TypeAlias = npt.NDArray[np.float64]
Ints: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Factors:
    """Items to index and users that ask, float32 ``[n, d]`` each."""

    items: Floats
    users: Floats

    def normalised(self) -> "Factors":
        """Return the same with all items of length one."""
        norms = np.linalg.norm(self.items, axis=1, keepdims=True)
        return Factors(self.items / np.maximum(norms, np.float32(1e-30)), self.users)


def made_factors(kind: str, count: int, users: int, sigma: float, seed: int) -> Factors:
    """Return `count` items whose norms are log-normal with `sigma`, and users.

    Parameters
    ----------
    kind
        ``"clusters"``: directions lie around fifty centres; ``"spectrum"``: their variance falls along the axes.
    """
    random = np.random.default_rng([seed, len(kind)])
    spectrum = 1 / np.sqrt(np.arange(1, _AXES + 1))
    if kind == "clusters":
        points = random.normal(size=(50, _AXES))[random.integers(0, 50, count)] + 0.7 * random.normal(
            size=(count, _AXES)
        )
    else:
        points = random.normal(size=(count, _AXES)) * spectrum
    items = points / np.linalg.norm(points, axis=1, keepdims=True)
    items *= random.lognormal(0, sigma, (count, 1))
    return Factors(items.astype(np.float32), _choosing(random, items, points, users).astype(np.float32))


def _choosing(random: np.random.Generator, items: Points, points: Points, users: int) -> Points:
    """Return users that are sums of items: those that agree with a taste, the longer the more often."""
    norms = np.linalg.norm(items, axis=1)
    directions = items / norms[:, None]
    asked = np.empty((users, items.shape[1]))
    for number in range(users):
        taste = points[random.integers(len(points))] / np.linalg.norm(points[0])
        odds = norms * np.exp(4 * directions @ taste)
        chosen = random.choice(len(items), size=1 + random.poisson(random.exponential(20)), p=odds / odds.sum())
        asked[number] = items[chosen].sum(axis=0)
    return asked


LOGS = ("gowalla", "ml-1m")


def log_factors(name: str, axes: int = _AXES) -> Factors:
    """Return the factors of one of :data:`LOGS`, the singular values shared by both sides.

    Raises
    ------
    FileNotFoundError
        When its file is missing.
    """
    users, items, shape = _pairs(name)
    by_user, by_item = _Sums(users, items, shape[0]), _Sums(items, users, shape[1])
    random = np.random.default_rng(0)
    basis = np.linalg.qr(random.normal(size=(shape[1], axes + _OVERSAMPLED)))[0]
    for _ in range(_ROUNDS):
        basis = np.linalg.qr(by_user.of(basis))[0]
        basis = np.linalg.qr(by_item.of(basis))[0]
    left, values, right = np.linalg.svd(by_user.of(basis), full_matrices=False)
    root = np.sqrt(values[:axes])
    return Factors(((basis @ right.T)[:, :axes] * root).astype(np.float32), (left[:, :axes] * root).astype(np.float32))


class _Sums:
    """Sums of the rows of a matrix over pairs, those of each left number."""

    def __init__(self, left: Ints, right: Ints, count: int) -> None:
        order = np.argsort(left, kind="stable")
        self._left, self._right, self._count = left[order], right[order], count

    def of(self, rows: Points) -> Points:
        """Return them, ``[count, d]``, for a matrix with a row for each right number."""
        sums = np.zeros((self._count, rows.shape[1]))
        for start in range(0, len(self._left), _PAIRS):
            left = self._left[start : start + _PAIRS]
            first = np.flatnonzero(np.diff(left, prepend=-1))
            sums[left[first]] += np.add.reduceat(rows[self._right[start : start + _PAIRS]], first, axis=0)
        return sums


def _pairs(name: str) -> tuple[Ints, Ints, tuple[int, int]]:
    """Return user and item of each event, and how many users and items there are."""
    if name == "gowalla":
        pairs, _, every_user, every_item = gowalla()
        return pairs[:, 0], pairs[:, 1], (every_user, every_item)
    path = data_folder() / name / "train.txt.xz"
    if not path.is_file():
        raise FileNotFoundError(f"no data set {name!r} at {path.parent}: put it there, or set MEMHIER_DATA")
    lines = [line.split() for line in lzma.decompress(path.read_bytes()).decode().splitlines()]
    users = np.repeat(np.arange(len(lines)), [max(0, len(line) - 1) for line in lines])
    numbers, items = np.unique(np.array([int(each) for line in lines for each in line[1:]]), return_inverse=True)
    return users, items, (len(lines), len(numbers))
