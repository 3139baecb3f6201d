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
    sources, scales
        Of ids.
    """

    shape: tuple[int, int]
    begins: Ints
    targets: Ints
    tables: Ints
    sources: Ints
    scales: NDArray[np.float32] | None


def lay_out(bags: list[Bags], widths: list[int]) -> Layout:
    """Return where the sums of bags lie, `widths` floats each; all features have as many bags."""
    samples = (len(bags[0].offsets) - bags[0].last) // bags[0].features
    shapes = tuple((width, bag.features, bag.mode) for width, bag in zip(widths, bags, strict=True))
    targets, tables, total = _targets(samples, shapes)
    if all(bag.single for bag in bags):
        # The mean of one is its sum.
        return Layout((samples, total), _counted(len(targets) + 1), targets, tables, targets, None)
    lengths = np.concatenate([bag.lengths.numpy() for bag in bags])
    begins = np.concatenate(([0], np.cumsum(lengths)))
    scales = None
    if any(bag.mode == MODES["mean"] for bag in bags):
        means = np.repeat(tables[:, 3], tables[:, 1] - tables[:, 0]) == 1
        scales = np.repeat(np.float32(1) / np.where(means, np.maximum(lengths, 1), 1).astype(np.float32), lengths)
    return Layout((samples, total), begins, targets, tables, np.repeat(targets, lengths), scales)


@functools.lru_cache(4)
def _targets(samples: int, shapes: tuple[tuple[int, int, int], ...]) -> tuple[Ints, Ints, int]:
    total = sum(width * features for width, features, _ in shapes)
    columns = np.concatenate([[width] * features for width, features, _ in shapes])
    begins = np.cumsum(columns) - columns
    targets = (begins[:, None] + np.arange(samples) * total).reshape(-1)
    ends = np.cumsum([features * samples for _, features, _ in shapes])
    first = np.concatenate(([0], ends[:-1]))
    tables = np.stack([first, ends, [shape[0] for shape in shapes], [shape[2] == MODES["mean"] for shape in shapes]], 1)
    return targets, tables.astype(np.int64), total


@functools.lru_cache(4)
def _counted(count: int) -> Ints:
    return np.arange(count)
