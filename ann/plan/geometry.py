"""The sizes of an index before it is built, by the functions that the build itself uses."""

import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from memhier.ann.zoom.construction.build import reader_bytes
from memhier.ann.zoom.preview.space import Metric
from memhier.ann.zoom.storage.fullview import stored_bytes
from memhier.ann.zoom.storage.layout import IndexLayout, IndexSizes, file_bytes, plan_layout
from memhier.errors import BudgetError
from memhier.io.page_file import PAGE_BYTES

__all__ = ["Geometry", "find_geometry"]

_BUILD_COPIES = 3  # of the vectors on disk, at most, while an index is built


@dataclass(frozen=True, slots=True)
class Geometry:
    """An index of a number of vectors in a budget.

    Attributes
    ----------
    vectors
        Their number.
    layout
        Lists, code bytes and DRAM.
    file_bytes, build_bytes
        Bytes on SSD of the finished index, and the most while it is built.
    held_share
        The share of the pages of vectors that the DRAM left by codes and lists holds.
    """

    vectors: int
    layout: IndexLayout
    file_bytes: int
    build_bytes: int
    held_share: float = 0.0

    def layout_of(self, vectors: int) -> IndexLayout:
        """Return the layout of a smaller index with the same codes, and lists of the same length."""
        lists = max(1, vectors * self.layout.lists // self.vectors)
        layout = self.layout
        return IndexLayout(lists, layout.coding, layout.code_bytes, layout.padded, layout.rotate, layout.searches, 0)


def find_geometry(vectors: int, dimension: int, dtype: str, metric: Metric, dram: int) -> Geometry | None:
    """Return the sizes of an index; None where `dram` bytes cannot hold it."""
    row_bytes = np.dtype(dtype).itemsize * dimension
    with tempfile.TemporaryDirectory() as scratch:
        reader = reader_bytes(Path(scratch), dram)
    sizes = IndexSizes(vectors, dimension, metric, "rabitq", row_bytes, 4 if vectors <= 2**32 else 8, reader)
    try:
        layout = plan_layout(sizes, dram, on_ssd=False)
    except BudgetError:
        return None
    files = file_bytes(sizes, layout)
    held_share = layout.pool_pages * PAGE_BYTES / stored_bytes(vectors, row_bytes)
    return Geometry(vectors, layout, files, max(files, _BUILD_COPIES * vectors * row_bytes), held_share)
