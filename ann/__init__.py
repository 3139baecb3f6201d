"""Search: the vector index."""

from memhier.ann.zoom import SearchResult, ZoomIndex

__all__ = ["SearchResult", "ZoomIndex"]
