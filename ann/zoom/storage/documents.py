"""The records of documents at places of an index, in its parts and among the vectors that wait."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.zoom.preview.scan_arguments import split_positions
from memhier.ann.zoom.storage.fresh import Fresh
from memhier.ann.zoom.storage.ids import Located
from memhier.ann.zoom.storage.rows import RowPart
from memhier.io.ranges import CountedReads

__all__ = ["records_at"]

Ints: TypeAlias = npt.NDArray[np.int64]


def records_at(
    parts: Sequence[RowPart], fresh: Fresh, places: Located, work_bytes: int, reads: CountedReads
) -> Iterator[tuple[int, bytes, Path | None]]:
    """Yield the records at different places with their number, in any order; none for a place without documents.

    Beside each stands the file that holds it, None for a vector that waits.

    Parameters
    ----------
    work_bytes
        DRAM for the pages that are read together.
    reads
        Does the reads.
    """
    if fresh.records is not None:
        waiting = np.flatnonzero(places.fresh >= 0)
        for place, record in zip(waiting.tolist(), fresh.records[places.fresh[waiting]].tolist(), strict=True):
            yield place, record, None
    numbers, rows = split_positions(places.positions)
    for which, part in enumerate(parts):
        here = np.flatnonzero((numbers == which) & (places.positions >= 0))
        if part.records is None or not len(here):
            continue
        for place, record in part.records.read(rows[here], work_bytes, reads):
            yield int(here[place]), record, part.records.path
