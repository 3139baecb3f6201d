"""What every call of a buffer checks first, and how a buffer ends."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Protocol, Self

from memhier.errors import ClosedError
from memhier.recsys.replay.parts import Parts
from memhier.shield import caller, shielded

__all__ = ["Guarded", "closing_on_error"]


class _Closable(Protocol):
    def close(self) -> None: ...


@contextmanager
def closing_on_error(part: _Closable) -> Iterator[None]:
    """Close what an error leaves unfinished; else its store stays locked for as long as the error is looked at."""
    try:
        yield
    except BaseException:
        part.close()
        raise


class Guarded:
    """A buffer that is open, or closed, or was closed for changes by one that failed."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._failure: BaseException | None = None
        self._closed = False
        self._pid = os.getpid()
        self._thread = caller()
        self._thread_name = _name_of(self._thread)

    @shielded
    def close(self) -> None:
        """Free all memory; what came since the last checkpoint is lost. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self._parts.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_open(self, writing: bool = False, using: bool = False) -> None:
        if self._closed:
            raise ClosedError("the buffer is closed")
        if writing and self._pid != os.getpid():
            raise ClosedError(f"the buffer belongs to process {self._pid}, which forked this one; use buffer.reader()")
        if (writing or using) and self._thread != caller():
            raise RuntimeError(
                f"the buffer belongs to thread {self._thread_name!r}, which made it, and was called by thread "
                f"{_name_of(caller())!r}: one thread uses it; others read memory through buffer.reader()"
            )
        if writing and self._failure is not None:
            raise ClosedError(
                f"a change failed ({self._failure!r}); what came since the last checkpoint is not on SSD: open it again"
            ) from self._failure

    @contextmanager
    def _writing(self, *breaking: type[BaseException]) -> Iterator[None]:
        """Take no more changes once the logs have failed: they are not in step with what is in memory any more.

        Neither are parts that a change has left at odds, nor all of them after an error of a kind that is `breaking`,
        which may have come anywhere in between.
        """
        try:
            yield
        except BaseException as error:
            parts = self._parts
            if isinstance(error, breaking) or parts.at_odds or any(log.failed for log in parts.storage.logs):
                self._failure = error
            raise


def _name_of(thread: int | None) -> str:
    return next((each.name for each in threading.enumerate() if each.ident == thread), str(thread))
