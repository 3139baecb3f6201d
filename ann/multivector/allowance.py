"""The reads that a search may still make for one query."""

import time
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.limits import NO_LIMITS, ReadLimits

__all__ = ["Allowance"]

Ints: TypeAlias = npt.NDArray[np.int64]


class Allowance:
    """The pages and the time that the limits of a call leave for one query.

    Parameters
    ----------
    limits
        Of the call.
    started
        `time.monotonic` at its begin.

    Attributes
    ----------
    stopped
        ``"max_reads"`` or ``"deadline"`` once that has ended the reads; empty before.
    """

    def __init__(self, limits: ReadLimits, started: float) -> None:
        self._pages, self._limited = limits.max_reads, limits is not NO_LIMITS
        self._end = started + limits.deadline
        self.stopped: str = ""

    @property
    def limited(self) -> bool:
        """Whether there are limits at all."""
        return self._limited

    def is_over(self) -> bool:
        """Return whether no more reads may start."""
        if self._limited and not self.stopped and time.monotonic() >= self._end:
            self.stopped = "deadline"
        return bool(self.stopped)

    def take(self, pages: Ints) -> int:
        """Return how many of the next items, which lie on so many pages each, may be read, and count their pages."""
        if self.is_over():
            return 0
        taken = int(np.searchsorted(np.cumsum(pages), self._pages, side="right"))
        self._pages -= int(pages[:taken].sum())
        if taken < len(pages):
            self.stopped = "max_reads"
        return taken
