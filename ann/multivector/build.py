"""The build of an index of items: sample, train, encode, calibrate, one commit."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from memhier.ann.multivector.coding.calibration import Calibration, learn
from memhier.ann.multivector.construction import trained_book, write_items
from memhier.ann.multivector.items import GivenItems
from memhier.ann.multivector.storage.catalog import ItemDescription
from memhier.ann.multivector.storage.layout import ItemSizes, plan_items
from memhier.ann.multivector.storage.part import ItemPart
from memhier.ann.zoom.construction.build import reader_bytes, text_pages_for
from memhier.ann.zoom.filters.attributes import as_columns, merged_schema, write_attributes
from memhier.ann.zoom.ids.stored_texts import in_order, write_texts
from memhier.ann.zoom.payload.staged import StagedDocuments
from memhier.ann.zoom.payload.stored import write_records
from memhier.ann.zoom.storage.ids import Ids
from memhier.ann.zoom.storage.layout import fresh_bytes, index_reader
from memhier.arguments import counted
from memhier.store.store import Store

__all__ = ["ItemBuild", "build_items"]


@dataclass(frozen=True, slots=True)
class ItemBuild:
    """The user's choices; see :meth:`memhier.ann.MultiVectorIndex.build`."""

    dram: int
    grow_to: int
    seed: int


def build_items(
    store: Store, source: GivenItems, ids: Ids | None, attributes: Any, documents: Any, options: ItemBuild
) -> None:
    """Build an index of items and commit it to the empty `store`."""
    with StagedDocuments(store, documents, fresh_bytes(options.dram)) as staged:
        _write(store, source, ids, attributes, staged, options)


def _write(
    store: Store, source: GivenItems, ids: Ids | None, attributes: Any, documents: StagedDocuments, options: ItemBuild
) -> None:
    count, seed = len(source), options.seed
    names = Ids(np.arange(count, dtype=np.int64), None) if ids is None else ids
    if len(names) != count:
        raise ValueError(f"ids has {counted(len(names), 'entry')} for {counted(count, 'item')}: expected one for each")
    columns = {} if attributes is None else as_columns(attributes, count)
    schema = merged_schema({}, columns, count)
    documents.finish(count, schema)
    sizes = ItemSizes(
        max(1, count), int(source.lengths.sum()), source.dimension, source.dtype.itemsize,
        int(source.lengths.max(initial=1)), reader_bytes(store.path / "tmp", options.dram), filtered=bool(schema),
        text_pages=text_pages_for(names, count), record_bytes=documents.record_bytes,
    )  # fmt: skip
    layout = plan_items(sizes.grown(options.grow_to), options.dram)
    book, entries, learnt = trained_book(source, layout, seed), list[dict[str, Any]](), Calibration()
    with index_reader(options.dram) as reader, store.begin() as tx:
        book.write(tx)
        if count:
            arrays = write_items(tx, "p0", source, names.numbers, book, seed)
            if columns:
                write_attributes(tx, "p0-a-", schema, columns, np.arange(count))
            if names.texts is not None:
                write_texts(tx, "p0-texts", in_order(names.texts.take, np.arange(count)))
            write_records(tx, "p0-docs", documents.records(np.arange(count), reader))
            learnt, entries = learn(book, arrays, source, seed), [ItemPart.entry_of("p0", arrays)]
        next_id = max(0, int(names.numbers.max(initial=-1)) + 1) if names.texts is None else 0
        ItemDescription(
            source.dtype.name, source.dimension, book.scale, book.lists, book.book.code_bytes, options.dram,
            layout.searches, seed, schema, next_part=1, next_id=next_id,
            trained_on=count, changes=0, calibration=learnt, parts=entries,
            id_kind="int64" if names.texts is None else "str", documents=[*documents.names],
        ).write(tx)  # fmt: skip
        tx.commit()
