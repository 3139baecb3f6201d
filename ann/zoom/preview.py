"""The preview: what of every vector is kept in DRAM, and the search that runs on it alone.

Inverted lists (Zoom, arXiv 1809.04067), and a product-quantised code of each vector's residual to the centroid of its
list, in list order.
"""

from dataclasses import dataclass
from typing import Any, TypeAlias

import faiss
import numpy as np
import numpy.typing as npt

from memhier.ann.zoom.router import Router
from memhier.ann.zoom.scan import CODES_PER_BOOK, pq_scan

__all__ = ["Preview", "PreviewTrainer", "training_rows"]

_FLAT_LISTS = 4096  # up to here one level of k-means, and every centroid compared when vectors are assigned
_KMEANS_ROUNDS = 10
_ROWS_PER_CENTROID = 48
_BOOK_ROWS = 32 * CODES_PER_BOOK  # more of them, or more rounds, rank no better on real data
_BOOK_ROUNDS = 8
_SAMPLE_BYTES = 256 << 20

Floats: TypeAlias = npt.NDArray[np.float32]
Ints: TypeAlias = npt.NDArray[np.int64]
Bytes: TypeAlias = npt.NDArray[np.uint8]


def training_rows(lists: int, padded: int) -> int:
    """Return how many vectors to sample for training: enough for lists and codebook, in at most 256 MiB of float32."""
    affordable = _SAMPLE_BYTES // (4 * padded)
    return max(lists, min(max(_ROWS_PER_CENTROID * lists, _BOOK_ROWS), affordable))


@dataclass(frozen=True, slots=True)
class Preview:
    """Codes, lists and the graph over their centroids, all in DRAM.

    Attributes
    ----------
    router
        Finds a query's nearest lists, and holds their centroids.
    codebook
        float32 ``[m, width, 256]``.
    starts
        int64 ``[lists + 1]``.
    codes
        uint8 ``[n, m]`` in list order.
    """

    router: Router
    codebook: Floats
    starts: Ints
    codes: Bytes

    @property
    def lists(self) -> int:
        """Number of inverted lists."""
        return len(self.starts) - 1

    @property
    def memory_bytes(self) -> int:
        """DRAM held, in bytes."""
        return self.router.memory_bytes + self.codebook.nbytes + self.starts.nbytes + self.codes.nbytes

    def search(self, queries: Floats, nprobe: int, candidates: int) -> tuple[Ints, int]:
        """Return the positions of the nearest codes, int64 ``[q, candidates]``, and the number scanned.

        -1 pads the rows of queries whose lists hold fewer codes.
        """
        probes = self.router.route(queries, nprobe)
        positions, _, scanned = pq_scan(
            queries, probes, self.router.centroids, self.starts, self.codes, self.codebook, candidates
        )
        return positions, scanned


class PreviewTrainer:
    """Centroids, graph and codebook learned from a sample; then lists and codes for any vectors.

    Parameters
    ----------
    sample
        float32 ``[s, padded]`` in the preview's space.
    lists
        Number of inverted lists.
    width
        Dimension of a sub-vector; divides ``padded``.
    seed
        Fixes every random choice; the result does not depend on the number of threads.
    """

    def __init__(self, sample: Floats, lists: int, width: int, seed: int) -> None:
        self.router = Router.build(_train_centroids(sample, lists, seed))
        self._exact: Any = None
        if lists <= _FLAT_LISTS:
            self._exact = faiss.IndexFlatL2(sample.shape[1])
            self._exact.add(self.router.centroids.astype(np.float32))
        self._quantizer = faiss.ProductQuantizer(sample.shape[1], sample.shape[1] // width, 8)
        self._quantizer.cp.seed = seed + 1
        self._quantizer.cp.niter = _BOOK_ROUNDS
        self._quantizer.cp.min_points_per_centroid = 1
        rows = np.random.default_rng(seed).permutation(len(sample))[:_BOOK_ROWS]
        residuals = self._residuals(sample[rows], self.assign(sample[rows]))
        # Each book needs at least 256 residuals; a smaller sample repeats itself.
        self._quantizer.train(np.resize(residuals, (max(len(residuals), CODES_PER_BOOK), residuals.shape[1])))

    def assign(self, vectors: Floats) -> npt.NDArray[np.int32]:
        """Return the list of each vector, int32 ``[n]``."""
        nearest = self._exact.search(vectors, 1)[1] if self._exact is not None else self.router.route(vectors, 1)
        return np.asarray(nearest[:, 0], dtype=np.int32)

    def encode(self, vectors: Floats, lists: npt.NDArray[np.int32]) -> Bytes:
        """Return the codes of the vectors' residuals, uint8 ``[n, m]``."""
        codes: Bytes = self._quantizer.compute_codes(self._residuals(vectors, lists))
        return codes

    def codebook(self) -> Floats:
        """Return the sub-centroids, float32 ``[m, width, 256]``."""
        quantizer = self._quantizer
        books = faiss.vector_to_array(quantizer.centroids).reshape(quantizer.M, CODES_PER_BOOK, quantizer.dsub)
        return np.ascontiguousarray(books.transpose(0, 2, 1))

    def _residuals(self, vectors: Floats, lists: npt.NDArray[np.int32]) -> Floats:
        # To the fp16 centroid that search will see, not to the fp32 one that training found.
        return vectors - self.router.centroids[lists].astype(np.float32)


def _train_centroids(sample: Floats, lists: int, seed: int) -> Floats:
    """Return k-means centroids, in two levels where one would cost too much.

    One level costs ``s * lists * d`` per round; the second splits each of ``sqrt(lists)`` coarse clusters into its
    share of lists, which costs ``2 * s * sqrt(lists) * d``.
    """
    if lists <= _FLAT_LISTS:
        return _kmeans(sample, lists, seed)
    coarse = _kmeans(sample, int(lists**0.5), seed)
    index = faiss.IndexFlatL2(sample.shape[1])
    index.add(coarse)
    member = index.search(sample, 1)[1][:, 0]
    shares = _apportion(np.bincount(member, minlength=len(coarse)), lists)
    fine = [_kmeans(sample[member == c], int(share), seed + c) for c, share in enumerate(shares) if share]
    return np.concatenate(fine)


def _apportion(sizes: npt.NDArray[np.int64], lists: int) -> npt.NDArray[np.int64]:
    """Share `lists` out in proportion to `sizes`, exactly, at most one for each member."""
    exact = sizes * (lists / sizes.sum())
    shares: Ints = np.minimum(np.floor(exact).astype(np.int64), sizes)
    for cluster in np.argsort(shares - exact, kind="stable")[: lists - int(shares.sum())]:
        shares[cluster] += 1
    return shares


def _kmeans(sample: Floats, clusters: int, seed: int) -> Floats:
    if clusters >= len(sample):
        return sample[np.resize(np.arange(len(sample)), clusters)]
    trainer = faiss.Kmeans(
        sample.shape[1], clusters, niter=_KMEANS_ROUNDS, seed=seed, min_points_per_centroid=1,
        max_points_per_centroid=_ROWS_PER_CENTROID,
    )  # fmt: skip
    trainer.train(sample)
    return np.asarray(trainer.centroids, dtype=np.float32)
