"""How a search travels: queries to lists, to candidates with bounds, to rounds of reads, to ids."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.zoom.calibration.calibrate import Calibration
from memhier.ann.zoom.calibration.needs import USUAL_MOST
from memhier.ann.zoom.filters.attributes import Schema
from memhier.ann.zoom.filters.bitmaps import Words, popcount
from memhier.ann.zoom.filters.conditions import check_types
from memhier.ann.zoom.filters.where import evaluate, parse
from memhier.ann.zoom.ids.ids import IdKind, Ids, Sightings, locate_all
from memhier.ann.zoom.preview.code_scan import PART_SHIFT, Candidates, CodedPart
from memhier.ann.zoom.preview.preview import Effort, Preview
from memhier.ann.zoom.preview.space import PreviewSpace
from memhier.ann.zoom.renewal.fresh import Fresh
from memhier.ann.zoom.storage.fullview import make_workspace, vectors_of
from memhier.ann.zoom.storage.part import Part, gather
from memhier.io.reader import Reader
from memhier.rows.ranking import HotPages, PageRows, Ranking, RankRequest, page_rows_of, rank_rows
from memhier.shield import check_interrupt

__all__ = [
    "CANDIDATE_BYTES",
    "Found",
    "Limits",
    "Selection",
    "Snapshot",
    "candidate_limit",
    "read_positions",
    "search_snapshot",
    "vectors_by_id",
]

CANDIDATE_BYTES = 64  # position, bound, estimate, file, offset and id of one
_AXIS_BYTES = 16  # of a query on its way into the preview's space
_PROBE_BYTES = 8  # of a list that a query is routed to
_LIMIT = 512  # candidates with bounds that are kept of a query, where there is no room for more

Floats: TypeAlias = npt.NDArray[np.float32]
Ints: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The index at one moment; a search keeps the one it started with.

    Attributes
    ----------
    space, dtype, schema
        Of the vectors, and of their attributes.
    preview
        Lists and code book.
    parts
        Rows on SSD.
    fresh
        Rows not yet there.
    calibration
        What a declared recall takes.
    hot
        Pages held in DRAM.
    scan_bytes
        DRAM for the candidates of queries that are searched together.
    """

    space: PreviewSpace
    dtype: np.dtype[Any]
    schema: Schema
    preview: Preview
    parts: tuple[Part, ...]
    fresh: Fresh
    calibration: Calibration
    hot: HotPages
    scan_bytes: int

    @property
    def count(self) -> int:
        """Vectors that can be found."""
        return sum(part.alive_count for part in self.parts) + len(self.fresh)

    @property
    def id_kind(self) -> IdKind:
        """What callers call vectors."""
        return "int64" if self.fresh.texts is None else "str"

    @property
    def row_bytes(self) -> int:
        """Bytes of a vector on SSD."""
        return self.dtype.itemsize * self.space.dimension


@dataclass(frozen=True, slots=True)
class Selection:
    """Which vectors a search may find.

    Attributes
    ----------
    parts
        For each part the bitmap of its rows, none of which were removed; None for all.
    fresh
        bool ``[n]`` of the fresh ones, None for all.
    share, left
        Of the vectors on SSD that are alive, and how many; None where nothing is left out.
    """

    parts: tuple[Words | None, ...]
    fresh: npt.NDArray[np.bool_] | None = None
    share: float = 1.0
    left: int | None = None

    @classmethod
    def everything(cls, snapshot: Snapshot) -> Self:
        """Return what leaves nothing out."""
        return cls((None,) * len(snapshot.parts))

    @classmethod
    def of(cls, snapshot: Snapshot, where: str) -> Self:
        """Return what fulfils a filter.

        Raises
        ------
        ValueError, TypeError
            When it is no filter, or names attributes that the index does not have.
        """
        expression = parse(where)
        if not snapshot.schema:
            raise ValueError(f"where={where!r}: this index has no attributes; give them to build() or add()")
        check_types(expression, snapshot.schema)
        fresh = None
        if len(snapshot.fresh):
            fresh = evaluate(expression, snapshot.fresh.attributes)
        bits, left = [], 0
        for part in snapshot.parts:
            bits.append(part.select(expression))
            left += popcount(bits[-1])
        every = sum(part.alive_count for part in snapshot.parts)
        return cls(tuple(bits), fresh, left / every if every else 1.0, left if left < every else None)


@dataclass(frozen=True, slots=True)
class Limits:
    """What ends the reading for a query early: pages, and seconds for the whole call."""

    max_reads: int = 2**62
    deadline: float = np.inf


@dataclass(frozen=True, slots=True)
class Found:
    """The nearest of each query and what was done for them.

    Attributes
    ----------
    ids, distances
        int64 and float32 ``[q, k]``.
    scanned
        int64 ``[q, 4]``: lists scanned, codes scanned, whether candidates were dropped for lack of room, and whether
        there were lists to scan beyond those looked at.
    admitted
        int64 ``[q]``: candidates that the bounds left.
    ranked
        int64 ``[q, 5]``; see `memhier.rows.ranking.Ranking`.
    """

    ids: Ints
    distances: Floats
    scanned: Ints
    admitted: Ints
    ranked: Ints


def candidate_limit(k: int, effort: Effort, scan_bytes: int) -> int:
    """Return how many candidates of a query are kept, as far as there is room for them."""
    if effort.candidates is not None:
        return effort.candidates
    room = max(_LIMIT, 4 * k, scan_bytes // CANDIDATE_BYTES)
    return room if effort.most is None else min(room, max(k, USUAL_MOST * max(effort.most, effort.usual)))


def is_cut_short(found: "Found", k: int, effort: Effort, scan_bytes: int) -> npt.NDArray[np.bool_]:
    """Return of which queries candidates were dropped that should have been looked at, ``[q]``."""
    wanted = effort.most is None or candidate_limit(k, effort, scan_bytes) < USUAL_MOST * effort.most
    return (found.scanned[:, 2] > 0) & (effort.candidates is None and wanted)


def vectors_by_id(snapshot: Snapshot, reader: Reader, ids: Ids) -> npt.NDArray[Any]:
    """Return the vectors of ids, ``[n, d]``; KeyError for one that is not there."""
    found = locate_all(snapshot.parts, snapshot.fresh, ids)
    is_fresh = found.fresh >= 0
    out = np.empty((len(ids), snapshot.space.dimension), snapshot.dtype)
    out[is_fresh] = snapshot.fresh.vectors[found.fresh[is_fresh]]
    out[~is_fresh] = read_positions(snapshot, reader, found.positions[~is_fresh])
    return out


def read_positions(snapshot: Snapshot, reader: Reader, positions: Ints) -> npt.NDArray[Any]:
    """Return the vectors at positions, ``[n, d]``."""
    out = np.empty((len(positions), snapshot.space.dimension), snapshot.dtype)
    number, rows = positions >> PART_SHIFT, positions & ((1 << PART_SHIFT) - 1)
    for which, part in enumerate(snapshot.parts):
        here = np.flatnonzero(number == which)
        if len(here):
            out[here] = vectors_of(part.places.read(reader, rows[here]), snapshot.dtype)
    return out


def search_snapshot(
    snapshot: Snapshot,
    reader: Reader,
    queries: Floats,
    k: int,
    effort: Effort,
    limits: Limits,
    selection: Selection,
    tally: Ints,
    seen: Sightings | None = None,
) -> Found:
    """Return the `k` nearest of each query among what is selected; -1 and infinity where there are fewer.

    Parameters
    ----------
    queries
        float32 ``[q, d]``, checked.
    selection
        What may be found.
    tally
        int64 ``[3]`` to which the I/Os, pages and bytes read are added.
    seen
        Notes where the vectors found are; None where nobody asks.
    """
    count = len(queries)
    found = Found(
        np.full((count, k), -1, np.int64),
        np.full((count, k), np.inf, np.float32),
        np.zeros((count, 4), np.int64),
        np.zeros(count, np.int64),
        np.zeros((count, 5), np.int64),
    )
    limit = candidate_limit(k, effort, snapshot.scan_bytes)
    each = limit * CANDIDATE_BYTES + snapshot.space.padded * _AXIS_BYTES + effort.nprobe * _PROBE_BYTES
    block = max(1, snapshot.scan_bytes // each)
    workspace = make_workspace(snapshot.row_bytes)
    for start in range(0, count, block):
        check_interrupt()
        part = slice(start, start + block)
        _search_block(
            snapshot, reader, queries[part], k, effort, limits, limit, selection, workspace, tally, found, part, seen
        )
        if len(snapshot.fresh):
            near = snapshot.fresh.nearest(queries[part], snapshot.space.metric, k, selection.fresh)
            _merge(found, part, near, k)
    return found


def _search_block(
    snapshot: Snapshot,
    reader: Reader,
    queries: Floats,
    k: int,
    effort: Effort,
    limits: Limits,
    limit: int,
    selection: Selection,
    workspace: npt.NDArray[np.uint8],
    tally: Ints,
    found: Found,
    part: slice,
    seen: Sightings | None,
) -> None:
    if not snapshot.parts:
        return
    turned = snapshot.preview.turn(snapshot.space.queries(queries, part.start))
    coded = [each.coded(bits) for each, bits in zip(snapshot.parts, selection.parts, strict=True)]
    candidates = snapshot.preview.search(turned, coded, k, effort, limit)
    candidates = _widen(snapshot, turned, coded, k, effort, limit, candidates)
    _cap(candidates, k, effort)
    inside = np.arange(candidates.positions.shape[1]) < candidates.counts[:, None]
    positions = candidates.positions[inside]
    files, offsets, ids = gather(snapshot.parts, positions)
    first = np.concatenate([[0], np.cumsum(candidates.counts)])
    space = snapshot.space
    request = RankRequest(
        queries, space.metric, snapshot.dtype.name, snapshot.row_bytes, first, files, offsets,
        space.distances(candidates.lower, queries)[inside], ids, space.distances(candidates.thresholds, queries),
        k, k if effort.candidates is None else limit, limits.max_reads, limits.deadline,
        _page_rows(snapshot, coded) if effort.candidates is None else None,
    )  # fmt: skip
    ranking = rank_rows(reader, request, workspace, hot=snapshot.hot, tally=tally)
    found.ids[part], found.distances[part] = ranking.ids, ranking.distances
    found.scanned[part], found.admitted[part] = candidates.tally, candidates.counts
    found.ranked[part] = ranking.tally
    if seen is not None:
        seen.note(ranking.ids, found_positions(snapshot, ranking))


def _page_rows(snapshot: Snapshot, coded: Sequence[CodedPart]) -> list[PageRows] | None:
    """Return what lies on the pages of each part, as far as it may be found; None where rows straddle pages."""
    if not page_rows_of(snapshot.row_bytes):
        return None
    both = zip(snapshot.parts, coded, strict=True)
    return [PageRows(part.places.file, part.arrays.ids, of_part.allowed) for part, of_part in both]


def found_positions(snapshot: Snapshot, ranking: Ranking) -> Ints:
    """Return the position of each vector found, -1 where there is none."""
    positions = np.full(ranking.ids.shape, -1, np.int64)
    for number, part in enumerate(snapshot.parts):
        here = ranking.files == part.places.file
        positions[here] = part.places.rows(ranking.offsets[here]) | number << PART_SHIFT
    return positions


def _widen(
    snapshot: Snapshot,
    turned: Floats,
    coded: Sequence[CodedPart],
    k: int,
    effort: Effort,
    limit: int,
    candidates: Candidates,
) -> Candidates:
    """Probe more lists for queries whose lists held fewer than `k` rows, or whose nearer lists were not all probed."""
    lists = snapshot.preview.lists
    open_ = candidates.counts < k
    if effort.gap < np.inf:
        open_ |= candidates.tally[:, 3] > 0
    short = np.flatnonzero(open_)
    while len(short) and effort.nprobe < lists:
        effort = replace(effort, nprobe=min(4 * effort.nprobe, lists))
        step = max(1, snapshot.scan_bytes // (effort.nprobe * _PROBE_BYTES))
        left = []
        for start in range(0, len(short), step):
            some = short[start : start + step]
            more = snapshot.preview.search(turned[some], coded, k, effort, limit)
            more.tally[:, 1] += candidates.tally[some, 1]  # scanned once more
            for name in ("positions", "lower", "estimates", "counts", "thresholds", "tally"):
                getattr(candidates, name)[some] = getattr(more, name)
            left.append(some[(more.counts < k) | ((more.tally[:, 3] > 0) & (effort.gap < np.inf))])
        short = np.concatenate(left)
    return candidates


def _cap(candidates: Candidates, k: int, effort: Effort) -> None:
    """Leave of the candidates of each query, in place, what the effort allows by how many there are."""
    if effort.candidates is None and effort.most is not None:
        # Nobody knows how many there were where some were dropped for lack of room.
        times = np.where(candidates.tally[:, 2] > 0, USUAL_MOST, candidates.counts / effort.usual)
        most = np.maximum(k, (effort.most * np.clip(times, 1, USUAL_MOST)).astype(np.int64))
        np.minimum(candidates.counts, most, out=candidates.counts)


def _merge(found: Found, part: slice, near: tuple[Ints, Floats], k: int) -> None:
    ids = np.hstack([found.ids[part], near[0]])
    distances = np.hstack([found.distances[part], near[1]])
    # What is missing has an infinite distance and so goes last.
    order = np.lexsort((ids, distances), axis=1)[:, :k]
    found.ids[part] = np.take_along_axis(ids, order, 1)
    found.distances[part] = np.take_along_axis(distances, order, 1)
