"""``memhier demo``: search every function of this Python installation from SSD."""

__all__: list[str] = []
