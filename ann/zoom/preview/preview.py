"""The preview: inverted lists and a code of every vector in DRAM, and the search on these alone.

A code describes a vector's residual to the centroid of its list. With codes that have bounds
(`memhier.ann.zoom.preview.codes`), the candidates are the vectors that the bounds cannot exclude; with
product-quantised codes, as in the paper, a fixed number of the nearest.

For inner products, codes describe plain vectors, and a search scans the lists where some vector may have a large
product: ``<q, c>`` plus a multiple of the spread of the list's residuals along the query. Two more coordinates, of the
router alone, make this a distance. In a centroid they are its list's radius, and the rest to a norm that is equal for
all (Bachrach et al., Speeding Up the Xbox Recommender System, RecSys 2014); in a query its spread, and zero.
"""

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.zoom.preview.blocks import interleave
from memhier.ann.zoom.preview.clusters import Assigner, train_centroids
from memhier.ann.zoom.preview.code_scan import code_scan
from memhier.ann.zoom.preview.codes import CodeBook, train_codes
from memhier.ann.zoom.preview.list_order import list_order
from memhier.ann.zoom.preview.product import ProductBook, train_product
from memhier.ann.zoom.preview.routing.router import Router
from memhier.ann.zoom.preview.scan import ProductLists, pq_scan
from memhier.ann.zoom.preview.scan_arguments import (
    REACH,
    SCAN_TALLY,
    Candidates,
    CodedPart,
    CodeLists,
    ScanLimits,
    ScanQueries,
)
from memhier.ann.zoom.preview.space import directions
from memhier.ann.zoom.preview.stored_scan import Parts, StoredPart, stored_scan

__all__ = ["BOOK_ROWS_MOST", "BORDER_GAP", "CODINGS", "Coding", "Effort", "Preview", "train_preview"]

Coding: TypeAlias = Literal["rabitq", "pq"]
BOOK_ROWS_MOST = 16384  # of the sample, that a code book is learned from, at most
_HALF_LOSS = 2**-12  # of a number in half precision
BORDER_GAP = 1.75  # times the gap, where borders count
_ROUTED_MORE = 8  # times the lists of an effort, where codes lie on SSD
_LIFTED = 2  # coordinates of the router of inner products beside those of the vectors
_ODD = np.uint64(0x9E3779B97F4A7C15)  # spreads numbers over 64 bits (Fibonacci hashing, Knuth, vol. 3, 6.4)
_BEFORE = -1e6  # a gap less than any
_SURE = 3.8  # standard deviations of a residual along a line, that hardly a vector exceeds, of heavy tails either
_FAR = 64.0  # norm of a query relative to that of centroids: half precision then costs inner products least

CODINGS: tuple[Coding, ...] = ("rabitq", "pq")

Floats: TypeAlias = npt.NDArray[np.float32]
Ints: TypeAlias = npt.NDArray[np.int64]
Bytes: TypeAlias = npt.NDArray[np.uint8]
Shorts: TypeAlias = npt.NDArray[np.uint16]


@dataclass(frozen=True, slots=True)
class Effort:
    """How hard a search looks.

    Attributes
    ----------
    nprobe
        Lists routed to at first.
    eps
        Standard errors between an estimate and its bounds.
    candidates
        If given, this many of the nearest estimates are read, whatever their bounds.
    most
        The most candidates kept of a query with `usual` candidates: those with the lowest bounds. None for as many as
        there is room for.
    least, gap
        After `least` lists, a query scans the lists that are farther than its nearest by at most `gap` times its k-th
        distance: few where one list stands out, many where a filter or the distance of the query makes all lists
        nearly alike. It is routed to more lists until one is farther. With an infinite gap it scans all lists of the
        first routing. Inner products have no zero: there the gap is in spreads of a list beyond the k-th product.
    usual
        The usual number of candidates that the bounds leave. Where they leave more, as neighbours are harder to tell
        apart, `most` grows in proportion.
    border
        If above 0, a query passes over the lists that lie so many k-th distances beyond their borders, both squared:
        see :attr:`memhier.ann.zoom.preview.scan_arguments.ScanLimits.border`. It then looks as far as `BORDER_GAP`
        gaps, at whatever lists are not passed over.
    clear
        Under a filter: the least squared distance of a list that ends a scan, in times that of the k-th.
    loss
        Under a filter: neighbours of a query that may be missed, on average, as none of the last candidates is likely
        one of them.
    """

    nprobe: int
    eps: float = 0.0
    candidates: int | None = None
    most: int | None = None
    least: int = 0
    gap: float = np.inf
    usual: int = 1
    border: float = 0.0
    clear: float = 0.0
    loss: float = 0.0

    @property
    def reach(self) -> dict[str, Any]:
        """How far it looks, as limits of a scan."""
        least, gap = (1, BORDER_GAP * self.gap) if self.border else (self.least, self.gap)
        return {"least": least, "gap": gap, "clear": self.clear, "border": self.border}


@dataclass(frozen=True)
class Preview:
    """Lists and code book; the codes themselves come in parts.

    Attributes
    ----------
    router
        Finds a query's nearest lists, and holds their centroids.
    book
        Makes codes: of several bits an axis with bounds, or product-quantised.
    radii
        float32 ``[lists]``: root mean square distance of a list's vectors to its centroid.
    inner
        Whether vectors are sought by their inner product, and not by their distance.
    on_ssd
        Whether codes and ids stay on SSD, and a search reads those of its lists.
    lists, coding
        The number of inverted lists, and the kind of the codes.
    """

    router: Router
    book: CodeBook | ProductBook
    radii: Floats
    inner: bool = False
    on_ssd: bool = False
    lists: int = field(init=False)
    coding: Coding = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "lists", len(self.router.centroids))
        object.__setattr__(self, "coding", "rabitq" if isinstance(self.book, CodeBook) else "pq")

    @cached_property
    def _code_lists(self) -> CodeLists:
        assert isinstance(self.book, CodeBook)
        return CodeLists(self.router.centroids, self.radii, self.book)

    @property
    def compiled(self) -> dict[str, Any]:
        """Lists and book as the native core takes them, made once for all searches."""
        return self._code_lists.compiled

    @property
    def memory_bytes(self) -> int:
        """DRAM held, in bytes, without the codes."""
        return self.router.memory_bytes + self.book.memory_bytes + self.radii.nbytes

    def turn(self, mapped: Floats) -> Floats:
        """Return vectors or queries of the preview's space ``[n, d]`` in the axes of the codes."""
        return self.book.turn(mapped) if isinstance(self.book, CodeBook) else mapped

    def assigner(self) -> Assigner:
        """Return an assigner, which finds the list of turned vectors."""
        return Assigner(self.centroids_of(slice(None)), 0)

    def centroids_of(self, lists: Any) -> Floats:
        """Return the centroids of some lists, float32 ``[..., d]``; the coordinates of the router alone are zero."""
        centroids: Floats = self.router.centroids[lists].astype(np.float32)
        if self.inner:
            centroids[..., -_LIFTED:] = 0
        return centroids

    def nearest_lists(self, turned: Floats, routed: int) -> Ints:
        """Return the list that each turned vector ``[n, d]`` goes to: that of the nearest centroid."""
        if not self.inner:
            return self.router.route(turned, routed)[:, 0]
        lifted, centroids = turned.copy(), self.router.centroids
        # All centroids have one norm; the vectors get the same norm, with a usual radius.
        norm = float(np.einsum("j,j->", centroids[0], centroids[0], dtype=np.float64))
        lifted[:, -_LIFTED] = np.median(centroids[:, -_LIFTED])
        lifted[:, -1] = np.sqrt(np.maximum(norm - np.einsum("ij,ij->i", lifted, lifted), 0))
        return self.router.route(lifted, routed)[:, 0]

    def deal_out(self, lists: npt.NDArray[np.integer[Any]], numbers: Ints) -> None:
        """Deal vectors whose centroid several lists have out among these, in place: such a list was too long for one.

        Parameters
        ----------
        lists
            ``[n]``: the list of each vector.
        numbers
            int64 ``[n]``: a number of each vector, such as its id, which decides.
        """
        for group in self.router.copies(self.router.centroids.shape[1] - _LIFTED * self.inner):
            rows = np.flatnonzero(np.isin(lists, group))
            lists[rows] = group[(numbers[rows].astype(np.uint64) * _ODD >> np.uint64(32)) % np.uint64(len(group))]

    def aims(self, turned: Floats) -> Floats:
        """Return points of the router's space ``[q, d]``: the nearer a centroid, the sooner a query scans its list."""
        if not self.inner:
            return turned
        aims = turned.copy()
        aims[:, -_LIFTED] = REACH * self._spread(turned)
        aims *= _FAR
        return aims

    def route(self, turned: Floats, nprobe: int, *, in_order: bool = False, among: Ints | None = None) -> Ints:
        """Return the `nprobe` lists that turned queries scan first, int64 ``[q, p]``; -1 where there are fewer.

        They are in that order; a request for all lists is ordered only with `in_order`. Only those `among` count, as in
        :meth:`memhier.ann.zoom.preview.routing.router.Router.route`.
        """
        return self.router.route(self.aims(turned), nprobe, in_order=in_order, among=among)

    def cautious(self, gap: float) -> tuple[float, float]:
        """Return the `gap` and `clear` of a scan that ends at no list that may hold one of the `k` nearest.

        The `k` nearest that a filter leaves may lie far beyond all near lists. Seen from the centroid of its list, the
        direction of such a vector is any that residuals have; only of near vectors is it that of the query.
        """
        return (max(gap, _SURE - REACH), 0.0) if self.inner else (gap, self._clear)

    @cached_property
    def _clear(self) -> float:
        assert isinstance(self.book, CodeBook)
        along = _SURE**2 * float(self.book.share @ self.book.share)  # squared, of the greatest cosine
        return 1 / (1 - along) if along < 1 else np.inf

    def remoteness(self, turned: Floats, probes: Ints) -> Floats:
        """Return that of the centroids of lists ``[q, p]`` from turned queries: squared distance, or ``-2 <q, c>``."""
        centroids = self.centroids_of(probes)
        if self.inner:
            products: Floats = -2 * np.einsum("ij,ikj->ik", turned, centroids)
            return products
        np.subtract(turned[:, None], centroids, out=centroids)
        squared: Floats = np.einsum("ikj,ikj->ik", centroids, centroids)
        return squared

    def gaps(self, turned: Floats, probes: Ints, away: Floats, kth: Floats) -> Floats:
        """Return the `gap` of lists ``[q, p]``, in their order: how far they lie beyond the k-th neighbour of a query.

        `away` is the remoteness of their centroids, `kth` ``[q]`` that of the k-th nearest.
        """
        with np.errstate(divide="ignore", invalid="ignore"):
            gaps: Floats
            if not self.inner:
                gaps = np.asarray((away - away[:, :1]) / np.abs(kth[:, None]), np.float32)
            else:
                radii, along = self.radii[probes], self._spread(turned)[:, None]
                unit = 2 * along * np.maximum.accumulate(radii, axis=1)
                gaps = np.asarray((away - REACH * 2 * along * radii - kth[:, None]) / unit, np.float32)
        np.nan_to_num(gaps, copy=False, nan=0.0, posinf=np.inf, neginf=_BEFORE)
        return gaps

    def _spread(self, turned: Floats) -> Floats:
        if isinstance(self.book, CodeBook):
            return self.book.spread(turned)
        return np.full(len(turned), turned.shape[1] ** -0.5, np.float32)

    def encode(self, turned: Floats, lists: npt.NDArray[Any]) -> tuple[Bytes, Shorts, Floats]:
        """Return codes ``[n, code_bytes]``, their numbers ``[2, n]`` (or ``[0, n]``) and squared radii ``[n]``."""
        # To the fp16 centroid that a search will see, not to the fp32 one that training found.
        residuals = turned - self.centroids_of(lists)
        squared: Floats = np.einsum("ij,ij->i", residuals, residuals)
        if isinstance(self.book, CodeBook):
            codes, numbers = self.book.encode(residuals, directions(turned) if self.inner else None)
        else:
            codes, numbers = self.book.encode(residuals), np.empty((0, len(residuals)), np.uint16)
        return codes, numbers, squared

    def arrange(self, codes: Bytes) -> None:
        """Put codes ``[n, code_bytes]``, in list order, into the layout that the scan reads, in place."""
        if isinstance(self.book, CodeBook):
            interleave(codes, self.book.dimensions)

    def with_radii(self, squared: npt.NDArray[np.float64], counts: Ints) -> Self:
        """Return the preview with the radii of lists that hold `counts` vectors of `squared` radii in sum."""
        radii = np.sqrt(squared / np.maximum(counts, 1)).astype(np.float32)
        return replace(self, radii=radii)

    def routed(self, effort: Effort, held: int | None) -> int:
        """Return how many lists a search is routed to at first, if `held` lists count; None for all."""
        if not self.on_ssd or effort.gap == np.inf:
            return effort.nprobe
        # A wider search would read the first lists again.
        return min(_ROUTED_MORE * effort.nprobe, self.lists if held is None else held)

    def search(
        self,
        turned: Floats,
        parts: Parts,
        k: int,
        effort: Effort,
        limit: int,
        among: Ints | None = None,
    ) -> Candidates:
        """Return the candidates among the codes of `parts` for turned queries ``[q, d]``; `among` as :meth:`route`."""
        # Only a scan that may end before the last list needs their order.
        in_order = effort.gap < np.inf
        routed = self.routed(effort, None if among is None else len(among))
        probes = self.route(turned, routed, in_order=in_order, among=among)
        if isinstance(self.book, ProductBook):
            return self._search_product(turned, probes, parts, effort.candidates or k)
        wanted, eps = (k, effort.eps) if effort.candidates is None else (effort.candidates, 0.0)
        return self.scan(turned, probes, parts, wanted, eps=eps, limit=max(limit, wanted), **effort.reach)

    def scan(
        self,
        turned: Floats,
        probes: Ints,
        parts: Parts,
        k: int,
        *,
        eps: float,
        limit: int,
        least: int = 0,
        gap: float = np.inf,
        clear: float = 0.0,
        border: float = 0.0,
        most: Floats | None = None,
    ) -> Candidates:
        """Return the candidates in some lists; see `memhier.ann.zoom.preview.code_scan.code_scan`."""
        assert isinstance(self.book, CodeBook)
        inner = None
        if self.inner:
            inner = np.stack([self.book.wrongness(turned), self.book.spread(turned)], axis=1)
        most = np.full(len(turned), np.inf, np.float32) if most is None else most
        queries, lists = ScanQueries(turned, probes, most, inner), self._code_lists
        limits = ScanLimits(k, eps, limit, least, gap, clear, border)
        stored = [part for part in parts if isinstance(part, StoredPart)]
        if stored:
            return stored_scan(queries, lists, stored, limits)
        return code_scan(queries, lists, [part for part in parts if isinstance(part, CodedPart)], limits)

    def _search_product(self, turned: Floats, probes: Ints, parts: Parts, candidates: int) -> Candidates:
        (part,) = parts  # the paper's form is written once
        assert isinstance(self.book, ProductBook)
        assert isinstance(part, CodedPart)
        lists = ProductLists(self.router.centroids, part.starts, part.codes, self.book.books)
        positions, distances, scanned = pq_scan(turned, probes, lists, candidates, inner=self.inner)
        tally = np.zeros(len(turned), SCAN_TALLY)
        tally["probed"] = (probes >= 0).sum(axis=1)
        tally["scanned"][:1] = scanned  # the scan counts all queries together
        return Candidates(
            positions,
            np.full_like(distances, -np.inf),
            distances,
            np.isfinite(distances).sum(axis=1),
            np.full(len(turned), np.inf, np.float32),
            tally,
        )


def train_preview(
    sample: Floats, lists: int, coding: Coding, code_bytes: int, seed: int, *, rotate: bool = True, inner: bool = False
) -> Preview:
    """Train lists and code book on a sample; the radii stay zero.

    Parameters
    ----------
    sample
        float32 ``[s, d]`` in the preview's space.
    lists
        Number of inverted lists.
    coding
        The kind of the codes.
    code_bytes
        Bytes of a code; for ``"pq"`` a divisor of ``d``.
    seed
        Fixes every random choice; the result does not depend on the number of threads.
    rotate
        False where a rotation takes too much DRAM.
    inner
        Whether vectors are sought by their inner product; the last two coordinates of the sample are then zero.
    """
    centroids = train_centroids(sample, lists, seed)
    centroids = centroids[list_order(centroids)]
    rows = np.random.default_rng([seed, 3]).permutation(len(sample))[:BOOK_ROWS_MOST]
    member = Assigner(centroids, seed).assign(sample[rows])
    residuals = sample[rows]
    residuals -= centroids[member]
    book: CodeBook | ProductBook
    if coding == "pq":
        book = train_product(residuals, sample.shape[1] // code_bytes, seed)
    else:
        # The residual of a copy of a centroid is the rounding error of half precision.
        norm = float(np.sqrt(np.einsum("ij,ij->i", centroids, centroids).mean()))
        least, own = max(_HALF_LOSS * norm, 1e-30), sample.shape[1] - _LIFTED * inner
        book = train_codes(residuals[:, :own], code_bytes, seed, rotate=rotate, least=least)
        book = book.widened(_LIFTED) if inner else book
        centroids = book.turn(centroids)
    if inner:
        _lift(centroids, residuals, member)
    return Preview(Router.build(centroids), book, np.zeros(lists, np.float32), inner)


def _lift(centroids: Floats, residuals: Floats, member: npt.NDArray[np.int32]) -> None:
    """Fill the last two coordinates of centroids, in place: the radius of their residuals, and up to one norm."""
    squared = np.einsum("ij,ij->i", residuals, residuals)
    counts = np.bincount(member, minlength=len(centroids))
    # A list with few residuals takes the usual radius into account.
    usual = float(squared.mean())
    sums = np.bincount(member, squared, len(centroids)) + usual
    centroids[:, -_LIFTED] = np.sqrt(sums / (counts + 1))
    norms = np.einsum("ij,ij->i", centroids, centroids)
    # With twice the largest norm, the last coordinate changes less than the centroid's own norm.
    centroids[:, -1] = np.sqrt(np.maximum(2 * norms.max() - norms, 0))
