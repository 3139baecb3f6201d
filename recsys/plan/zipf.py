"""Popularity by a power law: how many rows a step needs, and how many of them a cache lacks."""

import math
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from memhier.arguments import check_int, check_number

__all__ = ["Zipf"]

_BINS = 4096  # of ranks, each as much longer than the last: errors are below one in a thousand
_EXPONENTS = 0.0, 3.0
_HALVINGS = 40

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Zipf:
    """Rows whose accesses are independent, the r-th most popular in proportion to ``r ** -exponent``.

    Attributes
    ----------
    rows
        Number of rows, up to 2**50.
    exponent
        0 to 3; 0 is uniform.

    Examples
    --------
    >>> from memhier.recsys.plan import Zipf
    >>> round(Zipf(1000, 0.0).distinct(1000)), round(Zipf(1000, 0.0).missed(1000, 250))
    (632, 474)
    """

    rows: int
    exponent: float

    def __post_init__(self) -> None:
        check_int("rows", self.rows, 1, 2**50)
        check_number("exponent", self.exponent, *_EXPONENTS)

    @classmethod
    def fit(cls, rows: int, accesses: int, distinct: int) -> Self:
        """Return the power law by which so many accesses touch so many distinct rows on average."""
        check_int("distinct", distinct, 1, min(rows, accesses))
        low, high = _EXPONENTS
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if cls(rows, middle).distinct(accesses) > distinct else (low, middle)
        return cls(rows, (low + high) / 2)

    def hit_ratio(self, resident: int) -> float:
        """Return the share of accesses that go to the `resident` most popular rows."""
        return float(self._between(np.array([1.0, min(resident, self.rows) + 1.0]))[0])

    def distinct(self, accesses: int) -> float:
        """Return how many distinct rows so many accesses touch on average."""
        return self.missed(accesses, 0)

    def missed(self, accesses: int, resident: int) -> float:
        """Return how many distinct rows beyond the `resident` most popular so many accesses touch on average."""
        if resident >= self.rows:
            return 0.0
        first, last = resident + 1.0, self.rows + 1.0
        # Single ranks first, then bins of growing length.
        edges = np.unique(np.concatenate([
            np.arange(first, min(first + _BINS, last)), np.rint(np.geomspace(first, last, _BINS)), [first, last]
        ]))  # fmt: skip
        edges = edges[(edges >= first) & (edges <= last)]
        widths = np.diff(edges)
        each = self._between(edges) / widths
        return float(np.sum(widths * -np.expm1(accesses * np.log1p(-np.minimum(each, 1 - 1e-12)))))

    def _between(self, ranks: Floats) -> Floats:
        """Return the share of accesses from each rank to the next, as the integral of the density."""
        power = 1.0 - self.exponent
        steps, whole = np.diff(np.log(ranks)), math.log(self.rows + 1.0)
        if abs(power) < 1e-9:
            shares: Floats = steps / whole
        else:  # no difference of nearly equal numbers
            shares = ranks[:-1] ** power * np.expm1(power * steps) / math.expm1(power * whole)
        return shares
