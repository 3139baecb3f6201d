"""The ``memhier`` command: demo, probe and benchmarks."""

__all__: list[str] = []
