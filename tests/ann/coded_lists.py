"""A few inverted lists of random vectors, coded, and their scan."""

from typing import Any

import numpy as np
import numpy.typing as npt

from memhier.ann.zoom.preview.blocks import interleave
from memhier.ann.zoom.preview.code_scan import code_scan
from memhier.ann.zoom.preview.codes import CodeBook, train_codes
from memhier.ann.zoom.preview.scan_arguments import Candidates, CodedPart, CodeLists, ScanLimits, ScanQueries

Floats = npt.NDArray[np.float32]


class Lists:
    """A few inverted lists of random vectors, turned and coded."""

    def __init__(
        self, dimension: int, code_bytes: int, count: int = 400, seed: int = 0, lists: int = 7, queries: int = 5
    ) -> None:
        random = np.random.default_rng(seed)
        spread = np.exp(-2 * np.arange(dimension) / dimension)
        vectors = (random.normal(size=(count, dimension)) * spread).astype(np.float32)
        centroids = vectors[random.permutation(count)[:lists]]
        for _ in range(4):  # k-means: residuals should not lean to one side
            nearest = np.square(vectors[:, None] - centroids).sum(axis=2).argmin(axis=1)
            centroids = np.stack([vectors[nearest == each].mean(axis=0) for each in np.unique(nearest)])
        centroids = np.resize(centroids, (lists, dimension))
        nearest = np.square(vectors[:, None] - centroids).sum(axis=2).argmin(axis=1)
        order = np.argsort(nearest, kind="stable")
        vectors, nearest = vectors[order], nearest[order]
        self.book: CodeBook = train_codes(vectors - centroids[nearest], code_bytes, seed)
        self.centroids = (centroids @ self.book.rotation).astype(np.float16)
        self.vectors = vectors @ self.book.rotation
        residuals = self.vectors - self.centroids[nearest].astype(np.float32)
        self.starts = np.concatenate([[0], np.cumsum(np.bincount(nearest, minlength=lists))]).astype(np.int64)
        codes, numbers = self.book.encode(residuals)
        interleave(codes, self.book.dimensions)
        self.part = CodedPart(self.starts, codes, numbers)
        squared = np.bincount(nearest, np.square(residuals).sum(axis=1), lists)
        self.radii = np.sqrt(squared / np.maximum(np.diff(self.starts), 1)).astype(np.float32)
        wanted = (random.normal(size=(queries, dimension)) * spread).astype(np.float32)
        self.queries: Floats = wanted @ self.book.rotation
        self.inner: Floats | None = None
        away = np.square(self.queries[:, None] - self.centroids.astype(np.float32)).sum(axis=2)
        self.probes = np.argsort(away, axis=1, kind="stable").astype(np.int64)

    def seek_products(self) -> None:
        """Look for inner products, with queries of length one."""
        self.queries /= np.linalg.norm(self.queries, axis=1, keepdims=True)
        self.inner = np.stack([self.book.wrongness(self.queries), self.book.spread(self.queries)], axis=1)
        self.probes = np.argsort(-self.queries @ self.centroids.astype(np.float32).T, axis=1, kind="stable")

    def remoteness(self) -> Floats:
        """Return that of every vector from every query, exactly."""
        if self.inner is not None:
            return -2 * self.queries @ self.vectors.T
        away: Floats = np.square(self.queries[:, None] - self.vectors[None]).sum(axis=2)
        return away

    def scan(self, k: int = 3, parts: list[CodedPart] | None = None, **options: Any) -> Candidates:
        chosen: dict[str, Any] = {"eps": 2.0, "limit": 400} | options
        probes = chosen.pop("probes", self.probes)
        most = chosen.pop("most", np.full(len(self.queries), np.inf, np.float32))
        return code_scan(
            ScanQueries(self.queries, probes, most, self.inner),
            CodeLists(self.centroids, self.radii, self.book),
            parts or [self.part],
            ScanLimits(k=k, **chosen),
        )
