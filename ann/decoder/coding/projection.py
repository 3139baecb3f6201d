"""Coordinates in which a few directions carry nearly all of every logit.

With contexts of mean m and covariance C, and rows W less their mean row w, the logit of word i at context h is

    b_i + <W_i, m> + <w, h - m> + <(W_i - w) C^(1/2), C^(-1/2) (h - m)>

The projection turns the last term to the leading directions of (W - w) C^(1/2). Contexts are white there, so the share
of a direction in an average logit is the norm of its column. Plain SVD of W does not know the use of directions by
contexts.
"""

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.decoder.layer import Floats, OutputLayer

__all__ = ["Coordinates", "Projection", "fit_projection", "row_coordinates"]

# Shrinks the covariance of contexts towards a multiple of one; directions that no context uses keep an inverse.
_SHRINK = 1e-3
_GRAM_ROWS = 100_000  # about so many rows tell the leading directions
_DOUBLE_WORK = 5e10  # up to so many products, rows are turned in double precision

Doubles: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Projection:
    """The map from hidden states and rows to coordinates.

    Attributes
    ----------
    mean
        float32 ``[D]``: m.
    turn
        float32 ``[D', D]``: coordinates are ``turn @ (h - mean)``, leading directions first; D' is D rounded up to a
        multiple of 4, and the last directions, if any, are zero.
    common
        float32 ``[D]``: w, the mean row.
    """

    mean: Floats
    turn: Floats
    common: Floats

    def inverse(self) -> Doubles:
        """Return ``[D, D]``: rows less the mean row, times this, are the rows' coordinates."""
        return np.linalg.inv(self.turn[: len(self.mean)].astype(np.float64))

    def __call__(self, hidden: Floats) -> Floats:
        """Return the coordinates of hidden states, float32 ``[n, D]``."""
        away = np.ascontiguousarray(hidden - self.mean, np.float32)
        return np.asarray(away @ self.turn.T, np.float32)


@dataclass(frozen=True, slots=True)
class Coordinates:
    """A block of rows in the coordinates.

    Attributes
    ----------
    rows
        float64 ``[n, D]``, leading directions first.
    offsets
        float64 ``[n]``: the logits at the mean context.
    slack
        float64 ``[n]``: bounds of the norms of the rows' errors.
    """

    rows: Doubles
    offsets: Doubles
    slack: Doubles


def fit_projection(layer: OutputLayer, contexts: Floats | None) -> Projection:
    """Return the projection for contexts like these; without contexts, one that treats all contexts alike.

    Parameters
    ----------
    contexts
        Real hidden states, float32 ``[n, D]``; a few thousand are enough.
    """
    words, dimension = layer.shape
    if contexts is None:
        mean, root, inverse = np.zeros(dimension), np.eye(dimension), np.eye(dimension)
    else:
        mean, root, inverse = _whitening(contexts)
    common = sum((block.sum(0, dtype=np.float64) for _, block in layer.blocks()), np.zeros(dimension)) / words
    gram = np.zeros((dimension, dimension))
    # Some of many rows tell the leading directions.
    rng, share = np.random.default_rng(0), _GRAM_ROWS / words
    for _, block in layer.blocks():
        centred = (block[rng.random(len(block)) < share] if share < 1 else block) - common.astype(np.float32)
        gram += centred.T @ centred
    directions = np.linalg.eigh(root.T @ gram @ root)[1][:, ::-1]
    turn = np.zeros((-(-dimension // 4) * 4, dimension), np.float32)
    turn[:dimension] = directions.T @ inverse
    return Projection(mean.astype(np.float32), turn, common.astype(np.float32))


def _whitening(contexts: Floats) -> tuple[Doubles, Doubles, Doubles]:
    """Return the mean of contexts, a root of their covariance and its inverse."""
    mean = contexts.mean(0, dtype=np.float64)
    away = contexts - mean
    covariance = away.T @ away / len(contexts)
    share = float(np.trace(covariance)) / len(mean)
    covariance += (_SHRINK * share if share > 0 else 1.0) * np.eye(len(mean))
    values, vectors = np.linalg.eigh(covariance)
    roots = np.sqrt(np.maximum(values, values[-1] * 1e-12))
    return mean, vectors * roots, (vectors / roots).T


def row_coordinates(projection: Projection, inverse: Doubles, rows: Floats, bias: Floats, words: int) -> Coordinates:
    """Return the coordinates of a block of rows.

    Parameters
    ----------
    inverse
        The result of :meth:`Projection.inverse`.
    words
        Size of the whole layer: a large one is turned in single precision, and `slack` bounds the loss.
    """
    centred = rows.astype(np.float64) - projection.common
    offsets = bias + rows.astype(np.float64) @ projection.mean
    dimension = rows.shape[1]
    norms = np.linalg.norm(centred, axis=1)
    if float(words) * dimension**2 <= _DOUBLE_WORK:
        return Coordinates(centred @ inverse, offsets, norms * float(np.linalg.norm(inverse)) * 1e-12)
    turned = centred.astype(np.float32) @ inverse.astype(np.float32)
    return Coordinates(
        turned.astype(np.float64), offsets, norms * float(np.linalg.norm(inverse)) * (dimension + 8) * 2.0**-24
    )
