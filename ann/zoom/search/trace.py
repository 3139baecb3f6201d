"""The decisions of a search of one query, as the search takes them down for its explanation."""

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.zoom.storage.ids import Located

__all__ = ["Trace"]

Ints: TypeAlias = npt.NDArray[np.int64]


class Trace:
    """The decisions of a search of one query: at most 12 bytes for each candidate that the search holds.

    Attributes
    ----------
    nprobe
        Lists that the query was routed to in the end.
    positions, rounds
        int64 and int32 ``[n]``: the candidates admitted, by ascending lower bound, and the rounds of their reads as
        `memhier.rows.ranking.rank_rows` has them.
    threshold
        Distance beyond which a lower bound is refused.
    eps, most
        Where the search was completed exactly: standard errors of the bounds for that, and the most remoteness that a
        lower bound then had. None elsewhere.
    places
        Places of the vectors found, nearest first.
    """

    def __init__(self) -> None:
        self.nprobe: int = 0
        self.positions: Ints = np.empty(0, np.int64)
        self.rounds: npt.NDArray[np.int32] = np.empty(0, np.int32)
        self.threshold: float = np.inf
        self.eps: float | None = None
        self.most: float | None = None
        self.places: Located = Located(np.empty(0, np.int64), np.empty(0, np.int64))

    def routed(self, nprobe: int) -> None:
        """Take down the lists of the query."""
        self.nprobe = nprobe

    def ranked(self, positions: Ints, rounds: npt.NDArray[np.int32], threshold: float) -> None:
        """Take down the candidates and their reads."""
        self.positions, self.rounds, self.threshold = positions, rounds, threshold

    def completed(self, eps: float, most: float, radius: float) -> None:
        """Take down that everything with a lower bound of at most `most`, the distance `radius`, was read as well."""
        self.eps, self.most, self.threshold = eps, most, radius

    def found(self, places: Located) -> None:
        """Take down the places of the result."""
        self.places = places
