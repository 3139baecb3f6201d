"""The command ``memhier doctor``."""

__all__: list[str] = []
