"""When the gradients of a step are all there: at the end of a backward pass, once no other look-up waits for its own.

A step may look its tables up several times, and autograd comes back to each look-up on its own. An optimizer with state
must have the sum, as it is no sum of what it would do with each. So gradients wait until the pass has ended in which
they came, and until every look-up has had its pass or was forgotten with its output.
"""

import threading
from collections.abc import Callable
from functools import partial
from weakref import WeakSet

import torch
from torch.autograd import Variable

__all__ = ["LookUp", "Passes"]


class LookUp:
    """A look-up that has had no backward pass; ends with the graph that holds it."""

    __slots__ = ("__weakref__",)


class Passes:
    """Backward passes under way, and look-ups that wait for one.

    Parameters
    ----------
    ended
        Called once gradients that have come may be applied.
    failed
        Called before the next look-up with how many gradients there were before a pass that failed amid.
    count
        Returns how many gradients wait.
    """

    def __init__(self, ended: Callable[[], None], failed: Callable[[int], None], count: Callable[[], int]) -> None:
        self._ended = ended
        self._failed = failed
        self._count = count
        self._waiting: WeakSet[LookUp] = WeakSet()
        self._under_way: dict[tuple[int, int], int] = {}  # by thread and number: gradients that waited when it began

    def look_up(self) -> LookUp | None:
        """Note a look-up that will have a backward pass; None amid a pass, where activations are computed again."""
        if self.is_inside():
            # What it finds must be as it was in the forward pass: nothing is applied before the outer pass ends.
            self._await_end()
            return None
        self.forget_failed()
        look_up = LookUp()
        self._waiting.add(look_up)
        return look_up

    def forget_failed(self) -> None:
        """Drop what came in a pass of this thread that did not end."""
        thread = threading.get_ident()
        failed = [key for key in self._under_way if key[0] == thread]
        if failed and not self.is_inside():
            self._failed(min(self._under_way.pop(key) for key in failed))

    def arriving(self, look_up: LookUp | None) -> None:
        """Note that the gradient of a look-up is about to come, inside of a backward pass."""
        if look_up is not None:
            self._waiting.discard(look_up)
        self._await_end()

    @staticmethod
    def is_inside() -> bool:
        """Whether this thread is inside of a backward pass."""
        return Passes.current() >= 0

    @staticmethod
    def current() -> int:
        """Return the number of the backward pass that this thread is inside of; -1 for none."""
        return torch._C._current_graph_task_id()

    def _await_end(self) -> None:
        key = (threading.get_ident(), self.current())
        if key not in self._under_way:
            self._under_way[key] = self._count()
            Variable._execution_engine.queue_callback(partial(self._end, key))

    def _end(self, key: tuple[int, int]) -> None:
        self._under_way.pop(key, None)
        if not self._under_way and not self._waiting:
            self._ended()
