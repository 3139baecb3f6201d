"""Checkpoints of tiers beside each other: their logs become durable, at once or beside the calls that follow."""

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from memhier.ending import before_exit
from memhier.errors import LockedError
from memhier.shield import uninterrupted
from memhier.store.segments import FullError
from memhier.table.gate import Gate
from memhier.table.table import Table

__all__ = ["Checkpoints", "Saving"]

T = TypeVar("T")


class Saving(Future[T]):
    """A future whose lock no interrupt keeps.

    A future takes and releases its lock in lines of Python. An interrupt of the waiting thread there would keep the
    lock, and the thread that saves from its end. Callbacks may run on the thread of shielded calls.
    """

    def result(self, timeout: float | None = None) -> T:
        """Wait, at most so many seconds, and return the result; raise its error, or TimeoutError."""
        self._wait(timeout)
        return uninterrupted(super().result)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait, at most so many seconds, and return the error, None if there is none; or raise TimeoutError."""
        self._wait(timeout)
        return uninterrupted(super().exception)

    def done(self) -> bool:
        """Return whether there is a result, or an error."""
        return uninterrupted(super().done)

    def add_done_callback(self, fn: Callable[[Future[T]], object]) -> None:
        """Call a function with this future once it is done, or now if it is."""
        call = super().add_done_callback
        uninterrupted(lambda: call(fn))

    def _wait(self, timeout: float | None) -> None:
        told: SimpleQueue[Any] = SimpleQueue()  # built in
        self.add_done_callback(told.put)
        try:
            told.get(timeout=None if timeout is None else max(0, timeout))
        except Empty:
            raise TimeoutError from None


class Checkpoints:
    """Commits of the logs of all tables behind a gate, one at a time."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._thread: threading.Thread | None = None

    def now(self, values: Mapping[str, bytes] | None, first: Callable[[], object] | None = None) -> int:
        """Write all changed rows and commit while the caller waits; return the store's new generation."""
        with self.settled() as tables:
            checked = _checked(tables, values)
            if first is not None:
                first()
            for table in tables:
                table.writer.flush()
            with self._failing(), ExitStack() as paused:
                for table in tables:
                    paused.enter_context(table.loader.paused())
                return tables[0].log.commit(checked)

    def beside(self, values: Mapping[str, bytes] | None, first: Callable[[], object] | None = None) -> "Future[int]":
        """Take an image of this moment and commit it on a thread."""
        with self.settled() as tables:
            checked, done = _checked(tables, values), Saving[int]()
            if first is not None:
                first()
            for table in tables:
                table.writer.begin_image()
            self._thread = threading.Thread(
                target=self._save, args=(tables, checked, done), name="memhier-commit", daemon=True
            )
            taken_back = before_exit(self._thread.join)
            done.add_done_callback(lambda _: taken_back())
            self._thread.start()
            return done

    def wait(self) -> None:
        """Return once no commit is under way. For outside of calls, which the commit may need to go on."""
        if self._thread is not None:
            self._thread.join()

    @contextmanager
    def settled(self) -> Iterator[tuple[Table, ...]]:
        """Be a call inside the block, with no commit under way; yield all tables."""
        while True:
            self.wait()
            with self._gate.call():
                if self._thread is None or not self._thread.is_alive():
                    tables = self._gate.tables()
                    for table in tables:
                        table.check()
                    yield tables
                    return

    def _save(self, tables: tuple[Table, ...], values: dict[str, bytes], done: "Future[int]") -> None:
        try:
            with self._failing():
                for table in tables:
                    table.writer.save_image(self._gate.between)
                generation = tables[0].log.commit(values)
        except BaseException as error:
            self._end_images(tables)
            done.set_exception(error)
        else:
            self._end_images(tables)
            done.set_result(generation)

    def _end_images(self, tables: tuple[Table, ...]) -> None:
        # First: a call that waits for room in a queue goes on then, so that there is a time between calls.
        for table in tables:
            table.writer.release_queue()
        for table in tables:
            table.writer.end_image(self._gate.between)

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except (LockedError, FullError):
            raise
        except BaseException as error:
            self._gate.fail(error)
            raise


def _checked(tables: tuple[Table, ...], values: Mapping[str, bytes] | None) -> dict[str, bytes]:
    """Return the values of a commit, with those of all tables."""
    checked = dict(values or {})
    for table in tables:
        checked = table.checked_values(checked)
    return checked
