"""Laws fitted to a few measured sizes, to predict larger ones: growth in log N, and sums of known work."""

import itertools
import math
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

__all__ = ["GrowthLaw", "fit_work"]

Floats = npt.NDArray[np.float64]

_T95 = 3.18  # Student's t for 95 % and three degrees of freedom: five sizes less two numbers
_EXPONENT_MOST = 700.0  # of a float64; an interval as wide as that says nothing
_NOISE = 0.04  # relative, of one measured value: the calibration of one index differs from the next
_BEND = 0.1  # that the slope may change over a factor of e in size, as far as prior knowledge goes


@dataclass(frozen=True, slots=True)
class GrowthLaw:
    """How a quantity grows with N: a parabola in logarithms through the measured sizes; beyond, its slope dies away.

    Small sets grow because they end within a neighbourhood, and a larger set looks more like a small one seen from
    nearer. So from the parabola's end on, the slope falls exponentially towards the least that it may be, at the rate
    at which the parabola bends down; where it does not bend down, the slope stays.

    Attributes
    ----------
    size
        The largest size measured.
    level
        The fitted value there.
    slope, least, fade
        Beyond `size` the value grows as N ** slope at first. Over a factor of e in N, the slope's height over `least`
        becomes exp(-fade) of itself.
    residual
        Root mean square of the relative residuals at the measured sizes.
    level_error, slope_error
        Standard errors of ``log(level)`` and of `slope`.

    Examples
    --------
    >>> from memhier.planning.fits import GrowthLaw
    >>> law = GrowthLaw.fit([1000, 2000, 4000], [10, 20, 40])
    >>> round(law.at(16_000)), round(law.slope, 3)
    (160, 1.0)
    """

    size: int
    level: float
    slope: float
    least: float
    fade: float
    residual: float
    level_error: float
    slope_error: float

    @classmethod
    def fit(cls, sizes: npt.ArrayLike, values: npt.ArrayLike, *, low: float = 0.0, high: float = 1.0) -> Self:
        """Return the law of values, all positive, at different sizes.

        Parameters
        ----------
        sizes, values
            [n], n of at least 2.
        low, high
            The slope that the quantity can have at all.

        Raises
        ------
        ValueError
            When there are fewer than two sizes, or a value is not positive.
        """
        at, measured = np.asarray(sizes, np.float64), np.asarray(values, np.float64)
        if len(np.unique(at)) < 2 or at.shape != measured.shape:
            raise ValueError(f"sizes={at.tolist()}: expected two different sizes or more, and a value for each")
        if not (np.isfinite(measured) & (measured > 0)).all():
            raise ValueError(f"values={measured.tolist()}: expected positive, finite numbers")
        x, y = np.log(at / at.max()), np.log(measured)
        columns = np.stack([np.ones_like(x), x, x**2], 1)
        # The bend counts as one more observation, of zero.
        design = np.vstack([columns / _NOISE, [0, 0, 2 / _BEND]])
        found = np.linalg.lstsq(design, np.append(y / _NOISE, 0.0), rcond=None)[0]
        left = y - columns @ found
        free = len(x) - 2
        scatter = max(1.0, float(np.sum((left / _NOISE) ** 2)) / free) if free else 1.0
        errors = np.sqrt(np.diag(np.linalg.inv(design.T @ design)) * scatter)
        slope = float(np.clip(found[1], low, high))
        fade = max(0.0, -2 * float(found[2])) / (slope - low) if slope > low else 0.0
        rms = float(np.sqrt(np.mean(left**2)))
        return cls(int(at.max()), float(np.exp(found[0])), slope, low, fade, rms, float(errors[0]), float(errors[1]))

    def at(self, size: float) -> float:
        """Return the value at a size from that of the largest measured one up."""
        way = math.log(size / self.size)
        shortened = -math.expm1(-self.fade * way) / self.fade if self.fade > 1e-9 and way > 0 else way
        return float(self.level * math.exp(self.least * way + (self.slope - self.least) * shortened))

    def interval(self, size: float) -> tuple[float, float]:
        """Return the ends of a 95 % interval of the value at a size.

        It takes the slope to stay: how fast it fades is the least certain of all. Beyond the sizes measured the
        quantity neither falls nor grows faster than the size.
        """
        away = math.log(size / self.size)
        wide = math.exp(min(_EXPONENT_MOST, _T95 * math.hypot(self.level_error, self.slope_error * away)))
        near = math.exp(min(_EXPONENT_MOST, _T95 * self.level_error))
        flat, steep = sorted((self.level, self.level * size / self.size))
        return max(self.at(size) / wide, flat / near), min(self.at(size) * wide, steep * near)


def fit_work(work: npt.ArrayLike, seconds: npt.ArrayLike) -> Floats:
    """Return the seconds of a unit of each kind of work, none negative, by least squares of the relative errors.

    Kinds that do not help to tell a measurement from the others count as free.

    Parameters
    ----------
    work
        [n, kinds]: units of each kind in each measurement; at most six kinds.
    seconds
        [n], positive.

    Examples
    --------
    >>> from memhier.planning.fits import fit_work
    >>> fit_work([[1, 10], [1, 20], [1, 40]], [0.3, 0.5, 0.9]).round(3).tolist()
    [0.1, 0.02]
    """
    units, taken = np.asarray(work, np.float64), np.asarray(seconds, np.float64)
    share = units / taken[:, None]
    scale = np.maximum(np.abs(share).max(axis=0), np.finfo(np.float64).tiny)
    best, least = np.zeros(units.shape[1]), math.inf
    for number in range(1, units.shape[1] + 1):
        for kinds in itertools.combinations(range(units.shape[1]), number):
            chosen = share[:, kinds] / scale[list(kinds)]
            found = np.linalg.lstsq(chosen, np.ones(len(taken)), rcond=None)[0]
            left = _left_out(chosen)
            if (found >= 0).all() and left < least - 1e-12:
                best, least = np.zeros(units.shape[1]), left
                best[list(kinds)] = found / scale[list(kinds)]
    return best


def _left_out(chosen: Floats) -> float:
    """Return the squares of the relative errors of each measurement, told from the others, or all if few."""
    count, kinds = chosen.shape
    errors = []
    for row in range(count):
        others = np.delete(chosen, row, 0) if count > kinds else chosen
        found = np.linalg.lstsq(others, np.ones(len(others)), rcond=None)[0]
        errors.append(float(chosen[row] @ found - 1))
    return float(np.sum(np.square(errors)))
