"""Search: the vector index, the files that vectors come in, and the decoder of output layers."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from memhier.ann.files import GroundTruth, VectorReader, open_vectors, read_ground_truth, write_vectors
from memhier.ann.zoom import Explanation, RangeResult, SearchResult, ZoomIndex

if TYPE_CHECKING:
    from memhier.ann.decoder import LogitIndex, SparseLogits, TopKSoftmax

__all__ = [
    "Explanation",
    "GroundTruth",
    "LogitIndex",
    "RangeResult",
    "SearchResult",
    "SparseLogits",
    "TopKSoftmax",
    "VectorReader",
    "ZoomIndex",
    "open_vectors",
    "read_ground_truth",
    "write_vectors",
]

_DECODER = ("LogitIndex", "SparseLogits", "TopKSoftmax")


def __getattr__(name: str) -> Any:
    # A search of vectors does not need the decoder, which takes time to load.
    if name not in _DECODER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("memhier.ann.decoder"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
