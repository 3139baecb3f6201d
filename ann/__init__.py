"""Search: the vector index, and the files that vectors come in."""

from memhier.ann.files import GroundTruth, VectorReader, open_vectors, read_ground_truth, write_vectors
from memhier.ann.zoom import Explanation, RangeResult, SearchResult, ZoomIndex

__all__ = [
    "Explanation",
    "GroundTruth",
    "RangeResult",
    "SearchResult",
    "VectorReader",
    "ZoomIndex",
    "open_vectors",
    "read_ground_truth",
    "write_vectors",
]
