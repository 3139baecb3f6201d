"""The command ``memhier replay``."""

__all__: list[str] = []
