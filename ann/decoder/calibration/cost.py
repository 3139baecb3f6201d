"""The costs of the full product and of a scan of codes, as counts of bytes: the same on every machine.

The constants are measured processor times, as the bytes that stream from memory in that time.
"""

__all__ = ["full_costs_less"]

_PER_PRODUCT = 0.19  # a multiplication of a matrix product whose rows are in the cache
_PER_LOGIT = 120  # selection, for each logit of a state
_PER_ROW = 3000  # a row read alone, besides its bytes
_PER_CODE = 0.8  # a byte of a code
_NUMBERS = 8  # bytes of a row's offset and scale


def full_costs_less(states: int, words: int, dimension: int, width: int, rows: int, margin: float = 1.0) -> bool:
    """Say if a full product and a selection from it cost less than a scan, for a layer in DRAM.

    Parameters
    ----------
    states
        Hidden states in the batch: the full product reads the layer once for all.
    width
        Bytes of a row's code.
    rows
        Candidates that the scan ranks exactly, for each state.
    margin
        Multiplies the cost of the scan.
    """
    full = 4 * words * dimension + states * words * (_PER_PRODUCT * dimension + _PER_LOGIT)
    scan = states * (rows * (_PER_ROW + 4 * dimension) + words * _PER_CODE * (width + _NUMBERS))
    return full < margin * scan
