"""Limits on the reads of a search, and warnings of a recall that is not kept."""

import warnings
from dataclasses import dataclass

from memhier.callers import user_stacklevel
from memhier.errors import RecallWarning

__all__ = ["NO_LIMITS", "ReadLimits", "RecallWarnings", "read_limits"]


@dataclass(frozen=True, slots=True)
class ReadLimits:
    """The most pages read for a query, and the second at which a call ends its reads."""

    max_reads: int = 2**62
    deadline: float = float("inf")


NO_LIMITS = ReadLimits()


def read_limits(max_reads: int | None, deadline_ms: float | None) -> ReadLimits:
    """Return the limits of a search by its arguments; `NO_LIMITS` itself where there are none."""
    timed = deadline_ms is not None and deadline_ms < float("inf")
    if max_reads is None and not timed:
        return NO_LIMITS
    pages = NO_LIMITS.max_reads if max_reads is None else int(max_reads)
    return ReadLimits(pages, float(deadline_ms) / 1000 if timed and deadline_ms is not None else NO_LIMITS.deadline)


class RecallWarnings:
    """Warns of a recall that searches of an index do not keep, once for each cause."""

    def __init__(self) -> None:
        self._warned: set[str] = set()

    def warn(self, cause: str, words: str) -> None:
        """Warn, if this is the first time for the cause."""
        if cause not in self._warned:
            self._warned.add(cause)
            warnings.warn(words, RecallWarning, stacklevel=user_stacklevel())

    def warn_of_limits(self, recall: float, kept: float, early: int, queries: int, limits: ReadLimits) -> None:
        """Warn that limits keep `kept` in place of `recall`, as they ended `early` of the queries."""
        limit = f"max_reads={limits.max_reads}" if limits.deadline == NO_LIMITS.deadline else "deadline_ms="
        cause = f"ended {early} of {max(1, queries)} queries early" if early else "leaves no reads to be exact"
        had = f"about {kept:.2g}" if kept > 0.005 else "less than 0.5"
        self.warn(
            "limits", f"recall={recall:g} is not kept: {limit} {cause}, "
            f"and {had} can be had within it; allow more, or ask for that recall"
        )  # fmt: skip
