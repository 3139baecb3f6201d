"""What a checkpoint that goes on beside its caller gives back."""

from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from memhier.shield import uninterrupted

__all__ = ["Saving"]

T = TypeVar("T")


class Saving(Future[T]):
    """A future that an interrupt of whoever waits holds nothing up in.

    A future's own lock is taken and given back by lines of Python: an interrupt there would keep the thread that saves
    from its end. Callbacks may run on the thread of shielded calls.
    """

    def result(self, timeout: float | None = None) -> T:
        """Wait for the result, at most so many seconds, and return it; raise what went wrong, or TimeoutError."""
        self._wait(timeout)
        return uninterrupted(super().result)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait, at most so many seconds, and return what went wrong, if anything did; or raise TimeoutError."""
        self._wait(timeout)
        return uninterrupted(super().exception)

    def done(self) -> bool:
        """Whether there is a result, or an error."""
        return uninterrupted(super().done)

    def add_done_callback(self, fn: Callable[[Future[T]], object]) -> None:
        """Call a function with this once it is done, or now where it is."""
        call = super().add_done_callback
        uninterrupted(lambda: call(fn))

    def _wait(self, timeout: float | None) -> None:
        told: SimpleQueue[Any] = SimpleQueue()  # built in
        self.add_done_callback(told.put)
        try:
            told.get(timeout=None if timeout is None else max(0, timeout))
        except Empty:
            raise TimeoutError from None
