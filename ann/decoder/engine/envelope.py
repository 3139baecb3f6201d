"""Upper bounds of all logits: the rows of the largest, and the sum of exp of the others."""

from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.decoder.layer import Floats, Ints

__all__ = ["AS_IS", "DRAWS_MOST", "Envelope", "Shape", "ask_core"]

DRAWS_MOST = 8192  # rows of a head, and rows drawn: workspaces have room for so many of each

Doubles: TypeAlias = npt.NDArray[np.float64]


class Shape(NamedTuple):
    """The change of a logit before its exp: a cap, none at zero, as ``cap * tanh(logit / cap)``; then a factor."""

    cap: float = 0.0
    inverse: float = 1.0

    def __call__(self, logits: npt.NDArray[Any]) -> Doubles:
        """Return changed logits, float64; the factor is not among the change."""
        wide = logits.astype(np.float64)
        return self.cap * np.tanh(wide / self.cap) if self.cap > 0 else wide


AS_IS = Shape()


@dataclass(frozen=True, slots=True)
class Envelope:
    """A head of exact logits and a tail of bounds, for each of n hidden states.

    Attributes
    ----------
    rows, logits
        int64 and float32 ``[n, m]``: the rows of the m largest bounds, ascending, and their exact logits; -1 and
        minus infinity for none.
    cut, log_sum
        float64 ``[n]``: of all other rows, the largest bound, and log of the sum of exp of the bounds, which are
        capped, times the factor.
    """

    rows: Ints
    logits: Floats
    cut: Doubles
    log_sum: Doubles


def ask_core(core: Any, hidden: Floats, limit: int, shape: Shape, out: Ints | None) -> tuple[int, Envelope]:
    """Return the number of the first state that is not finite, -1 for none, and the envelope of a core."""
    count = len(hidden)
    rows, logits = np.empty((count, limit), np.int64), np.empty((count, limit), np.float32)
    ends = np.empty((count, 2))
    out = None if out is None else np.ascontiguousarray(out)
    bad = core.envelope(hidden=hidden, shape=tuple(shape), out=out, rows=rows, logits=logits, ends=ends)
    return bad, Envelope(rows, logits, ends[:, 0], ends[:, 1])
