"""The Zoom vector index (arXiv 1809.04067): a preview in DRAM, full vectors on SSD."""

from memhier.ann.zoom.index import ZoomIndex
from memhier.ann.zoom.search.explain import Explanation
from memhier.ann.zoom.search.range_search import RangeResult
from memhier.ann.zoom.search.results import SearchResult

__all__ = ["Explanation", "RangeResult", "SearchResult", "ZoomIndex"]
