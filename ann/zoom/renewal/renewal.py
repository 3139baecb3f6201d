"""Parts written anew beside the commits: joined, or with new lists, codes and calibration.

The index goes on changing meanwhile. The old parts stay, and vectors are removed from them; the origin of each new row
tells later which new rows are gone. Parts that are written while lists and codes are made are coded for these in turn,
until a commit can code the few that are left. All segments here are staged: no catalog names them before that commit,
and without it nothing has happened.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.zoom.calibration.added import some_of_added
from memhier.ann.zoom.calibration.calibration import Calibration
from memhier.ann.zoom.construction.construct import construct
from memhier.ann.zoom.construction.silent import SilentBar
from memhier.ann.zoom.filters.attributes import Schema
from memhier.ann.zoom.filters.bitmaps import BitmapCache, Words
from memhier.ann.zoom.pauses import pause
from memhier.ann.zoom.preview.clusters import pieces_of
from memhier.ann.zoom.preview.preview import Preview
from memhier.ann.zoom.preview.space import PreviewSpace
from memhier.ann.zoom.renewal.anew import Anew
from memhier.ann.zoom.renewal.merge import PartsSource, merge_parts, write_carried
from memhier.ann.zoom.renewal.spill import write_coded
from memhier.ann.zoom.storage.arrays import PartArrays, Spread
from memhier.ann.zoom.storage.catalog import write_preview
from memhier.ann.zoom.storage.fullview import RowWriter
from memhier.ann.zoom.storage.layout import IndexLayout
from memhier.ann.zoom.storage.part import IndexPart, PartFiles, without
from memhier.io.page_file import PAGE_BYTES
from memhier.io.reader import Reader
from memhier.store.store import Staging, Store, Transaction

__all__ = [
    "DEPTH", "FEWEST", "Made", "Renewed", "Task", "first_of_newest", "follow", "join", "open_parts", "renew",
    "write_recoded",
]  # fmt: skip

DEPTH = 16  # reads in flight
FEWEST = 128  # queries of a kind: fewer hardly tell of a recall of .99
_NEWEST = 0.05  # of the vectors, that the parts written last hold at least


@dataclass(frozen=True, slots=True)
class Task:
    """The parts to write anew, and how.

    Attributes
    ----------
    store
        Holds the parts; the new segments are staged in it.
    name
        Of the new part.
    parts
        The parts as they are now.
    preview, space
        The preview that they are coded with, and its space.
    dtype, schema
        Types of vectors and attributes.
    work_bytes, buffer_bytes
        DRAM for the work, and of it for the write buffer of each segment.
    """

    store: Store
    name: str
    parts: tuple[IndexPart, ...]
    preview: Preview
    space: PreviewSpace
    dtype: np.dtype[Any]
    schema: Schema
    work_bytes: int
    buffer_bytes: int

    @property
    def row_bytes(self) -> int:
        """Bytes of a vector on SSD."""
        return self.dtype.itemsize * self.space.dimension

    @contextmanager
    def opened(self) -> Iterator[tuple[list[IndexPart], Reader]]:
        """Open the parts with a reader of their own, which no search uses, and which keeps their files open."""
        with Reader(depth=DEPTH) as reader:
            parts = open_parts(self.store, self.parts, reader, self.schema)
            yield parts, reader


def open_parts(store: Store, parts: Sequence[IndexPart], reader: Reader, schema: Schema) -> list[IndexPart]:
    """Open parts with a reader that no search uses; it keeps their files open."""
    texts = any(part.texts is not None for part in parts)
    files = PartFiles(store, reader, BitmapCache(1), texts, PAGE_BYTES, PAGE_BYTES)
    return [
        files.open(part.name, part.arrays, part.row_bytes, schema, part.alive, part.alive_name, part.entry())
        for part in (part.read_by(reader) for part in parts)
    ]


def first_of_newest(parts: Sequence[IndexPart]) -> int:
    """Return the number of the first of the parts written last, which hold a twentieth of the vectors; 0 for all."""
    counts, first = [part.alive_count for part in parts], len(parts)
    while first and sum(counts[first:]) < max(_NEWEST * sum(counts), FEWEST):
        first -= 1
    return first


@dataclass(frozen=True, slots=True)
class Made:
    """A written part that no transaction has taken over.

    Attributes
    ----------
    name
        Of the part.
    replaced
        Names of the parts that it replaces.
    entry
        Its entry in the catalog, without removed rows.
    staging
        Its segments, finished.
    arrays
        Its codes, ids and lists, so that the commit which takes it over reads nothing; None where they stay on SSD.
    places
        Integers ``[m]``: its row for each row of the replaced parts, all of them counted; meaningless for removed ones.
    marks
        The bitmaps of rows alive in the replaced parts when it was begun.
    known
        The changes of attributes in the replaced parts then, as pairs of name and generation.
    spread
        The spread of its vectors; see `memhier.ann.zoom.storage.arrays.PartArrays.spread`.
    before
        That of the parts it replaces, where these have the same lists.
    """

    name: str
    replaced: tuple[str, ...]
    entry: dict[str, Any]
    staging: Staging
    arrays: PartArrays | None
    places: npt.NDArray[Any]
    marks: tuple[Words | None, ...]
    known: tuple[frozenset[tuple[str, int | None]], ...]
    spread: Spread
    before: Spread | None = None

    def alive(self, parts: Sequence[IndexPart]) -> Words | None:
        """Return the bitmap of rows that are still alive in `parts`, which it replaces; None for all.

        Its work is in proportion to the rows removed since it was begun, beside a pass over the bitmaps.
        """
        removed, first = [np.empty(0, np.int64)], 0
        for part, before in zip(parts, self.marks, strict=True):
            removed.append(first + part.removed_since(before))
            first += len(part)
        rows = self.places[np.concatenate(removed)].astype(np.int64)
        return without(None, int(self.entry["rows"]), rows) if len(rows) else None

    def drop(self) -> None:
        """Remove its segments."""
        self.staging.drop()


Renewed: TypeAlias = Anew[Made, Preview, Calibration]
"""An index made anew, as far as its parts are done."""


def join(task: Task) -> Made:
    """Write the parts as one, with the same lists and codes."""
    with task.store.stage(task.buffer_bytes) as staging, task.opened() as (parts, reader):
        writer = RowWriter(staging.segment(f"{task.name}-rows"), task.row_bytes)
        merged = merge_parts(parts, task.preview, reader, writer, task.work_bytes, True)
        assert merged.rows is not None
        merged.arrays.write(staging, task.name, task.preview)
        write_carried(staging, task.name, parts, task.schema, merged.rows, task.work_bytes)
        before: Spread = np.sum([part.arrays.spread(task.preview) for part in parts], axis=0)
        return replace(_made(task, staging, merged.arrays, task.preview, merged.rows), before=before)


def renew(task: Task, layout: IndexLayout, seed: int, changes: int) -> Renewed:
    """Write the parts as one, with lists, codes and calibration made for their vectors."""
    store, scratch = task.store, task.store.path / "tmp"
    with store.stage(task.buffer_bytes) as staging, store.stage(task.buffer_bytes) as lists, task.opened() as opened:
        parts, reader = opened
        source = PartsSource(parts, task.dtype, task.space.dimension, reader)
        try:
            newest = sum(part.alive_count for part in parts[first_of_newest(parts) or len(parts) :])
            made = construct(source, source.ids, task.space, layout, seed, scratch, SilentBar(), newest=newest)
            for _ in made.rows.write(RowWriter(staging.segment(f"{task.name}-rows"), task.row_bytes)):
                pause()
        finally:
            for leftover in scratch.glob("bucket-*"):
                leftover.unlink()
        rows = source.rows[made.order]
        made.arrays.write(staging, task.name, made.preview)
        write_carried(staging, task.name, parts, task.schema, rows, task.work_bytes)
        part = _made(task, staging, made.arrays.held(), made.preview, rows)
        write_preview(lists, made.preview, radii=False)
        lists.finish()
        return Renewed((part,), made.preview, made.calibration, lists, changes)


def follow(task: Task, renewed: Renewed) -> Renewed:
    """Write newer parts as one, with the lists and codes of `renewed`."""
    try:
        with task.store.stage(task.buffer_bytes) as staging, task.opened() as (parts, reader):
            arrays, rows, calibration = write_recoded(staging, task, parts, renewed, reader)
            part = _made(task, staging, arrays, renewed.book, rows)
    except BaseException:
        renewed.drop()
        raise
    return replace(renewed, parts=(*renewed.parts, part), calibration=calibration, rounds=renewed.rounds + 1)


def write_recoded(
    tx: Transaction | Staging, task: Task, parts: Sequence[IndexPart], renewed: Renewed, reader: Reader
) -> tuple[PartArrays, npt.NDArray[Any], Calibration]:
    """Write the parts of a task as one, with the codes of `renewed`; return its arrays, and where its rows come from.

    The calibration that it returns has measured them.

    Parameters
    ----------
    parts, reader
        The parts of the task, opened with this reader.
    """
    preview, calibration = renewed.book, renewed.calibration
    source = PartsSource(parts, task.dtype, task.space.dimension, reader)
    arrays, order = write_coded(tx, task.name, source, source.ids, preview, task.space, task.work_bytes)
    rows = source.rows[order]
    write_carried(tx, task.name, parts, task.schema, rows, task.work_bytes)
    if source.count:
        some = some_of_added(source, preview, task.space, task.work_bytes)
        calibration = calibration.written(some, preview, source.count)
    return arrays, rows, calibration


def _made(task: Task, staging: Staging, arrays: PartArrays, preview: Preview, rows: npt.NDArray[Any]) -> Made:
    """Finish the staged segments of a part; return the part.

    `rows` are the numbers of its rows when those of all the parts of the task are counted, removed ones included.
    """
    staging.finish()
    replaced, total = tuple(part.name for part in task.parts), sum(map(len, task.parts))
    places = np.zeros(total, np.uint32 if total <= 2**32 else np.int64)
    for some in pieces_of(len(rows)):
        places[rows[some]] = np.arange(some.start, some.stop)
    marks = tuple(part.alive for part in task.parts)
    known = tuple(
        frozenset((name, each.generation) for name, every in part.changes.items() for each in every)
        for part in task.parts
    )
    held = None if preview.on_ssd else arrays
    return Made(
        task.name, replaced, arrays.entry(task.name), staging, held, places, marks, known, arrays.spread(preview)
    )  # fmt: skip
