"""What a decoder answers with."""

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["LogProb", "Partition", "TopK"]

Floats: TypeAlias = npt.NDArray[np.float32]
Doubles: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class TopK:
    """The largest logits of each hidden state.

    Attributes
    ----------
    values, indices
        float32 and int64 ``[n, k]``, largest first: exact logits of the words found.
    proven
        bool ``[n]``: whether these are the k largest of the whole layer beyond doubt, rounding included. None where
        no certificate was asked for.
    """

    values: Floats
    indices: npt.NDArray[np.int64]
    proven: npt.NDArray[np.bool_] | None = None


@dataclass(frozen=True, slots=True)
class Partition:
    """log Z, the logarithm of the sum of exp of all logits.

    Attributes
    ----------
    estimate
        float64 ``[n]``.
    low, high
        float64 ``[n]``: proven bounds, whatever the context.
    """

    estimate: Doubles
    low: Doubles
    high: Doubles


@dataclass(frozen=True, slots=True)
class LogProb:
    """Log-probabilities of given words.

    Attributes
    ----------
    estimate
        float64 ``[n]``.
    low, high
        float64 ``[n]``: proven bounds.
    """

    estimate: Doubles
    low: Doubles
    high: Doubles
