"""Items of many vectors, searched by MaxSim (late interaction): codes in DRAM, vectors on SSD."""

from memhier.ann.multivector.explanation import ItemExplanation, ItemRecord
from memhier.ann.multivector.index import MultiVectorIndex
from memhier.ann.multivector.results import ItemResult

__all__ = ["ItemExplanation", "ItemRecord", "ItemResult", "MultiVectorIndex"]
