"""Follower: a thread that has an index take over the newest commit, again and again."""

import threading
from typing import TYPE_CHECKING, Union

from memhier.ann.zoom import ZoomIndex
from memhier.closing import Closing
from memhier.errors import MemhierError

if TYPE_CHECKING:
    from memhier.ann.cluster import ShardedIndex

__all__ = ["Follower"]


class Follower(Closing):
    """Calls :meth:`ZoomIndex.refresh` every so many seconds until it is closed.

    Parameters
    ----------
    index
        Open for searching.
    seconds
        Between the end of a call and the next.

    Attributes
    ----------
    failure
        The error of the last call, in words; None where it succeeded. The index then stays at its commit.
    """

    def __init__(self, index: Union[ZoomIndex, "ShardedIndex"], seconds: float) -> None:
        self.failure: str | None = None
        self._index, self._seconds, self._ended = index, seconds, threading.Event()
        self._thread = threading.Thread(target=self._run, name="memhier-refresh", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread, after the call that is under way."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(self._seconds):
            try:
                self._index.refresh()
                self.failure = None
            except (MemhierError, OSError, MemoryError) as error:
                self.failure = f"{type(error).__name__}: {error}"
