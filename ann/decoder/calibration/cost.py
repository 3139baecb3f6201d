"""The costs of the full product and of a scan of codes, as counts of bytes: the same on every machine.

The constants are measured processor times, as the bytes that stream from memory in that time.
"""

__all__ = ["full_costs_less", "listed_costs_less", "proof_costs_less"]

_PER_PRODUCT = 0.19  # a multiplication of a matrix product whose rows are in the cache
_PER_HALF_PRODUCT = 0.02  # the same of half precision
_PER_LOGIT = 120  # selection, for each logit of a state
_PER_ROW = 3000  # a row read alone, besides its bytes
_PER_CODE = 0.8  # a byte of a code
_NUMBERS = 8  # bytes of a row's offset and scale


def full_costs_less(states: int, words: int, dimension: int, width: int, rows: int) -> bool:
    """Say if a full product and a selection from it cost less than a scan, for a layer in DRAM.

    Parameters
    ----------
    states
        Hidden states in the batch: the full product reads the layer once for all.
    width
        Bytes of a row's code.
    rows
        Candidates that the scan ranks exactly, for each state.
    """
    return _full_cost(states, words, dimension, 4 * dimension) < _scan_cost(states, words, 4 * dimension, width, rows)


def listed_costs_less(listed: int, states: int, words: int, row_bytes: int, width: int, rows: int) -> bool:
    """Say if the exact logits of listed rows alone cost less than a scan, for a layer in DRAM.

    Parameters
    ----------
    listed
        Rows, those of all states together.
    row_bytes
        Of a row of the layer.
    states, words, width, rows
        As in :func:`full_costs_less`.
    """
    return listed * (_PER_ROW + row_bytes) < _scan_cost(states, words, row_bytes, width, rows)


def proof_costs_less(
    states: int, shape: tuple[int, int], row_bytes: int, width: int, rows: int, unproven: float
) -> bool:
    """Say if a scan with bounds, and a full product of the states that it leaves, costs less than one of all states.

    Parameters
    ----------
    states
        Hidden states in the batch.
    shape
        Words and dimension of a layer in DRAM, whose rows have `row_bytes`.
    width
        Bytes of a row's code.
    rows, unproven
        Rows that a proof ranks exactly, in the mean, and the share of states without one.
    """
    left = _full_cost(unproven * states, *shape, row_bytes) if unproven else 0.0
    return _scan_cost(states, shape[0], row_bytes, width, rows) + left < _full_cost(states, *shape, row_bytes)


def _full_cost(states: float, words: int, dimension: int, row_bytes: int) -> float:
    product = _PER_PRODUCT if row_bytes >= 4 * dimension else _PER_HALF_PRODUCT
    return row_bytes * words + states * words * (product * dimension + _PER_LOGIT)


def _scan_cost(states: int, words: int, row_bytes: int, width: int, rows: int) -> float:
    return states * (rows * (_PER_ROW + row_bytes) + words * _PER_CODE * (width + _NUMBERS))
