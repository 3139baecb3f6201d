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
_LIST_AXES = 64  # that a list takes beside those of its direction
_LIST_BYTES = 320  # of the objects of a list, without its direction
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
        had_vectors = preview.radii[numbers] > 0  # an empty list tells nothing about those that are far
        for row in np.flatnonzero((lengths > _BEYOND * self.rim * radii) & had_vectors).tolist():
            number, length = int(numbers[row]), float(lengths[row])
            radius, longest, _ = lists.get(number, (float(radii[row]), 0.0, b""))
            if length > longest:
                lists[number] = radius, length, np.rint(residuals[row] * (127 / length)).astype(np.int8).tobytes()
            if len(lists) > max(1, _AXES // (turned.shape[1] + _LIST_AXES)):
                del lists[min(lists, key=lambda each: lists[each][1] - self.rim * lists[each][0])]
        return replace(self, lists=lists)

    @property
    def memory_bytes(self) -> int:
        """DRAM held, in bytes."""
        return sum(_LIST_BYTES + len(direction) for _, _, direction in self.lists.values())

    def perhaps_near(self, scanned: Tallies) -> list[int]:
        """Return the numbers of queries that may lie where strays do, by a `SCAN_TALLY` ``[q]`` of each."""
        return [query for query, number in enumerate(scanned["nearest"].tolist()) if number in self.lists]

    def near(self, turned: Floats, preview: Preview) -> npt.NDArray[np.bool_]:
        """Return which of turned queries ``[q, d]`` lie in a list of strays: along one, or as far from its centroid."""
        assert isinstance(preview.book, CodeBook)
        numbers, residuals = _residuals(turned, preview)
        lengths, far = np.linalg.norm(residuals, axis=1), np.zeros(len(turned), np.bool_)
        for query, number in enumerate(numbers.tolist()):
            if number in self.lists:
                radius, _, direction = self.lists[number]
                axes = np.frombuffer(direction, np.int8)[: turned.shape[1]].astype(np.float32)
                spread = np.sqrt(np.square(axes) @ preview.book.share[: len(axes)])
                along = residuals[query, : len(axes)] @ axes > _DEVIATIONS * radius * spread
                far[query] = along or lengths[query] > self.rim * radius
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
