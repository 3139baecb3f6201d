"""The tiers of a collection of tables, one for each group, in one store and one budget."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from memhier.budget import format_bytes
from memhier.cache.slab_memory import SlabLayout
from memhier.errors import BudgetError
from memhier.log.parts import LogRecord
from memhier.policies import Policy
from memhier.recsys.embedding.groups.row_groups import RowGroups
from memhier.recsys.embedding.ids.hash64 import Hash64
from memhier.recsys.embedding.ids.id_room import IdRoom
from memhier.store.store import Store
from memhier.table.budgets import index_bytes, shared_out, tier_costs
from memhier.table.loader import Initial
from memhier.table.schema import RowSchema
from memhier.table.side_log import SideLog
from memhier.table.sizes import TRAINING_ASIDE, TierNeeds, batch_within, divide, rows_within
from memhier.table.table import Options, needs_of
from memhier.table.tiered import Tiered

__all__ = ["TierArguments", "all_rows_in", "live_records", "log_name", "open_tiers", "rows_in", "stats_of"]

_ROWS_MAX = 2**31 - 1
# A budget that is enough is found to this part of it.
_GROWTH = 8


def log_name(group: int) -> str:
    """Return the name of the tier of a group, and of its log."""
    return "embedding" if group == 0 else f"embedding-{group}"


def rows_in(store: Store, group: int) -> int:
    """Return the number of rows of a group that a store holds."""
    return live_records(store, log_name(group))


def live_records(store: Store, name: str) -> int:
    """Return the number of records that a log holds, by its name."""
    value = store.get(f"log/{name}")
    record = None if value is None else LogRecord.decode(value)
    return 0 if record is None else record.live


def all_rows_in(store: Store) -> int:
    """Return the number of rows of all groups that a store holds."""
    found = group = 0
    while store.get(f"log/{log_name(group)}") is not None:
        found, group = found + rows_in(store, group), group + 1
    return found


@dataclass(frozen=True)
class TierArguments:
    """The arguments that all tiers of a collection share; see :class:`TableOptions`.

    Attributes
    ----------
    maps
        The capacity and the rules of each table for any ids, whose maps are beside the first tier.
    """

    groups: RowGroups
    dram: int
    policy: str | Policy
    codec: str
    touched: int | None
    step_rows: int | None
    maps: Sequence[tuple[int, Hash64]] = ()

    def with_dram(self, dram: int) -> "TierArguments":
        """Return the same with another budget."""
        return replace(self, dram=dram)

    @cached_property
    def id_room(self) -> IdRoom | None:
        """The room for ids in the budget; BudgetError if there is none."""
        return IdRoom.of(self.maps, self.dram) if self.maps else None

    @cached_property
    def side(self) -> SideLog | None:
        """The log of the maps."""
        return None if self.id_room is None else self.id_room.log()

    @cached_property
    def _beside(self) -> int:
        """DRAM of the first share that is the maps', of several groups; an eighth of it is set aside once more."""
        side = self.side if len(self.groups) > 1 else None
        return 0 if side is None else side.planned_bytes + side.planned_bytes // 4

    @cached_property
    def shares(self) -> list[int]:
        """The share of each group in the budget; BudgetError if there is no room for a row of each."""
        found = self.possible_shares()
        if found is None:
            raise BudgetError(
                f"dram={format_bytes(self.dram)}: too little for the logs and a row of each of {len(self.groups)} "
                f"widths; dram={self._least_dram(lambda shares: True)} would be enough"
            )
        return found

    def possible_shares(self) -> list[int] | None:
        """Return the shares, None if there is no room for a row of each group."""
        groups = self.groups
        if len(groups) == 1:
            return [self.dram]
        dram = self.dram - self._beside
        costs = tier_costs(self._needs(None), [min(rows, self._most_touched) for rows in groups.rows], dram)
        found = shared_out(costs, groups.weights, groups.rows, dram)
        return None if found is None else [found[0] + self._beside, *found[1:]]

    def _least_dram(self, fits: Callable[[list[int]], bool], stored: Sequence[int] | None = None) -> int:
        """Return a budget whose shares are enough; and, where so many rows are stored, have room for the tiers."""
        dram = self.dram
        while True:
            larger = self.with_dram(dram)
            shares = larger.possible_shares()
            if shares is not None and fits(shares) and (stored is None or larger.have_room(stored)):
                return dram
            dram += dram // _GROWTH

    @property
    def _most_touched(self) -> int:
        return _ROWS_MAX if self.touched is None else self.touched

    def _needs(self, side: SideLog | None) -> list[TierNeeds]:
        found = []
        for group, (width, rows) in enumerate(zip(self.groups.widths, self.groups.rows, strict=True)):
            options = Options(
                "", log_name(group), SlabLayout.checked(1, np.float32, width), 1, self.dram, self.policy, None,
                self.codec, rows, self.batch_of(group), None, TRAINING_ASIDE, None if group else side,
            )  # fmt: skip
            found.append(needs_of(options, is_beside=group > 0))
        return found

    def batch_of(self, group: int) -> int | None:
        """Return the most rows of a group in a call; None leaves it to the tier."""
        if len(self.groups) == 1:
            return self.step_rows
        # A step may ask much more of one group than of the others.
        most = 2 * batch_within(self.dram) // (len(self.groups) + 1) if self.step_rows is None else self.step_rows
        return max(1, min(most, self.groups.rows[group]))

    def index_rows(self, stored: Sequence[int]) -> list[int]:
        """Return the rows of each group that its index has room for, where so many are stored."""
        if self.touched is None:
            return [self.index_rows_of(group, rows) for group, rows in enumerate(stored)]
        if len(stored) == 1:
            return [self.touched]
        return [min(self.touched, rows) for rows in self.groups.rows]

    def index_rows_of(self, group: int, stored: int) -> int:
        """Return the rows that the index of a group has room for: all, if that takes half of its share at most.

        Otherwise it grows with the rows that are stored, as long as it leaves half of the share and some buffers.
        """
        row_bytes, total = 4 * self.groups.widths[group], self.groups.rows[group]
        dram = self.shares[group] - (0 if group else self._beside)
        if rows_within(dram // 2, row_bytes, total) == total:
            return total
        first, most = (rows_within(part, row_bytes, total) for part in index_bytes(dram, row_bytes, total))
        return min(max(first, min(stored + stored // 2, most), stored), total, _ROWS_MAX)

    def check(self, store: Store, stored: Sequence[int]) -> None:
        """Raise BudgetError without room for tiers of so many rows, FormatError where the store has rows of others."""
        if not self.have_room(stored):
            enough = self._least_dram(lambda shares: True, stored)
            raise BudgetError(
                f"dram={format_bytes(self.dram)}: too little for the maps of ids, the logs and a row; dram={enough} "
                "would be enough"
            )
        for group, width in enumerate(self.groups.widths):
            RowSchema(store, log_name(group), SlabLayout.checked(1, np.float32, width), self.codec).check()

    def have_room(self, stored: Sequence[int]) -> bool:
        """Whether the shares have room for tiers of so many rows."""
        needs = zip(self._needs(self.side), self.shares, self.index_rows(stored), strict=True)
        return all(divide(need, share, rows, self.policy)[0].fits(self.policy) for need, share, rows in needs)

    def dram_for(self, group: int, share: int) -> int:
        """Return a budget of which a group gets a share."""
        if len(self.groups) == 1:
            return share
        return self._least_dram(lambda shares: shares[group] >= share)


def open_tiers(
    store: Store, arguments: TierArguments, index_rows: Sequence[int], initial: Sequence[Initial]
) -> list[Tiered]:
    """Open the tier of each group; a checkpoint of the first is one of all, and closing it closes all."""
    tiers: list[Tiered] = []
    groups = arguments.groups
    try:
        for group, dram in enumerate(arguments.shares):
            tiers.append(
                Tiered(
                    store,
                    log_name(group),
                    np.float32,
                    groups.widths[group],
                    rows=index_rows[group],
                    dram=dram,
                    policy=arguments.policy,
                    initial=initial[group],
                    codec=arguments.codec,
                    key_space=groups.rows[group],
                    batch=arguments.batch_of(group),
                    aside=TRAINING_ASIDE,
                    side=None if group else arguments.side,
                    beside=tiers[0] if tiers else None,
                )
            )
    except BaseException:
        if tiers:
            tiers[0].close()
        raise
    return tiers


def stats_of(tiers: Sequence[Tiered]) -> dict[str, Any]:
    """Return the counts of tiers beside each other, together; reads are those of the one reader."""
    found = tiers[0].stats()
    for tier in tiers[1:]:
        for name, value in tier.stats().items():
            if name not in ("reads", "read_bytes"):
                found[name] += value
    return found
