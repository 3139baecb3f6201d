"""Parts that are written anew beside the commits: joined, or for lists, codes and calibration that are made anew.

Whoever asks for it goes on changing the index. The parts that are replaced stay meanwhile, and vectors are removed from
them; where each row came from tells later which of the new ones are gone. Parts that come while lists and codes are
made are coded for these in turn, until so few are left that a commit can do it. What is written here is staged: no
catalog names it before that commit, and if there never is one, nothing has happened.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from memhier.ann.zoom.calibration.calibrate import Calibration
from memhier.ann.zoom.construction.construct import construct
from memhier.ann.zoom.filters.attributes import Schema
from memhier.ann.zoom.filters.bitmaps import BitmapCache, Words, pack
from memhier.ann.zoom.preview.layout import Layout
from memhier.ann.zoom.preview.preview import Preview
from memhier.ann.zoom.preview.space import PreviewSpace
from memhier.ann.zoom.renewal.carried import write_carried
from memhier.ann.zoom.renewal.merge import PartsSource, Spread, merge_parts, spread_of
from memhier.ann.zoom.renewal.pauses import pause
from memhier.ann.zoom.renewal.spill import coded
from memhier.ann.zoom.storage.catalog import write_preview
from memhier.ann.zoom.storage.fullview import RowWriter, raw_rows
from memhier.ann.zoom.storage.part import Part, PartArrays, PartFiles
from memhier.io.reader import PAGE_BYTES, Reader
from memhier.store.store import Staging, Store, Transaction

__all__ = ["DEPTH", "WRITTEN_BYTES", "Made", "Renewed", "Task", "follow", "join", "recoded", "renew"]

DEPTH = 16  # reads in flight
WRITTEN_BYTES = 64  # of a row of an attribute that is being written


@dataclass(frozen=True, slots=True)
class Task:
    """Which parts to write anew, and how.

    Attributes
    ----------
    store
        Where they are and what comes is staged.
    name
        Of the new part.
    parts
        As they are now.
    preview, space
        That the parts are coded with.
    dtype, schema
        Of vectors and attributes.
    work_bytes, buffer_bytes
        What may be held meanwhile, and of it for what waits to be written of each segment.
    """

    store: Store
    name: str
    parts: tuple[Part, ...]
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

    @property
    def written_rows(self) -> int:
        """Rows of attributes that are on their way at a time."""
        return max(1, self.work_bytes // WRITTEN_BYTES)

    @contextmanager
    def opened(self) -> Iterator[tuple[list[Part], Reader]]:
        """Open the parts with a reader of their own, so that nobody else waits for these reads or closes the files."""
        with Reader(depth=DEPTH) as reader:
            texts = any(part.texts is not None for part in self.parts)
            files = PartFiles(self.store, reader, BitmapCache(1), texts, PAGE_BYTES)
            parts = [
                files.open(part.name, part.arrays, self.row_bytes, self.schema, part.alive, part.alive_name)
                for part in self.parts
            ]
            yield parts, reader


@dataclass(frozen=True, slots=True)
class Made:
    """A part that is written, and that no transaction has taken over.

    Attributes
    ----------
    name
        Of the part.
    replaced
        Names of the parts that it takes the place of.
    entry
        The catalog's, of a part of which nothing was removed.
    staging
        Its segments, finished.
    rows
        Integers ``[n]``: number of each row when the rows of the replaced parts are counted, with those removed.
    spread
        How far its vectors lie from their centroids.
    """

    name: str
    replaced: tuple[str, ...]
    entry: dict[str, Any]
    staging: Staging
    rows: npt.NDArray[Any]
    spread: Spread

    def alive(self, parts: Sequence[Part]) -> Words | None:
        """Return which of its rows are left when these are the parts that it replaces; None for all."""
        if not self.rows.size or all(part.alive is None for part in parts):
            return None
        left = np.concatenate([part.is_alive(np.arange(len(part))) for part in parts])[self.rows]
        return None if left.all() else pack(left)

    def drop(self) -> None:
        """Remove its segments."""
        self.staging.drop()


@dataclass(frozen=True, slots=True)
class Renewed:
    """An index made anew, as far as its parts have come.

    Attributes
    ----------
    parts
        What takes the place of parts there were, in their order.
    preview, calibration
        Lists and codes, and what a declared recall takes.
    staging
        The segments of lists and codes, finished.
    changes
        Vectors that had been added and removed when it was begun.
    rounds
        How often parts that came meanwhile were made up for.
    """

    parts: tuple[Made, ...]
    preview: Preview
    calibration: Calibration
    staging: Staging
    changes: int
    rounds: int = 0

    @property
    def replaced(self) -> tuple[str, ...]:
        """Names of the parts that are replaced."""
        return tuple(name for made in self.parts for name in made.replaced)

    def drop(self) -> None:
        """Remove its segments."""
        self.staging.drop()
        for made in self.parts:
            made.drop()


def join(task: Task) -> Made:
    """Write the parts as one, in the lists and codes that they have."""
    with task.store.stage(task.buffer_bytes) as staging, task.opened() as (parts, reader):
        writer = RowWriter(staging.segment(f"{task.name}-rows"), task.row_bytes)
        merged = merge_parts(parts, task.preview, reader, writer, task.work_bytes, True)
        assert merged.rows is not None
        return _finished(task, parts, staging, merged.arrays, task.preview, merged.rows)


def renew(task: Task, layout: Layout, seed: int, changes: int) -> Renewed:
    """Write the parts as one, with lists, codes and calibration made for what they hold."""
    store, scratch = task.store, task.store.path / "tmp"
    with store.stage(task.buffer_bytes) as staging, store.stage(task.buffer_bytes) as lists, task.opened() as opened:
        parts, reader = opened
        source = PartsSource(parts, task.dtype, task.space.dimension, reader)
        try:
            made = construct(source, source.ids, task.space, layout, "rabitq", seed, scratch, tqdm(disable=True))
            for _ in made.rows.write(RowWriter(staging.segment(f"{task.name}-rows"), task.row_bytes)):
                pause()
        finally:
            for leftover in scratch.glob("bucket-*"):
                leftover.unlink()
        rows = source.rows[made.order]
        part = _finished(task, parts, staging, made.arrays, made.preview, rows)
        write_preview(lists, made.preview, radii=False)
        lists.finish()
        return Renewed((part,), made.preview, made.calibration, lists, changes)


def follow(task: Task, renewed: Renewed) -> Renewed:
    """Write parts that came meanwhile as one more, for the lists and codes of `renewed`."""
    try:
        with task.store.stage(task.buffer_bytes) as staging, task.opened() as (parts, reader):
            arrays, rows = recoded(staging, task, parts, renewed.preview, reader)
            part = _finished(task, parts, staging, arrays, renewed.preview, rows)
    except BaseException:
        renewed.drop()
        raise
    return replace(renewed, parts=(*renewed.parts, part), rounds=renewed.rounds + 1)


def recoded(
    tx: Transaction | Staging, task: Task, parts: Sequence[Part], preview: Preview, reader: Reader
) -> tuple[PartArrays, npt.NDArray[Any]]:
    """Write the vectors of parts for another preview; return the arrays that are theirs there, and where rows were.

    Parameters
    ----------
    parts, reader
        Those of the task, opened with this reader.
    """
    source = PartsSource(parts, task.dtype, task.space.dimension, reader)

    def take(rows: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        return source.take_any(rows)

    arrays, order = coded(take, source.ids, preview, task.space, task.row_bytes, task.work_bytes)
    writer = RowWriter(tx.segment(f"{task.name}-rows"), task.row_bytes)
    step = max(1, task.work_bytes // (4 * task.row_bytes))
    for start in range(0, len(order), step):
        writer.append(raw_rows(source.take_any(order[start : start + step])))
    writer.finish()
    return arrays, source.rows[order]


def _finished(
    task: Task,
    parts: Sequence[Part],
    staging: Staging,
    arrays: PartArrays,
    preview: Preview,
    rows: npt.NDArray[Any],
) -> Made:
    """Write what else there is of a part, and make it durable."""
    arrays.write(staging, task.name)
    write_carried(staging, task.name, parts, task.schema, rows, task.written_rows)
    staging.finish()
    replaced = tuple(part.name for part in task.parts)
    narrow = rows.astype(np.uint32 if sum(map(len, task.parts)) <= 2**32 else np.int64)
    return Made(task.name, replaced, arrays.about(task.name), staging, narrow, spread_of(arrays, preview))
