"""The build of an index: sample, train, assign and encode, calibrate, write in list order, commit."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from memhier.ann.zoom.calibrate import Calibration, NeighbourTruth, calibrate
from memhier.ann.zoom.fullview import record_dtype, write_records
from memhier.ann.zoom.layout import Layout, plan_layout
from memhier.ann.zoom.preview import Preview, PreviewTrainer, training_rows
from memhier.ann.zoom.source import VectorSource, open_source
from memhier.ann.zoom.space import Metric, PreviewSpace, fit_space
from memhier.reader import PAGE_BYTES, Reader
from memhier.rows import RowsWriter
from memhier.store import Store, Transaction

__all__ = ["KIND", "VERSION", "write_index"]

KIND = "zoom-index"
VERSION = 1

Ints: TypeAlias = npt.NDArray[np.int64]


def write_index(
    store: Store, vectors: object, ids: object, metric: Metric, dram: int, seed: int, progress: bool
) -> None:
    """Build an index of `vectors` and commit it to the empty `store`."""
    scratch = store.path / "tmp"
    source = open_source(vectors, scratch)
    checked_ids = _check_ids(ids, source.count)
    record_bytes = record_dtype(source.dtype, source.dimension).itemsize
    layout = plan_layout(source.count, source.dimension, metric, record_bytes, _reader_bytes(scratch), dram)
    space = fit_space(source, metric, layout.padded)
    with _progress(progress, source.count) as bar:
        trainer = _train(source, space, layout, seed)
        truth = NeighbourTruth(source.count, seed)
        lists, codes = _encode(source, space, layout, trainer, truth, bar)
        order = np.argsort(lists, kind="stable")
        positions = np.empty(source.count, np.int64)
        positions[order] = np.arange(source.count)
        starts = np.concatenate([[0], np.cumsum(np.bincount(lists, minlength=layout.lists))]).astype(np.int64)
        preview = Preview(trainer.router, trainer.codebook(), starts, codes[order])
        bar.set_description("calibrate")
        effort = calibrate(preview, truth, positions)
        with store.begin() as tx:
            bar.set_description("write")
            rows = RowsWriter(tx, "vectors", record_bytes)
            for step in write_records(rows, source, checked_ids, positions, scratch):
                bar.update(step)
            rows.finish()
            _write_preview(tx, preview)
            tx.put("index", _describe(source, space, layout, effort, dram, seed))
            tx.commit()
    for leftover in scratch.iterdir():  # a staged iterator
        leftover.unlink()


def _reader_bytes(scratch: Path) -> int:
    """Return the DRAM of a reader that has read: its buffers are made at the first read, and differ by engine."""
    path = scratch / "one-page"
    path.write_bytes(bytes(PAGE_BYTES))
    with Reader() as reader:
        reader.read(reader.add(path), [0], PAGE_BYTES)
        held = reader.memory_bytes
    path.unlink()
    return held


def _train(source: VectorSource, space: PreviewSpace, layout: Layout, seed: int) -> PreviewTrainer:
    wanted = min(source.count, training_rows(layout.lists, layout.padded))
    rows = np.sort(np.random.default_rng(seed).permutation(source.count)[:wanted])
    return PreviewTrainer(space.vectors(source.take(rows)), layout.lists, layout.width, seed)


def _encode(
    source: VectorSource, space: PreviewSpace, layout: Layout, trainer: PreviewTrainer, truth: NeighbourTruth, bar: Any
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]:
    """Return the list and the code of every vector, and let `truth` see them all on the way."""
    lists = np.empty(source.count, np.int32)
    codes = np.empty((source.count, layout.code_bytes), np.uint8)
    # The sampled vectors act as queries, so they go through the queries' map.
    truth.queries = space.queries(source.take(truth.rows).astype(np.float32))
    bar.set_description("encode")
    for start, block in source.blocks():
        mapped = space.vectors(block)
        stop = start + len(block)
        lists[start:stop] = trainer.assign(mapped)
        codes[start:stop] = trainer.encode(mapped, lists[start:stop])
        truth.add(start, mapped)
        bar.update(len(block))
    return lists, codes


def _write_preview(tx: Transaction, preview: Preview) -> None:
    for name, data in (
        ("codes", preview.codes),
        ("starts", preview.starts),
        ("codebook", preview.codebook),
        ("router", preview.router.save()),
    ):
        tx.segment(name).append(np.ascontiguousarray(data).view(np.uint8).data)


def _describe(
    source: VectorSource, space: PreviewSpace, layout: Layout, effort: Calibration, dram: int, seed: int
) -> bytes:
    return json.dumps(
        {
            "version": VERSION,
            "count": source.count,
            "dtype": source.dtype.name,
            "dram": dram,
            "seed": seed,
            "lists": layout.lists,
            "width": layout.width,
            "space": asdict(space),
            "effort": asdict(effort),
        }
    ).encode()


def _check_ids(ids: object, count: int) -> Ints:
    if ids is None:
        return np.arange(count, dtype=np.int64)
    array = np.asarray(ids)
    if array.dtype.kind not in "iu" or array.ndim != 1:
        raise TypeError(f"ids has dtype {array.dtype} and shape {array.shape}: expected integers of shape [n]")
    if len(array) != count:
        raise ValueError(f"ids has {len(array)} entries for {count} vectors: expected one for each")
    if array.dtype == np.uint64 and (array > np.iinfo(np.int64).max).any():
        raise ValueError(f"ids holds {array.max()}: expected values below 2**63")
    values, counts = np.unique(array, return_counts=True)
    if (counts > 1).any():
        raise ValueError(f"ids holds {values[counts > 1][0]} more than once: every vector needs an id of its own")
    return array.astype(np.int64)


@contextmanager
def _progress(shown: bool, count: int) -> Iterator[Any]:
    # Every vector passes twice: once to be encoded, once to be written.
    with tqdm(total=2 * count, unit=" vectors", unit_scale=True, disable=not shown, desc="train") as bar:
        yield bar
