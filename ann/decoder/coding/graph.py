"""The graph over the rows' codes, and the seeds that a walk starts from.

Links join rows that are near each other after FGD's transform in the coordinates of the codes: distances there weigh
directions by their use in contexts. The build learns the seeds of each group of contexts: the rows that are among the
largest for some context of the group.
"""

from dataclasses import dataclass
from typing import Any, TypeAlias

import faiss
import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from memhier.ann.decoder.coding.codes import CHUNK_ROWS, BlockCodes, RowCodes, pack_blocks
from memhier.ann.decoder.core.core import new_core
from memhier.ann.decoder.layer import Floats, Ints
from memhier.ann.links import links_as_rows, prune_links, with_reverse
from memhier.ann.threads import one_thread

__all__ = ["Graph", "build_links", "giants", "learn_seeds", "relink"]

DEGREE = 16
_NEAR = 64  # candidates for the links of a row
_SCAN_ROWS = 100_000  # up to so many, all rows are compared with all
_LEADING = 64  # directions that decide on lists of like rows
_BLOCK = 1024
_MANY = 1 << 16  # rows transformed at a time
_GIANT = 4.0  # a giant's norm is more than so many times the usual norm
_FEW = 0.99  # share of the rows with at most the usual norm
_GIANTS_MOST = 16
_CONTEXTS_PER_GROUP = 50
_GROUPS_MOST = 128

Words: TypeAlias = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class Graph:
    """Links, and the seeds that a walk starts from.

    Attributes
    ----------
    links
        uint32 ``[V, degree]``, :data:`memhier.ann.links.NO_ROW` where a row has fewer.
    centres
        float32 ``[groups, width]``: centres of the groups of contexts, in the coordinates of the codes.
    halves
        float32 ``[groups]``: half the squared norms of the centres.
    starts, seeds
        int64 ``[groups + 1]`` and uint32: the rows among the largest of the contexts of each group.
    """

    links: Words
    centres: Floats
    halves: Floats
    starts: Ints
    seeds: Words


def learn_seeds(links: Words, coordinates: Floats, largest: Ints, always: Ints, seed: int) -> Graph:
    """Group contexts; return a graph with these links whose seeds are the largest rows of each group's contexts.

    Parameters
    ----------
    coordinates
        Contexts in the coordinates of the codes, float32 ``[n, width]``.
    largest
        int64 ``[n, c]``: the rows of the contexts' largest logits.
    always
        int64: seeds of every group.
    """
    count, width = coordinates.shape
    groups = max(1, min(_GROUPS_MOST, count // _CONTEXTS_PER_GROUP))
    with one_thread():
        kmeans = faiss.Kmeans(width, groups, niter=15, seed=seed + 1, min_points_per_centroid=1)
        kmeans.train(np.ascontiguousarray(coordinates))
        _, nearest = kmeans.index.search(np.ascontiguousarray(coordinates), 1)
    rows = [np.unique(largest[nearest[:, 0] == group]).astype(np.uint32) for group in range(groups)]
    # A walk would have no start in a group that is empty after the last step.
    rows = [own if len(own) else np.unique(largest).astype(np.uint32) for own in rows]
    rows = [np.union1d(own, always).astype(np.uint32) for own in rows]
    starts = np.cumsum([0, *map(len, rows)], dtype=np.int64)
    centres = np.ascontiguousarray(kmeans.centroids, np.float32)
    return Graph(links, centres, (np.square(centres).sum(1) / 2).astype(np.float32), starts, np.concatenate(rows))


def build_links(codes: RowCodes, progress: bool = False) -> Words:
    """Return the links of all rows, uint32 ``[V, 16]``."""
    rows = _transformed(codes)
    links = np.empty((len(rows), DEGREE), np.uint32)
    numbers, near = np.arange(len(rows)), _Near(rows)
    for start in tqdm(range(0, len(rows), _BLOCK), "links", disable=not progress, unit_scale=_BLOCK):
        some = numbers[start : start + _BLOCK]
        links[start : start + _BLOCK] = prune_links(rows, some, near.of(some), DEGREE, inner=True)
    del near
    return with_reverse(links, rows, numbers, inner=True)


def relink(links: Words, codes: RowCodes, changed: Ints) -> Words:
    """Return links in which the changed rows have new links, and links back from the rows that they link to."""
    rows = _transformed(codes)
    again = links.copy()
    near = _Near(rows)
    for start in range(0, len(changed), _BLOCK):
        some = changed[start : start + _BLOCK]
        again[some] = prune_links(rows, some, near.of(some), DEGREE, inner=True)
    touched = np.unique(links_as_rows(again[changed]))
    touched = touched[touched >= 0]
    again[touched] = with_reverse(again, rows, touched, inner=True)
    return again


class _Near:
    """Finds the near rows of a row: by a scan if rows are few, in lists of like rows if they are many."""

    def __init__(self, rows: Floats) -> None:
        self._rows = rows
        self._count = min(_NEAR + 1, len(rows))
        if len(rows) <= _SCAN_ROWS:
            self._scan = self._make_scan(rows)
            return
        self._scan = None
        lists = int(4 * len(rows) ** 0.5)
        # The leading directions, and the two of the transform.
        self._parts = np.r_[0 : min(_LEADING, rows.shape[1] - 2), -2, -1]
        self._index = faiss.index_factory(len(self._parts), f"IVF{lists},Flat", faiss.METRIC_INNER_PRODUCT)
        self._index.cp.niter = 8  # lists of like rows need not be good
        with one_thread():
            self._index.train(rows[:: max(1, len(rows) // (40 * lists)), self._parts])
            for start in range(0, len(rows), _MANY):
                self._index.add(rows[start : start + _MANY, self._parts])
        self._index.nprobe = 8

    def of(self, numbers: Ints) -> Ints:
        """Return near rows of some rows, int64 ``[n, 65]``, the rows themselves among them."""
        if self._scan is None:
            with one_thread():
                return np.asarray(self._index.search(self._rows[numbers][:, self._parts], self._count)[1])
        states = np.zeros((len(numbers), self._width), np.float32)
        states[:, : self._rows.shape[1]] = self._rows[numbers]
        found = np.empty((len(numbers), self._count), np.int64)
        keys, left = np.empty((*found.shape, 2), np.float32), np.empty(len(numbers), np.float32)
        self._scan.candidates(hidden=states, coarse=(0, 0), rows=found, keys=keys, left=left, coordinates=True)
        return found

    def _make_scan(self, rows: Floats) -> Any:
        words, width = rows.shape
        self._width = -(-width // 4) * 4
        scale = np.abs(rows).max(1) / np.float32(127)
        inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale > 0)
        padded = -(-words // CHUNK_ROWS) * CHUNK_ROWS
        codes = np.full((padded, self._width), 128, np.uint8)
        codes[:words, :width] = np.rint(rows * inverse[:, None]) + 128
        numbers = np.zeros((5, padded), np.float32)
        numbers[0, words:], numbers[1, :words] = -1e30, scale
        none = np.zeros(self._width, np.float32)
        projection = none, np.zeros((self._width, self._width), np.float32), none, words
        return new_core(projection, (pack_blocks(codes), numbers, self._width), None, None, None)


def giants(blocks: BlockCodes, words: int) -> Ints:
    """Return the rows of by far the largest norm, at most 16; walks start from them, too."""
    offsets, coded = blocks.numbers[[0, 4], :words].astype(np.float64)
    squares = np.square(coded) + np.square(offsets - offsets.mean())
    beyond = np.flatnonzero(squares > _usual(squares))
    return beyond[np.argsort(-squares[beyond], kind="stable")[:_GIANTS_MOST]]


def _usual(squares: npt.NDArray[np.float64]) -> float:
    """Return the largest squared norm of a row that is not a giant."""
    return float(_GIANT**2 * np.quantile(squares, _FEW))


def _transformed(codes: RowCodes) -> Floats:
    """Return the coded rows after FGD's transform, float32 ``[V, width + 2]``; it works in blocks.

    The transform gives all rows one norm. The norm of a row a thousand times larger than the others would leave nothing
    else to tell these apart, so such a giant is scaled down and keeps only its direction.
    """
    words, width = codes.codes.shape
    rows = np.empty((words, width + 2), np.float32)
    squares = np.empty(words)
    # A constant in all biases changes no order, but would hide the directions.
    rows[:, width] = codes.numbers[0] - codes.numbers[0].mean()
    for start in range(0, words, _MANY):
        block = rows[start : start + _MANY]
        np.subtract(codes.codes[start : start + _MANY], np.float32(128), out=block[:, :width])
        block[:, :width] *= codes.numbers[1, start : start + _MANY, None]
        squares[start : start + _MANY] = np.square(block[:, :-1], dtype=np.float64).sum(1)
    most = min(squares.max(), _usual(squares))
    giant = np.flatnonzero(squares > most)
    rows[giant, :-1] *= np.sqrt(most / squares[giant])[:, None]
    rows[:, -1] = np.sqrt(np.maximum(0, most - squares))
    return rows
