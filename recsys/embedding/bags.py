"""Bags of ids: what a step pools, and where each sum lies in what it returns."""

import functools
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["MODES", "Bags", "Layout", "lay_out"]

MODES = {"sum": 0, "mean": 1, "max": 2}
"""The modes of `torch.nn.EmbeddingBag`, and their numbers there."""

Ints = NDArray[np.int64]


@dataclass(slots=True)
class Bags:
    """The bags of one table in a step, feature after feature.

    Attributes
    ----------
    table
        Its number.
    indices
        int64 [n]: the ids; once rows are known, for every id which of the table's rows in this step it is.
    offsets
        int64: where bags begin, and where the last one ends if `last`.
    mode
        One of the values of :data:`MODES`.
    weights
        float32 [n], or None.
    padding
        Of `indices` those that are left out; -1 for none.
    features
        How many features share the table: the first bags are the first feature's.
    single
        Whether every bag is known to have one id.
    """

    table: int
    indices: Tensor
    offsets: Tensor
    mode: int
    weights: Tensor | None = None
    padding: int = -1
    last: bool = False
    features: int = 1
    single: bool = False

    @property
    def lengths(self) -> Tensor:
        """Return how many ids each bag has."""
        ends = self.offsets if self.last else torch.cat([self.offsets, torch.tensor([len(self.indices)])])
        return torch.diff(ends)


@dataclass(frozen=True, slots=True)
class Layout:
    """Where everything lies, in the words of :func:`memhier.recsys.embedding.kernels.pool_rows`.

    Attributes
    ----------
    shape
        Of the output: bags of a feature, and the sum of all widths.
    begins, targets, tables
        Of bags.
    scales
        Of ids.
    bags
        What is laid out: their widths, features and modes.
    lengths
        int64 [bags]: how many ids each has; None where each has one.
    """

    shape: tuple[int, int]
    begins: Ints
    targets: Ints
    tables: Ints
    scales: NDArray[np.float32] | None
    bags: tuple[tuple[int, int, int], ...]
    lengths: Ints | None

    def sources(self, stride: int) -> Ints:
        """Return where the gradient of each id's bag begins, in a gradient whose rows are so many floats apart."""
        targets = self.targets if stride == self.shape[1] else _targets(self.shape[0], self.bags, stride)[0]
        return targets if self.lengths is None else np.repeat(targets, self.lengths)


def lay_out(bags: list[Bags], widths: list[int]) -> Layout:
    """Return where the sums of bags lie, `widths` floats each; all features have as many bags."""
    samples = (len(bags[0].offsets) - bags[0].last) // bags[0].features
    shapes = tuple((width, bag.features, bag.mode) for width, bag in zip(widths, bags, strict=True))
    total = sum(width * features for width, features, _ in shapes)
    targets, tables = _targets(samples, shapes, total)
    if all(bag.single for bag in bags):
        # The mean of one is its sum.
        return Layout((samples, total), _counted(len(targets) + 1), targets, tables, None, shapes, None)
    lengths = np.concatenate([bag.lengths.numpy() for bag in bags])
    begins = np.concatenate(([0], np.cumsum(lengths)))
    scales = None
    if any(bag.mode == MODES["mean"] for bag in bags):
        means = np.repeat(tables[:, 3], tables[:, 1] - tables[:, 0]) == 1
        scales = np.repeat(np.float32(1) / np.where(means, np.maximum(lengths, 1), 1).astype(np.float32), lengths)
    return Layout((samples, total), begins, targets, tables, scales, shapes, lengths)


@functools.lru_cache(4)
def _targets(samples: int, shapes: tuple[tuple[int, int, int], ...], stride: int) -> tuple[Ints, Ints]:
    columns = np.concatenate([[width] * features for width, features, _ in shapes])
    begins = np.cumsum(columns) - columns
    targets = (begins[:, None] + np.arange(samples) * stride).reshape(-1)
    ends = np.cumsum([features * samples for _, features, _ in shapes])
    first = np.concatenate(([0], ends[:-1]))
    tables = np.stack([first, ends, [shape[0] for shape in shapes], [shape[2] == MODES["mean"] for shape in shapes]], 1)
    return targets, tables.astype(np.int64)


@functools.lru_cache(4)
def _counted(count: int) -> Ints:
    return np.arange(count)
