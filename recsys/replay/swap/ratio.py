"""How many of the samples that a step used are swapped."""

import math
from typing import Any, Protocol

__all__ = ["FixedRatio", "Ratio", "SteeredRatio", "as_ratio", "swaps"]


class Ratio(Protocol):
    """A share of the samples used."""

    def share(self) -> float:
        """Return the share for this step, 0 to 1."""

    def stalled(self, seconds: float, step_seconds: float) -> None:
        """Hear how long the last step waited for swaps, and how long it took."""


class FixedRatio:
    """The same share in every step.

    Parameters
    ----------
    share
        0 to 1.
    """

    def __init__(self, share: float) -> None:
        self._share = _checked("ratio", share)

    def share(self) -> float:
        return self._share

    def stalled(self, seconds: float, step_seconds: float) -> None:
        return

    def __repr__(self) -> str:
        return f"{self._share}"


class SteeredRatio:
    """As large a share as storage sustains: it shrinks when a step had to wait, and grows slowly otherwise.

    What is swapped then depends on the speed of the machine, so that runs no longer repeat each other.

    Parameters
    ----------
    largest
        Share to start with and not to exceed.
    tolerance
        The share of a step's time that it may wait.
    """

    def __init__(self, largest: float = 1.0, tolerance: float = 0.01) -> None:
        self.largest = _checked("largest", largest)
        self.tolerance = _checked("tolerance", tolerance)
        self._share = self.largest

    def share(self) -> float:
        return self._share

    def stalled(self, seconds: float, step_seconds: float) -> None:
        if seconds > self.tolerance * step_seconds:
            self._share *= 0.7
        else:
            self._share = min(self.largest, self._share + 0.005)

    def __repr__(self) -> str:
        return f"SteeredRatio({self.largest}, {self.tolerance})"


def as_ratio(ratio: float | Ratio) -> Ratio:
    """Return a fixed ratio for a number, and any other as it is."""
    return FixedRatio(ratio) if isinstance(ratio, int | float) else ratio


def swaps(ratio: Ratio, used: int) -> int:
    """Return how many of the used samples leave: the share, rounded up."""
    # 0.1 * 30 is a little more than 3.
    return min(used, math.ceil(round(ratio.share() * used, 9)))


def _checked(name: str, share: Any) -> float:
    if isinstance(share, bool) or not isinstance(share, int | float):
        raise TypeError(f"{name}={share!r}: expected a share as a float")
    if not 0 <= share <= 1:
        raise ValueError(f"{name}={share!r}: expected a share, 0 to 1")
    return float(share)
