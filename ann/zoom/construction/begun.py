"""The beginning of an index without vectors: stand-ins for lists and codes until there are vectors to learn from."""

from dataclasses import replace

import numpy as np

from memhier.ann.zoom.calibration.calibration import Calibration
from memhier.ann.zoom.preview.codes import CodeBook
from memhier.ann.zoom.preview.preview import Effort, Preview, train_preview
from memhier.ann.zoom.preview.space import PreviewSpace, fit_space
from memhier.ann.zoom.source import VectorSource
from memhier.ann.zoom.storage.layout import IndexLayout
from memhier.ann.zoom.storage.snapshot import IndexSnapshot

__all__ = ["begun", "stand_in", "uncalibrated"]

_ROWS = 64  # random vectors, to learn codes that are never used
_SAMPLE_ROWS = 2048
_NORM_ROOM = 4  # times the largest norm of the first vectors: the limit of later norms for inner products
_EPS = 8.0  # standard errors: bounds so wide lose no neighbour, whatever the codes


def stand_in(space: PreviewSpace, layout: IndexLayout, seed: int) -> Preview:
    """Return one list, and codes learned from random vectors, for an index that holds no vector."""
    sample = np.random.default_rng(seed).normal(size=(_ROWS, space.dimension)).astype(np.float32)
    inner = space.metric == "ip"
    made = train_preview(space.vectors(sample), 1, "rabitq", layout.code_bytes, seed, rotate=layout.rotate, inner=inner)
    return replace(made, on_ssd=layout.on_ssd)


def uncalibrated() -> Calibration:
    """Return the calibration of an index where nothing was measured: look everywhere for every recall."""
    return Calibration(0, {1: [(1.0, Effort(1, eps=_EPS), 1.0)]}, {1: 1.0})


def begun(state: IndexSnapshot, seed: int) -> IndexSnapshot:
    """Return the first snapshot with vectors: one list, and codes learned from the vectors that wait."""
    source, book = VectorSource(state.fresh.vectors), state.preview.book
    space = fit_space(source, state.space.metric, state.space.padded)
    inner = space.metric == "ip"
    if inner:
        space = replace(space, scale=space.scale / _NORM_ROOM)
    rows = np.sort(np.random.default_rng(seed).permutation(source.count)[:_SAMPLE_ROWS])
    rotate = isinstance(book, CodeBook) and book.rotation.ndim == 2
    sample = space.vectors(source.take(rows))
    preview = train_preview(sample, 1, "rabitq", book.code_bytes, seed, rotate=rotate, inner=inner)
    return replace(state, space=space, preview=replace(preview, on_ssd=state.preview.on_ssd))
