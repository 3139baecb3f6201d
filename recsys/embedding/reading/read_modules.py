"""The modules of tables that one loader is read ahead for: the rows of a batch are those of all of them."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from memhier.policies import Belady
from memhier.recsys.embedding.groups.step_loan import StepTicket
from memhier.recsys.embedding.module import TableModule
from memhier.recsys.embedding.tables import StepRows
from memhier.table.keep_all import KeepAll

__all__ = ["ReadModules"]


class _Planned(Protocol):
    """The look-ups of a module whose batches are known ahead; `Any` stands for its type of ids."""

    reads_in_turn: bool

    def ids_of(self, *arguments: Any) -> Any:
        """Return the ids of a batch to come, from the arguments that the module will get."""

    def ids_of_all(self, look_ups: Sequence[tuple[Any, ...]]) -> Any:
        """Return the ids of several look-ups of a batch to come, from the arguments of each."""

    def distinct(self, ids: Any) -> StepRows:
        """Return the distinct rows of a batch."""

    def reading(self) -> AbstractContextManager[None]:
        """Return a context to read a loader in; it tells other ranks, if any, of a failure."""

    def agree(self, size: int) -> int | None:
        """Return the largest of the sizes that all ranks say; None if no other rank reads in step."""

    def bytes_of(self, ids: Any) -> int:
        """Return the DRAM that a batch to come takes beside its ids and rows."""

    def map_ahead(self, trains: bool) -> None:
        """Say whether the batches that are read from now on are for training."""

    def drop_ahead(self) -> None:
        """Forget the batches that were read ahead."""

    def settle(self) -> None:
        """Let the rows of gradients go that need not wait."""

    def catch_up(self) -> None:
        """Apply the update that was put off, if any, which lets its rows go."""

    def plan(self, ids: Any, rows: StepRows, ticket: StepTicket | None) -> None:
        """Load the rows of a batch that is handed out."""

    def end_plan(self) -> None:
        """Release the rows of the batch that was handed out last."""


class ReadModules:
    """Modules of tables, by their names in a model.

    Attributes
    ----------
    window_bytes
        The DRAM that they set aside for batches known ahead.
    """

    def __init__(self, modules: Mapping[str, TableModule], ids: Callable[[Any], Any]) -> None:
        self._modules = dict(modules)
        self._tables = [module.tables for module in self._modules.values()]
        self._look_ups: list[_Planned] = [module.look_ups for module in self._modules.values()]
        self._ids = ids
        self._planned = 0  # modules that have the rows of the batch that is handed out
        self.window_bytes: int = sum(tables.window_bytes for tables in self._tables)

    def check_open(self) -> None:
        """Raise ClosedError for closed tables, and ValueError for those that take no announcements."""
        for tables in self._tables:
            tables.check_open()
            if not tables.planners:
                raise ValueError("model: its tables have a policy that takes no announcements; use policy='belady'")

    def begin_epoch(self, end: Callable[[], None]) -> None:
        """End the epochs of lookahead that are under way; `end` ends the one that begins."""
        for module in self._modules.values():
            module.begin_epoch(end)

    def map_ahead(self, grad_enabled: bool) -> None:
        """Say whether the epoch that begins is one of training."""
        for module in self._modules.values():
            module.look_ups.map_ahead(module.training and grad_enabled)

    def drop_ahead(self) -> None:
        """Forget the batches that were read ahead."""
        for look_ups in self._look_ups:
            look_ups.drop_ahead()

    # A batch to come.

    def bytes_of(self, ids: list[Any]) -> int:
        """Return the DRAM that a batch to come takes beside its ids and rows."""
        return sum(look_ups.bytes_of(some) for look_ups, some in zip(self._look_ups, ids, strict=True))

    def reading(self) -> AbstractContextManager[None]:
        """Return a context to read the loader in."""
        return self._look_ups[0].reading() if len(self._look_ups) == 1 else nullcontext()

    def agree(self, size: int) -> int | None:
        """Return the largest of the sizes that all ranks say; None if no other rank reads in step."""
        return self._look_ups[0].agree(size) if len(self._look_ups) == 1 else None

    def asked_of(self, batch: Any) -> list[Any]:
        """Return the arguments that each module will get for a batch."""
        try:
            found = self._ids(batch)
        except StopIteration as error:
            # Otherwise it would end the epoch as the end of the loader does.
            raise RuntimeError("ids: raised StopIteration") from error
        if len(self._modules) == 1:
            return [found]
        if not isinstance(found, Mapping) or found.keys() != self._modules.keys():
            said = sorted(map(str, found)) if isinstance(found, Mapping) else type(found).__name__
            raise ValueError(f"ids: expected a dict with {sorted(self._modules)}, the model's tables, got {said}")
        return [found[name] for name in self._modules]

    def ids_of(self, asked: list[Any]) -> list[Any]:
        """Return the ids of a batch to come of each module, from the arguments that it will get."""
        found = []
        for look_ups, given in zip(self._look_ups, asked, strict=True):
            calls = given if isinstance(given, list) else [given]
            if not calls:
                raise ValueError("ids: expected the arguments of at least one look-up, got an empty list")
            each = [one if isinstance(one, tuple) else (one,) for one in calls]
            found.append(look_ups.ids_of(*each[0]) if len(each) == 1 else look_ups.ids_of_all(each))
        return found

    def distinct(self, ids: list[Any]) -> list[StepRows]:
        """Return the distinct rows of a batch; BudgetError for one that will never fit."""
        rows = [look_ups.distinct(some) for look_ups, some in zip(self._look_ups, ids, strict=True)]
        for tables, some in zip(self._tables, rows, strict=True):
            tables.check_fits(some)
        return rows

    def announce(self, rows: list[StepRows]) -> None:
        """Tell the planners of the batch after those already announced."""
        for tables, some in zip(self._tables, rows, strict=True):
            tables.announce(some)

    def withdraw(self) -> None:
        """Take all announced batches back."""
        for tables in self._tables:
            tables.withdraw()

    def prefetch(self, rows: list[StepRows], tickets: list[StepTicket]) -> None:
        """Begin to fetch the rows of the oldest announced batch that was not fetched yet.

        Tickets are added module after module. Where one has no room, the same call goes on there later.
        """
        for tables, some in zip(self._tables[len(tickets) :], rows[len(tickets) :], strict=True):
            tickets.append(tables.prefetch(some))

    @property
    def is_known(self) -> bool:
        """Whether knowing more would change nothing: all in DRAM are needed again, or no row ever leaves."""
        return all(_knows_enough(planner) for tables in self._tables for planner in tables.planners)

    @property
    def rest(self) -> bool:
        """Whether reading ahead would change nothing: every row has a slot, and for a while none had to be read."""
        return all(
            bool(tables.planners)
            and all(isinstance(planner, KeepAll) for planner in tables.planners)
            and tables.has_all
            and not look_ups.reads_in_turn
            for tables, look_ups in zip(self._tables, self._look_ups, strict=True)
        )

    # The batch that is handed out.

    def settle(self) -> None:
        """Let the rows of gradients go that need not wait."""
        for look_ups in self._look_ups:
            look_ups.settle()

    def catch_up(self) -> None:
        """Let the rows of updates go that were put off: at a place of their own, so that each run fetches the same."""
        for look_ups in self._look_ups:
            look_ups.catch_up()

    def plan(self, ids: list[Any], rows: list[StepRows], tickets: list[StepTicket]) -> None:
        """Load the rows of a batch that is handed out; after an error the same call goes on."""
        for number in range(self._planned, len(self._look_ups)):
            self._look_ups[number].plan(ids[number], rows[number], tickets[number])
            self._planned = number + 1

    def end_plan(self) -> None:
        """Release the rows of the batch that was handed out last."""
        self._planned = 0
        for look_ups in self._look_ups:
            look_ups.end_plan()


def _knows_enough(planner: Belady | KeepAll) -> bool:
    if isinstance(planner, KeepAll):
        return planner.pending > 1  # one stays announced, so that calls for other rows are told from those of the loop
    return planner.idle == 0 and len(planner) == planner.capacity
