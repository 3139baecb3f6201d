"""Whether hidden states are like those that a decoder was built from: a look at some of them, and one warning.

Norms tell: that of the distance from the mean context, and those within the leading coordinates, where contexts of the
build are white. Made-up contexts have other norms than a model's own in at least one of them; another domain of the
same model has nearly the same.
"""

import warnings
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.decoder.coding.layer import Floats
from memhier.ann.decoder.coding.projection import Projection

__all__ = ["Familiar", "Ranges", "ranges_of"]

Ranges: TypeAlias = tuple[tuple[float, float], ...]
Doubles: TypeAlias = npt.NDArray[np.float64]

_LEADING = (16, 64)  # coordinates
_TAIL = 0.005  # of the contexts of the build lie on either side of a range before it is widened
_WIDER = 0.25  # of a range, on either side
_AT_ONCE = 16  # states of a call, at most
_FIRST = 64  # states that are looked at, whatever the call
_EVERY = 64  # calls, of which one is looked at from then on
_ENOUGH = 16  # states before anything is said
_MANY = 0.25  # of them
_REMEMBERED = 256  # states; then what was seen counts half


def ranges_of(projection: Projection, contexts: Floats) -> Ranges:
    """Return the range of each norm among the contexts of a build."""
    norms = _norms(projection, contexts)
    low, high = np.quantile(norms, [_TAIL, 1 - _TAIL], axis=0)
    wider = _WIDER * (high - low) + 1e-3
    return tuple(zip((low - wider).tolist(), (high + wider).tolist(), strict=True))


class Familiar:
    """Looks at the first states that a decoder is asked with, and at those of one call in 64 from then on.

    Parameters
    ----------
    ranges
        From :func:`ranges_of`; without any nothing is looked at.

    Attributes
    ----------
    checked, unlike
        States that were looked at, and those among them unlike the build's.
    """

    def __init__(self, projection: Projection, ranges: Ranges) -> None:
        self._projection = projection
        self._ranges = np.array(ranges, np.float64).reshape(-1, 2)
        self._calls = self._recent = self._recent_unlike = 0
        self._warned = False
        self.checked = self.unlike = 0

    def look(self, hidden: Floats) -> None:
        """Look at states, float32 ``[n, D]``, if it is their turn; warn once if many are unlike the build's.

        The warning names the caller of the public method that calls this.
        """
        self._calls += 1
        if not len(self._ranges) or not len(hidden) or (self.checked >= _FIRST and self._calls % _EVERY):
            return
        norms = _norms(self._projection, hidden[:: max(1, len(hidden) // _AT_ONCE)][:_AT_ONCE])
        unlike = int(((norms < self._ranges[:, 0]) | (norms > self._ranges[:, 1])).any(1).sum())
        self.checked, self.unlike = self.checked + len(norms), self.unlike + unlike
        self._recent, self._recent_unlike = self._recent + len(norms), self._recent_unlike + unlike
        if self._recent >= _ENOUGH and self._recent_unlike > _MANY * self._recent and not self._warned:
            self._warned = True
            warnings.warn(
                f"{self._recent_unlike} of {self._recent} hidden states are unlike the contexts that this decoder was "
                "built from, so its answers may be slow and below the declared precision: build it again with "
                "contexts= of the model and texts in use (accelerate: input_ids=)",
                stacklevel=3,
            )
        if self._recent > _REMEMBERED:
            self._recent, self._recent_unlike = self._recent // 2, self._recent_unlike // 2


def _norms(projection: Projection, hidden: Floats) -> Doubles:
    """Return logarithms of norms, float64 ``[n, 3]``."""
    away = hidden - projection.mean
    leading = away @ projection.turn[: _LEADING[-1]].T
    squares = [np.einsum("nd,nd->n", part, part) for part in (away, *(leading[:, :most] for most in _LEADING))]
    # Where a norm is zero it stays finite.
    logarithms: Doubles = np.log(np.stack(squares, 1, dtype=np.float64) + 1e-30)
    return logarithms
