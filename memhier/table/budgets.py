"""The shares that tiers beside each other have of one budget."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from memhier.table.sizes import Sizes, TierNeeds, log_bytes

__all__ = ["index_bytes", "shared_out", "tier_costs"]

Cost = Callable[[int], int]
"""Returns the bytes of DRAM that so many slots take."""

# About the buffers of log and reader that an index leaves in a small budget.
_BUFFERS_BYTES = 2**22
_CHECKSUMS = 8


def tier_costs(needs: Sequence[TierNeeds], rows: Sequence[int], dram: int) -> list[Cost]:
    """Return the cost of each of several tiers, with the index of their logs, which have so many rows.

    Where the indices of all rows take more than half of the budget, each gets up to half of its share, as far as that
    leaves room for buffers.
    """
    logs = [log_bytes(count, need.encoded_bytes, need.key_space) for need, count in zip(needs, rows, strict=True)]
    empty = [log_bytes(1, need.encoded_bytes, 1) for need in needs]
    if sum(logs) - sum(empty) <= dram // 2:
        return [_with(need, log).enough for need, log in zip(needs, logs, strict=True)]
    return [_with_share(need, log) for need, log in zip(needs, empty, strict=True)]


def _with(need: TierNeeds, fixed_bytes: int, aside: float = 0.0) -> Sizes:
    return Sizes(replace(need, fixed_bytes=need.fixed_bytes + fixed_bytes, aside=need.aside + aside), 0)


def _with_share(need: TierNeeds, log: int) -> Cost:
    """Return the cost where the index takes a share of the budget, as `index_bytes` says, or the room of one row."""
    least, _ = index_bytes(0, need.encoded_bytes, need.key_space or 1)
    sizes = _with(need, log + least), _with(need, log, 1 / 4), _with(need, log - _BUFFERS_BYTES // 2, 1 / 2)
    return lambda slots: max(each.enough(slots) for each in sizes)


def index_bytes(dram: int, row_bytes: int, key_space: int) -> tuple[int, int]:
    """Return the bytes for the index of a log that grows with its rows: in the beginning, and at most."""
    # The smallest index has room for more than a row, whose pages have checksums.
    least = log_bytes(1, row_bytes, key_space) - log_bytes(1, row_bytes, 1)
    return max(dram // 4, least + least // _CHECKSUMS), max(0, dram - _BUFFERS_BYTES) // 2


def shared_out(costs: Sequence[Cost], weights: Sequence[float], most: Sequence[int], dram: int) -> list[int] | None:
    """Return the shares of a budget that have slots in proportion to weights; None without room for a slot of each.

    Parameters
    ----------
    costs
        Of each share.
    weights
        Above 0.
    most
        Slots beyond which a share has no use of more.
    dram
        Bytes, to the last of which the shares add up.
    """

    if len(costs) == 1:
        return [dram]

    def taken(scale: float) -> list[int]:
        slots = [min(top, max(1, int(scale * weight))) for weight, top in zip(weights, most, strict=True)]
        return [cost(count) for cost, count in zip(costs, slots, strict=True)]

    found = taken(0)
    if sum(found) > dram:
        return None
    low, high = 0.0, float(dram) / min(weights)
    while (high - low) * max(weights) > 1:
        middle = (low + high) / 2
        if sum(some := taken(middle)) <= dram:
            low, found = middle, some
        else:
            high = middle
    spare, all_of_them = dram - sum(found), sum(found)
    found = [share + spare * share // all_of_them for share in found]
    found[0] += dram - sum(found)
    return found
