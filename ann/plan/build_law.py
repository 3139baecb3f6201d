"""The processor time of a build, phase by phase: units of known work, and their cost on small indexes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.plan.small_index import SmallIndex
from memhier.ann.zoom.construction.construct import BOOK_ROWS, held_out_rows
from memhier.ann.zoom.preview.clusters import assigning_work, training_rows, training_work
from memhier.ann.zoom.preview.preview import BOOK_ROWS_MOST
from memhier.ann.zoom.storage.layout import IndexLayout
from memhier.planning.fits import GrowthLaw, fit_work

__all__ = ["BuildLaw"]

# Of the calibration for one vector. It grew as N^0.4 or slower from a quarter of the vectors to all of them, in the
# three sets of `python -m memhier.benchmarks.workloads.search.plan`; the limit was chosen with these figures in view.
_STEEPEST = 0.4
_LEAST_S = 1e-3  # of a phase: below, the clock's steps count

Floats: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class BuildLaw:
    """Processor seconds of each phase as a function of size and layout.

    Attributes
    ----------
    units
        Seconds of a unit of each kind of work, by phase.
    calibration
        Seconds of the calibration for one held-out vector.
    link_s
        Seconds to link one list into the graph over the lists.
    residual
        Root mean square of the relative errors at the sizes measured.
    """

    units: dict[str, Floats]
    calibration: GrowthLaw
    link_s: float
    residual: float

    @classmethod
    def fit(cls, measured: Sequence[SmallIndex], link_s: float = 0.0) -> Self:
        """Return the law of builds of different sizes, none of which had a graph over its lists."""
        units = {}
        for phase in ("train", "assign", "encode", "write"):
            work = [_work(small.vectors, small.layout)[phase] for small in measured]
            units[phase] = fit_work(work, [max(_LEAST_S, small.phases[phase]) for small in measured])
        sizes = [small.vectors for small in measured]
        each = [max(_LEAST_S, small.phases["calibrate"]) / held_out_rows(small.vectors) for small in measured]
        law = cls(units, GrowthLaw.fit(sizes, each, high=_STEEPEST), 0.0, 0.0)
        off = [law.seconds(small.vectors, small.layout) / sum(small.phases.values()) - 1 for small in measured]
        return cls(units, law.calibration, link_s, float(np.sqrt(np.mean(np.square(off)))))

    def seconds(self, vectors: int, layout: IndexLayout) -> float:
        """Return the processor seconds of a build."""
        phases = _work(vectors, layout)
        total = sum(float(np.dot(self.units[phase], phases[phase])) for phase in self.units)
        total += self.calibration.at(vectors) * held_out_rows(vectors)
        return total + layout.lists * self.link_s


def _work(vectors: int, layout: IndexLayout) -> dict[str, list[float]]:
    """Return the units of each kind of work in each phase."""
    sample = min(vectors, training_rows(layout.lists, layout.padded, BOOK_ROWS))
    compared = assigning_work(layout.lists) + held_out_rows(vectors)
    return {
        "train": [training_work(layout.lists, sample) * layout.padded, min(sample, BOOK_ROWS_MOST), layout.lists, 1.0],
        "assign": [vectors * compared * layout.padded, vectors],
        "encode": [vectors, 1.0],
        "write": [vectors, 1.0],
    }
