"""How unlike those measured the vectors just added are: by errors of their codes, and by their distance to centroids.

Their codes may err all one way. And of vectors far from all centroids, the nearest lie in many lists, on many pages.
"""

from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from memhier.ann.zoom.preview.codes import CodeBook
from memhier.ann.zoom.preview.preview import Preview
from memhier.ann.zoom.preview.space import PreviewSpace, directions
from memhier.ann.zoom.source import VectorSource

__all__ = ["FAR_SHARE", "excess_beyond", "lengths_of_residuals", "one_way_error", "some_of_added"]

_MOST, _LEAST = 256, 8  # vectors looked at; fewer tell nothing
_NEAREST = 2  # of the others, that play the queries of a vector
_AXIS_BYTES = 32  # of work for an axis of a vector
_DOUBT = 4.0  # vectors of no error that are counted with those of a list
_OF_VECTORS = 0.9  # that lie in lists of no greater mean error
FAR_SHARE = 0.05  # of the vectors measured, that are taken to lie far from their centroids
_CHANCE = 3.0  # standard errors of that share

Floats: TypeAlias = npt.NDArray[np.float32]
Bytes: TypeAlias = npt.NDArray[np.uint8]
Shorts: TypeAlias = npt.NDArray[np.uint16]


def some_of_added(vectors: VectorSource, preview: Preview, space: PreviewSpace, work_bytes: int) -> Floats:
    """Return some turned vectors of those ``[n, d]`` that an index gets, to look at with `work_bytes` of DRAM."""
    most = min(_MOST, max(_LEAST, work_bytes // (_AXIS_BYTES * space.padded)))
    step = max(1, -(-vectors.count // most))
    return preview.turn(space.vectors(vectors.take(np.arange(0, vectors.count, step))))


def lengths_of_residuals(turned: Floats, preview: Preview) -> Floats:
    """Return the distance of some turned vectors ``[n, d]`` to the centroids of their lists.

    For inner products, of their directions alone: vectors of any length may lie along a centroid.
    """
    turned = directions(turned) if preview.inner else turned
    centroids = preview.centroids_of(preview.nearest_lists(turned, 1))
    lengths: Floats = np.linalg.norm(turned - (directions(centroids) if preview.inner else centroids), axis=1)
    return lengths


def excess_beyond(far: float, lengths: Floats, count: int) -> float:
    """Return how many of `count` vectors lie farther than `far` beyond the :data:`FAR_SHARE` of usual ones.

    `lengths` are those of all, or of some; then the chance of this choice counts for none. It is negative for fewer.
    """
    if not len(lengths):
        return 0.0
    chance = _CHANCE * float(np.sqrt(FAR_SHARE * (1 - FAR_SHARE) / len(lengths))) * (len(lengths) < count)
    excess = float(np.mean(lengths > far)) - FAR_SHARE
    return count * max(excess - chance, min(excess, 0.0))


def one_way_error(turned: Floats, preview: Preview) -> float:
    """Return by how many standard errors the codes of some turned vectors ``[n, d]`` overstate distances.

    Codes are made for residuals that point all ways: the errors of near vectors then differ in sign. Where many were
    added that lie elsewhere, their residuals share a direction, which short codes leave out of each.
    """
    turned = np.ascontiguousarray(turned[:: max(1, -(-len(turned) // _MOST))])
    if len(turned) < _LEAST or not isinstance(preview.book, CodeBook):
        return 0.0
    lists = preview.nearest_lists(turned, 1)
    codes, numbers, _ = preview.encode(turned, lists)
    wrong, errors = _errors_of(turned, lists, codes, numbers, preview)
    centroids = preview.centroids_of(lists)
    asked, squared = turned, np.einsum("ij,ij->i", turned, turned)
    if preview.inner:
        asked, squared = directions(turned), np.zeros(len(turned), np.float32)
    found = np.zeros(len(turned))
    for row, vector in enumerate(turned):
        away = squared - 2 * (asked @ vector)
        away[row] = np.inf
        near = asked[np.argpartition(away, _NEAREST)[:_NEAREST]]
        near = near if preview.inner else near - centroids[row]
        usual = errors[row] * _lengths_of(near, preview)
        if usual.all():
            found[row] = float(np.mean(near @ wrong[row] / usual))
    held = np.unique(lists, return_inverse=True)[1]
    of_list = np.bincount(held, found) / (np.bincount(held) + _DOUBT)
    return max(0.0, float(np.quantile(of_list[held], _OF_VECTORS)))


def _errors_of(turned: Floats, lists: Any, codes: Bytes, numbers: Shorts, preview: Preview) -> tuple[Floats, Floats]:
    """Return how codes of vectors are wrong ``[n, d]``, and their standard errors ``[n]``, before any is raised."""
    book, wrong = cast(CodeBook, preview.book), turned - preview.centroids_of(lists)
    coded = book.decode(codes, numbers)
    wrong[:, : coded.shape[1]] -= coded * np.float32(book.unit)
    return wrong, np.sqrt(np.square(wrong) @ book.share)


def _lengths_of(asked: Floats, preview: Preview) -> Floats:
    """Return the lengths of queries ``[n, d]`` by which standard errors count."""
    if preview.inner:
        return cast(CodeBook, preview.book).wrongness(asked)
    lengths: Floats = np.sqrt(np.einsum("ij,ij->i", asked, asked))
    return lengths
