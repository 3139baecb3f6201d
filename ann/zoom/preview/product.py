"""Product-quantised codes of residuals (Jegou, Douze, Schmid, 2011), which Zoom (arXiv 1809.04067) keeps in DRAM."""

from typing import TypeAlias

import faiss
import numpy as np
import numpy.typing as npt

from memhier.ann.zoom.preview.scan import CODES_PER_BOOK

__all__ = ["ProductBook", "train_product"]

_ROWS = 32 * CODES_PER_BOOK  # more of them, or more rounds, rank no better on real data
_ROUNDS = 8

Floats: TypeAlias = npt.NDArray[np.float32]
Bytes: TypeAlias = npt.NDArray[np.uint8]


class ProductBook:
    """A codebook, and residuals in and out of it.

    Parameters
    ----------
    books
        float32 ``[m, width, 256]``: for each sub-vector of `width` axes the sub-centroids.
    """

    def __init__(self, books: Floats) -> None:
        self.books = books
        self.code_bytes: int
        self.code_bytes, self._width, _ = books.shape
        self._quantizer = faiss.ProductQuantizer(self.code_bytes * self._width, self.code_bytes, 8)
        flat = np.ascontiguousarray(books.transpose(0, 2, 1)).ravel()
        faiss.copy_array_to_vector(flat, self._quantizer.centroids)

    @property
    def memory_bytes(self) -> int:
        """DRAM held, in bytes; the quantiser has a copy."""
        return 2 * self.books.nbytes

    def encode(self, residuals: Floats) -> Bytes:
        """Return codes uint8 ``[n, m]`` of residuals float32 ``[n, d]``."""
        padded = np.zeros((len(residuals), self.code_bytes * self._width), np.float32)
        padded[:, : residuals.shape[1]] = residuals
        codes: Bytes = self._quantizer.compute_codes(padded)
        return codes


def train_product(residuals: Floats, width: int, seed: int) -> ProductBook:
    """Return a codebook whose sub-vectors are `width` axes, which divides the dimension, for residuals like these."""
    dimension = residuals.shape[1]
    quantizer = faiss.ProductQuantizer(dimension, dimension // width, 8)
    quantizer.cp.seed = seed + 1
    quantizer.cp.niter = _ROUNDS
    quantizer.cp.min_points_per_centroid = 1
    rows = residuals[np.random.default_rng(seed).permutation(len(residuals))[:_ROWS]]
    # Each book needs at least 256 residuals; a smaller sample repeats itself.
    quantizer.train(np.resize(rows, (max(len(rows), CODES_PER_BOOK), dimension)))
    books = faiss.vector_to_array(quantizer.centroids).reshape(quantizer.M, CODES_PER_BOOK, quantizer.dsub)
    return ProductBook(np.ascontiguousarray(books.transpose(0, 2, 1)))
