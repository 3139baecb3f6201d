"""The build of an index: sample, train, assign, encode, calibrate, write in list order, commit."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from memhier.ann.zoom.construction.begun import stand_in, uncalibrated
from memhier.ann.zoom.construction.construct import construct
from memhier.ann.zoom.construction.silent import SilentBar
from memhier.ann.zoom.filters.attributes import Schema, as_columns, item_bytes, merged_schema, write_attributes
from memhier.ann.zoom.ids.stored_texts import in_order, text_pages, write_texts
from memhier.ann.zoom.payload.staged import StagedDocuments
from memhier.ann.zoom.payload.stored import write_records
from memhier.ann.zoom.preview.preview import Coding, Preview
from memhier.ann.zoom.preview.space import Metric, PreviewSpace, fit_space
from memhier.ann.zoom.source import VectorSource, open_source
from memhier.ann.zoom.storage.arrays import compact_dtype, compact_ids
from memhier.ann.zoom.storage.catalog import Description, write_preview
from memhier.ann.zoom.storage.fullview import RowWriter
from memhier.ann.zoom.storage.ids import Ids
from memhier.ann.zoom.storage.layout import IndexLayout, IndexSizes, fresh_bytes, index_reader, plan_layout
from memhier.arguments import counted
from memhier.io.page_file import PAGE_BYTES
from memhier.store.store import Store, Transaction

__all__ = ["BuildOptions", "reader_bytes", "text_pages_for", "write_index"]


Ints: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """The user's choices; and those of a plan, which builds a small index like a large one.

    Attributes
    ----------
    layout
        In place of the one that `dram` gives.
    bar
        In place of tqdm's progress bar: hears each phase (``set_description``) and the vectors done (``update``).
    """

    metric: Metric
    coding: Coding
    dram: int
    grow_to: int
    seed: int
    progress: bool
    layout: IndexLayout | None = None
    bar: Any = None


def write_index(
    store: Store, vectors: object, ids: Ids | None, attributes: Any, documents: Any, options: BuildOptions
) -> None:
    """Build an index of `vectors` and commit it to the empty `store`."""
    scratch = store.path / "tmp"
    with (
        StagedDocuments(store, documents, fresh_bytes(options.dram)) as staged,
        open_source(vectors, scratch, staged.take) as source,
    ):
        _write_source(store, source, ids, attributes, staged, options)
    for leftover in scratch.iterdir():  # a staged iterator
        leftover.unlink()


def _write_source(
    store: Store,
    source: VectorSource,
    ids: Ids | None,
    attributes: Any,
    documents: StagedDocuments,
    options: BuildOptions,
) -> None:
    scratch = store.path / "tmp"
    # Without ids, vectors have their numbers, which are held nowhere.
    names = Ids(np.empty(0, np.int64), None) if ids is None else ids
    if ids is not None and len(names) != source.count:
        raise ValueError(
            f"ids has {counted(len(names), 'entry')} for {counted(source.count, 'vector')}: expected one for each"
        )
    if not source.count and options.coding == "pq":
        raise ValueError("vectors is empty: an index with preview='pq' is not added to; expected preview='rabitq'")
    columns = {} if attributes is None else as_columns(attributes, source.count)
    schema = merged_schema({}, columns, source.count)
    documents.finish(source.count, schema)
    stored_ids = None if ids is None else compact_ids(names.numbers)
    row_bytes = source.dtype.itemsize * source.dimension
    most = max(source.count, options.grow_to, 1)
    sizes = IndexSizes(
        most, source.dimension, options.metric, options.coding, row_bytes, compact_dtype(names.numbers).itemsize,
        reader_bytes(scratch, options.dram), text_pages_for(names, most), filtered=bool(schema),
        growing=most > source.count, record_bytes=-(-documents.record_bytes * most // max(1, source.count)),
        item_bytes=-(-item_bytes(columns) * most // max(1, source.count)),
    )  # fmt: skip
    layout = options.layout or plan_layout(sizes, options.dram)
    if not source.count:
        space = PreviewSpace(options.metric, source.dimension, layout.padded, 1.0)
        preview = stand_in(space, layout, options.seed)
        with store.begin() as tx:
            write_preview(tx, preview)
            about = _describe(source, space, preview, layout, names, schema, options)
            _commit(tx, replace(about, documents=[*documents.names]))
        return
    space = fit_space(source, options.metric, layout.padded)
    with _progress(options, source.count) as bar:
        made = construct(source, stored_ids, space, layout, options.seed, scratch, bar)
        bar.set_description("write")
        about = replace(
            _describe(source, space, made.preview, layout, names, schema, options),
            next_part=1,
            next_id=_next_id(names, source.count),
            trained_on=source.count,
            calibration=made.calibration,
            parts=[made.arrays.entry("p0")],
            documents=[*documents.names],
        )
        with index_reader(options.dram) as reader, store.begin() as tx:
            for step in made.rows.write(RowWriter(tx.segment("p0-rows"), row_bytes)):
                bar.update(step)
            made.arrays.write(tx, "p0", made.preview)
            write_preview(tx, made.preview)
            if schema:
                write_attributes(tx, "p0-a-", schema, columns, made.order)
            if names.texts is not None:
                write_texts(tx, "p0-texts", in_order(names.texts.take, made.order))
            write_records(tx, "p0-docs", documents.records(made.order, reader))
            _commit(tx, about)


def _next_id(names: Ids, count: int) -> int:
    """Return the first integer above all ids of `count` vectors, 0 beside strings."""
    if names.texts is not None:
        return 0
    return max(int(names.numbers.max()) + 1, 0) if len(names) else count


def _commit(tx: Transaction, about: Description) -> None:
    tx.put("index", json.dumps(about.to_json()).encode())
    tx.commit()


def _describe(
    source: VectorSource,
    space: PreviewSpace,
    preview: Preview,
    layout: IndexLayout,
    ids: Ids,
    schema: Schema,
    options: BuildOptions,
) -> Description:
    """Return the description of an index without vectors."""
    return Description(
        dtype=source.dtype.name,
        space=space,
        coding=options.coding,
        lists=preview.lists,
        book_bytes=preview.book.code_bytes,
        dram=options.dram,
        searches=layout.searches,
        seed=options.seed,
        schema=schema,
        next_part=0,
        next_id=0,
        trained_on=0,
        calibration=uncalibrated(),
        parts=[],
        id_kind="int64" if ids.texts is None else "str",
        on_ssd=preview.on_ssd,
    )


def text_pages_for(ids: Ids, count: int) -> int:
    """Return how many pages the strings of `count` vectors take, if the others are as long as `ids`."""
    if ids.texts is None or not len(ids):
        return 0
    pages = text_pages(len(ids), len(ids.texts.letters), ids.texts.longest)
    return -(-pages * count // len(ids))


def reader_bytes(scratch: Path, dram: int) -> int:
    """Return the DRAM of a reader that has read: its buffers are made at the first read, and differ by engine."""
    path = scratch / "one-page"
    path.write_bytes(bytes(PAGE_BYTES))
    with index_reader(dram) as reader:
        reader.read(reader.add(path), [0], PAGE_BYTES)
        path.unlink()
        return reader.planned_bytes


@contextmanager
def _progress(options: BuildOptions, count: int) -> Iterator[Any]:
    if options.bar is not None or not options.progress:
        yield options.bar or SilentBar()
        return
    # Every vector passes three times: to its list, to its code, and to its place on SSD.
    with tqdm(total=3 * count, unit=" vectors", unit_scale=True, desc="train") as bar:
        yield bar
