"""log Z if the exact rows come from SSD: sums over all codes, in which exact logits replace their estimates."""

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.decoder.answers import Partition
from memhier.ann.decoder.coding.view import Codes
from memhier.ann.decoder.layer import Floats, Ints

__all__ = ["ExactLogits", "close_sums", "margins"]

_ROUNDING = 1e-6  # of the terms of an estimate: 16 times the loss of single precision
_SLACK = 1e-5  # of a sum of exp: a hundred times the loss of addition

Doubles: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ExactLogits:
    """Rows whose logits were computed exactly, ``[n, c]`` each.

    Attributes
    ----------
    rows
        -1 for none.
    error
        Bounds of the rounding errors of the logits.
    """

    rows: Ints
    estimates: Floats
    logits: Floats
    error: Doubles


def margins(codes: Codes, hidden: Floats, rows: Ints) -> tuple[Doubles, Doubles]:
    """Return the margins between estimates and bounds of rows ``[n, c]``, and the norms outside the codes.

    The second is the product of two norms beyond the width: the row's and the hidden state's.
    """
    projection, blocks = codes.projection, codes.blocks
    away = hidden.astype(np.float64) - projection.mean
    z = away @ projection.turn.T.astype(np.float64)
    inner = z[:, : blocks.width].astype(np.float32)
    step = np.abs(inner).max(1, keepdims=True) / np.float32(127)
    inverse = np.divide(1, step, out=np.zeros_like(step), where=step > 0)
    rounded = np.linalg.norm(inner - step * np.rint(inner * inverse), axis=1, keepdims=True)
    inside = np.linalg.norm(inner, axis=1, keepdims=True)
    outside = np.linalg.norm(z[:, blocks.width :], axis=1, keepdims=True)
    offsets, _, beyond, lost, coded = blocks.numbers[:, rows].astype(np.float64)
    terms = np.abs(offsets) + np.abs(away @ projection.common)[:, None] + (coded + lost) * inside
    # The hidden state's own norms are rounded up, as in the core.
    around = (beyond * outside + lost * inside + coded * rounded) * (1 + 2e-6) + _ROUNDING * terms
    return around, beyond * outside


def close_sums(
    codes: Codes, hidden: Floats, exact: ExactLogits, sums: Doubles, inverse: float, counts: Ints
) -> Partition:
    """Return log Z from sums over all rows and the exact logits of some.

    Parameters
    ----------
    sums
        float64 ``[n, 4]``: sums over all rows of exp of estimates plus half their variance, of lower bounds and of
        upper bounds, each relative to the fourth number.
    inverse
        Multiplies logits in Z.
    counts
        int64 ``[n]``, or ``[1]`` for all states: the rows in the sums.
    """
    rows, estimates, logits, error = exact.rows, exact.estimates, exact.logits, exact.error
    around, outside = margins(codes, hidden, rows)
    reference = sums[:, 3:]
    here = rows >= 0
    middle = np.minimum(inverse * estimates + codes.variance / 2 * np.square(inverse * outside), reference + 80)
    found = []
    for column, before, after, slack in (
        (0, middle, logits, 0.0),
        (1, inverse * (estimates - around), logits - error, -_SLACK),
        (2, inverse * (estimates + around), logits + error, _SLACK),
    ):
        with np.errstate(over="ignore", invalid="ignore"):
            replaced = np.where(here, np.exp(before - reference), 0).sum(1)
            tail = sums[:, column] * (1 + slack) - replaced * (1 - slack)
        tail = np.where(np.isfinite(tail), np.maximum(tail, 0), np.inf if column == 2 else 0)
        tail = np.where(here.sum(1) == counts, 0, tail)
        head = np.logaddexp.reduce(np.where(here, inverse * after.astype(np.float64), -np.inf), axis=1)
        with np.errstate(divide="ignore"):
            found.append(np.logaddexp(head, reference[:, 0] + np.log(tail)))
    return Partition(np.clip(found[0], found[1], found[2]), found[1], found[2])
