"""An interval for a mean recall that holds for any number of queries and any distribution of their recalls."""

import math
from collections.abc import Callable

__all__ = ["ERROR", "recall_interval"]

ERROR = 0.05  # chance that an interval does not hold the mean
_STEPS = 50  # of bisection


def recall_interval(mean: float, count: int, error: float = ERROR) -> tuple[float, float]:
    """Return the low and the high end of the mean recall after `count` queries whose recalls have this `mean`.

    The ends are those by Hoeffding's first theorem (1963), the Chernoff bound with a relative entropy: independent
    numbers between 0 and 1 of mean ``p`` have a mean of ``m`` or beyond with probability at most ``exp(-n kl(m, p))``.
    The recall of one query counts as one number, however many neighbours it has, as those are not independent. The
    bound is exact in form for any count, so few queries need no guard; it is wide where recalls vary little.
    """
    if not count:
        return 0.0, 1.0
    most = math.log(2 / error) / count
    mean = min(max(mean, 0.0), 1.0)
    low = _border(mean, 0.0, lambda each: _entropy(mean, each) <= most)
    high = _border(mean, 1.0, lambda each: _entropy(mean, each) <= most)
    return low, high


def _border(inside: float, outside: float, holds: Callable[[float], bool]) -> float:
    """Return the last number from `inside` towards `outside` for which `holds` is true, by bisection."""
    if holds(outside):
        return outside
    for _ in range(_STEPS):
        middle = (inside + outside) / 2
        inside, outside = (middle, outside) if holds(middle) else (inside, middle)
    return outside


def _entropy(mean: float, other: float) -> float:
    """Return the relative entropy of coins of these chances."""
    found = 0.0
    for of_mean, of_other in ((mean, other), (1 - mean, 1 - other)):
        if of_mean > 0:
            found += of_mean * math.log(of_mean / of_other) if of_other > 0 else math.inf
    return found
