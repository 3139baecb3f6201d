"""The preview: what of every vector is kept in DRAM, and the search that runs on it alone.

Inverted lists, and a code of each vector's residual to the centroid of its list. Codes with bounds
(`memhier.ann.zoom.codes`) leave as candidates what the bounds cannot exclude; product-quantised codes, as in the paper,
a fixed number of the nearest.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.zoom.blocks import interleave
from memhier.ann.zoom.clusters import Assigner, train_centroids
from memhier.ann.zoom.code_scan import Candidates, CodedPart, code_scan
from memhier.ann.zoom.codes import CodeBook, train_codes
from memhier.ann.zoom.product import ProductBook, train_product
from memhier.ann.zoom.router import Router
from memhier.ann.zoom.scan import pq_scan

__all__ = ["CODINGS", "Coding", "Effort", "Preview", "train_preview"]

Coding: TypeAlias = Literal["rabitq", "pq"]
_BOOK_ROWS = 16384  # of the sample, that a code book is learned from
_HALF_LOSS = 2**-12  # of a number in half precision

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
        Lists routed to.
    zeta
        Which of them are passed over; see `memhier.ann.zoom.code_scan.code_scan`. Infinity passes over none.
    eps
        How many standard errors lie between an estimate and its bounds.
    candidates
        Where not None, this many of the nearest estimates are read, whatever their bounds.
    most
        The most candidates that the bounds may leave: those with the lowest. None for as many as there is room for.
    """

    nprobe: int
    zeta: float = np.inf
    eps: float = 0.0
    candidates: int | None = None
    most: int | None = None


@dataclass(frozen=True, slots=True)
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
    """

    router: Router
    book: CodeBook | ProductBook
    radii: Floats

    @property
    def lists(self) -> int:
        """Number of inverted lists."""
        return len(self.router.centroids)

    @property
    def coding(self) -> Coding:
        """The kind of the codes."""
        return "rabitq" if isinstance(self.book, CodeBook) else "pq"

    @property
    def memory_bytes(self) -> int:
        """DRAM held, in bytes, without the codes."""
        return self.router.memory_bytes + self.book.memory_bytes + self.radii.nbytes

    def turn(self, mapped: Floats) -> Floats:
        """Return vectors or queries of the preview's space ``[n, d]`` in the axes of the codes."""
        return self.book.turn(mapped) if isinstance(self.book, CodeBook) else mapped

    def assigner(self) -> Assigner:
        """Return what finds the list of turned vectors."""
        return Assigner(self.router.centroids.astype(np.float32), 0)

    def encode(self, turned: Floats, lists: npt.NDArray[np.int32]) -> tuple[Bytes, Shorts, Floats]:
        """Return codes ``[n, code_bytes]``, their numbers ``[2, n]`` (or ``[0, n]``) and squared radii ``[n]``."""
        # To the fp16 centroid that a search will see, not to the fp32 one that training found.
        residuals = turned - self.router.centroids[lists].astype(np.float32)
        squared: Floats = np.einsum("ij,ij->i", residuals, residuals)
        if isinstance(self.book, CodeBook):
            codes, numbers = self.book.encode(residuals)
        else:
            codes, numbers = self.book.encode(residuals), np.empty((0, len(residuals)), np.uint16)
        return codes, numbers, squared

    def arrange(self, codes: Bytes) -> None:
        """Put codes ``[n, code_bytes]`` in list order the way that the scan reads them, in place."""
        if isinstance(self.book, CodeBook):
            interleave(codes, self.book.dimensions)

    def with_radii(self, squared: npt.NDArray[np.float64], counts: Ints) -> Self:
        """Return the preview with the radii of lists that hold `counts` vectors of `squared` radii in sum."""
        radii = np.sqrt(squared / np.maximum(counts, 1)).astype(np.float32)
        return replace(self, radii=radii)

    def search(self, turned: Floats, parts: Sequence[CodedPart], k: int, effort: Effort, limit: int) -> Candidates:
        """Return the candidates among the codes of `parts` for turned queries ``[q, d]``."""
        probes = self.router.route(turned, effort.nprobe)
        if isinstance(self.book, ProductBook):
            return self._search_product(turned, probes, parts, effort.candidates or k)
        wanted, eps = (k, effort.eps) if effort.candidates is None else (effort.candidates, 0.0)
        return code_scan(
            turned, probes, self.router.centroids, self.radii, self.book, parts, wanted,
            eps=eps, zeta=effort.zeta, limit=max(limit, wanted),
        )  # fmt: skip

    def _search_product(self, turned: Floats, probes: Ints, parts: Sequence[CodedPart], candidates: int) -> Candidates:
        assert isinstance(self.book, ProductBook)
        (part,) = parts  # the paper's form is written once
        positions, distances, scanned = pq_scan(
            turned, probes, self.router.centroids, part.starts, part.codes, self.book.books, candidates
        )
        tally = np.zeros((len(turned), 3), np.int64)
        tally[:, 0] = (probes >= 0).sum(axis=1)
        tally[:, 1] = np.where(np.arange(len(turned)) == 0, scanned, 0)  # known of all together
        return Candidates(
            positions,
            np.full_like(distances, -np.inf),
            distances,
            np.isfinite(distances).sum(axis=1),
            np.full(len(turned), np.inf, np.float32),
            tally,
        )


def train_preview(
    sample: Floats, lists: int, coding: Coding, code_bytes: int, seed: int, *, rotate: bool = True
) -> Preview:
    """Return lists and code book learned from a sample; the radii are left zero.

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
    """
    centroids = train_centroids(sample, lists, seed)
    rows = np.random.default_rng([seed, 3]).permutation(len(sample))[:_BOOK_ROWS]
    residuals = sample[rows] - centroids[Assigner(centroids, seed).assign(sample[rows])]
    radii = np.zeros(lists, np.float32)
    if coding == "pq":
        return Preview(Router.build(centroids), train_product(residuals, sample.shape[1] // code_bytes, seed), radii)
    # What is left of copies of a centroid is what half precision loses of that.
    norm = float(np.sqrt(np.einsum("ij,ij->i", centroids, centroids).mean()))
    book = train_codes(residuals, code_bytes, seed, rotate=rotate, least=max(_HALF_LOSS * norm, 1e-30))
    return Preview(Router.build(book.turn(centroids)), book, radii)
