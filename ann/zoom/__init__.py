"""The Zoom vector index (arXiv 1809.04067): a preview in DRAM, full vectors on SSD."""

from memhier.ann.zoom.index import ZoomIndex
from memhier.ann.zoom.search.results import Explanation, RangeResult, SearchResult

__all__ = ["Explanation", "RangeResult", "SearchResult", "ZoomIndex"]
