"""Search: the vector index, the files that vectors come in, and the decoder of output layers."""

from typing import TYPE_CHECKING

from memhier.lazy import lazy

if TYPE_CHECKING:
    from memhier.ann.decoder import LogitIndex, SparseLogits, TopKSoftmax, open_head
    from memhier.ann.files import GroundTruth, VectorReader, open_vectors, read_ground_truth, write_vectors
    from memhier.ann.multivector import ItemExplanation, ItemRecord, ItemResult, MultiVectorIndex
    from memhier.ann.zoom import CandidateRecord, Explanation, RangeResult, SearchResult, ZoomIndex

__all__ = [
    "CandidateRecord",
    "Explanation",
    "GroundTruth",
    "ItemExplanation",
    "ItemRecord",
    "ItemResult",
    "LogitIndex",
    "MultiVectorIndex",
    "RangeResult",
    "SearchResult",
    "SparseLogits",
    "TopKSoftmax",
    "VectorReader",
    "ZoomIndex",
    "open_head",
    "open_vectors",
    "read_ground_truth",
    "write_vectors",
]

# Names load on use: the index needs faiss, the decoder faiss and torch, the files neither.
_HOMES = {
    "decoder": ("LogitIndex", "SparseLogits", "TopKSoftmax", "open_head"),
    "files": ("GroundTruth", "VectorReader", "open_vectors", "read_ground_truth", "write_vectors"),
    "multivector": ("ItemExplanation", "ItemRecord", "ItemResult", "MultiVectorIndex"),
    "zoom": ("CandidateRecord", "Explanation", "RangeResult", "SearchResult", "ZoomIndex"),
}
if not TYPE_CHECKING:  # a type checker would take any name for one of the package
    __getattr__, __dir__ = lazy(
        __name__, {name: f"memhier.ann.{home}" for home, names in _HOMES.items() for name in names}, [*globals()]
    )
