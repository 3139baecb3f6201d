"""Data sets of the search workloads, in four families: made or real, with labels, as factors, or as they are.

- ``plain``: vectors of many shapes, made or real, with held-out queries; users' factors against items' factors; patches
  of photographs, whitened.
- ``labelled``: vectors whose label goes with their place, for filters.
- ``factors``: inner products as recommenders have them. Norms vary, and queries are no vectors of the set. Factors of
  real logs come from a truncated singular value decomposition. Made ones have its shape: a falling spectrum, norms
  log-normal beside their directions, and users that are sums of the items they chose.
- ``whole``: real data sets as they are.
"""

import lzma
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.zoom.preview.space import Metric
from memhier.benchmarks.datasets import data_set_folder, gowalla, load_images, load_search_set
from memhier.benchmarks.generators import mixed

__all__ = [
    "FAMILIES", "LOGS", "Factors", "SearchCase", "log_factors", "made_factors", "make_labelled", "make_set",
]  # fmt: skip

_AXES = 64
_ROUNDS = 3
_OVERSAMPLED = 16
_PAIRS = 1 << 18  # whose rows are summed at a time
_SIDES = {"patches": 12, "small patches": 8}  # of a patch, in pixels
_LABELS = 10

Matrix: TypeAlias = npt.NDArray[Any]
Floats: TypeAlias = npt.NDArray[np.float32]
Points: TypeAlias = npt.NDArray[np.float64]
Ints: TypeAlias = npt.NDArray[np.int64]
Random: TypeAlias = np.random.Generator


@dataclass(frozen=True, slots=True)
class SearchCase:
    """Vectors ``[n, d]`` to index, and queries ``[q, d]``.

    Attributes
    ----------
    by_id
        Whether recall counts ids: some products are so small that all of them would tie by distance.
    labels, asked
        The labels of the vectors and of the queries, if they have any.
    """

    base: Matrix
    queries: Matrix
    metric: Metric = "l2"
    by_id: bool = False
    labels: Ints | None = None
    asked: Ints | None = None


LOGS = ("gowalla", "ml-1m")


@dataclass(frozen=True, slots=True)
class Factors:
    """Items to index and users as queries, float32 ``[n, d]`` each."""

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


def _choosing(random: Random, items: Points, points: Points, users: int) -> Points:
    """Return users as sums of items: those that agree with a taste, long ones more often."""
    norms = np.linalg.norm(items, axis=1)
    directions = items / norms[:, None]
    asked = np.empty((users, items.shape[1]))
    for number in range(users):
        taste = points[random.integers(len(points))] / np.linalg.norm(points[0])
        odds = norms * np.exp(4 * directions @ taste)
        chosen = random.choice(len(items), size=1 + random.poisson(random.exponential(20)), p=odds / odds.sum())
        asked[number] = items[chosen].sum(axis=0)
    return asked


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
        pairs, every_user, every_item = gowalla()
        return pairs[:, 0], pairs[:, 1], (every_user, every_item)
    text = lzma.decompress((data_set_folder(name) / "train.txt.xz").read_bytes()).decode()
    lines = [line.split() for line in text.splitlines()]
    users = np.repeat(np.arange(len(lines)), [max(0, len(line) - 1) for line in lines])
    numbers, items = np.unique(np.array([int(each) for line in lines for each in line[1:]]), return_inverse=True)
    return users, items, (len(lines), len(numbers))


def _clusters(random: Random, count: int) -> Points:
    """Fifty clouds, some forty times as wide as others."""
    centres = 3 * random.normal(size=(50, 48))
    member = random.integers(0, 50, count)
    return centres[member] + random.normal(size=(count, 48)) * random.uniform(0.05, 2, 50)[member, None]


def _alike(random: Random, count: int) -> Points:
    return random.normal(size=(count, 16))


def _copies(random: Random, count: int) -> Points:
    return np.repeat(random.normal(size=(-(-count // 20), 24)), 20, axis=0)[random.permutation(count)]


def _flat(random: Random, count: int) -> Points:
    return random.normal(size=(count, 6)) @ random.normal(size=(6, 96)) + 0.01 * random.normal(size=(count, 96))


def _outlier(random: Random, count: int) -> Points:
    points = random.normal(size=(count, 24)) * random.lognormal(0, 0.5, (count, 1))
    points[np.linalg.norm(points, axis=1).argmax()] *= 8
    return points


def _whole(random: Random, count: int) -> Points:
    """Whole numbers of few values, as bytes."""
    return np.clip(np.rint(_clusters(random, count)[:, :32] * 4 + 128), 0, 255)


_METRICS: tuple[Metric, ...] = ("ip", "cosine")
_SHAPES: dict[str, tuple[Metric, str, Callable[[Random, int], Points]]] = {
    "clusters": ("l2", "float32", _clusters),
    "alike": ("l2", "float32", _alike),
    "copies": ("l2", "float32", _copies),
    "flat": ("l2", "float16", _flat),
    "bytes": ("l2", "uint8", _whole),
    "outlier": ("ip", "float32", _outlier),
    "directions": ("cosine", "float32", _clusters),
}
_REAL = ("fashion-mnist", "mnist", "sift-imagenet200k")
_USERS = tuple(f"{log}, {metric}" for log in LOGS for metric in _METRICS)


def make_set(name: str, count: int, queries: int, seed: int) -> tuple[Matrix, Matrix, Metric]:
    """Return vectors ``[count, d]``, queries ``[queries, d]`` and the metric of a set of the family ``plain``.

    Raises
    ------
    FileNotFoundError
        When a real data set is missing.
    """
    random = np.random.default_rng([seed, len(name)])
    if name in _REAL:
        data = load_search_set(name)
        base = data.base[np.sort(random.permutation(len(data.base))[:count])]
        return base, data.queries[random.permutation(len(data.queries))[:queries]], "l2"
    if name in _SIDES:
        return *_patches(random, count, queries, _SIDES[name]), "l2"
    if name in _USERS:
        log, metric = name.split(", ")
        factors = log_factors(log)
        some, asking = random.permutation(len(factors.items))[:count], random.permutation(len(factors.users))[:queries]
        return factors.items[some], factors.users[asking], "ip" if metric == "ip" else "cosine"
    if name == "mixed":
        made = mixed(count, 64, seed)
        return made.array(), made.queries(queries), "l2"
    metric, dtype, make = _SHAPES[name]
    points = make(random, count + queries).astype(dtype)
    chosen = random.permutation(count + queries)
    return points[chosen[queries:]], points[chosen[:queries]], metric


def _patches(random: Random, count: int, queries: int, side: int) -> tuple[Matrix, Matrix]:
    """Return whitened grey patches, and queries from other photographs."""
    images = load_images("cifar10")
    some, asked = (
        _cut(random, photographs.mean(axis=3), wanted, side)
        for photographs, wanted in ((images.train, count), (images.test, queries))
    )
    variances, axes = np.linalg.eigh(np.cov(some.T))
    white = axes[:, 1:] / np.sqrt(variances[1:])  # the mean was taken off
    return (some @ white).astype(np.float32), (asked @ white).astype(np.float32)


def _cut(random: Random, photographs: Points, count: int, side: int) -> Points:
    """Return `count` squares of photographs ``[n, side, side]``, each less its mean."""
    which = random.integers(0, len(photographs), count)
    across, down = random.integers(0, photographs.shape[1] - side + 1, (2, count, 1, 1))
    steps = np.arange(side)
    cut: Points = photographs[which[:, None, None], across + steps[:, None], down + steps].reshape(count, -1)
    cut -= cut.mean(axis=1, keepdims=True)
    return cut


def _labelled_clusters(random: Random, count: int) -> tuple[Matrix, Ints]:
    """A hundred tight clusters, ten of each label."""
    member = random.integers(0, 100, count)
    points = 3 * random.normal(size=(100, 32))[member] + 0.2 * random.normal(size=(count, 32))
    return points.astype(np.float32), member % _LABELS


def _heavy(random: Random, count: int) -> tuple[Matrix, Ints]:
    """Axes and lengths with heavy tails; the longest axis gives the label."""
    points = random.standard_t(2.5, (count, 24)) * random.lognormal(0, 0.5, (count, 1))
    return points.astype(np.float32), np.abs(points).argmax(axis=1) % _LABELS


_IMAGES = ("cifar10", "fashion-mnist", "mnist")
_LABELLED = {"clusters": _labelled_clusters, "heavy": _heavy}


def make_labelled(name: str, count: int, queries: int, seed: int) -> SearchCase:
    """Return at most `count` vectors of a set of the family ``labelled``, with `queries` held out.

    Raises
    ------
    FileNotFoundError
        When a real data set is missing.
    """
    random = np.random.default_rng([seed, len(name)])
    if name in _LABELLED:
        points, labels = _LABELLED[name](random, count + queries)
        return SearchCase(points[queries:], points[:queries], labels=labels[queries:], asked=labels[:queries])
    if name in _IMAGES:
        images = load_images(name)
        some, held = random.permutation(len(images.train))[:count], random.permutation(len(images.test))[:queries]
        flat = images.train[some].reshape(len(some), -1), images.test[held].reshape(len(held), -1)
        return SearchCase(*flat, labels=images.train_labels[some], asked=images.test_labels[held])
    data = load_search_set(name)
    some, held = random.permutation(len(data.base))[:count], random.permutation(len(data.queries))[:queries]
    base, asked = data.base[some], data.queries[held]
    return SearchCase(base, asked, labels=_strongest(base), asked=_strongest(asked))


def _strongest(descriptors: Matrix) -> Ints:
    """Return the strongest of eight directions of gradient descriptors ``[n, 128]``."""
    found: Ints = descriptors.reshape(len(descriptors), -1, 8).sum(axis=1, dtype=np.int64).argmax(axis=1)
    return found


_KINDS, _SIGMAS = ("clusters", "spectrum"), (0.0, 0.5, 1.0, 1.5)
_LEVEL = ", normalised"
_MADE_FACTORS = tuple(f"{kind}, sigma {sigma:g}" for kind in _KINDS for sigma in _SIGMAS)


def _plain_case(name: str, count: int, queries: int, seed: int) -> SearchCase:
    return SearchCase(*make_set(name, count, queries, seed), by_id=name in _USERS)


def _factors_case(name: str, count: int, queries: int, seed: int) -> SearchCase:
    """Return items as they are, or of one length if the name says so."""
    source = name.removesuffix(_LEVEL)
    if source in LOGS:
        factors = log_factors(source)
        chosen = np.random.default_rng(seed).permutation(len(factors.users))[:queries]
        factors = Factors(factors.items, factors.users[chosen])
    else:
        kind, sigma = source.split(", sigma ")
        factors = made_factors(kind, count, queries, float(sigma), seed)
    if name != source:
        factors = factors.normalised()
    return SearchCase(factors.items, factors.users, "ip", by_id=True)


def _whole_case(name: str, count: int, queries: int, seed: int) -> SearchCase:
    data = load_search_set(name)
    return SearchCase(data.base[: count or None], data.queries[:queries].astype(np.float32))


FAMILIES: dict[str, tuple[tuple[str, ...], Callable[[str, int, int, int], SearchCase]]] = {
    "plain": (("mixed", *_SHAPES, *_REAL, *_SIDES, *_USERS), _plain_case),
    "labelled": (("sift-imagenet200k", *_IMAGES, *_LABELLED), make_labelled),
    "factors": ((*_MADE_FACTORS, *LOGS), _factors_case),
    "whole": (_REAL, _whole_case),
}
"""For each family: its names, and a function of name, count of vectors, count of queries and seed.

A name of ``factors`` that ends with ``, normalised`` is the same set with items of length one.
"""
