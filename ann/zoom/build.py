"""The build of an index: sample, train, assign, encode, calibrate, write in list order, commit."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from memhier.ann.zoom.attributes import Schema, merge_schema, write_attributes
from memhier.ann.zoom.calibrate import Calibration, calibrate
from memhier.ann.zoom.catalog import Description, write_preview
from memhier.ann.zoom.clusters import training_rows
from memhier.ann.zoom.code_scan import CodedPart
from memhier.ann.zoom.fullview import RowWriter, SortedRows, raw_rows
from memhier.ann.zoom.layout import Layout, plan_layout
from memhier.ann.zoom.part import PartArrays, compact_ids
from memhier.ann.zoom.preview import Coding, Preview, train_preview
from memhier.ann.zoom.source import VectorSource, open_source
from memhier.ann.zoom.space import Metric, PreviewSpace, fit_space
from memhier.ann.zoom.truth import QUERIES, NeighbourTruth
from memhier.reader import PAGE_BYTES, Reader
from memhier.store import Store

__all__ = ["BuildOptions", "write_index"]

_BOOK_ROWS = 8192  # of the sample, that a code book is learned from, at least
_SAMPLE_BLOCK = 8192
_HELD_OUT_MOST = 8  # one vector in as many, at most, is kept from training to play a query

Ints: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """What the user chose."""

    metric: Metric
    coding: Coding
    dram: int
    grow_to: int
    seed: int
    progress: bool


def write_index(store: Store, vectors: object, ids: Ints | None, attributes: Any, options: BuildOptions) -> None:
    """Build an index of `vectors` and commit it to the empty `store`."""
    scratch = store.path / "tmp"
    with open_source(vectors, scratch) as source:
        _write_source(store, source, ids, attributes, options, scratch)
    for leftover in scratch.iterdir():  # a staged iterator
        leftover.unlink()


def _write_source(
    store: Store, source: VectorSource, ids: Ints | None, attributes: Any, options: BuildOptions, scratch: Path
) -> None:
    names = np.arange(source.count, dtype=np.int64) if ids is None else ids
    if len(names) != source.count:
        raise ValueError(f"ids has {len(names)} entries for {source.count} vectors: expected one for each")
    schema: Schema = {} if attributes is None else merge_schema({}, attributes, source.count)
    stored_ids = compact_ids(names)
    row_bytes = source.dtype.itemsize * source.dimension
    layout = plan_layout(
        max(source.count, options.grow_to), source.dimension, options.metric, options.coding, row_bytes,
        stored_ids.itemsize, _reader_bytes(scratch), options.dram,
    )  # fmt: skip
    space = fit_space(source, options.metric, layout.padded)
    held_out = _held_out(source.count, options.seed)
    with _progress(options.progress, source.count) as bar:
        preview = _train(source, space, layout, held_out, options)
        bar.set_description("assign")
        lists, cells = np.empty(source.count, np.int32), np.empty(source.count, np.uint8)
        # The held-out vectors act as queries, so they go through the queries' map.
        queries = space.queries(source.take(held_out).astype(np.float32))
        truth = NeighbourTruth(queries, held_out, source.count)
        assigner = preview.assigner()
        for start, block in source.blocks():
            mapped = space.vectors(block)
            turned, part = preview.turn(mapped), slice(start, start + len(block))
            lists[part] = assigner.assign(turned)
            cells[part] = preview.cells(turned, lists[part])
            truth.add(np.arange(start, start + len(block)), mapped)
            bar.update(len(block))
        positions, starts = _list_order(lists, cells, layout.lists)
        truth.finish(positions)
        bar.set_description("encode")
        rows = SortedRows(source.count, source.dtype.itemsize * source.dimension, scratch)
        preview, codes, numbers = _encode(source, space, preview, lists, positions, starts, rows, bar)
        bar.set_description("calibrate")
        calibration = calibrate(preview, [CodedPart(starts, codes, numbers)], truth)
        del truth, lists, cells
        ordered = np.empty_like(stored_ids)
        ordered[positions] = stored_ids
        arrays = PartArrays(starts, codes, numbers, ordered)
        _commit(
            store,
            source,
            space,
            layout,
            preview,
            calibration,
            arrays,
            rows,
            positions,
            schema,
            attributes,
            options,
            bar,
        )


def _commit(
    store: Store,
    source: VectorSource,
    space: PreviewSpace,
    layout: Layout,
    preview: Preview,
    calibration: Calibration,
    arrays: PartArrays,
    rows: SortedRows,
    positions: Ints,
    schema: Schema,
    attributes: Any,
    options: BuildOptions,
    bar: Any,
) -> None:
    about = Description(
        dtype=source.dtype.name,
        space=space,
        coding=options.coding,
        lists=layout.lists,
        book_bytes=preview.book.code_bytes,
        dram=options.dram,
        searches=layout.searches,
        seed=options.seed,
        schema=schema,
        next_part=1,
        next_id=max(int(arrays.ids.max()) + 1, 0),
        trained_on=source.count,
        calibration=calibration,
        parts=[{"name": "p0", "rows": source.count, "ids": arrays.ids.dtype.str, "alive": None}],
    )
    with store.begin() as tx:
        bar.set_description("write")
        for step in rows.write(RowWriter(tx.segment("p0-rows"), source.dtype.itemsize * source.dimension)):
            bar.update(step)
        arrays.write(tx, "p0")
        write_preview(tx, preview)
        if schema:
            order = np.empty(source.count, np.int64)
            order[positions] = np.arange(source.count)
            write_attributes(tx, "p0-a-", schema, attributes, order)
        tx.put("index", json.dumps(about.to_json()).encode())
        tx.commit()


def _reader_bytes(scratch: Path) -> int:
    """Return the DRAM of a reader that has read: its buffers are made at the first read, and differ by engine."""
    path = scratch / "one-page"
    path.write_bytes(bytes(PAGE_BYTES))
    with Reader() as reader:
        reader.read(reader.add(path), [0], PAGE_BYTES)
        held = reader.planned_bytes
    path.unlink()
    return held


def _held_out(count: int, seed: int) -> Ints:
    """Return the vectors that play queries, ascending; few of a small index, which has to be trained on the rest."""
    wanted = min(QUERIES, max(count // _HELD_OUT_MOST, min(count, 64)))
    chosen = np.random.default_rng([seed, 1]).permutation(count)[:wanted]
    return np.sort(chosen).astype(np.int64)


def _train(source: VectorSource, space: PreviewSpace, layout: Layout, held_out: Ints, options: BuildOptions) -> Preview:
    # Lists that were made with a query in them would find its neighbours all too well.
    random = np.random.default_rng(options.seed)
    wanted = training_rows(layout.lists, layout.padded, _BOOK_ROWS)
    spare = source.count - len(held_out)
    if spare < max(layout.lists, 2 * len(held_out)):
        rows = np.arange(source.count)  # too few to leave any out
    else:
        drawn = random.permutation(source.count)[: wanted + len(held_out)]
        rows = drawn[~np.isin(drawn, held_out)]
    rows = np.sort(rows[:wanted])
    wanted = len(rows)
    sample = np.empty((wanted, layout.padded), np.float32)
    for start in range(0, wanted, _SAMPLE_BLOCK):  # its own copies are in double precision
        part = slice(start, start + _SAMPLE_BLOCK)
        sample[part] = space.vectors(source.take(rows[part]))
    return train_preview(sample, layout.lists, options.coding, layout.code_bytes, options.seed, rotate=layout.rotate)


def _list_order(lists: npt.NDArray[np.int32], cells: npt.NDArray[np.uint8], count: int) -> tuple[Ints, Ints]:
    """Return the position of each vector in list order, and where the lists start."""
    positions = np.empty(len(lists), np.int64)
    positions[np.lexsort((cells, lists))] = np.arange(len(lists))
    starts = np.concatenate([[0], np.cumsum(np.bincount(lists, minlength=count))]).astype(np.int64)
    return positions, starts


def _encode(
    source: VectorSource,
    space: PreviewSpace,
    preview: Preview,
    lists: npt.NDArray[np.int32],
    positions: Ints,
    starts: Ints,
    rows: SortedRows,
    bar: Any,
) -> tuple[Preview, npt.NDArray[np.uint8], npt.NDArray[np.float16]]:
    """Return the preview with its radii, and all codes in list order; stage the vectors for writing."""
    codes = np.empty((source.count, preview.book.code_bytes), np.uint8)
    numbers = np.empty((3 if preview.coding == "rabitq" else 0, source.count), np.float16)
    squared = np.zeros(preview.lists)
    for start, block in source.blocks():
        part = slice(start, start + len(block))
        place = positions[part]
        codes[place], numbers[:, place], radii = preview.encode(preview.turn(space.vectors(block)), lists[part])
        squared += np.bincount(lists[part], radii, preview.lists)
        rows.add(place, raw_rows(block))
        bar.update(len(block))
    return preview.with_radii(squared, np.diff(starts)), codes, numbers


@contextmanager
def _progress(shown: bool, count: int) -> Iterator[Any]:
    # Every vector passes three times: to its list, to its code, and to its place on SSD.
    with tqdm(total=3 * count, unit=" vectors", unit_scale=True, disable=not shown, desc="train") as bar:
        yield bar
