"""How hard to look for a declared recall, measured on vectors of the index itself or on the user's queries.

Held-out vectors play the queries; each must find its nearest neighbours other than itself. Neighbours are lost in two
ways: their list is not scanned, or their bound, wrong by more than `eps` standard errors, keeps them from being read.
Both are measured on the preview alone. The least effort is chosen whose mean loss, by conformal risk control
(Angelopoulos et al., ICLR 2024), stays below the loss that a declared recall allows: for ``n`` exchangeable queries
the expected loss of the next one is at most ``(n mean + 1) / (n + 1)``.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.zoom.code_scan import PART_SHIFT, CodedPart
from memhier.ann.zoom.preview import Effort, Preview
from memhier.ann.zoom.truth import NeighbourTruth
from memhier.ranking import page_rows_of

__all__ = ["RECALLS", "TARGET", "Calibration", "calibrate"]

TARGET = 0.99  # what a search reaches when it is not told
RECALLS = (0.5, 0.7, 0.8, 0.85, 0.9, 0.92, 0.94, 0.95, 0.96, 0.97, 0.98, 0.985, 0.99, 0.995, 0.998)
NEIGHBOURS = (1, 10, 100)
_CHANGES = 0.1  # of the vectors, beyond which nobody knows whether a calibration still holds
_WORN = 0.3  # of the vectors, beyond which lists no longer fit what they hold; a vector replaced is two changes
_LISTS_LOSSES = (0.6, 0.35, 0.15)  # of the loss allowed, for lists that are not scanned; the rest is for bounds
# Codes scanned for what a page costs: a quarter of it the processor, to check and rank it, the rest the device.
_READ_COST = 6000
_EPS = np.geomspace(0.2, 5.0, 20, dtype=np.float32)
_CANDIDATES = (10, 15, 20, 30, 40, 60, 80, 100, 150, 200, 300, 400, 600, 800)
_LIMIT = 512  # candidates of a query that are looked at
_FIRST_PROBES, _MOST_PROBES = 8, 2048
_COVERED = 0.9995  # of the neighbours; the lists of the rest are not looked for
_CENTROIDS = 4096  # compared at a time
_DIFFERENCES = 1 << 22  # of coordinates, held at a time
_BLOCK = 64
_GROWTH = 0.5  # of the lists with the neighbours wanted, at least: a power

Floats: TypeAlias = npt.NDArray[np.float32]
Ints: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Calibration:
    """The least effort for each recall, for each number of neighbours.

    Attributes
    ----------
    queries
        How many it was measured on.
    efforts
        By k, then by ascending recall: the recall, and the effort that reaches it.
    reached
        By k, the highest recall measured, with the greatest effort.
    vectors, changes
        How many there were then, and how many were added or removed since.
    tuned
        Whether the queries were the user's, which cannot be had again.
    """

    queries: int
    efforts: dict[int, list[tuple[float, Effort]]]
    reached: dict[int, float]
    vectors: int = 0
    changes: int = 0
    tuned: bool = False

    @property
    def worn(self) -> bool:
        """Whether so much has changed since that the index had better be made anew, and nothing is lost by it."""
        return not self.tuned and self.changes > _WORN * self.vectors

    def changed(self, count: int) -> Self:
        """Return it after `count` vectors were added or removed."""
        return replace(self, changes=self.changes + count)

    def effort(self, k: int, recall: float, share: float = 1.0) -> tuple[Effort, bool]:
        """Return the effort for `recall` at `k`, and whether it is known to reach it.

        Where a filter leaves only a `share` of the vectors, the k nearest of those lie as far as some ``k / share`` of
        all, and so do their lists.
        """
        known = min((each for each in self.efforts if each >= k), default=max(self.efforts))
        found, reached = self._at(known, recall)
        reached = reached and self.changes <= _CHANGES * self.vectors
        if self.changes > _WORN * self.vectors:
            # Nothing that was measured then says how far the k nearest are now, nor how many stand before them.
            found = replace(found, zeta=np.inf, most=None)
        if k > known and found.most is not None:
            found = replace(found, most=-(-k * found.most // known))
        if found.candidates is not None:
            return (found if k <= known else replace(found, candidates=-(-k * found.candidates // known))), reached
        wanted = k / max(share, 1e-9)
        if wanted <= known:
            return found, reached and share == 1
        wide = min((each for each in self.efforts if each >= wanted), default=max(self.efforts))
        lists, _ = self._at(wide, recall)
        nprobe = float(max(found.nprobe, lists.nprobe))
        if wanted > wide:  # as fast as it grew from the number of neighbours before
            before = max((each for each in self.efforts if each < wide), default=wide)
            near, _ = self._at(before, recall)
            growth = np.log(max(lists.nprobe / near.nprobe, 1)) / np.log(wide / before) if before < wide else _GROWTH
            nprobe *= (wanted / wide) ** max(float(growth), _GROWTH)
        found = replace(found, nprobe=int(np.ceil(nprobe)), zeta=max(found.zeta, lists.zeta))
        return found, reached and share == 1 and k <= known

    def _at(self, known: int, recall: float) -> tuple[Effort, bool]:
        for reached, effort in self.efforts[known]:
            if reached >= recall - 1e-9:
                return effort, True
        return self.efforts[known][-1][1], False

    def to_json(self) -> dict[str, Any]:
        """Return it as plain values."""
        efforts = {k: [(recall, asdict(effort)) for recall, effort in of_k] for k, of_k in self.efforts.items()}
        about = {name: getattr(self, name) for name in ("queries", "vectors", "changes", "tuned")}
        return about | {"efforts": efforts, "reached": self.reached}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        """Return what :meth:`to_json` gave."""
        efforts = {
            int(k): [(recall, Effort(**effort)) for recall, effort in of_k] for k, of_k in values["efforts"].items()
        }
        reached = {int(k): recall for k, recall in values["reached"].items()}
        return cls(values["queries"], efforts, reached, values["vectors"], values["changes"], values["tuned"])


def calibrate(preview: Preview, parts: Sequence[CodedPart], truth: NeighbourTruth, row_bytes: int) -> Calibration:
    """Return the efforts for vectors of `parts`; `truth` has been given all of them, and their positions.

    Where rows of `row_bytes` bytes lie whole in pages, a neighbour is also found when another row of its page is read.
    """
    measure = _Measure(preview, parts, truth, page_rows_of(row_bytes))
    efforts: dict[int, list[tuple[float, Effort]]] = {}
    reached: dict[int, float] = {}
    for k in sorted({min(k, truth.neighbours) for k in NEIGHBOURS if truth.neighbours}):
        of_k = measure.product_efforts(k) if preview.coding == "pq" else measure.bounded_efforts(k)
        efforts[k], reached[k] = of_k
    if not efforts:  # nothing but copies of one vector, or one vector
        efforts, reached = (
            {1: [(1.0, Effort(preview.lists, eps=float(_EPS[-1]), candidates=10 if preview.coding == "pq" else None))]},
            {1: 1.0},
        )
    return Calibration(len(truth.queries), efforts, reached, sum(len(part.codes) for part in parts))


@dataclass(frozen=True, slots=True)
class _Needs:
    """What reading takes.

    Attributes
    ----------
    widths
        ``[q, k]``: the first of the widths of the bounds at which each neighbour is read.
    ranks
        ``[widths, q, k]``: where the lower bound for which it is read stands among those of its query, the query and
        its copies not counted.
    pages
        ``[widths, ranks]``: on how many pages that are read the least bound stands there among those of its query.
    """

    widths: Ints
    ranks: Ints
    pages: Ints

    def reads(self, width: int, most: int) -> float:
        """Return how many pages a query reads where the bounds leave `most` candidates at most."""
        return float(self.pages[width, :most].sum()) / max(1, len(self.widths))


class _Measure:
    """What efforts are judged by: where the true neighbours of the queries lie."""

    def __init__(self, preview: Preview, parts: Sequence[CodedPart], truth: NeighbourTruth, rows_of_page: int) -> None:
        self._preview, self._parts, self._truth = preview, parts, truth
        self._rows_of_page = max(1, rows_of_page)
        self._turned = preview.turn(truth.queries)
        self._lists = np.where(truth.found >= 0, _list_of(parts, truth.found), -1)
        sizes = np.sum([np.diff(part.starts) for part in parts], axis=0)
        self._probes = self._route()
        present = self._probes >= 0
        self._sizes = np.where(present, sizes[self._probes], 0)
        self._rank = _ranks(self._lists, self._probes)
        centroids = preview.router.centroids
        away = np.empty(self._probes.shape, np.float32)
        step = max(1, _DIFFERENCES // max(1, self._probes.size // len(away) * self._turned[0].size))
        for start in range(0, len(away), step):
            part = slice(start, start + step)
            difference = self._turned[part, None] - centroids[self._probes[part]].astype(np.float32)
            away[part] = np.einsum("ijk,ijk->ij", difference, difference)
        self._away, self._radii = away, preview.radii[self._probes]

    def bounded_efforts(self, k: int) -> tuple[list[tuple[float, Effort]], float]:
        """Return the efforts for codes with bounds, and the highest recall measured."""
        needs = self._needs(k)
        known = self._lists[:, :k] >= 0
        chosen: list[tuple[float, Effort]] = []
        best = _mean_share(needs.widths < len(_EPS), known)
        for recall in RECALLS:
            found = self._cheapest_effort(k, needs, known, recall)
            if found is None:
                break
            chosen.append((recall, found))
        widest = Effort(self._probes.shape[1], np.inf, float(_EPS[-1]))
        return chosen or [(0.0, widest)], best

    def _cheapest_effort(self, k: int, needs: "_Needs", known: npt.NDArray[np.bool_], recall: float) -> Effort | None:
        """Return the lists and bounds that take the least time for a recall, None where none reach it."""
        best, least, tried = None, np.inf, set()
        for share in _LISTS_LOSSES:
            effort, covered, scanned = self._probe_effort(k, share * (1 - recall))
            if effort in tried:
                continue
            tried.add(effort)
            bounds = self._cheapest_bounds(k, needs, covered, known, recall)
            if bounds is not None and (cost := scanned + _READ_COST * bounds[2]) < least:
                best, least = replace(effort, eps=float(_EPS[bounds[0]]), most=max(k, bounds[1])), cost
        return best

    def _cheapest_bounds(
        self, k: int, needs: "_Needs", covered: npt.NDArray[np.bool_], known: npt.NDArray[np.bool_], recall: float
    ) -> tuple[int, int, float] | None:
        """Return which width of the bounds, with how many candidates at most, reads the fewest pages for a recall.

        Beside them that number of pages, of a query.
        """
        count = len(self._turned)
        # Below zero where there are too few queries to tell, though none of them lost anything.
        allowed = int(np.floor((((1 - recall) * (count + 1) - 1) / count) * known.sum())) if count else 0
        best: tuple[int, int, float] | None = None
        for each in range(len(_EPS)):
            read = known & covered & (needs.widths <= each)
            spare = allowed - int((known & ~read).sum())
            if spare < 0:
                continue
            ranks = needs.ranks[each][read]
            last = max(0, len(ranks) - 1 - spare)
            most = int(np.partition(ranks, last)[last]) + 1 if len(ranks) else 1
            cost = needs.reads(each, max(k, most))
            if best is None or cost < best[2] - 1e-9:
                best = each, most, cost
        return best

    def product_efforts(self, k: int) -> tuple[list[tuple[float, Effort]], float]:
        """Return the efforts for product-quantised codes, and the highest recall measured."""
        chosen: list[tuple[float, Effort]] = []
        tried = [count for count in _CANDIDATES if count >= k] or [10 * k]
        for recall in RECALLS:
            effort, _, _ = self._probe_effort(k, _LISTS_LOSSES[0] * (1 - recall), skip=False)
            ranks = self._candidate_ranks(k, effort, tried[-1])
            losses = np.array([float(np.mean(ranks >= count)) for count in tried])
            fits = np.flatnonzero(self._conformal(losses) <= 1 - recall)
            if not len(fits):
                break
            chosen.append((recall, Effort(effort.nprobe, candidates=tried[fits[0]])))
        widest = Effort(self._probes.shape[1], candidates=tried[-1])
        best = float(np.mean(self._candidate_ranks(k, widest, tried[-1]) < tried[-1]))
        return chosen or [(0.0, widest)], best

    def _route(self) -> Ints:
        """Return so many probes ``[q, p]`` that more would find hardly a neighbour more."""
        centroids = self._preview.router.centroids
        ranks = []
        for start in range(0, len(self._turned), _BLOCK):
            away = _squared_distances(self._turned[start : start + _BLOCK], centroids)
            lists = self._lists[start : start + _BLOCK]
            own = np.take_along_axis(away, np.maximum(lists, 0), 1)
            order = np.sort(away, axis=1)
            ranks += [np.searchsorted(row, each)[have >= 0] for row, each, have in zip(order, own, lists, strict=True)]
        deepest = int(np.quantile(np.concatenate(ranks), _COVERED)) + 1 if sum(map(len, ranks)) else 1
        return self._preview.router.route(
            self._turned, min(max(deepest, _FIRST_PROBES), _MOST_PROBES, self._preview.lists)
        )

    def _probe_effort(self, k: int, loss: float, *, skip: bool = True) -> tuple[Effort, npt.NDArray[np.bool_], float]:
        """Return the probes that scan the fewest codes and leave out at most this share of the neighbours.

        Beside them, bool ``[q, k]``: which neighbours they find, and the codes that a query scans in that time.
        """
        kth = self._truth.distances[:, k - 1]
        with np.errstate(divide="ignore", invalid="ignore"):
            cosine = (self._away + np.square(self._radii) - kth[:, None]) / (2 * np.sqrt(self._away) * self._radii)
        cosine = np.where(np.isfinite(cosine), cosine, -np.inf)
        rank, known = self._rank[:, :k], self._lists[:, :k] >= 0
        most = cosine.shape[1]
        needed = np.take_along_axis(cosine, np.minimum(rank, most - 1), 1)
        allowed = max(0, int((loss * (len(self._turned) + 1) - 1) * k))
        best, least = Effort(most), np.inf
        for nprobe in _steps(min(_FIRST_PROBES, most), most):
            missed = int((rank[known] >= nprobe).sum())
            if missed > allowed and nprobe < most:
                continue
            inside = np.sort(needed[known & (rank < nprobe)])
            spare = max(0, min(allowed - missed, len(inside) - 1))
            zeta = float(inside[-1 - spare]) + 1e-4 if skip and len(inside) else np.inf
            cost = float(np.where(cosine[:, :nprobe] <= zeta, self._sizes[:, :nprobe], 0).sum())
            cost += self._preview.router.cost(nprobe) * len(cosine)
            if cost < least:
                best, least = Effort(nprobe, zeta), cost
        return best, (rank < best.nprobe) & (needed <= best.zeta), least / max(1, len(cosine))

    def _needs(self, k: int) -> "_Needs":
        """Return what it takes to read each neighbour, and how much would be read, for each width of the bounds."""
        truth, most = self._truth, float(_EPS[-1])
        needs = _Needs(
            np.full((len(self._turned), k), len(_EPS)),
            np.full((len(_EPS), len(self._turned), k), _LIMIT),
            np.zeros((len(_EPS), _LIMIT + 1), np.int64),
        )
        wide = Effort(self._probes.shape[1], np.inf, most)
        for start in range(0, len(self._turned), _BLOCK):
            part = slice(start, start + _BLOCK)
            # The query is among its own nearest, and so are its copies: they hide as many of those that are looked for.
            wanted_k = k + 1 + int(truth.copies[part].max(initial=0))
            found = self._preview.search(self._turned[part], self._parts, wanted_k, wide, max(_LIMIT, 4 * wanted_k))
            for query, count in enumerate(found.counts.tolist(), start):
                positions, estimates = found.positions[query - start, :count], found.estimates[query - start, :count]
                error = (estimates - found.lower[query - start, :count]) / most
                # Copies have one code. Nobody would read a page for them, were the query not in the index.
                own = np.flatnonzero(positions == truth.own[query])
                others = ~np.isin(estimates, estimates[own])
                if others.any():
                    self._need(needs, query, k, positions[others], estimates[others], error[others])
        return needs

    def _need(self, needs: "_Needs", query: int, k: int, positions: Ints, estimates: Floats, error: Floats) -> None:
        """Note what one query needs, whose candidates have these positions, estimates and standard errors."""
        truth = self._truth
        lower, upper = estimates - _EPS[:, None] * error, estimates + _EPS[:, None] * error
        kth = np.full(len(_EPS), np.inf)
        if len(positions) >= k:
            kth = np.partition(upper, k - 1, axis=1)[:, k - 1]
        reached = np.minimum(kth, truth.distances[query, k - 1] * (1 + 1e-5))[:, None]
        # A row is read with its page, whichever row of that is wanted first; of other lists' rows there nobody knows
        # whether they are scanned.
        pages, member = np.unique(self._pages_of(positions, _list_of(self._parts, positions)), return_inverse=True)
        order = np.argsort(member, kind="stable")
        least = np.minimum.reduceat(lower[:, order], np.searchsorted(member[order], np.arange(len(pages))), axis=1)
        wanted = self._pages_of(truth.found[query, :k], self._lists[query, :k])
        place = np.minimum(np.searchsorted(pages, wanted), len(pages) - 1)
        least_wanted = np.where(pages[place] == wanted, least[:, place], np.inf)
        ascending = np.sort(lower, axis=1)
        read = least_wanted <= reached
        needs.widths[query] = np.where(read.any(axis=0), read.argmax(axis=0), len(_EPS))
        for each, row in enumerate(ascending):
            needs.ranks[each, query] = np.searchsorted(row, least_wanted[each])
            places = np.searchsorted(row, least[each][least[each] <= reached[each]])
            needs.pages[each] += np.bincount(np.minimum(places, _LIMIT), minlength=_LIMIT + 1)

    def _pages_of(self, positions: Ints, lists: Ints) -> Ints:
        """Return a number for the page, and the list, that each position lies in; -1 for none."""
        number, rows = positions >> PART_SHIFT, positions & ((1 << PART_SHIFT) - 1)
        page = number << PART_SHIFT | rows // self._rows_of_page
        return np.where(positions >= 0, page * self._preview.lists + lists, -1)

    def _candidate_ranks(self, k: int, effort: Effort, most: int) -> Ints:
        """Return the ranks of the true neighbours among the candidates, the query itself not counted."""
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


def _mean_share(found: npt.NDArray[np.bool_], known: npt.NDArray[np.bool_]) -> float:
    """Return the mean over queries of the share of their known neighbours that were found."""
    counts = known.sum(axis=1)
    return float(((found & known).sum(axis=1)[counts > 0] / counts[counts > 0]).mean()) if counts.any() else 1.0


def _steps(first: int, last: int) -> list[int]:
    """Return ``first``, a quarter more and so on, and ``last``."""
    values = [first]
    while values[-1] < last:
        values.append(min(values[-1] * 5 // 4 + 1, last))
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
    """Return where each list stands among the probes of its query; their number where it does not."""
    ranks = np.full(lists.shape, probes.shape[1])
    for query, (wanted, probed) in enumerate(zip(lists, probes, strict=True)):
        order = np.argsort(probed, kind="stable")
        place = np.minimum(np.searchsorted(probed[order], wanted), len(order) - 1)
        hit = (probed[order][place] == wanted) & (wanted >= 0)
        ranks[query, hit] = order[place[hit]]
    return ranks


def _list_of(parts: Sequence[CodedPart], positions: Ints) -> Ints:
    """Return the list that each position lies in."""
    lists = np.zeros(positions.shape, np.int64)
    number, rows = positions >> PART_SHIFT, positions & ((1 << PART_SHIFT) - 1)
    for which, part in enumerate(parts):
        here = number == which
        lists[here] = np.searchsorted(part.starts, rows[here], side="right") - 1
    return lists
