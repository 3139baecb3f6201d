"""``memhier index``: a vector index from the shell."""

__all__: list[str] = []
