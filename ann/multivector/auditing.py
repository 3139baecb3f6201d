"""The searches of an index of items as its audit needs them; see `memhier.ann.zoom.audit.audited`."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.multivector.coding.calibration import LearntEfforts
from memhier.ann.multivector.storage.snapshot import ItemSnapshot
from memhier.ann.multivector.tuning import can_tune, tuned
from memhier.ann.multivector.writer import ItemWriter
from memhier.ann.zoom.audit.audited import AuditedIndex

__all__ = ["AuditedItems"]

Floats: TypeAlias = npt.NDArray[np.float32]


class AuditedItems(AuditedIndex[ItemSnapshot, ItemWriter]):
    """The searches of a MultiVectorIndex; the distance of an item is its negative score."""

    def efforts(self, state: ItemSnapshot) -> Sequence[LearntEfforts]:
        return state.calibration.learnt

    def plain(self, efforts: Sequence[LearntEfforts]) -> Any:
        return [asdict(each) for each in efforts]

    def tune(
        self, state: ItemSnapshot, queries: Sequence[Floats], note: Callable[[Any], None], stopped: Callable[[], bool]
    ) -> bool:
        """Tune as in :class:`AuditedIndex`.

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
