"""Walks answered again by the preview, and one warning if they found too little.

The norms of a context do not say how near it is to those of the build: a wide cloud with their mean and covariance has
the same norms. So some walks are compared whatever their context.
"""

import threading
import warnings
from typing import Any

from memhier.ann.decoder.answers import TopK
from memhier.ann.decoder.calibration.audit import precision_of
from memhier.ann.decoder.layer import Floats
from memhier.callers import user_stacklevel
from memhier.errors import RecallWarning

__all__ = ["WALKS_MOST", "WalkAudit"]

WALKS_MOST = 4  # states of a call that are answered again
_FIRST = 64  # states that are compared, of calls that walk
_EVERY = 4  # from then on, one of so many that are watched: the preview takes the time of about three walks
_ENOUGH = 16  # calls before a doubt
_SURE = 32  # calls before a warning
_IN_DOUBT = 512  # calls that are compared besides, as those before found too little
_REMEMBERED = 1024  # recent calls; beyond them all counts are halved


class WalkAudit:
    """Says which walks are answered again, and keeps their precision. Copies of it count from zero."""

    def __init__(self, declared: float) -> None:
        self._declared, self._lock, self._warned = declared, threading.Lock(), False
        self._walks, self._compared, self._left = 0, 0, _FIRST
        self._count = self._sum = self._squares = 0.0

    def __reduce__(self) -> tuple[type["WalkAudit"], tuple[float]]:
        """Pickle and copy the option alone."""
        return type(self), (self._declared,)

    @property
    def settled(self) -> bool:
        """Whether no further call has to be compared."""
        return not self._left

    def due(self) -> bool:
        """Say if a walk that is watched, one in 64 where all is settled, is answered again."""
        with self._lock:
            self._walks += 1
            return self._left > 0 or not self._walks % _EVERY

    def note(self, found: TopK, better: TopK, slack: Floats) -> None:
        """Count a call as one number, as :meth:`PrecisionAudit.note` does; doubt, and warn once, if calls miss much."""
        precision = precision_of(found, better, slack)
        if precision is None:
            return
        with self._lock:
            self._compared, self._left = self._compared + 1, max(0, self._left - len(found.values))
            self._count, self._sum, self._squares = self._count + 1, self._sum + precision, self._squares + precision**2
            if self._count > _REMEMBERED:
                self._count, self._sum, self._squares = self._count / 2, self._sum / 2, self._squares / 2
            mean, low, high = self._estimate()
            if mean < self._declared and self._count >= _ENOUGH and self._compared < _FIRST + _IN_DOUBT:
                self._left = max(1, self._left)
            warn = high < self._declared and self._count >= _SURE and not self._warned
            self._warned |= warn
        if warn:
            warnings.warn(
                f"{self._compared} walks answered again by the preview put the precision of this decoder at {mean:.4f} "
                f"({low:.4f} to {high:.4f}), below the declared {self._declared}: build it again with contexts= of the "
                "model and texts in use (accelerate: input_ids=), or with method='preview'",
                RecallWarning,
                stacklevel=user_stacklevel(),
            )

    def stats(self) -> dict[str, Any]:
        """Return plain numbers: walks that were compared, and the precision of the last with its interval."""
        with self._lock:
            known = zip(("precision", "precision_low", "precision_high"), self._estimate(), strict=True)
            return {"calls": self._compared} | (dict(known) if self._compared else {})

    def _estimate(self) -> tuple[float, float, float]:
        """Return the mean precision of recent calls, less and plus two standard errors."""
        count = max(self._count, 1.0)
        mean = self._sum / count
        error = (max(0.0, self._squares / count - mean**2) / count) ** 0.5
        return mean, max(0.0, mean - 2 * error), min(1.0, mean + 2 * error)
