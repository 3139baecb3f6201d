"""The decisions of a search of one query, as the search takes them down for its explanation."""

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["ItemTrace"]

Floats: TypeAlias = npt.NDArray[np.float32]


class ItemTrace:
    """The decisions of a search: 20 bytes for each item on SSD.

    Parameters
    ----------
    count
        Items on SSD.

    Attributes
    ----------
    listed, estimated, upper, scores
        float32 ``[count]``, NaN where unknown: the score by the lists of an item's vectors, by their codes, the most
        that it may be as the search had it, and exactly.
    rounds
        int32 ``[count]``: the submission that read each item, from 1 on; 0 for none.
    """

    def __init__(self, count: int) -> None:
        self.listed, self.estimated, self.upper, self.scores = np.full((4, count), np.nan, np.float32)
        self.rounds: npt.NDArray[np.int32] = np.zeros(count, np.int32)
