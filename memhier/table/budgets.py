"""The shares that tiers beside each other have of one budget."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from memhier.budget import format_bytes
from memhier.errors import BudgetError
from memhier.table.sizes import Sizes, TierNeeds, log_bytes

__all__ = ["index_bytes", "shared_out", "tier_costs"]

Cost = Callable[[int], int]
"""Returns the bytes of DRAM that so many slots take."""

# About the buffers of log and reader that an index leaves in a small budget.
_BUFFERS_BYTES = 2**22
# Slots in proportion to the weights are found to this part.
_STEPS = 40


def tier_costs(needs: Sequence[TierNeeds], rows: Sequence[int], dram: int) -> list[Cost]:
    """Return the cost of each of several tiers, with the index of their logs, which have so many rows.

    Where the indices of all rows take more than half of the budget, each gets up to half of its share, as far as that
    leaves room for buffers.
    """
    logs = [log_bytes(count, need.encoded_bytes, count) for need, count in zip(needs, rows, strict=True)]
    least = [log_bytes(1, need.encoded_bytes, 1) for need in needs]
    all_indexed = sum(logs) - sum(least) <= dram // 2

    def cost_of(need: TierNeeds, log: int) -> Cost:
        sizes = Sizes(replace(need, fixed_bytes=need.fixed_bytes + log), 0)
        if all_indexed:
            return sizes.enough
        return lambda slots: _with_index(sizes.enough(slots))

    return [cost_of(*each) for each in zip(needs, logs if all_indexed else least, strict=True)]


def index_bytes(dram: int) -> tuple[int, int]:
    """Return the bytes for the index of a log that grows with its rows: in the beginning, and at most."""
    return dram // 4, max(0, dram - _BUFFERS_BYTES) // 2


def _with_index(dram: int) -> int:
    """Return the budget that leaves so much beside such an index."""
    return max(-(-4 * dram // 3), 2 * dram - _BUFFERS_BYTES)


def shared_out(costs: Sequence[Cost], weights: Sequence[float], most: Sequence[int], dram: int) -> list[int]:
    """Return the shares of a budget that have slots in proportion to weights, none more than it has rows.

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

    Raises
    ------
    BudgetError
        When there is no room for a slot of each.
    """

    if len(costs) == 1:
        return [dram]

    def taken(scale: float) -> list[int]:
        slots = [min(top, max(1, int(scale * weight))) for weight, top in zip(weights, most, strict=True)]
        return [cost(count) for cost, count in zip(costs, slots, strict=True)]

    found = taken(0)
    if sum(found) > dram:
        raise BudgetError(
            f"dram={format_bytes(dram)}: too little for the logs and a row of each of {len(costs)} widths; "
            f"dram={sum(found)} would be enough"
        )
    low, high = 0.0, float(dram) / min(weights)
    for _ in range(_STEPS + dram.bit_length()):
        middle = (low + high) / 2
        if sum(some := taken(middle)) <= dram:
            low, found = middle, some
        else:
            high = middle
    spare, all_of_them = dram - sum(found), sum(found)
    found = [share + spare * share // all_of_them for share in found]
    found[0] += dram - sum(found)
    return found
