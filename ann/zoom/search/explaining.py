"""How the account of a search is made: a second scan of the same lists, matched with the decisions taken down."""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.zoom.filters.bitmaps import unpack
from memhier.ann.zoom.preview.preview import Effort
from memhier.ann.zoom.preview.scan_arguments import Candidates, CodedPart, split_positions
from memhier.ann.zoom.preview.stored_scan import StoredPart
from memhier.ann.zoom.search.explanation import CandidateRecord, Explanation
from memhier.ann.zoom.search.planning import Plan
from memhier.ann.zoom.search.results import SearchResult
from memhier.ann.zoom.search.search import Search
from memhier.ann.zoom.search.trace import Trace
from memhier.ann.zoom.storage.ids import Located, texts_at
from memhier.ann.zoom.storage.part import IndexPart, ids_at
from memhier.io.page_file import PAGE_BYTES

__all__ = ["explain"]

_RECORDS = 4096

Floats: TypeAlias = npt.NDArray[np.float32]
Ints: TypeAlias = npt.NDArray[np.int64]


def explain(search: Search, plan: Plan, result: SearchResult, query: Floats, trace: Trace) -> Explanation:
    """Return the account of a search that `trace` took down, of a query ``[1, d]``."""
    state, effort, stats = search.snapshot, plan.effort, result.stats
    turned = state.preview.turn(state.space.queries(query))
    scans = list(islice(_scans(search, turned, trace), stats["probed"]))
    eps = effort.eps if trace.eps is None else trace.eps
    records: list[CandidateRecord] = []
    shown: Ints = np.empty(0, np.int64)
    if scans:
        most = max(_RECORDS, 2 * result.ids.shape[1])
        effort_again = Effort(trace.nprobe, eps, min(most, max(1, stats["scanned"])))
        codes = _scan_again(search, turned, [number for number, _ in scans], effort_again, plan)
        shown = codes.positions[0, : codes.counts[0]]
        records += _of_codes(search, plan, query, trace, codes)
    records += _of_others(search, plan, result, trace, shown)
    kth, lists = float(result.distances[0, -1]), state.preview.lists
    return Explanation(
        lists=lists, probed=stats["probed"], routed=min(max(effort.nprobe, stats["probed"]), lists),
        vectors=state.count, scanned=stats["scanned"], candidates=stats["candidates"],
        eps=None if effort.candidates is not None else effort.eps, ranked=stats["ranked"],
        pages=stats["page_requests"], hot_pages=stats["hot_pages"], rounds=stats["rounds"],
        stopped=stats["stopped"], calibrated=stats["calibrated"], last_eps=trace.eps,
        threshold=_known(trace.threshold), kth=_known(kth),
        scans=scans, records=records,
    )  # fmt: skip


def _scans(search: Search, turned: Floats, trace: Trace) -> Iterator[tuple[int, int]]:
    """Yield the lists that a search may scan, in its order, with the number of codes in each that it compares."""
    preview, rows = search.snapshot.preview, search.selection.rows
    nprobe = trace.nprobe if trace.most is None else preview.lists
    for number in preview.route(turned, nprobe, in_order=True, among=rows.lists)[0].tolist() if nprobe else ():
        count = sum(_codes_in(part, number) for part in rows.coded)
        # The scan of product-quantised codes counts empty lists as well.
        if number >= 0 and (count or preview.coding == "pq"):
            yield number, count


def _codes_in(part: CodedPart | StoredPart, number: int) -> int:
    start, stop = int(part.starts[number]), int(part.starts[number + 1])
    if part.allowed is None or start == stop:
        return stop - start
    first = start // 64
    return int(unpack(part.allowed[first : -(-stop // 64)], stop - 64 * first)[start - 64 * first :].sum())


def _scan_again(search: Search, turned: Floats, lists: list[int], effort: Effort, plan: Plan) -> Candidates:
    """Return the codes with the least lower bounds, admitted or not: as many as the candidates of `effort`."""
    preview, coded, most = search.snapshot.preview, search.selection.rows.coded, effort.candidates
    assert most is not None
    if preview.coding == "pq":
        return preview.search(turned, coded, most, effort, most)
    # The k-th upper bound refuses none of so many.
    eps = effort.eps if plan.effort.candidates is None else 0.0
    return preview.scan(turned, np.array([lists]), coded, most, eps=eps, limit=most)


def _of_codes(search: Search, plan: Plan, query: Floats, trace: Trace, codes: Candidates) -> list[CandidateRecord]:
    """Return the records of codes."""
    state, count = search.snapshot, int(codes.counts[0])
    positions, lower = codes.positions[0, :count], codes.lower[0, :count]
    admitted, rounds = np.isin(positions, trace.positions), _rounds(search, plan, trace, positions)
    if trace.most is not None:
        late = lower <= np.float32(trace.most)
        rounds[late & (rounds == 0)] = trace.rounds.max(initial=0) + 1
        admitted |= late
    distances = np.full(count, np.inf, np.float32)
    distances[rounds > 0] = _distances(search, query, positions[rounds > 0])
    bounds = (state.space.distances(each[None, :count], query)[0] for each in (lower, codes.estimates[0]))
    named: npt.NDArray[Any] = ids_at(state.parts, positions)
    if state.fresh.texts is not None:
        places = Located(positions, np.full(count, -1, np.int64))
        named = texts_at(state.parts, state.fresh, places, search.tally).objects()
    columns = (named, *_lists_and_pages(state.parts, positions), *bounds, admitted, rounds, distances)
    return [
        CandidateRecord(name, number, page, _known(low), _known(estimate), inside, turn or None, _known(away))
        for name, number, page, low, estimate, inside, turn, away in zip(
            *(each.tolist() for each in columns), strict=True
        )
    ]


def _of_others(
    search: Search, plan: Plan, result: SearchResult, trace: Trace, shown: Ints
) -> Iterator[CandidateRecord]:
    """Yield the records of vectors found that are not among those shown: fresh ones, and others on the pages read."""
    positions, parts = trace.places.positions, search.snapshot.parts
    names, near = result.ids[0].tolist(), result.distances[0].tolist()
    rounds = _rounds(search, plan, trace, positions)
    admitted, shown_too = np.isin(positions, trace.positions), np.isin(positions, shown)
    for at, position in enumerate(positions.tolist()):
        if position < 0:
            yield CandidateRecord(names[at], None, None, None, None, False, None, near[at])
        elif not shown_too[at]:
            (number,), (page,) = (each.tolist() for each in _lists_and_pages(parts, positions[at : at + 1]))
            turn = int(rounds[at]) or int(trace.rounds.max(initial=0)) + 1
            yield CandidateRecord(names[at], number, page, None, None, bool(admitted[at]), turn, near[at])


def _rounds(search: Search, plan: Plan, trace: Trace, positions: Ints) -> npt.NDArray[np.int32]:
    """Return the round that read each vector, or its page where pages are ranked whole, 0 for none."""
    read = trace.rounds > 0
    taken, keys = trace.positions[read], positions
    if search.snapshot.page_rows and plan.effort.candidates is None:
        parts = search.snapshot.parts
        taken, keys = _lists_and_pages(parts, taken)[1], _lists_and_pages(parts, positions)[1]
    known = dict(zip(taken.tolist(), trace.rounds[read].tolist(), strict=True))
    return np.array([known.get(key, 0) for key in keys.tolist()], np.int32)


def _lists_and_pages(parts: Sequence[IndexPart], positions: Ints) -> tuple[Ints, Ints]:
    """Return the list of each position and its page, counted through the parts; -1 for the position -1."""
    lists, pages = np.full(len(positions), -1, np.int64), np.full(len(positions), -1, np.int64)
    numbers, rows = split_positions(positions)
    before = 0
    for which, part in enumerate(parts):
        here = np.flatnonzero(numbers == which)
        lists[here] = np.searchsorted(part.arrays.starts, rows[here], "right") - 1
        pages[here] = before + part.offsets(rows[here]) // PAGE_BYTES
        before += int(part.offsets(np.array([len(part)]))[0]) // PAGE_BYTES + 1
    return lists, pages


def _distances(search: Search, query: Floats, positions: Ints) -> Floats:
    """Return the exact distances of the vectors at positions, which are read again."""
    if not len(positions):
        return np.empty(0, np.float32)
    count = len(positions)
    ranking = search.rank(
        query, positions, np.array([count]), lower=np.full(count, -np.inf, np.float32),
        thresholds=np.full(1, np.inf, np.float32), k=count, first_round=count,
    )  # fmt: skip
    ids = ids_at(search.snapshot.parts, positions)
    found = np.empty(count, np.float32)
    found[np.argsort(ids)] = ranking.distances[0, np.argsort(ranking.ids[0])]
    return found


def _known(value: float) -> float | None:
    return value if np.isfinite(value) else None
