"""Efforts measured anew for the vectors that there are, while lists and codes stay.

Vectors come and go, and those that come may be unlike those measured, as where data drift: then efforts no longer keep
the recall that they declare. So once enough has changed, some vectors play the queries again: some of all, and as many
of the parts written last, as queries often look for these. Each kind is measured alone, and the stricter effort counts.

A thread does it beside the commits, and hands its result to the searches that follow. A commit that finds more than a
tenth changed, which no thread measures, does it by itself. Both take DRAM beyond the budget, so a commit that must not
compact does neither.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from threading import RLock
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.zoom.calibration.calibration import Calibration
from memhier.ann.zoom.calibration.mixtures import calibrate_newest, play_queries
from memhier.ann.zoom.pauses import pause
from memhier.ann.zoom.preview.scan_arguments import positions_of
from memhier.ann.zoom.renewal.beside import Beside, Caller
from memhier.ann.zoom.renewal.merge import alive_blocks
from memhier.ann.zoom.renewal.renewal import DEPTH, FEWEST, first_of_newest, open_parts
from memhier.ann.zoom.storage.snapshot import IndexSnapshot
from memhier.io.reader import Reader
from memhier.store.store import Store

__all__ = ["Measured", "Measurements"]

_QUERIES = 160  # of each kind
_ROWS = 1 << 16  # looked at together
_SEED = 5
_POLL_SECONDS = 0.01

Ints: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Measured:
    """A calibration measured anew.

    Attributes
    ----------
    before, calibration
        The one that it replaces, and itself.
    """

    before: Calibration
    calibration: Calibration

    def for_later(self, now: Calibration) -> Calibration:
        """Return the calibration for a later snapshot, which has `now` this one.

        What has changed in between still counts. If lists, codes or efforts are others by now, `now` stays.
        """
        return now.measured_anew(self.calibration, self.before) if now.efforts is self.before.efforts else now

    def drop(self) -> None:
        """Nothing is left of it."""


class Measurements:
    """Measures beside the commits, by a thread. For the thread of the writer.

    Parameters
    ----------
    store
        Holds the parts.
    caller
        The writer; the thread waits while it is busy.
    lock
        Held by the thread that changes the index.

    Attributes
    ----------
    hand_over
        Takes the result in the thread that measured, which holds the lock; otherwise it waits for :meth:`take`.
    """

    def __init__(self, store: Store, caller: Caller, lock: RLock) -> None:
        self._store, self._lock = store, lock
        self.hand_over: Callable[[Measured], None] | None = None
        self._work: Beside[Measured] = Beside("zoom-measure", caller)

    def begin(self, state: IndexSnapshot) -> None:
        """Measure a snapshot, if that is due and nothing else is under way."""
        if self._work.occupied or not state.calibration.stale or state.count <= FEWEST:
            return
        reader = Reader(depth=DEPTH)  # no search uses it
        try:
            self._work.start(partial(_measure_with, self._opened(state, reader), reader, self._lock, self.hand_over))
        except BaseException:
            reader.close()
            raise

    def measure(self, state: IndexSnapshot) -> Measured:
        """Measure a snapshot now."""
        with Reader(depth=DEPTH) as reader:  # reads many lists together, for which that of the index has no room
            return _measure_anew(self._opened(state, reader), reader)

    def _opened(self, state: IndexSnapshot, reader: Reader) -> IndexSnapshot:
        return replace(state, parts=tuple(open_parts(self._store, state.parts, reader, state.schema)))

    def is_overdue(self, state: IndexSnapshot) -> bool:
        """Return whether so much has changed that efforts are to be measured at once, as no thread does."""
        now = state.calibration
        return now.stale and now.changed_much and not self._work.occupied and state.count > FEWEST

    def take(self) -> Measured | None:
        """Return the result; None if there is none yet. Or raise the error that ended the work."""
        return self._work.take()

    def stop(self) -> None:
        """End the work, after the step that is under way, and forget its result."""
        self._work.stop()


def _measure_anew(state: IndexSnapshot, reader: Reader) -> Measured:
    """Return the efforts for vectors of a snapshot, which are read once. They do not depend on earlier efforts.

    Raises
    ------
    OSError
        When a read fails.
    """
    before, counts = state.calibration, [part.alive_count for part in state.parts]
    random = np.random.default_rng([_SEED, before.all_changes])
    first = first_of_newest(state.parts)
    newest = _some_rows(state, first, random) if first else np.empty(0, np.int64)
    others = np.setdiff1d(_some_rows(state, 0, random), newest)
    own = np.sort(np.concatenate([newest, others]))
    vectors = state.vectors_at(own, reader).astype(np.float32)
    truth = play_queries(state.space, vectors, own, sum(counts), int(random.integers(2**31)))
    for positions, block in alive_blocks(state.parts, state.dtype, reader):
        pause()
        truth.add(positions, state.space.vectors(block))
    truth.finish()
    made = calibrate_newest(state.preview, state.findable.coded, truth, state.row_bytes, np.isin(own, newest))
    return Measured(before, made)


def _measure_with(
    state: IndexSnapshot, reader: Reader, lock: RLock, hand_over: Callable[[Measured], None] | None
) -> Measured:
    with reader:
        measured = _measure_anew(state, reader)
    while not lock.acquire(timeout=_POLL_SECONDS):
        pause()
    try:
        if hand_over is not None:
            hand_over(measured)
    finally:
        lock.release()
    return measured


def _some_rows(state: IndexSnapshot, first: int, random: np.random.Generator) -> Ints:
    """Return positions of some rows that are alive, ascending, from the parts from number `first` on."""
    counts = [part.alive_count for part in state.parts[first:]]
    chosen = np.sort(random.choice(sum(counts), min(sum(counts), _QUERIES), replace=False))
    found, before = [], 0
    for number, part in enumerate(state.parts[first:], first):
        for start in range(0, len(part), _ROWS):
            rows = np.arange(start, min(start + _ROWS, len(part)))
            rows = rows[part.is_alive(rows)]
            here = chosen[(chosen >= before) & (chosen < before + len(rows))] - before
            found.append(positions_of(number, rows[here]))
            before += len(rows)
    return np.concatenate(found)
