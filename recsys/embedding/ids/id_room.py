"""The room that maps of ids have in a budget of DRAM."""

from collections.abc import Sequence
from dataclasses import dataclass

from memhier.budget import format_bytes
from memhier.errors import BudgetError
from memhier.recsys.embedding.ids.hash64 import CELLS_BLOCK, Hash64
from memhier.recsys.embedding.ids.id_map import GROUP, RECORD_BYTES, IdMap
from memhier.table.side_log import SideLog
from memhier.table.sizes import log_bytes

__all__ = ["IdRoom"]

# Bytes of a slot in a map that grows: its arrays and its place in the index, twice while they are copied, and its share
# of a record in the log.
_SLOT_BYTES = 64
# Maps for all ids take half of the budget at most; otherwise they grow, up to a quarter.
_AT_ONCE, _GROWING = 2, 4


@dataclass(frozen=True, slots=True)
class IdRoom:
    """The room for the ids of several tables.

    Attributes
    ----------
    maps
        The capacity and the rules of each.
    slots
        Ids that may have a row, of all tables together.
    at_once
        Whether that is enough for all rows; maps take their memory at the start.
    aside_bytes
        DRAM set aside for the maps.
    """

    maps: tuple[tuple[int, Hash64], ...]
    slots: int
    at_once: bool
    aside_bytes: int

    @classmethod
    def of(cls, maps: Sequence[tuple[int, Hash64]], dram: int) -> "IdRoom":
        """Return the room in a budget; BudgetError if it has none for the sketches."""
        whole = sum(IdMap.bytes_for(*each) for each in maps)
        if whole <= dram // _AT_ONCE:
            return cls(tuple(maps), sum(capacity for capacity, _ in maps), True, whole)
        cells = [rules.cells(capacity) for capacity, rules in maps]
        if sum(cells) > dram // _GROWING:
            raise BudgetError(
                f"dram={format_bytes(dram)}: the sketches of admit_after take {format_bytes(sum(cells))}, by default 8 "
                "bytes for each of num_embeddings; pass id_space=Hash64(sketch=...): 8 counts for each id that you "
                "expect are enough"
            )
        slots = dram // _GROWING // _SLOT_BYTES
        # Each map has a group from the start.
        held = (slots + len(maps) * GROUP) * _SLOT_BYTES
        return cls(tuple(maps), slots, False, held + sum(cells) + sum(cells) // CELLS_BLOCK)

    @property
    def first_slots(self) -> int | None:
        """Slots that each map takes memory for at the start; None for all."""
        return None if self.at_once else GROUP

    def enough_for(self, ids: int, dram: int) -> int:
        """Return a budget, twice as large as `dram` or more, with room for so many ids."""
        larger = 2 * dram
        while (room := IdRoom.of(self.maps, larger)).slots < ids and not room.at_once:
            larger *= 2
        return larger

    def log(self) -> SideLog:
        """Return the log of the maps, with the DRAM that is left to them."""
        keys = sum(IdMap.records_for(*each) for each in self.maps)
        if self.at_once:
            return SideLog("ids", RECORD_BYTES, keys, keys, self.aside_bytes)
        cells = sum(rules.cells(capacity) // CELLS_BLOCK for capacity, rules in self.maps)
        records = min(keys, self.slots // GROUP + 2 * len(self.maps) + cells)
        beside = log_bytes(records, RECORD_BYTES, keys) - log_bytes(1, RECORD_BYTES, 1)
        return SideLog("ids", RECORD_BYTES, records, keys, max(0, self.aside_bytes - beside))
