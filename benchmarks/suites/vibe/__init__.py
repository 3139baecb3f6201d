"""The folder of memhier in VIBE: copy it into the suite."""

__all__: list[str] = []
