"""How a DRAM budget is spent: so many lists, so many bytes of code for each vector."""

from dataclasses import dataclass

from memhier.ann.zoom.fullview import workspace_bytes
from memhier.ann.zoom.router import router_bytes_per_list
from memhier.ann.zoom.scan import CODES_PER_BOOK
from memhier.ann.zoom.space import Metric, core_dimension
from memhier.budget import format_bytes
from memhier.errors import BudgetError
from memhier.reader import PAGE_BYTES

__all__ = ["Layout", "plan_layout"]

_VECTORS_PER_LIST = 200  # 0.5 % of n; shorter lists probe finer but each costs its centroid
_LISTS_SHARE = 0.25  # of the budget, at most, for lists and their graph
_WIDEST, _NARROWEST = 32, 4  # dimensions that one byte of code describes; narrower than 4 hardly ranks better


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes of an index, decided before it is built.

    Attributes
    ----------
    lists
        Number of inverted lists.
    width
        Dimension of the sub-vector that one byte of code describes.
    padded
        Dimension of the preview space, a multiple of `width`.
    memory_bytes
        DRAM the index will hold when open, everything counted.
    """

    lists: int
    width: int
    padded: int
    memory_bytes: int

    @property
    def code_bytes(self) -> int:
        """Bytes of code for each vector."""
        return self.padded // self.width


def plan_layout(count: int, dimension: int, metric: Metric, record_bytes: int, reader_bytes: int, dram: int) -> Layout:
    """Return the layout with the longest codes that fits `dram` bytes.

    Parameters
    ----------
    count, dimension, metric
        Of the vectors.
    record_bytes
        Bytes of one vector with its id on SSD; a CRC is kept for each page of them.
    reader_bytes
        DRAM of the reader's buffers.
    dram
        The budget in bytes.

    Raises
    ------
    BudgetError
        When even the shortest codes do not fit; says what would be enough.
    """
    core = core_dimension(metric, dimension)
    checksums = 4 * (count * record_bytes // PAGE_BYTES + 1)
    fixed = reader_bytes + workspace_bytes(record_bytes) + checksums

    least = []
    for width in range(min(_NARROWEST, core), _WIDEST + 1):
        padded = -(-core // width) * width
        per_list = router_bytes_per_list(padded, count // _VECTORS_PER_LIST)
        without_lists = fixed + 4 * CODES_PER_BOOK * padded + 8 + count * (padded // width)
        lists = max(1, min(count // _VECTORS_PER_LIST, int(_LISTS_SHARE * dram) // per_list))
        total = without_lists + lists * per_list
        if total <= dram:
            return Layout(lists, width, padded, total)
        least.append(without_lists + per_list)
    # A budget this much larger than all but the lists leaves the lists their share.
    enough = int(min(least) / (1 - _LISTS_SHARE)) + 1
    raise BudgetError(
        f"dram={format_bytes(dram)} is too small for {count:,} vectors of dimension {dimension}: "
        f"at least {format_bytes(enough)} ({enough} bytes) is needed"
    )
