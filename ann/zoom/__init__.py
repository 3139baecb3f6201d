"""The Zoom vector index (arXiv 1809.04067): a preview in DRAM, full vectors on SSD."""

from memhier.ann.zoom.explain import Explanation
from memhier.ann.zoom.index import SearchResult, ZoomIndex

__all__ = ["Explanation", "SearchResult", "ZoomIndex"]
