"""The folder of memhier in big-ann-benchmarks: copy it into the suite, or name it as the module."""

__all__: list[str] = []
