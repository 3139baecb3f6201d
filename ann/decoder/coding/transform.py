"""FGD's transform (arXiv 1806.04189): the nearest row by distance has the largest logit.

With rows x and biases b, and U at least the largest norm of (x, b), a row becomes (x, b, sqrt(U^2 - |x|^2 - b^2)) and a
context h becomes (h, 1, 0). All rows then have norm U, and

    |row - context|^2 / 2 = (U^2 + |h|^2 + 1) / 2 - (<h, x> + b)
"""

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["transform_contexts", "transform_rows"]

Floats: TypeAlias = npt.NDArray[np.float32]


def transform_rows(rows: Floats, bias: Floats) -> Floats:
    """Return rows ``[V, D]`` and biases ``[V]`` as float32 ``[V, D + 2]``, all of one norm."""
    squares = np.square(rows, dtype=np.float64).sum(1) + np.square(bias, dtype=np.float64)
    missing = np.sqrt(np.maximum(0, squares.max(initial=0) - squares))
    return np.concatenate([rows, bias[:, None], missing[:, None]], 1, dtype=np.float32)


def transform_contexts(hidden: Floats) -> Floats:
    """Return contexts ``[n, D]`` as float32 ``[n, D + 2]``."""
    ones, zeros = np.ones((len(hidden), 1)), np.zeros((len(hidden), 1))
    return np.concatenate([hidden, ones, zeros], 1, dtype=np.float32)
