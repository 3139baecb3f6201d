"""log Z when the exact rows come from SSD: sums over all codes, with what was computed exactly in its place."""

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.decoder.answers import Partition
from memhier.ann.decoder.coding.codes import BlockCodes
from memhier.ann.decoder.coding.layer import Floats
from memhier.ann.decoder.coding.projection import Projection

__all__ = ["close_sums", "margins"]

_ROUNDING = 1e-6  # of the terms of an estimate, what single precision loses, 16 times over
_SLACK = 1e-5  # of a sum of exp, a hundred times what is lost in adding up

Ints: TypeAlias = npt.NDArray[np.int64]
Doubles: TypeAlias = npt.NDArray[np.float64]


def margins(projection: Projection, blocks: BlockCodes, hidden: Floats, rows: Ints) -> tuple[Doubles, Doubles]:
    """Return for rows ``[n, c]`` the margins between estimates and bounds, and the norms that lie outside the codes.

    The second is the product of the row's norm beyond the width with that of the hidden state.
    """
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
    # The query's own norms are rounded up, as the core's are.
    around = (beyond * outside + lost * inside + coded * rounded) * (1 + 2e-6) + _ROUNDING * terms
    return around, beyond * outside


def close_sums(
    projection: Projection,
    blocks: BlockCodes,
    hidden: Floats,
    rows: Ints,
    estimates: Floats,
    logits: Floats,
    error: Doubles,
    sums: Doubles,
    inverse: float,
    variance: float,
) -> Partition:
    """Return log Z from sums over all rows and the exact logits of some.

    Parameters
    ----------
    rows, estimates, logits, error
        ``[n, c]``: the rows that are exact, -1 for none; their estimates, logits, and what those may be wrong by.
    sums
        float64 ``[n, 4]``: of exp over all rows of estimates with half their variance, of lower and of upper bounds;
        and what they are relative to.
    """
    around, outside = margins(projection, blocks, hidden, rows)
    reference = sums[:, 3:]
    here = rows >= 0
    middle = np.minimum(inverse * estimates + variance / 2 * np.square(inverse * outside), reference + 80)
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
        whole = here.sum(1) == blocks.numbers.shape[1] - (blocks.numbers[0] <= -1e30).sum()
        tail = np.where(whole, 0, tail)
        head = np.logaddexp.reduce(np.where(here, inverse * after.astype(np.float64), -np.inf), axis=1)
        with np.errstate(divide="ignore"):
            found.append(np.logaddexp(head, reference[:, 0] + np.log(tail)))
    return Partition(np.clip(found[0], found[1], found[2]), found[1], found[2])
