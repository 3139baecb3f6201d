"""Moments as attributes: microseconds since 1970 in UTC, from types of Python, NumPy and pandas, and from text.

A moment without a time zone is taken as UTC. Moments finer than a microsecond are refused, not rounded.
"""

import re
from datetime import UTC, date, datetime, timedelta
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["as_moments", "microseconds", "moment_of_text", "moments"]

_EPOCH = datetime(1970, 1, 1)
_MICROSECOND = timedelta(microseconds=1)
_FINER = re.compile(r"[.,][0-9]{6}[0-9]*[1-9]")  # than a microsecond


def moments(values: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Return datetime64 of any unit as microseconds; those that are NaT as zero.

    Raises
    ------
    ValueError
        When one is no whole number of microseconds, or does not fit 64 bits; the message names its value and row.
    """
    made = values.astype("M8[us]")
    null = np.isnat(values)
    wrong = np.flatnonzero(~null & ((made.astype(values.dtype) != values) | np.isnat(made)))
    if len(wrong):
        raise ValueError(f"{values[wrong[0]]} in row {int(wrong[0])}")
    return np.where(null, 0, made.view(np.int64))


def microseconds(value: date | np.datetime64) -> int:
    """Return a moment as microseconds; ValueError for one that they do not hold."""
    if isinstance(value, np.datetime64):
        return int(moments(np.array([value]))[0])
    if not isinstance(value, datetime):
        value = datetime(value.year, value.month, value.day)
    if getattr(value, "nanosecond", 0):  # as pandas has them
        raise ValueError(str(value))
    return (value - (_EPOCH if value.tzinfo is None else _EPOCH.replace(tzinfo=UTC))) // _MICROSECOND


def as_moments(values: npt.NDArray[np.int64]) -> npt.NDArray[np.object_]:
    """Return microseconds as objects, each a datetime64."""
    made = np.empty(len(values), object)
    made[:] = list(values.astype(np.int64).view("M8[us]"))
    return made


def moment_of_text(text: str) -> int:
    """Return the microseconds of a date, or a date and time, in ISO 8601; ValueError for other text.

    Examples
    --------
    >>> from memhier.ann.zoom.filters.times import moment_of_text
    >>> moment_of_text("1970-01-02"), moment_of_text("1970-01-01T02:00:00.5+02:00")
    (86400000000, 500000)
    """
    if _FINER.search(text):
        raise ValueError(f"{text!r} is finer than a microsecond")
    return microseconds(datetime.fromisoformat(text))
