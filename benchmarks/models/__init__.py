"""Models that benchmarks train on the spot, from text that lies beside the checkout."""

__all__: list[str] = []
