"""The end of a tier's checkpoint: what the log has becomes durable, at once or beside the calls that follow."""

import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager

from memhier.errors import LockedError
from memhier.store.segments import FullError
from memhier.table.calls import Calls
from memhier.table.parts import TieredParts
from memhier.table.saving import Saving

__all__ = ["Commits"]


class Commits:
    """Commits of a tier whose changed rows have been flushed."""

    def __init__(self, parts: TieredParts, calls: Calls) -> None:
        self._parts = parts
        self._calls = calls
        self._thread: threading.Thread | None = None

    def checked(self, values: Mapping[str, bytes] | None) -> dict[str, bytes]:
        """Return the values of a commit, the tier's own added."""
        parts = self._parts
        checked = parts.log.check_values(values)
        if parts.schema.key in checked:
            raise ValueError(f"values: {parts.schema.key!r} is the tier's own")
        return checked | parts.schema.missing()

    def now(self, values: dict[str, bytes]) -> int:
        """Commit while the caller waits; inside of a call."""
        with self._parts.loader.paused(), self._failing():
            return self._parts.log.commit(values)

    def beside(self, values: dict[str, bytes]) -> "Future[int]":
        """Take an image of this moment and commit it on a thread; inside of a call."""
        done: Saving[int] = Saving()
        self._parts.residents.begin_image()
        self._thread = threading.Thread(target=self._run, args=(values, done), name="memhier-commit", daemon=True)
        self._thread.start()
        return done

    def wait(self) -> None:
        """Return once no commit is under way; outside of calls, which it may need to go on."""
        if self._thread is not None:
            self._thread.join()

    @contextmanager
    def settled(self) -> Iterator[None]:
        """Be a call inside the block, with no commit under way."""
        while True:
            self.wait()
            with self._calls.call():
                if self._thread is None or not self._thread.is_alive():
                    yield
                    return

    def _run(self, values: dict[str, bytes], done: "Future[int]") -> None:
        queue, residents = self._parts.queue, self._parts.residents
        try:
            with self._failing():
                queue.drain()
                while residents.unsaved:
                    with self._calls.between() as there:
                        if there:
                            residents.save_some()
                queue.drain()
                generation = self._parts.log.commit(values)
        except BaseException as error:
            # A call that waits for room in the queue goes on now, so that there is a time between calls.
            queue.release()
            while residents.unsaved:
                with self._calls.between() as there:
                    if there:
                        residents.drop_image()
            done.set_exception(error)
        else:
            queue.release()
            done.set_result(generation)

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except (LockedError, FullError):
            raise
        except BaseException as error:
            self._calls.fail(error)
            raise
