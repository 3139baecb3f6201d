"""The way of a search: from queries to lists, to candidates with bounds, to rounds of reads, to ids."""

from dataclasses import dataclass, replace
from typing import Self, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.zoom.calibration.needs import USUAL_MOST
from memhier.ann.zoom.filters.bitmaps import Words, popcount
from memhier.ann.zoom.filters.conditions import check_types
from memhier.ann.zoom.filters.where import evaluate, parse
from memhier.ann.zoom.preview.code_scan import Candidates, CodedPart, positions_of
from memhier.ann.zoom.preview.preview import Effort
from memhier.ann.zoom.storage.fullview import make_workspace
from memhier.ann.zoom.storage.ids import Sightings
from memhier.ann.zoom.storage.part import alive_rows, gather
from memhier.ann.zoom.storage.snapshot import IndexSnapshot
from memhier.io.reader import Reader
from memhier.rows.ranking import PageRows, Ranking, RankRequest, page_rows_of, rank_rows
from memhier.shield import check_interrupt

__all__ = [
    "CANDIDATE_BYTES",
    "NO_LIMITS",
    "Found",
    "ReadLimits",
    "Search",
    "Selection",
    "candidate_limit",
    "is_cut_short",
]

CANDIDATE_BYTES = 64  # position, bound, estimate, file, offset and id of one candidate
_AXIS_BYTES = 16  # of a query on its way into the preview's space
_PROBE_BYTES = 8  # of a list that a query is routed to
_LIMIT = 512  # candidates with bounds that are kept of a query, where there is no room for more

Floats: TypeAlias = npt.NDArray[np.float32]
Ints: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Selection:
    """The vectors that a search may find.

    Attributes
    ----------
    parts
        The bitmap of rows of each part, without removed ones; None for all rows.
    fresh
        bool ``[n]`` of the fresh vectors; None for all.
    share, left
        The share of the vectors on SSD that the filter leaves, and their number; None where it leaves all.
    """

    parts: tuple[Words | None, ...]
    fresh: npt.NDArray[np.bool_] | None = None
    share: float = 1.0
    left: int | None = None

    @classmethod
    def of(cls, snapshot: IndexSnapshot, where: str | None) -> Self:
        """Return the vectors that fulfil a filter; all of them when there is none.

        Raises
        ------
        ValueError, TypeError
            When it is no filter, or names attributes that the index does not have.
        """
        if where is None:
            return cls((None,) * len(snapshot.parts))
        expression = parse(where)
        if not snapshot.schema:
            raise ValueError(f"where={where!r}: this index has no attributes; give them to build() or add()")
        check_types(expression, snapshot.schema)
        fresh = evaluate(expression, snapshot.fresh.attributes) if len(snapshot.fresh.ids) else None
        bits = tuple(part.select(expression) for part in snapshot.parts)
        left, every = sum(map(popcount, bits)), alive_rows(snapshot.parts)
        return cls(bits, fresh, left / every if every else 1.0, left if left < every else None)


@dataclass(frozen=True, slots=True)
class ReadLimits:
    """The most pages read for a query, and the second at which a call ends its reads."""

    max_reads: int = 2**62
    deadline: float = np.inf


NO_LIMITS = ReadLimits()


@dataclass(frozen=True, slots=True)
class Found:
    """The nearest vectors of each query, and the work done for them.

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


def is_cut_short(found: Found, k: int, effort: Effort, scan_bytes: int) -> npt.NDArray[np.bool_]:
    """Return the queries, bool ``[q]``, that lost candidates which the search should have looked at."""
    wanted = effort.most is None or candidate_limit(k, effort, scan_bytes) < USUAL_MOST * effort.most
    return (found.scanned[:, 2] > 0) & (effort.candidates is None and wanted)


class Search:
    """One call: the snapshot that it searches, the vectors that it may find, and the reads that it makes.

    Parameters
    ----------
    snapshot, reader
        The state of the index, and the reader of its files.
    selection
        The vectors that may be found.
    named
        Whether the call notes where it finds vectors, to read the strings that are their ids.

    Attributes
    ----------
    tally
        int64 ``[3]``: I/Os, pages and bytes read.
    sightings
        Where the vectors found are; None where nothing asks.
    coded
        The codes of each part.
    row_bytes, workspace
        Bytes of a vector on SSD, and room for the vectors of one submission.
    """

    def __init__(self, snapshot: IndexSnapshot, reader: Reader, selection: Selection, *, named: bool = False) -> None:
        self.selection: Selection
        self.reader: Reader
        self.snapshot: IndexSnapshot
        self.snapshot, self.reader, self.selection = snapshot, reader, selection
        self.tally: npt.NDArray[np.int64] = np.zeros(3, np.int64)
        self.sightings: Sightings | None = Sightings(snapshot.parts, snapshot.fresh) if named else None
        self.coded: list[CodedPart] = [
            part.coded(bits) for part, bits in zip(snapshot.parts, selection.parts, strict=True)
        ]
        self.row_bytes: int = snapshot.row_bytes
        self.workspace: npt.NDArray[np.uint8] = make_workspace(self.row_bytes)
        self._on_page = page_rows_of(self.row_bytes)

    def nearest(self, queries: Floats, k: int, effort: Effort, limits: ReadLimits = NO_LIMITS) -> Found:
        """Return the `k` nearest of each query, float32 ``[q, d]``; -1 and infinity where there are fewer."""
        snapshot, count = self.snapshot, len(queries)
        found = Found(
            np.full((count, k), -1, np.int64),
            np.full((count, k), np.inf, np.float32),
            np.zeros((count, 4), np.int64),
            np.zeros(count, np.int64),
            np.zeros((count, 5), np.int64),
        )
        limit = candidate_limit(k, effort, snapshot.scan_bytes)
        each = limit * CANDIDATE_BYTES + snapshot.space.padded * _AXIS_BYTES + effort.nprobe * _PROBE_BYTES
        step = max(1, snapshot.scan_bytes // each)
        for start in range(0, count, step):
            check_interrupt()
            part = slice(start, start + step)
            if snapshot.parts:
                turned = snapshot.preview.turn(snapshot.space.queries(queries[part], start))
                candidates = self._candidates(turned, k, effort, limit)
                ranking = self._rank(queries[part], candidates, k, effort, limits)
                found.ids[part], found.distances[part] = ranking.ids, ranking.distances
                found.scanned[part], found.admitted[part] = candidates.tally, candidates.counts
                found.ranked[part] = ranking.tally
            if len(snapshot.fresh.ids):
                near = snapshot.fresh.nearest(queries[part], snapshot.space.metric, k, self.selection.fresh)
                _merge(found, part, near, k)
        return found

    def note(self, ranking: Ranking, wanted: npt.NDArray[np.bool_] | None = None) -> None:
        """Note where the ranked vectors are, or those `wanted`, where their strings have to be read."""
        if self.sightings is None:
            return
        positions = np.full(ranking.ids.shape, -1, np.int64)
        for number, part in enumerate(self.snapshot.parts):
            here = ranking.files == part.file
            positions[here] = positions_of(number, part.rows_at(ranking.offsets[here]))
        chosen = slice(None) if wanted is None else wanted
        self.sightings.note(ranking.ids[chosen], positions[chosen])

    def _candidates(self, turned: Floats, k: int, effort: Effort, limit: int) -> Candidates:
        """Return the candidates of turned queries.

        A query whose lists hold fewer than `k` rows, or that did not scan all near lists, scans more of them.
        """
        snapshot, lists = self.snapshot, len(self.snapshot.preview.radii)
        candidates = snapshot.preview.search(turned, self.coded, k, effort, limit)
        is_open = candidates.counts < k
        if effort.gap < np.inf:
            is_open |= candidates.tally[:, 3] > 0
        short, wider = np.flatnonzero(is_open), effort
        while len(short) and wider.nprobe < lists:
            wider = replace(wider, nprobe=min(4 * wider.nprobe, lists))
            step = max(1, snapshot.scan_bytes // (wider.nprobe * _PROBE_BYTES))
            left = []
            for start in range(0, len(short), step):
                some = short[start : start + step]
                more = snapshot.preview.search(turned[some], self.coded, k, wider, limit)
                more.tally[:, 1] += candidates.tally[some, 1]  # scanned once more
                for name in ("positions", "lower", "estimates", "counts", "thresholds", "tally"):
                    getattr(candidates, name)[some] = getattr(more, name)
                left.append(some[(more.counts < k) | ((more.tally[:, 3] > 0) & (wider.gap < np.inf))])
            short = np.concatenate(left)
        if effort.candidates is None and effort.most is not None:
            # The number of candidates is unknown where some were dropped for lack of room.
            times = np.where(candidates.tally[:, 2] > 0, USUAL_MOST, candidates.counts / effort.usual)
            most = np.maximum(k, (effort.most * np.clip(times, 1, USUAL_MOST)).astype(np.int64))
            np.minimum(candidates.counts, most, out=candidates.counts)
        return candidates

    def _rank(self, queries: Floats, candidates: Candidates, k: int, effort: Effort, limits: ReadLimits) -> Ranking:
        """Read the vectors of candidates and return the nearest."""
        snapshot, space = self.snapshot, self.snapshot.space
        inside = np.arange(candidates.positions.shape[1]) < candidates.counts[:, None]
        files, offsets, ids = gather(snapshot.parts, candidates.positions[inside])
        lower, thresholds = space.distances(candidates.lower, queries), space.distances(candidates.thresholds, queries)
        request = RankRequest(
            queries=queries, metric=space.metric, dtype=snapshot.dtype.name, row_bytes=self.row_bytes,
            first=np.concatenate([[0], np.cumsum(candidates.counts)]), files=files, offsets=offsets,
            lower=lower[inside], ids=ids, thresholds=thresholds, k=k,
            first_round=k if effort.candidates is None else effort.candidates,
            max_reads=limits.max_reads, deadline=limits.deadline,
            page_rows=self._page_rows() if effort.candidates is None else None,
        )  # fmt: skip
        ranking = rank_rows(self.reader, request, self.workspace, hot=snapshot.hot, tally=self.tally)
        self.note(ranking)
        return ranking

    def _page_rows(self) -> list[PageRows] | None:
        """Return the rows on the pages of each part that may be found; None where rows straddle pages."""
        if not self._on_page:
            return None
        both = zip(self.snapshot.parts, self.coded, strict=True)
        return [PageRows(part.file, part.arrays.ids, coded.allowed) for part, coded in both]


def _merge(found: Found, part: slice, near: tuple[Ints, Floats], k: int) -> None:
    ids = np.hstack([found.ids[part], near[0]])
    distances = np.hstack([found.distances[part], near[1]])
    # Missing neighbours have an infinite distance and so go last.
    order = np.lexsort((ids, distances), axis=1)[:, :k]
    found.ids[part] = np.take_along_axis(ids, order, 1)
    found.distances[part] = np.take_along_axis(distances, order, 1)
