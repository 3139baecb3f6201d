"""A check of some hidden states against the contexts of the build, and one warning if they are unlike.

It compares norms: of the difference from the mean context, of the leading coordinates, and of all coordinates, in which
contexts of the build are white. Made-up contexts differ from a model's own in at least one of these norms: those with
noise, or with the numbers of real ones in another order, in the norm of all coordinates. Contexts of another domain of
the same model have nearly the same norms.
"""

import warnings
import zlib
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.decoder.calibration.audit import PrecisionAudit
from memhier.ann.decoder.coding.projection import Projection
from memhier.ann.decoder.layer import Floats
from memhier.callers import user_stacklevel

__all__ = ["Familiarity", "Ranges", "pause_after", "ranges_of"]

Ranges: TypeAlias = tuple[tuple[float, float], ...]
Doubles: TypeAlias = npt.NDArray[np.float64]

_LEADING = (16, 64)  # coordinates
_NORMS = 4  # decoders of before version 4 have the ranges of three
_TAIL = 0.005  # share of the build's contexts beyond either end of a range, before it is widened
_WIDER = 0.25  # of a range, at either end
_AT_ONCE = 16  # states of a call that are checked, at most
_FIRST = 64  # states that are checked in any call
_PAUSE = 127  # from then on, fewer calls than this are passed over, 63 in the mean
_ENOUGH = 16  # states before a warning
_MANY = 0.25  # share of unlike states that warns
_REMEMBERED = 256  # recent states; beyond them all counts are halved


def ranges_of(projection: Projection, contexts: Floats) -> Ranges:
    """Return the range of each norm among the contexts of a build."""
    norms = _norms(projection, contexts)
    low, high = np.quantile(norms, [_TAIL, 1 - _TAIL], axis=0)
    wider = _WIDER * (high - low) + 1e-3
    return tuple(zip((low - wider).tolist(), (high + wider).tolist(), strict=True))


def pause_after(turn: int) -> int:
    """Return how many calls to pass over after a check; at equal distances all might be of one kind."""
    return zlib.crc32(turn.to_bytes(8, "little")) % _PAUSE


class Familiarity:
    """Checks the first states that a decoder answers, and states of one call in 64, in the mean, from then on.

    Parameters
    ----------
    ranges
        From :func:`ranges_of`; without ranges it checks nothing.
    audit
        Its estimate of the precision, if it has one, is part of the warning.

    Attributes
    ----------
    checked, unlike
        States checked, and states among them unlike the build's.
    """

    def __init__(self, projection: Projection, ranges: Ranges, audit: PrecisionAudit) -> None:
        self._projection, self._audit = projection, audit
        self._ranges = np.array(ranges, np.float64).reshape(-1, 2)
        self._turns = self._rest = self._recent = self._recent_unlike = 0
        self._warned = False
        self.checked: int
        self.unlike: int
        self.checked = self.unlike = 0

    def look(self, hidden: Floats) -> bool:
        """Check states, float32 ``[n, D]``, if it is their turn; warn once if many are unlike the build's.

        Returns whether many of the checked ones are.

        The warning names the user's call.
        """
        if self._rest:
            self._rest -= 1
            return False
        unlike = self.check(hidden)
        if self.settled:
            self._turns += 1
            self._rest = pause_after(self._turns)
        return unlike

    @property
    def settled(self) -> bool:
        """Whether the first states are checked, or none ever will be."""
        return self.checked >= _FIRST or not len(self._ranges)

    def check(self, hidden: Floats) -> bool:
        """Check states in any case; returns as :meth:`look`."""
        if not len(self._ranges) or not len(hidden):
            return False
        norms = _norms(self._projection, hidden[:: max(1, len(hidden) // _AT_ONCE)][:_AT_ONCE], len(self._ranges))
        unlike = int(((norms < self._ranges[:, 0]) | (norms > self._ranges[:, 1])).any(1).sum())
        self.checked, self.unlike = self.checked + len(norms), self.unlike + unlike
        self._recent, self._recent_unlike = self._recent + len(norms), self._recent_unlike + unlike
        if self._recent >= _ENOUGH and self._recent_unlike > _MANY * self._recent and not self._warned:
            self._warned = True
            told = self._audit.told()
            warnings.warn(
                f"{self._recent_unlike} of {self._recent} hidden states are unlike the contexts that this decoder was "
                "built from, so its answers may be slow and below the declared precision: build it again with "
                f"contexts= of the model and texts in use (accelerate: input_ids=){told and f'; {told}'}",
                stacklevel=user_stacklevel(),
            )
        if self._recent > _REMEMBERED:
            self._recent, self._recent_unlike = self._recent // 2, self._recent_unlike // 2
        return unlike > _MANY * len(norms)


def _norms(projection: Projection, hidden: Floats, count: int = _NORMS) -> Doubles:
    """Return logarithms of the first `count` norms, float64 ``[n, count]``."""
    away = hidden - projection.mean
    leading = away @ (projection.turn if count == _NORMS else projection.turn[: _LEADING[-1]]).T
    parts = [away, *(leading[:, :most] for most in _LEADING), leading][:count]
    squares = [np.einsum("nd,nd->n", part, part) for part in parts]
    # The small number keeps the logarithm of zero finite.
    logarithms: Doubles = np.log(np.stack(squares, 1, dtype=np.float64) + 1e-30)
    return logarithms
