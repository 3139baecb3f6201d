"""Another name of the checks of arrays; see `memhier.arguments`."""

from memhier.arguments import as_bytes, as_ints, check_array, check_range

__all__ = ["as_bytes", "as_ints", "check_array", "check_range"]
