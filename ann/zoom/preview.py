"""The preview: what of every vector is kept in DRAM, and the search that runs on it alone.

Inverted lists whose centroids are reached through an HNSW graph (Zoom, arXiv 1809.04067; the graph makes many
centroids affordable), and a product-quantised code of each vector's residual to its centroid, in list order.
"""

from dataclasses import dataclass, field
from typing import Any, TypeAlias

import faiss
import numpy as np
import numpy.typing as npt

from memhier.ann.zoom.scan import CODES_PER_BOOK, pq_scan
from memhier.errors import CorruptionError

__all__ = ["Preview", "PreviewTrainer", "graph_bytes_per_list"]

GRAPH_NEIGHBOURS = 16  # M of HNSW: a list's node has up to 2 M links on the ground level
_EF_CONSTRUCTION = 80
_EXACT_LISTS = 4096  # up to here every centroid is compared when vectors are assigned to lists
_KMEANS_ROUNDS = 10
_ROWS_PER_CENTROID = 48
_BOOK_ROWS = 32 * CODES_PER_BOOK  # more of them, or more rounds, rank no better on real data
_BOOK_ROUNDS = 8

Floats: TypeAlias = npt.NDArray[np.float32]
Ints: TypeAlias = npt.NDArray[np.int64]
Bytes: TypeAlias = npt.NDArray[np.uint8]


def graph_bytes_per_list(padded: int) -> int:
    """Return the DRAM bytes of one list: fp16 centroid, graph links with their bookkeeping, start of the list."""
    return 2 * padded + 4 * (2 * GRAPH_NEIGHBOURS + 2) + 8 + 4 + 8


def training_rows(lists: int) -> int:
    """Return how many vectors to sample for training: enough for the lists and for the codebook."""
    return max(_ROWS_PER_CENTROID * lists, _BOOK_ROWS)


@dataclass(frozen=True, slots=True)
class Preview:
    """Codes, lists and the graph over their centroids, all in DRAM.

    Attributes
    ----------
    graph
        faiss HNSW over the fp16 centroids.
    codebook
        float32 ``[m, width, 256]``.
    starts
        int64 ``[lists + 1]``.
    codes
        uint8 ``[n, m]`` in list order.
    centroids
        float16 ``[lists, d]``: the graph's own storage, not a copy.
    """

    graph: Any
    codebook: Floats
    starts: Ints
    codes: Bytes
    centroids: npt.NDArray[np.float16] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "centroids", centroid_view(self.graph))

    @property
    def lists(self) -> int:
        """Number of inverted lists."""
        return len(self.starts) - 1

    @property
    def memory_bytes(self) -> int:
        """DRAM held, in bytes."""
        return graph_memory_bytes(self.graph) + self.codebook.nbytes + self.starts.nbytes + self.codes.nbytes

    def route(self, queries: Floats, nprobe: int) -> Ints:
        """Return the `nprobe` lists nearest to each query, int64 ``[q, nprobe]``; -1 where the graph found fewer."""
        if nprobe >= self.lists:
            return np.broadcast_to(np.arange(self.lists, dtype=np.int64), (len(queries), self.lists)).copy()
        parameters = faiss.SearchParametersHNSW(efSearch=max(2 * nprobe, 32))
        probes: Ints = self.graph.search(queries, nprobe, params=parameters)[1]
        return probes

    def search(self, queries: Floats, nprobe: int, candidates: int) -> tuple[Ints, int]:
        """Return the positions of the nearest codes, int64 ``[q, candidates]``, and the number scanned.

        -1 pads the rows of queries whose lists hold fewer codes.
        """
        positions, _, scanned = pq_scan(
            queries, self.route(queries, nprobe), self.centroids, self.starts, self.codes, self.codebook, candidates
        )
        return positions, scanned

    def save_graph(self) -> Bytes:
        """Return the graph as bytes."""
        data: Bytes = faiss.serialize_index(self.graph)
        return data


def load_graph(data: Bytes, lists: int, padded: int) -> Any:
    """Return the graph from the bytes of :meth:`Preview.save_graph`, checked against what the catalog says."""
    try:
        graph = faiss.deserialize_index(data)
    except RuntimeError as error:
        raise CorruptionError(f"the centroid graph cannot be read: {error}") from error
    if graph.ntotal != lists or graph.d != padded:
        raise CorruptionError(
            f"the centroid graph holds {graph.ntotal} lists of dimension {graph.d}: expected {lists} of {padded}"
        )
    return graph


def centroid_view(graph: Any) -> npt.NDArray[np.float16]:
    """Return the fp16 centroids in the graph's memory, ``[lists, d]``; valid while the graph is."""
    storage = faiss.downcast_index(graph.storage)
    raw: Bytes = faiss.rev_swig_ptr(storage.codes.data(), storage.codes.size())
    return raw.view(np.float16).reshape(graph.ntotal, graph.d)


def graph_memory_bytes(graph: Any) -> int:
    hnsw = graph.hnsw
    links = 4 * (hnsw.neighbors.size() + hnsw.levels.size()) + 8 * hnsw.offsets.size()
    return int(links) + centroid_view(graph).nbytes


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
        self.graph = _build_graph(_train_centroids(sample, lists, seed))
        self._exact: Any = None
        if lists <= _EXACT_LISTS:
            self._exact = faiss.IndexFlatL2(sample.shape[1])
            self._exact.add(self._centroids.astype(np.float32))
        self._quantizer = faiss.ProductQuantizer(sample.shape[1], sample.shape[1] // width, 8)
        self._quantizer.cp.seed = seed + 1
        self._quantizer.cp.niter = _BOOK_ROUNDS
        self._quantizer.cp.min_points_per_centroid = 1
        rows = np.random.default_rng(seed).permutation(len(sample))[:_BOOK_ROWS]
        residuals = self._residuals(sample[rows], self.assign(sample[rows]))
        # Each book needs at least 256 residuals; a smaller sample repeats itself.
        self._quantizer.train(np.resize(residuals, (max(len(residuals), CODES_PER_BOOK), residuals.shape[1])))

    @property
    def _centroids(self) -> npt.NDArray[np.float16]:
        return centroid_view(self.graph)

    def assign(self, vectors: Floats) -> npt.NDArray[np.int32]:
        """Return the list of each vector, int32 ``[n]``."""
        if self._exact is not None:
            nearest = self._exact.search(vectors, 1)[1]
        else:
            nearest = self.graph.search(vectors, 1, params=faiss.SearchParametersHNSW(efSearch=64))[1]
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
        return vectors - self._centroids[lists].astype(np.float32)


def _build_graph(centroids: Floats) -> Any:
    graph = faiss.IndexHNSWSQ(centroids.shape[1], faiss.ScalarQuantizer.QT_fp16, GRAPH_NEIGHBOURS)
    graph.hnsw.efConstruction = _EF_CONSTRUCTION
    graph.train(centroids)
    threads = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)  # nodes inserted by several threads link in the order of their timing
    try:
        graph.add(centroids)
    finally:
        faiss.omp_set_num_threads(threads)
    return graph


def _train_centroids(sample: Floats, lists: int, seed: int) -> Floats:
    """Return k-means centroids, in two levels where one would cost too much.

    One level costs ``s * lists * d`` per round; the second splits each of ``sqrt(lists)`` coarse clusters into its
    share of lists, which costs ``2 * s * sqrt(lists) * d``.
    """
    if lists <= _EXACT_LISTS:
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
