"""The effort for a declared recall, measured on vectors of the index or on the user's queries.

Held-out vectors play the queries; each must find its nearest neighbours other than itself. A search loses neighbours in
two ways: it does not scan their list, or it does not read them, as their bound is wrong by more than `eps` standard
errors. Both are measured on the preview alone. Calibration chooses the least effort whose mean loss, by conformal risk
control (Angelopoulos et al., ICLR 2024), stays below the loss that a declared recall allows: for ``n`` exchangeable
queries the expected loss of the next one is at most ``(n mean + 1) / (n + 1)``.

A query looks as far as a multiple of the distance of its own k-th neighbour. So a query unlike those measured, or under
a filter, looks at more lists, as its neighbours are farther. One in two of the held-out queries ends at the fewest
lists. No part of the effort for a recall exceeds that for a higher one, so a higher recall never costs less.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import gt
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.zoom.calibration.added import FAR_SHARE, lengths_of_residuals, one_way_error
from memhier.ann.zoom.calibration.calibration import NEIGHBOURS, RECALLS, SHORT, Calibration, Steps
from memhier.ann.zoom.calibration.needs import EPS, Needs, lists_of, measure_needs
from memhier.ann.zoom.calibration.strays import Strays
from memhier.ann.zoom.calibration.truth import NeighbourTruth
from memhier.ann.zoom.pauses import pause
from memhier.ann.zoom.preview.preview import BORDER_GAP, Effort, Preview
from memhier.ann.zoom.preview.scan_arguments import BORDERS, CodedPart, beyond_borders
from memhier.ann.zoom.preview.stored_codes import block_bytes, pages_of_lists
from memhier.ann.zoom.preview.stored_scan import Parts, StoredPart
from memhier.rows.ranking import page_rows_of

__all__ = ["calibrate"]

_LISTS_LOSSES = (0.8, 0.6, 0.4, 0.2)  # shares of the loss allowed for lists that are not scanned; bounds have the rest
# Cost of a page, in codes scanned: a quarter is processor time, to check and rank it, the rest is the device.
_READ_COST = 6000
_CANDIDATES = (10, 15, 20, 30, 40, 60, 80, 100, 150, 200, 300, 400, 600, 800)
_LIMITS_OF_K = (10, 40)  # candidates measured of a query, by k; more where few do not suffice
_LIMIT = 512  # likewise, at least
_NEAR = (0.03, 0.06, 0.1, 0.2, 0.35, 0.6)  # of the gap at the fewest lists
_LEAST_LISTS, _FIRST_PROBES, _MOST_PROBES = 2, 8, 2048
_NEARLY_ALL = 1 / 3  # of the lists, beyond which a query is routed to all of them at first
_BORDER_LISTS, _BORDER_RECALL = 6, 0.9  # lists that half of the queries need for this recall, where borders count
_USUAL_K = 10  # neighbours whose cost tells of an index
_USUAL = tuple(recall for recall in RECALLS if 0.9 <= recall <= 0.97)  # likewise, recalls
_COVERED = 0.9995  # of the neighbours; the lists of the rest are not looked for
_CENTROIDS = 4096  # compared at a time
_WAVE_BYTES = 2 << 20  # of codes read at a time, where these lie on SSD
_DIFFERENCES = 1 << 20  # of coordinates, held at a time
_BLOCK = 64
_HOPELESS = 2  # times the least cost found, beyond which no more lists are tried
_ALONE_LOSS = 0.4  # of the loss allowed, where rows are read alone
_DEEPER = 10  # times as deep as `k` lie the neighbours that tell how far lists may lie under a filter, where there are
_ID_BYTES = 4  # of most ids

Floats: TypeAlias = npt.NDArray[np.float32]
Ints: TypeAlias = npt.NDArray[np.int64]


def calibrate(preview: Preview, parts: Parts, truth: NeighbourTruth, row_bytes: int) -> Calibration:
    """Return the efforts for vectors of `parts`; `truth` holds their neighbours and positions.

    If rows of `row_bytes` bytes lie whole in pages, a read of any row of a page also finds a neighbour on it.
    """
    measure = _Measure(preview, [_in_large_waves(part) for part in parts], truth, page_rows_of(row_bytes))
    efforts: dict[int, list[tuple[float, Effort, float]]] = {}
    reached: dict[int, float] = {}
    alone: dict[float, float] = {}
    clear: dict[int, list[tuple[float, float]]] = {}
    costs: dict[int, float] = {}
    numbers = sorted({min(k, truth.neighbours) for k in NEIGHBOURS if truth.neighbours})
    if preview.coding == "pq":
        for k in numbers:
            efforts[k], reached[k] = measure.product_efforts(k)
    elif numbers:
        for k, needs in measure.needs(numbers).items():
            efforts[k], reached[k], errors, costs[k] = measure.bounded_efforts(k, needs)
            alone = {recall: max(eps, alone.get(recall, 0.0)) for recall, eps in errors.items()}
            if not preview.inner:
                clear[k] = measure.clear(k, efforts[k])
    if not efforts:  # only one vector, or copies of it
        some = 10 if preview.coding == "pq" else None
        efforts, reached = {1: [(1.0, Effort(preview.lists, eps=float(EPS[-1]), candidates=some), 1.0)]}, {1: 1.0}
    one_way = far = strays = None
    if (truth.own >= 0).all():
        turned = preview.turn(truth.vectors())
        one_way = one_way_error(turned, preview)
        far = float(np.quantile(lengths_of_residuals(turned, preview), 1 - FAR_SHARE))
        strays = Strays.none(turned, preview)
    return Calibration(
        len(truth.queries), efforts, reached, sorted(alone.items()), truth.count, clear=clear, one_way=one_way,
        far=far, strays=strays, cost=costs.get(_USUAL_K, 0.0),
    )  # fmt: skip


def _in_large_waves(part: CodedPart | StoredPart) -> CodedPart | StoredPart:
    """Return a part of which many queries read the codes together."""
    if isinstance(part, CodedPart):
        return part
    return replace(part, wave_bytes=max(part.wave_bytes, _WAVE_BYTES))


class _Measure:
    """The places of the true neighbours of the queries, by which efforts are judged."""

    def __init__(self, preview: Preview, parts: Parts, truth: NeighbourTruth, rows_of_page: int) -> None:
        self._preview, self._parts, self._truth = preview, parts, truth
        self._rows_of_page = max(1, rows_of_page)
        self._turned = preview.turn(truth.queries)
        self._lists = np.where(truth.found >= 0, lists_of(parts, truth.found), -1)
        sizes = np.sum([_list_costs(preview, part.starts) for part in parts], axis=0)
        self._probes = self._route()
        present = self._probes >= 0
        self._sizes = np.where(present, sizes[self._probes], 0).astype(np.int32)
        self._rank = _ranks(self._lists, self._probes)
        self._rungs: list[_Rung] = []
        away = np.empty(self._probes.shape, np.float32)
        step = max(1, _DIFFERENCES // max(1, self._probes.shape[1] * self._turned.shape[1]))
        for start in range(0, len(away), step):
            part = slice(start, start + step)
            away[part] = preview.remoteness(self._turned[part], self._probes[part])
        self._away = np.where(present, away, np.inf)

    @cached_property
    def _beyond(self) -> Floats:
        """How far queries lie beyond the borders of their lists, squared ``[q, p]``."""
        pairs = zip(self._turned, self._probes, strict=True)
        residuals = (query - self._preview.centroids_of(lists) for query, lists in pairs)
        return np.stack([beyond_borders(each, each[:BORDERS]) for each in residuals])

    def needs(self, numbers: Sequence[int]) -> dict[int, Needs]:
        """Return the needs by number of neighbours; looks at more candidates where some are far behind others."""
        preview, truth, most = self._preview, self._truth, numbers[-1]
        found: dict[int, Needs] = {}
        for times in _LIMITS_OF_K:
            limit = max(_LIMIT, times * most)
            found = measure_needs(
                preview, self._parts, truth, self._rows_of_page, numbers, self._probes.shape[1], limit
            )
            if _mean_share(found[most].widths < len(EPS), self._lists[:, :most] >= 0) >= SHORT:
                break
        return found

    def bounded_efforts(
        self, k: int, needs: Needs
    ) -> tuple[list[tuple[float, Effort, float]], float, dict[float, float], float]:
        """Return the efforts for codes with bounds, the highest recall measured, and the errors of rows read alone.

        The last value is the cost of a query for the usual recalls, in codes scanned.
        """
        known = self._lists[:, :k] >= 0
        chosen, costs = self._ladder(k, needs, known)
        usual = next((effort.least for recall, effort, _ in reversed(chosen) if recall >= _BORDER_RECALL), 0)
        if self._preview.on_ssd and not self._preview.inner and usual >= _BORDER_LISTS:
            others, less = self._ladder(k, needs, known, chosen)
            chosen, costs = (others, less) if sum(less) < sum(costs) else (chosen, costs)
        widest = Effort(self._probes.shape[1], eps=float(EPS[-1]))
        best = _mean_share(needs.widths < len(EPS), known)
        steps = zip(chosen, costs, strict=True)
        usual_costs = [cost + _READ_COST * pages for (recall, _, pages), cost in steps if recall in _USUAL]
        cost = float(np.mean(usual_costs)) if usual_costs else 0.0
        return chosen[::-1] or [(0.0, widest, float(_LIMIT))], best, _errors_alone(needs.alone, known), cost

    def _ladder(
        self, k: int, needs: Needs, known: npt.NDArray[np.bool_], without: Steps | None = None
    ) -> tuple[Steps, list[float]]:
        """Return the efforts for codes with bounds, by descending recall, and the costs of their lists.

        Borders count where there are efforts `without` them, unless these alone reach a recall.
        """
        gaps = self._preview.gaps(self._turned, self._probes, self._away, needs.kth)
        self._rungs = self._rungs_of(k, gaps)
        chosen: Steps = []
        within: tuple[Effort, float] | None = None
        costs = {_lists_effort(rung.effort): rung.cost for rung in self._rungs}
        tried = {recall: (effort, pages) for recall, effort, pages in without or ()}
        for recall in reversed(RECALLS):
            if without is not None:
                within = within or tried.get(recall)
                self._rungs = self._border_rungs(k, gaps, needs.kth, tried[recall][0]) if recall in tried else []
            costs |= {_lists_effort(rung.effort): rung.cost for rung in self._rungs}
            # The effort for a higher recall reaches this one, too.
            within = self._cheapest_effort(k, needs, known, recall, within) or within
            if within is not None:
                chosen.append((recall, *within))
        # With equal routing, a query that needs more lists scans none of them twice for a lower recall.
        routed = max((effort.nprobe for _, effort, _ in chosen), default=0)
        of_lists = [costs[_lists_effort(effort)] for _, effort, _ in chosen]
        return [(recall, replace(effort, nprobe=routed), pages) for recall, effort, pages in chosen], of_lists

    def clear(self, k: int, steps: Steps) -> list[tuple[float, float]]:
        """Return by recall the squared distance of lists that hardly hold one of the `k` nearest under a filter.

        It is in times that of the k-th. The neighbours of a held-out query from some rank on play those that a filter
        leaves. Half of the loss allowed is for lists.
        """
        most = self._truth.neighbours
        first = max(0, min(_DEEPER * k, most - k))
        windows = [slice(start, start + k) for start in range(first, min(first + _DEEPER, most - k + 1))]
        rank = np.concatenate([self._rank[:, window] for window in windows], axis=1)
        away = np.take_along_axis(self._away, np.minimum(rank, self._away.shape[1] - 1), 1)
        kth = np.repeat([window.stop - 1 for window in windows], k)
        times = away / np.maximum(self._truth.distances[:, kth], np.finfo(np.float32).tiny)
        found: list[tuple[float, float]] = []
        for recall, effort, _ in steps:
            beyond = np.where((rank >= effort.least) & np.isfinite(times), times, 0)
            found.append((recall, float(np.quantile(beyond, 1 - (1 - recall) / 2)) if beyond.size else 0.0))
        return found

    def _cheapest_effort(
        self, k: int, needs: Needs, known: npt.NDArray[np.bool_], recall: float, within: tuple[Effort, float] | None
    ) -> tuple[Effort, float] | None:
        """Return the lists and bounds that take the least time for a recall, and pages; None if none reach it.

        They do not exceed those `within`, which reach a higher recall.
        """
        best, least, tried = None, np.inf, set()
        above = None if within is None else within[0]
        for share in _LISTS_LOSSES:
            lists = self._probe_effort(k, share * (1 - recall), above)
            if lists is None or lists[0] in tried:
                continue
            effort, covered, scanned = lists
            tried.add(effort)
            bounds = self._cheapest_bounds(k, needs, covered & known, known, recall, above)
            if bounds is not None and (cost := scanned + _READ_COST * bounds[2]) < least:
                width, most, pages = bounds
                found = replace(effort, eps=float(EPS[width]), most=max(k, most), usual=int(needs.usual[width]))
                best, least = (found, pages), cost
        return best

    def _cheapest_bounds(
        self,
        k: int,
        needs: Needs,
        covered: npt.NDArray[np.bool_],
        known: npt.NDArray[np.bool_],
        recall: float,
        within: Effort | None,
    ) -> tuple[int, int, float] | None:
        """Return the width of the bounds and the number of candidates that read the fewest pages for a recall.

        The third value is the number of pages of a query.
        """
        count = len(self._turned)
        # Below zero if there are too few queries to tell, even if none of them lost a neighbour.
        allowed = int(np.floor((((1 - recall) * (count + 1) - 1) / count) * known.sum())) if count else 0
        best: tuple[int, int, float] | None = None
        widths = needs.widths[covered]
        for each in range(len(EPS)):
            read = widths <= each
            spare = allowed - int(known.sum() - read.sum())
            if spare < 0:
                continue
            if within is not None and EPS[each] > within.eps:
                break
            ranks = needs.ranks[each][covered][read]
            last = max(0, len(ranks) - 1 - spare)
            most = int(np.partition(ranks, last)[last]) + 1 if len(ranks) else 1
            if within is not None and within.most is not None and most > within.most:
                continue
            cost = needs.reads(each, max(k, most))
            if best is None or cost < best[2] - 1e-9:
                best = each, most, cost
        return best

    def product_efforts(self, k: int) -> tuple[list[tuple[float, Effort, float]], float]:
        """Return the efforts for product-quantised codes, and the highest recall measured."""
        chosen: list[tuple[float, Effort, float]] = []
        tried = [count for count in _CANDIDATES if count >= k] or [10 * k]
        for recall in RECALLS:
            effort = self._fewest_lists(k, _LISTS_LOSSES[0] * (1 - recall))
            ranks = self._candidate_ranks(k, effort, tried[-1])
            losses = np.array([float(np.mean(ranks >= count)) for count in tried])
            fits = np.flatnonzero(self._conformal(losses) <= 1 - recall)
            if not len(fits):
                break
            before = chosen[-1][1].candidates if chosen else None
            candidates = max(tried[fits[0]], before or 0)
            chosen.append((recall, Effort(effort.nprobe, candidates=candidates), float(candidates)))
        widest = Effort(self._probes.shape[1], candidates=tried[-1])
        best = float(np.mean(self._candidate_ranks(k, widest, tried[-1]) < tried[-1]))
        return chosen or [(0.0, widest, float(tried[-1]))], best

    def _route(self) -> Ints:
        """Return probes ``[q, p]``, enough to find nearly all neighbours."""
        centroids = self._preview.router.centroids
        ranks = []
        for start in range(0, len(self._turned), _BLOCK):
            away = _squared_distances(self._preview.aims(self._turned[start : start + _BLOCK]), centroids)
            lists = self._lists[start : start + _BLOCK]
            own = np.take_along_axis(away, np.maximum(lists, 0), 1)
            order = np.sort(away, axis=1)
            ranks += [np.searchsorted(row, each)[have >= 0] for row, each, have in zip(order, own, lists, strict=True)]
        deepest = int(np.quantile(np.concatenate(ranks), _COVERED)) + 1 if sum(map(len, ranks)) else 1
        count = min(max(deepest, _FIRST_PROBES), _MOST_PROBES, self._preview.lists)
        return self._preview.route(self._turned, count, in_order=True)

    def _fewest_lists(self, k: int, loss: float) -> Effort:
        """Return the fewest probes, equal for all queries, that miss at most this share of the neighbours."""
        rank, known = self._rank[:, :k], self._lists[:, :k] >= 0
        most, allowed = self._probes.shape[1], self._allowed(k, loss)
        steps = _steps(min(_FIRST_PROBES, most), most)
        return Effort(next((each for each in steps if (rank[known] >= each).sum() <= allowed), most))

    def _allowed(self, k: int, loss: float) -> int:
        return max(0, int((loss * (len(self._turned) + 1) - 1) * k))

    def _rungs_of(self, k: int, gaps: Floats) -> "list[_Rung]":
        """Return steps of how far queries look, from near to far; `gaps` are those of their lists."""
        most, rungs = self._probes.shape[1], []
        for least, share in self._steps_of_lists(most):
            pause()
            # The k-th neighbour of every second query ends its search there.
            gap = share * float(np.median(gaps[:, min(least, most - 1)])) if len(gaps) else np.inf
            scanned = self._within(gaps, least, gap)
            rungs.append(self._rung(k, Effort(0, least=least, gap=gap), scanned, scanned))
        return rungs

    def _border_rungs(self, k: int, gaps: Floats, kth: Floats, without: Effort) -> "list[_Rung]":
        """Return the same for queries that pass over lists beyond their borders; `without` is the effort without."""
        beyond = self._beyond / np.maximum(kth.astype(np.float64), np.finfo(np.float32).tiny)[:, None]
        reached, ordered = self._within(gaps, 1, BORDER_GAP * without.gap), np.sort(beyond, axis=1)
        most, rungs = self._probes.shape[1], []
        for least, share in self._steps_of_lists(most):
            pause()
            border = share * float(np.median(ordered[:, min(least, most - 1)]))
            effort = Effort(0, least=without.least, gap=without.gap, border=border)
            rungs += [self._rung(k, effort, reached & (beyond < border), reached)] if border > 0 else []
        return rungs

    @staticmethod
    def _within(gaps: Floats, least: int, gap: float) -> npt.NDArray[np.bool_]:
        """Return whether a query reaches a list, bool ``[q, p]``."""
        beyond = gaps >= gap
        beyond[:, :least] = False
        return ~np.logical_or.accumulate(beyond, axis=1)

    def _rung(self, k: int, effort: Effort, scanned: npt.NDArray[np.bool_], reached: npt.NDArray[np.bool_]) -> "_Rung":
        """Return the step of queries that reach some lists, and scan most or all of these."""
        most, lists = self._probes.shape[1], self._preview.lists
        rank, known = self._rank[:, :k], self._lists[:, :k] >= 0
        routed = int(reached.sum(axis=1).max(initial=effort.least)) + 1
        routed = routed if routed < _NEARLY_ALL * lists else lists
        cost = float(self._sizes[scanned].sum(dtype=np.int64)) / max(1, len(rank)) + self._preview.router.cost(routed)
        covered = np.take_along_axis(scanned, np.minimum(rank, most - 1), 1) & (rank < most)
        return _Rung(replace(effort, nprobe=routed), covered, int((known & ~covered).sum()), cost)

    def _steps_of_lists(self, most: int) -> list[tuple[int, float]]:
        """Return the fewest lists of each step, and the share of the usual gap beyond them.

        Where each list is a read, there are steps with smaller gaps. A list in DRAM costs too little for them, and
        queries unlike those measured are served by the greater gap.
        """
        least = _steps(min(_LEAST_LISTS, most), most)
        near = _NEAR if self._preview.on_ssd else ()
        return [*((least[0], share) for share in near), *((each, 1.0) for each in least)]

    def _probe_effort(
        self, k: int, loss: float, within: Effort | None
    ) -> tuple[Effort, npt.NDArray[np.bool_], float] | None:
        """Return the probes that scan the fewest codes and miss at most this share of the neighbours.

        The other values are the neighbours found, bool ``[q, k]``, and the cost in codes scanned. None if that takes
        more than those `within`.
        """
        allowed, best = self._allowed(k, loss), None
        for rung in self._rungs:
            if within is not None and any(map(gt, _lists_effort(rung.effort), _lists_effort(within))):
                break
            if rung.missed > allowed and (rung.effort.border or rung.effort.least < self._probes.shape[1]):
                continue
            if best is None or rung.cost < best.cost:
                best = rung
            elif rung.cost > _HOPELESS * best.cost:
                break
        return None if best is None else (best.effort, best.covered, best.cost)

    def _candidate_ranks(self, k: int, effort: Effort, most: int) -> Ints:
        """Return the ranks of the true neighbours among the candidates, without the query itself."""
        truth = self._truth
        ranks = np.full((len(self._turned), k), most)
        for start in range(0, len(self._turned), _BLOCK):
            part = slice(start, start + _BLOCK)
            wanted = Effort(effort.nprobe, candidates=most + 1)
            found = self._preview.search(self._turned[part], self._parts, k, wanted, most + 1)
            own = found.positions == truth.own[part, None]
            before = np.cumsum(own, axis=1)
            for column in range(k):
                match = (found.positions == truth.found[part, column][:, None]) & ~own
                rank = match.argmax(axis=1)
                shift = np.take_along_axis(before, rank[:, None], 1)[:, 0]
                ranks[part, column] = np.where(match.any(axis=1), rank - shift, most)
        return ranks[truth.found[:, :k] >= 0]

    def _conformal(self, losses: npt.NDArray[Any]) -> npt.NDArray[Any]:
        count = len(self._turned)
        return (count * losses + 1) / (count + 1)


def _list_costs(preview: Preview, starts: Ints) -> Ints:
    """Return the cost of each list of a part, in codes scanned; with codes on SSD it has pages to read, too."""
    rows: Ints = np.diff(starts)
    if not preview.on_ssd:
        return rows
    return rows + _READ_COST * pages_of_lists(starts, block_bytes(preview.book.code_bytes, _ID_BYTES))


def _lists_effort(effort: Effort) -> tuple[int, float, float]:
    """Return the parts of an effort that tell which lists are scanned."""
    return effort.least, effort.gap, effort.border or np.inf


def _mean_share(found: npt.NDArray[np.bool_], known: npt.NDArray[np.bool_]) -> float:
    """Return the mean over queries of the share of their known neighbours that were found."""
    counts = known.sum(axis=1)
    return float(((found & known).sum(axis=1)[counts > 0] / counts[counts > 0]).mean()) if counts.any() else 1.0


@dataclass(frozen=True, slots=True)
class _Rung:
    """One step of how far queries look.

    Attributes
    ----------
    effort
        The lists.
    covered
        bool ``[q, k]``: the neighbours in lists that are scanned.
    missed
        The number of neighbours missed.
    cost
        The cost for a query, in codes scanned.
    """

    effort: Effort
    covered: npt.NDArray[np.bool_]
    missed: int
    cost: float


def _errors_alone(widths: npt.NDArray[np.uint8], known: npt.NDArray[np.bool_]) -> dict[float, float]:
    """Return by recall the standard errors that lose few enough neighbours if each is read alone."""
    lost = np.array([float((widths[known] > each).mean()) if known.any() else 0.0 for each in range(len(EPS))])
    fits = {recall: np.flatnonzero(lost <= _ALONE_LOSS * (1 - recall)) for recall in RECALLS}
    return {recall: float(EPS[width[0] if len(width) else -1]) for recall, width in fits.items()}


def _steps(first: int, last: int) -> list[int]:
    """Return ``first``, an eighth more and so on, and ``last``."""
    values = [first]
    while values[-1] < last:
        values.append(min(values[-1] * 9 // 8 + 1, last))
    return values


def _squared_distances(queries: Floats, centroids: npt.NDArray[np.float16]) -> Floats:
    """Return float32 ``[q, lists]``."""
    out = np.empty((len(queries), len(centroids)), np.float32)
    for start in range(0, len(centroids), _CENTROIDS):
        block = centroids[start : start + _CENTROIDS].astype(np.float32)
        out[:, start : start + _CENTROIDS] = np.einsum("ij,ij->i", block, block) - 2 * (queries @ block.T)
    out += np.einsum("ij,ij->i", queries, queries)[:, None]
    return np.maximum(out, 0, out=out)


def _ranks(lists: Ints, probes: Ints) -> Ints:
    """Return the place of each list among the probes of its query; the number of probes if it is absent."""
    ranks = np.full(lists.shape, probes.shape[1])
    for query, (wanted, probed) in enumerate(zip(lists, probes, strict=True)):
        order = np.argsort(probed, kind="stable")
        place = np.minimum(np.searchsorted(probed[order], wanted), len(order) - 1)
        hit = (probed[order][place] == wanted) & (wanted >= 0)
        ranks[query, hit] = order[place[hit]]
    return ranks
