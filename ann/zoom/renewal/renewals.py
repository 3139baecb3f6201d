"""Which parts are being written anew beside the commits, and which of that is ready for one to take over."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from memhier.ann.zoom.preview.layout import Layout
from memhier.ann.zoom.renewal.beside import Beside, Caller
from memhier.ann.zoom.renewal.renewal import Made, Renewed, Task, follow, join, renew
from memhier.ann.zoom.storage.part import Part

__all__ = ["Renewals"]

_PATIENCE = 0.05  # of the vectors: what has to change before one that failed is tried again


class Renewals:
    """Joins of parts, and one renewal of the index, each by a thread of its own; for one thread, the writer's.

    Attributes
    ----------
    made
        Parts that were joined, to be taken over.
    renewed
        The index made anew, to be taken over or made up for parts that came meanwhile.
    caller
        Whom both wait for.
    """

    def __init__(self) -> None:
        self.made: Made | None = None
        self.renewed: Renewed | None = None
        self.caller = Caller()
        self._joins: Beside[Made] = Beside("zoom-join", self.caller)
        self._renewals: Beside[Renewed] = Beside("zoom-renew", self.caller)
        self._joined: frozenset[str] = frozenset()
        self._covered: frozenset[str] = frozenset()
        self._planned = 0
        self._failures: list[BaseException] = []
        self._last_failure: BaseException | None = None
        self._not_before = -1

    @property
    def joining(self) -> bool:
        """Whether parts are joined, or were and are not taken over."""
        return self.made is not None or self._joins.occupied

    @property
    def renewing(self) -> bool:
        """Whether the index is made anew, or was and is not taken over."""
        return self.renewed is not None or self._renewals.occupied

    @property
    def planned_bytes(self) -> int:
        """DRAM that joins under way come to hold, until they are taken over."""
        return self._planned if self.joining else 0

    def held(self, parts: Sequence[Part]) -> int:
        """Return how many parts from the first on may not be changed otherwise."""
        spoken = (self._joined if self.joining else frozenset()) | (self._covered if self.renewing else frozenset())
        return max((number for number, part in enumerate(parts, 1) if part.name in spoken), default=0)

    def may_start(self, changes: int) -> bool:
        """Whether enough has changed since something failed."""
        return changes >= self._not_before

    def start_join(self, task: Task, planned: int) -> None:
        """Begin to join the parts of a task, for which `planned` bytes are taken."""
        self._joined, self._planned = frozenset(part.name for part in task.parts), planned
        self._joins.start(partial(join, task))

    def start_renewal(self, task: Task, layout: Layout, seed: int, changes: int) -> None:
        """Begin to make the index anew, whose parts are those of a task."""
        self.stop_joins()
        self._covered = frozenset(part.name for part in task.parts)
        self._renewals.start(partial(renew, task, layout, seed, changes))

    def make_up(self, task: Task) -> None:
        """Begin to write the parts of a task, which came meanwhile, as those that were made anew are."""
        renewed, self.renewed = self.renewed, None
        assert renewed is not None
        self.stop_joins()
        self._covered = frozenset((*renewed.replaced, *(part.name for part in task.parts)))
        self._renewals.start(partial(follow, task, renewed))

    def collect(self, changes: int) -> None:
        """Take note of what is done: `made`, `renewed`, or a failure, after which no other starts for a while.

        `changes` is how many vectors were added and removed until now.
        """
        if self.made is None:
            self.made = self._noted(self._joins.take, changes)
        if self.renewed is None:
            self.renewed = self._noted(self._renewals.take, changes)

    def failed(self, error: BaseException, changes: int) -> None:
        """Take note of a failure."""
        self._failures.append(error)
        self._last_failure = error
        self._not_before = changes + max(1, int(_PATIENCE * changes))

    def failures(self) -> list[BaseException]:
        """Return the failures that nobody was told of yet."""
        failures, self._failures = self._failures, []
        return failures

    def take_made(self) -> Made | None:
        """Return the parts that were joined, which are the caller's to use or drop from now on."""
        made, self.made = self.made, None
        return made

    def take_renewed(self) -> Renewed | None:
        """Return the index made anew, which is the caller's to use or drop from now on."""
        renewed, self.renewed = self.renewed, None
        return renewed

    def give_way(self) -> None:
        """Wait for what is under way as long as it waited, so that it ends however fast one commit follows another."""
        for each in (self._renewals, self._joins):
            started = time.monotonic()
            each.wait(self.caller.owes)
            self.caller.owes = max(0.0, self.caller.owes - (time.monotonic() - started))
        self.caller.owes = 0.0

    def stop_joins(self) -> None:
        """End the joins, and forget them."""
        self._joins.stop()
        if (made := self.take_made()) is not None:
            made.drop()

    def stop(self) -> None:
        """End all of it, after the step that is under way, and forget it."""
        self._renewals.stop()
        self.stop_joins()
        if (renewed := self.take_renewed()) is not None:
            renewed.drop()

    def stats(self, *, due: bool) -> str:
        """Return how it stands with the renewal; `due` is whether one is called for."""
        if self.renewing:
            return "ready" if self.renewed is not None or self._renewals.done else "running"
        if due and self._last_failure is not None:
            return f"failed: {self._last_failure!r}"
        return "due" if due else "none"

    def _noted(self, take: Callable[[], Any], changes: int) -> Any:
        try:
            return take()
        except Exception as error:
            self.failed(error, changes)
            return None
