"""When parts are joined, and when all of an index had better be made anew."""

import numpy as np

from memhier.ann.zoom.preview.clusters import LONGEST
from memhier.ann.zoom.renewal.merge import merged_bytes
from memhier.ann.zoom.search.search import Snapshot

__all__ = ["first_to_join", "outgrown"]

_JOIN = 2  # a part is joined with those after it once they come to half of it
_LONG = 2 * LONGEST  # times the mean: how long a list may grow
_LONG_CHANGES = 0.05  # of the vectors, before which a long list is not worth a compaction


def first_to_join(
    state: Snapshot, earliest: int, room: int, *, strings: int, with_rows: bool, most: int | None = None
) -> int:
    """Return the part, from number `earliest` on, from which on all are written anew.

    So sizes fall by a factor from part to part, and no part holds more rows that were removed than others; as far as
    there is room for the new part beside those that it is made of, which are searched until it is there.

    Parameters
    ----------
    state
        Whose parts they are.
    room
        Bytes of DRAM.
    strings, with_rows
        As in `memhier.ann.zoom.renewal.merge.merged_bytes`.
    most
        Rows to write; None for any number.
    """
    parts = state.parts
    first, rows = len(parts), 0
    for number in range(len(parts) - 1, earliest - 1, -1):
        part = parts[number]
        if most is not None and sum(each.alive_count for each in parts[number:]) > most:
            break
        if merged_bytes(parts[number:], state.preview, strings, with_rows) > room:
            break
        if (rows and len(part) <= _JOIN * rows) or 2 * part.alive_count < len(part):
            first = number
        rows += len(part)
    return first


def outgrown(state: Snapshot) -> bool:
    """Return whether so much has changed, or a list grown so long, that the index had better be made anew."""
    calibration = state.calibration
    if calibration.worn or calibration.tuned or calibration.changes <= _LONG_CHANGES * calibration.vectors:
        return calibration.worn
    lengths = np.sum([np.diff(part.arrays.starts) for part in state.parts], axis=0)
    return bool(np.max(lengths, initial=0) > _LONG * np.mean(lengths))
