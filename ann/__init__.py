"""Search: the vector index."""

__all__: list[str] = []
