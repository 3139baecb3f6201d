"""Tests if a mean lies above a number, by bets: right whatever the distribution, but for a chance of 10^-6.

A bet of a share of its wealth on each number of a sample, in [0, 1], gains nothing on average if the mean is the number
it bets against. So, by Ville's inequality, its wealth passes 1 / c with a chance of at most c (Waudby-Smith and
Ramdas, arXiv 2010.09686). Samples of little variance decide after some dozen numbers.
"""

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["ERROR", "is_mean_above"]

ERROR = 1e-6
_STAKES = np.array([0.05, 0.3, 0.95])[:, None, None]
_EQUAL = float(np.log(len(_STAKES)))  # stakes have equal parts of the wealth

Doubles: TypeAlias = npt.NDArray[np.float64]


def is_mean_above(sample: Doubles, limit: Doubles, tests: int = 1) -> npt.NDArray[np.int8]:
    """Return 1 for rows whose mean is above the limit, -1 for those below, and 0 where the sample is too small.

    Parameters
    ----------
    sample
        ``[n, t]``: independent numbers of each row, 0 to 1.
    limit
        ``[n]``.
    tests
        Divides the chance of an error, for a decision by so many tests.
    """
    inside = np.minimum(np.maximum(limit, 1e-12), 1 - 1e-12)
    above = sample.sum(1) > inside * sample.shape[1]  # the one bet of two that can have won
    gain = (sample - inside[:, None]) / np.where(above, inside, inside - 1)[:, None]
    wealth = np.logaddexp.reduce(np.log(1 + _STAKES * gain).sum(-1), axis=0) - _EQUAL
    enough = np.log(2 * tests / ERROR)
    verdict = np.where(wealth >= enough, np.where(above, 1, -1), 0)
    verdict[limit < 0] = 1
    verdict[limit > 1] = -1
    return verdict.astype(np.int8)
