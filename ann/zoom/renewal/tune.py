"""Tuning by queries: the effort for each recall, and the pages that are worth their DRAM."""

from dataclasses import replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.zoom.calibration.calibration import TARGET, Calibration
from memhier.ann.zoom.calibration.mixtures import calibrate_kinds
from memhier.ann.zoom.calibration.truth import QUERIES, NeighbourTruth
from memhier.ann.zoom.pauses import pause
from memhier.ann.zoom.renewal.merge import alive_blocks
from memhier.ann.zoom.renewal.renewal import DEPTH
from memhier.ann.zoom.renewal.trials import try_efforts
from memhier.ann.zoom.search.search import Search, Selection, candidate_limit
from memhier.ann.zoom.storage.part import gather
from memhier.ann.zoom.storage.snapshot import IndexSnapshot
from memhier.io.page_file import PAGE_BYTES
from memhier.io.reader import Reader
from memhier.rows.rank_request import HotPages, page_keys

__all__ = ["measure", "tune_snapshot"]

_K = 10
_LEAST_HITS = 0.05  # of the pages read, below which a cache is not worth its bytes
_ENTRY_BYTES = PAGE_BYTES + 8

Floats: TypeAlias = npt.NDArray[np.float32]
Ints: TypeAlias = npt.NDArray[np.int64]


def tune_snapshot(state: IndexSnapshot, reader: Reader, queries: Floats, spare: int) -> IndexSnapshot:
    """Return the snapshot calibrated for `queries` ``[q, d]``, with hot pages in at most `spare` bytes of DRAM.

    Raises
    ------
    ValueError
        When no vector is on SSD.
    """
    if not any(part.alive_count for part in state.parts):
        raise ValueError("no vector of the index is on SSD, so there is nothing to tune: add vectors and commit first")
    cold = replace(state, hot=HotPages.none())
    chosen = np.sort(np.random.default_rng(0).permutation(len(queries))[:QUERIES])
    calibration = replace(measure(cold, reader, queries[chosen]), tuned=True)
    cold = replace(cold, calibration=calibration)
    pages = _choose_pages(cold, reader, queries, (spare + state.hot.memory_bytes) // _ENTRY_BYTES)
    return replace(cold, hot=HotPages.load(reader, pages))


def measure(state: IndexSnapshot, reader: Reader, queries: Floats) -> Calibration:
    """Return the calibration for queries ``[q, d]``, which are searched for."""
    count, before = sum(part.alive_count for part in state.parts), state.calibration
    lengths = state.space.lengths(queries) if state.preview.inner else None
    truth = NeighbourTruth(state.space.queries(queries), np.full(len(queries), -1), count, lengths)
    for positions, vectors in alive_blocks(state.parts, state.dtype, reader):
        pause()
        truth.add(positions, state.space.vectors(vectors))
    truth.finish()
    with Reader(depth=DEPTH) as apart:  # reads many lists together, for which the other has no room
        own = replace(state, parts=tuple(part.read_by(apart) for part in state.parts))  # keeps their files open
        found = calibrate_kinds(state.preview, own.findable.coded, truth, state.row_bytes)
    found = before.measured_anew(replace(found, far=before.far), before)
    if state.preview.coding == "pq":
        return found
    return try_efforts(state, reader, found, truth, queries)


def _choose_pages(state: IndexSnapshot, reader: Reader, queries: Floats, most: int) -> Ints:
    """Return the keys of the pages to hold: those that half of the queries read most, if the other half reads them."""
    if most < 1 or not state.parts:
        return np.empty(0, np.int64)
    half = len(queries) // 2
    learned, judged = _pages_of(state, reader, queries[:half]), _pages_of(state, reader, queries[half:])
    keys, counts = np.unique(learned, return_counts=True)
    order = np.argsort(-counts, kind="stable")[:most]
    chosen = np.sort(keys[order[counts[order] > 1]])
    hits = np.isin(judged, chosen).mean() if len(judged) else 0.0
    return chosen if hits >= _LEAST_HITS else np.empty(0, np.int64)


def _pages_of(state: IndexSnapshot, reader: Reader, queries: Floats) -> Ints:
    """Return the keys of the pages of each query; a page that several queries read repeats."""
    k = min(_K, state.count)
    effort, _ = state.calibration.effort(k, TARGET)
    search = Search(state, reader, Selection.of(state, None))
    found, limit = search.nearest(queries, k, effort), candidate_limit(k, effort, state.scan_bytes)
    keys = []
    for query, distances in zip(queries, found.distances, strict=True):
        turned = state.preview.turn(state.space.queries(query[None]))
        candidates = state.preview.search(turned, search.selection.rows.coded, k, effort, limit)
        lower = state.space.distances(candidates.lower, query[None])[0, : candidates.counts[0]]
        read = candidates.positions[0, : len(lower)][lower <= distances[-1]]
        files, offsets, _ = gather(state.parts, read)
        keys.append(np.unique(page_keys(files, offsets // PAGE_BYTES)))
    return np.concatenate(keys) if keys else np.empty(0, np.int64)
