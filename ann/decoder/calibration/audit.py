"""Precision in use: some calls answered again by the full product, and one warning if they found too little."""

import threading
import warnings
from collections import deque
from typing import Any

import numpy as np

from memhier.ann.decoder.answers import TopK
from memhier.ann.decoder.layer import Floats
from memhier.ann.interval import recall_interval
from memhier.callers import user_stacklevel
from memhier.errors import RecallWarning

__all__ = ["STATES_MOST", "PrecisionAudit", "precision_of"]

STATES_MOST = 16  # states of an audited call that are answered again
_RECENT = 1024  # audited calls that the estimate is about
_DRAWN = 4096  # calls drawn for at a time
_UNASKED = 512  # calls audited without a share, as their states are unlike the build's


def precision_of(found: TopK, exact: TopK, slack: Floats) -> float | None:
    """Return the share of an answer that is among the largest, see :meth:`PrecisionAudit.note`; None if it is empty."""
    present = exact.indices >= 0
    if not present.any():
        return None
    least = np.where(present, exact.values, np.inf).min(1) - slack
    return float((found.values >= least[:, None])[present].mean())


class PrecisionAudit:
    """Draws calls and keeps the precision of those that were answered again. Copies of it count from zero.

    Parameters
    ----------
    share, seed
        The share of calls, and the seed by which they are drawn: the same calls, in their order, for one seed.
    declared
        The precision to be kept.
    """

    def __init__(self, share: float, seed: int, declared: float) -> None:
        self.share: float
        self.share, self._seed, self._declared = share, seed, declared
        self._lock = threading.Lock()
        self._calls = self._audited = self._unasked = 0
        self._drawn = np.zeros(0, np.bool_)
        self._recent: deque[float] = deque(maxlen=_RECENT)
        self._warned = False

    def __reduce__(self) -> tuple[type["PrecisionAudit"], tuple[float, int, float]]:
        """Pickle and copy the options alone."""
        return type(self), (self.share, self._seed, self._declared)

    def draw(self, *, unlike: bool = False) -> bool:
        """Say if the next call is audited: it is drawn, or one of the first calls with states unlike the build's."""
        if not self.share and not unlike:
            return False
        with self._lock:
            unasked = unlike and self._unasked < _UNASKED
            self._unasked += unasked
            return (bool(self.share) and self._next()) or unasked

    def note(self, found: TopK, exact: TopK, slack: Floats) -> None:
        """Count an audited call by its share of values that are among the largest, and warn once if they are too few.

        Parameters
        ----------
        found, exact
            Answers with as many words, of the call and of the full product.
        slack
            float32 ``[n]``: the most that another order of summing takes from a logit.
        """
        precision = precision_of(found, exact, slack)
        if precision is None:
            return
        with self._lock:
            self._audited += 1
            self._recent.append(precision)
            _, _, high = self._estimate()
            warn = high < self._declared and not self._warned
            self._warned |= warn
        if warn:
            warnings.warn(
                f"{self.told()}, below the declared {self._declared}: build it again with contexts= of the model and "
                "texts in use, or take certify=True or method='full'",
                RecallWarning,
                stacklevel=user_stacklevel(),
            )

    def told(self) -> str:
        """Return a clause that tells the estimate, for a warning; empty without one."""
        with self._lock:
            count, (estimate, low, high) = len(self._recent), self._estimate()
        if not count:
            return ""
        return (
            f"{count} calls answered again by the full product put the precision of this decoder at {estimate:.4f} "
            f"({low:.4f} to {high:.4f})"
        )

    def stats(self) -> dict[str, Any]:
        """Return plain numbers: the share, calls audited, and the estimated precision of the last with its interval."""
        with self._lock:
            estimate, low, high = self._estimate()
            audited = self._audited
        known = {} if not audited else {"precision": estimate, "precision_low": low, "precision_high": high}
        return {"share": self.share, "calls": audited, **known}

    def _estimate(self) -> tuple[float, float, float]:
        """Return the mean precision of recent calls and its interval; one call counts as one number."""
        mean = float(np.mean(self._recent)) if self._recent else 1.0
        return mean, *recall_interval(mean, len(self._recent))

    def _next(self) -> bool:
        block, at = divmod(self._calls, _DRAWN)
        if not at:
            self._drawn = np.random.default_rng((self._seed, block)).random(_DRAWN) < self.share
        self._calls += 1
        return bool(self._drawn[at])
