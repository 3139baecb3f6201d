"""The searches of an index of items as its audit needs them; see `memhier.ann.zoom.audit.audited`."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from threading import RLock
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.multivector.coding.calibration import LearntEfforts
from memhier.ann.multivector.searcher import ItemSearcher
from memhier.ann.multivector.storage.snapshot import ItemSnapshot
from memhier.ann.multivector.tuning import can_tune, tuned
from memhier.ann.multivector.writer import ItemWriter
from memhier.ann.zoom.audit.audited import Listener
from memhier.io.reader import Reader

__all__ = ["AuditedItems"]

Floats: TypeAlias = npt.NDArray[np.float32]


class AuditedItems:
    """The searches of a MultiVectorIndex; the distance of an item is its negative score.

    Parameters
    ----------
    searcher, reader, writer
        Of the index; `writer` is None where it is read only.
    changing
        The lock under which the snapshot is replaced.
    """

    def __init__(self, searcher: ItemSearcher, reader: Reader, writer: ItemWriter | None, changing: RLock) -> None:
        self._searcher, self._reader, self._writer, self._changing = searcher, reader, writer, changing

    @property
    def state(self) -> ItemSnapshot:
        """The snapshot of the next search."""
        return self._searcher.state

    @property
    def busy(self) -> bool:
        """Whether all turns are taken."""
        return self._searcher.turns.busy

    def tell(self, listener: Listener | None) -> None:
        """Let a listener hear of every search; None for nobody."""
        self._searcher.watch = listener

    def nearest_exactly(self, state: ItemSnapshot, query: Floats, k: int, where: str | None) -> Floats:
        """Return the distances of the `k` nearest of a query in a snapshot, for certain."""
        return self._searcher.nearest_exactly(state, query, k, where)

    def efforts(self, state: ItemSnapshot) -> Sequence[LearntEfforts]:
        """Return the efforts of a snapshot's searches."""
        return state.calibration.learnt

    def plain(self, efforts: Sequence[LearntEfforts]) -> Any:
        """Return efforts as plain values."""
        return [asdict(each) for each in efforts]

    def tune(
        self, state: ItemSnapshot, queries: Sequence[Floats], note: Callable[[Any], None], stopped: Callable[[], bool]
    ) -> bool:
        """Learn efforts from queries, and give them to the index unless it has others by then; return whether it did.

        It learns nothing where no class of queries has enough of them. It takes no turn, which it would keep from
        searches for a long time, and so the DRAM of one search more.
        """
        if not can_tune(state, queries):
            return False
        calibration = tuned(state, self._reader, queries)
        with self._changing:
            now = self._searcher.state
            if now.calibration.learnt is not state.calibration.learnt or stopped():
                return False
            note(calibration.learnt)
            if self._writer is not None:
                self._writer.keep_tuning(calibration)
            self._searcher.state = replace(now, calibration=calibration)
        return True
