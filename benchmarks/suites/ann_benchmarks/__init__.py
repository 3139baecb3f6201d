"""The folder ``ann_benchmarks/algorithms/memhier`` of ann-benchmarks: copy it there, or name it as the module."""

__all__: list[str] = []
