"""The searches of an index as its audit needs them, of a ZoomIndex or of another kind."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from threading import RLock
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from memhier.ann.zoom.arguments import SearchOptions
from memhier.ann.zoom.calibration.calibration import Calibration
from memhier.ann.zoom.renewal.life import IndexWriter
from memhier.ann.zoom.renewal.tune import measure
from memhier.ann.zoom.search.turns import Turns
from memhier.ann.zoom.storage.snapshot import IndexSnapshot
from memhier.io.reader import Reader

__all__ = ["AuditedIndex", "AuditedVectors", "Listener"]

Floats: TypeAlias = npt.NDArray[np.float32]
Listener: TypeAlias = Callable[[Any, Any, SearchOptions, Floats], None]
"""Hears of a search that has ended: its snapshot, queries, ``[q, d]`` or a list, options, and distances ``[q, k]``."""

S = TypeVar("S")
W = TypeVar("W")

_BUSY = ("running", "ready")  # states of a renewal that ends with a calibration of its own


class AuditedSearcher(Protocol[S]):
    """The searcher of an index with snapshots of type `S`."""

    state: S
    turns: Turns
    watch: Any

    def nearest_exactly(self, state: S, query: Floats, k: int, where: str | None) -> Floats:
        """Return the distances of the `k` nearest of a query in a snapshot, for certain."""


class AuditedIndex(ABC, Generic[S, W]):
    """The searches of an index with snapshots of type `S`. A query is an array of float32; distances ascend.

    Parameters
    ----------
    searcher, reader, writer
        Of the index; `writer` is None where it is read only.
    changing
        The lock under which the snapshot is replaced.
    """

    def __init__(self, searcher: AuditedSearcher[S], reader: Reader, writer: W | None, changing: RLock) -> None:
        self._searcher, self._reader, self._writer, self._changing = searcher, reader, writer, changing

    @property
    def state(self) -> S:
        """The snapshot of the next search."""
        return self._searcher.state

    @property
    def busy(self) -> bool:
        """Whether a search would wait for its turn."""
        return self._searcher.turns.busy

    def tell(self, listener: Listener | None) -> None:
        """Let a listener hear of every search; None for nobody."""
        self._searcher.watch = listener

    def nearest_exactly(self, state: S, query: Floats, k: int, where: str | None) -> Floats:
        """Return the distances of the `k` nearest of a query in a snapshot, for certain."""
        return self._searcher.nearest_exactly(state, query, k, where)

    @abstractmethod
    def efforts(self, state: S) -> Any:
        """Return the efforts of a snapshot's searches: one object, until they are learnt anew."""

    @abstractmethod
    def plain(self, efforts: Any) -> Any:
        """Return efforts as plain values, to be told from others by a checksum."""

    @abstractmethod
    def tune(
        self, state: S, queries: Sequence[Floats], note: Callable[[Any], None], stopped: Callable[[], bool]
    ) -> bool:
        """Learn efforts from queries, and give them to the index unless it has others by then; return whether it did.

        `note` takes the efforts before they are made durable. Nothing is given once `stopped`.
        """


class AuditedVectors(AuditedIndex[IndexSnapshot, IndexWriter]):
    """The searches of a ZoomIndex."""

    def efforts(self, state: IndexSnapshot) -> dict[int, Any]:
        return state.calibration.efforts

    def plain(self, efforts: dict[int, Any]) -> Any:
        return Calibration(0, efforts, {}).to_json()["efforts"]

    def tune(
        self, state: IndexSnapshot, queries: Sequence[Floats], note: Callable[[Any], None], stopped: Callable[[], bool]
    ) -> bool:
        """Tune as in :class:`AuditedIndex`.

        It passes over all vectors, as :meth:`ZoomIndex.tune <memhier.ann.ZoomIndex.tune>` does.
        """
        if not any(part.alive_count for part in state.parts) or not self._may_tune(state):
            return False
        measured = measure(state, self._reader, np.stack(queries))
        with self._changing:
            now, before = self._searcher.state, state.calibration
            if now.calibration.efforts is not before.efforts or not self._may_tune(now) or stopped():
                return False
            # A later rebuild may undo it, as the audit will find out.
            tuned = replace(now, calibration=now.calibration.measured_anew(measured, before))
            note(tuned.calibration.efforts)
            if self._writer is not None:
                self._writer.keep_tuning(tuned)
            self._searcher.state = tuned
        return True

    def _may_tune(self, state: IndexSnapshot) -> bool:
        """Whether nothing is under way that tuning would undo, or that makes the calibration anew."""
        return self._writer is None or (not self._writer.prepared and self._writer.renewal(state) not in _BUSY)
