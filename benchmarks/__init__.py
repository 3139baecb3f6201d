"""The ``memhier`` command: demo, probe and benchmarks."""
