"""The Zoom vector index (arXiv 1809.04067): a preview in DRAM, full vectors on SSD."""

from memhier.ann.zoom.index import ZoomIndex
from memhier.ann.zoom.search.explanation import CandidateRecord, Explanation
from memhier.ann.zoom.search.results import RangeResult, SearchResult

__all__ = ["CandidateRecord", "Explanation", "RangeResult", "SearchResult", "ZoomIndex"]
