"""How far the codes of vectors just added err all one way, as those of vectors unlike the ones made for do."""

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.zoom.preview.codes import CodeBook
from memhier.ann.zoom.preview.preview import Preview
from memhier.ann.zoom.preview.space import PreviewSpace

__all__ = ["error_of_added", "one_way_error"]

_MOST, _LEAST = 256, 8  # vectors looked at; fewer tell nothing
_NEAREST = 2  # of the others, that play the queries of a vector
_AXIS_BYTES = 32  # of work for an axis of a vector
_DOUBT = 4.0  # vectors of no error that are counted with those of a list
_OF_VECTORS = 0.9  # that lie in lists of no greater mean error

Floats: TypeAlias = npt.NDArray[np.float32]


def error_of_added(vectors: npt.NDArray[Any], preview: Preview, space: PreviewSpace, work_bytes: int) -> float:
    """Return the :func:`one_way_error` of vectors ``[n, d]`` of an index, with `work_bytes` of DRAM for the work."""
    most = min(_MOST, max(_LEAST, work_bytes // (_AXIS_BYTES * space.padded)))
    step = max(1, -(-len(vectors) // most))
    return one_way_error(preview.turn(space.vectors(vectors[::step])), preview)


def one_way_error(turned: Floats, preview: Preview) -> float:
    """Return by how many standard errors the codes of some turned vectors ``[n, d]`` overstate distances.

    Codes are made for residuals that point all ways: the errors of near vectors then differ in sign. Where many were
    added that lie elsewhere, their residuals share a direction, which short codes leave out of each. Inner products are
    not looked at.
    """
    turned = np.ascontiguousarray(turned[:: max(1, -(-len(turned) // _MOST))])
    if preview.inner or len(turned) < _LEAST or not isinstance(preview.book, CodeBook):
        return 0.0
    lists = preview.nearest_lists(turned, 1)
    centroids = preview.centroids_of(lists)
    wrong = turned - centroids
    codes, numbers = preview.book.encode(wrong)
    coded = preview.book.decode(codes, numbers)
    wrong[:, : coded.shape[1]] -= coded * np.float32(preview.book.unit)
    errors = preview.book.numbers_of(numbers)[2] * np.float32(preview.book.unit)
    squared = np.einsum("ij,ij->i", turned, turned)
    found = np.zeros(len(turned))
    for row, vector in enumerate(turned):
        away = squared - 2 * (turned @ vector)
        away[row] = np.inf
        near = turned[np.argpartition(away, _NEAREST)[:_NEAREST]] - centroids[row]
        usual = errors[row] * np.sqrt(np.einsum("ij,ij->i", near, near))
        if 0 < errors[row] < np.inf and usual.all():
            found[row] = float(np.mean(near @ wrong[row] / usual))
    held = np.unique(lists, return_inverse=True)[1]
    of_list = np.bincount(held, found) / (np.bincount(held) + _DOUBT)
    return max(0.0, float(np.quantile(of_list[held], _OF_VECTORS)))
