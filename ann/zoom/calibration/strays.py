"""Vectors added far from the centroids of their lists, and the queries that lie where these do.

Codes and bounds are made for residuals of usual lengths that point all ways. Vectors that drift away have long
residuals of one direction. Short codes leave out the same share of each, so that all errors add up.
"""

from dataclasses import dataclass, field, replace
from typing import Any, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.zoom.preview.codes import CodeBook
from memhier.ann.zoom.preview.preview import Preview
from memhier.io.read_arguments import Tallies

__all__ = ["Strays"]

_NEARLY_ALL = 0.999  # of the vectors measured
_BEYOND = 1.1  # times the distance of these, from which on a vector is a stray
_DEVIATIONS = 4.0  # along the direction of a stray, that a usual query does not exceed
_AXES = 8192  # of all directions kept
_LEAST_RADIUS = 0.5  # of a list, in usual lengths of residuals: one of copies has none

Floats: TypeAlias = npt.NDArray[np.float32]
Ints: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Strays:
    """The vectors added since a calibration that lie far from their centroids; not of inner products.

    Attributes
    ----------
    rim
        How far nearly all vectors measured lie from their centroids, in radii of their lists.
    lists
        By list: its radius before strays came, and length and direction, of int8, of the longest of their residuals.
    """

    rim: float
    lists: dict[int, tuple[float, float, bytes]] = field(default_factory=dict)

    @classmethod
    def none(cls, turned: Floats, preview: Preview) -> Self | None:
        """Return no strays beside turned vectors ``[n, d]``; None of inner products, and where codes have no bounds."""
        if preview.inner or not isinstance(preview.book, CodeBook) or not len(turned):
            return None
        lists, residuals = _residuals(turned, preview)
        return cls(float(np.quantile(np.linalg.norm(residuals, axis=1) / _radii(lists, preview), _NEARLY_ALL)))

    def written(self, turned: Floats, preview: Preview) -> Self:
        """Return those after vectors such as some turned ones ``[n, d]`` were written."""
        numbers, residuals = _residuals(turned, preview)
        lengths, radii, lists = np.linalg.norm(residuals, axis=1), _radii(numbers, preview), dict(self.lists)
        for row in np.flatnonzero(lengths > _BEYOND * self.rim * radii).tolist():
            number, length = int(numbers[row]), float(lengths[row])
            radius, longest, _ = lists.get(number, (float(radii[row]), 0.0, b""))
            if length > longest and (number in lists or len(lists) < max(1, _AXES // turned.shape[1])):
                lists[number] = radius, length, np.rint(residuals[row] * (127 / length)).astype(np.int8).tobytes()
        return replace(self, lists=lists)

    def perhaps_near(self, scanned: Tallies, preview: Preview) -> list[int]:
        """Return the numbers of queries that may lie where strays do, by a `SCAN_TALLY` ``[q]`` of each."""
        least = _LEAST_RADIUS * preview.book.unit if isinstance(preview.book, CodeBook) else 0.0
        if len(scanned) == 1:  # as most calls have
            *_, number, away = scanned.item()
            is_far = away > (self.rim * max(least, preview.radii.item(number))) ** 2
            return [0] if number in self.lists or is_far else []
        far = scanned["away"] > np.square(self.rim * _radii(scanned["nearest"], preview))
        return [query for query, number in enumerate(scanned["nearest"].tolist()) if number in self.lists or far[query]]

    def near(self, turned: Floats, preview: Preview) -> npt.NDArray[np.bool_]:
        """Return which of turned queries ``[q, d]`` lie along a stray, or as far from their centroids as these do."""
        assert isinstance(preview.book, CodeBook)
        numbers, residuals = _residuals(turned, preview)
        lengths, radii = np.linalg.norm(residuals, axis=1), _radii(numbers, preview)
        for query, number in enumerate(numbers.tolist()):
            if number in self.lists:
                radii[query], _, direction = self.lists[number]
                axes = np.frombuffer(direction, np.int8)[: turned.shape[1]].astype(np.float32)
                spread = np.sqrt(np.square(axes) @ preview.book.share[: len(axes)])
                if residuals[query, : len(axes)] @ axes > _DEVIATIONS * radii[query] * spread:
                    lengths[query] = np.inf
        far: npt.NDArray[np.bool_] = lengths > self.rim * radii
        return far

    def to_json(self) -> dict[str, Any]:
        """Return it as plain values."""
        return {"rim": self.rim, "lists": {n: [*some, axes.hex()] for n, (*some, axes) in self.lists.items()}}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        """Return it from the values of :meth:`to_json`."""
        lists = {int(n): (radius, length, bytes.fromhex(axes)) for n, (radius, length, axes) in values["lists"].items()}
        return cls(values["rim"], lists)


def _residuals(turned: Floats, preview: Preview) -> tuple[Ints, Floats]:
    """Return the lists of turned vectors ``[n, d]``, and their residuals."""
    lists = preview.nearest_lists(turned, 1)
    return lists, turned - preview.centroids_of(lists)


def _radii(lists: Ints, preview: Preview) -> Floats:
    """Return the radii of lists, none far below the usual one."""
    assert isinstance(preview.book, CodeBook)
    radii: Floats = np.maximum(preview.radii[lists], np.float32(_LEAST_RADIUS * preview.book.unit))
    return radii
