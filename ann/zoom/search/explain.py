"""What a search did for one query, in words and numbers."""

from dataclasses import dataclass
from typing import Any

__all__ = ["Explanation"]

_WHY = {
    "bound": "the bound of every candidate left was beyond the k-th nearest vector",
    "all_read": "every candidate had been read",
    "max_reads": "the pages allowed by max_reads were read",
    "deadline": "the time allowed by deadline_ms was over",
}


@dataclass(frozen=True, slots=True)
class Explanation:
    """One search, step by step.

    Attributes
    ----------
    lists, probed
        Inverted lists there are, and how many were scanned.
    routed
        How many the graph was asked for; those between were passed over.
    vectors, scanned
        Vectors there are, and codes compared.
    candidates
        Left by the bounds, which lie `eps` standard errors from an estimate (None where a fixed number is read).
    eps
        See above.
    ranked, pages, hot_pages, rounds
        Vectors compared exactly, pages read for them and found in DRAM, and in how many rounds.
    stopped
        Why: ``"bound"``, ``"all_read"``, ``"max_reads"`` or ``"deadline"``.
    calibrated
        Whether the effort is known to reach the recall asked for.
    """

    lists: int
    probed: int
    routed: int
    vectors: int
    scanned: int
    candidates: int
    eps: float | None
    ranked: int
    pages: int
    hot_pages: int
    rounds: int
    stopped: str
    calibrated: bool

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain values."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    def __str__(self) -> str:
        bounds = "their estimates" if self.eps is None else f"bounds of {self.eps:.2f} standard errors"
        known = "" if self.calibrated else "\nThe recall asked for is not known to be reached: see ZoomIndex.tune."
        return (
            f"{self.probed} of {self.lists} lists were scanned ({self.routed} were near enough to be looked at),\n"
            f"{self.scanned:,} of {self.vectors:,} codes compared, and {self.candidates} vectors left by {bounds}.\n"
            f"{self.ranked} were ranked exactly in {self.rounds} round{'' if self.rounds == 1 else 's'}: "
            f"{self.pages} pages read, {self.hot_pages} in DRAM.\n"
            f"It stopped as {_WHY[self.stopped]}.{known}"
        )
