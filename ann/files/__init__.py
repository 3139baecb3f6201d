"""Files and containers of vectors, and files of ground truth: opened, streamed and written."""

from memhier.ann.files._containers import as_array, as_rows
from memhier.ann.files._open import open_vectors
from memhier.ann.files._reader import VectorReader
from memhier.ann.files._sliced import SlicedVectors
from memhier.ann.files._truth import GroundTruth, read_ground_truth
from memhier.ann.files._write import write_vectors

__all__ = [
    "GroundTruth",
    "SlicedVectors",
    "VectorReader",
    "as_array",
    "as_rows",
    "open_vectors",
    "read_ground_truth",
    "write_vectors",
]
