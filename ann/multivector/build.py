"""The build of an index of items: sample, train, encode, calibrate, one commit."""

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.multivector.coding.calibration import Calibration, learn
from memhier.ann.multivector.construction import trained_book, write_items
from memhier.ann.multivector.items import GivenItems
from memhier.ann.multivector.storage.catalog import ItemDescription
from memhier.ann.multivector.storage.layout import ItemSizes, plan_items
from memhier.ann.multivector.storage.part import ItemPart
from memhier.ann.zoom.construction.build import reader_bytes
from memhier.ann.zoom.filters.attributes import as_columns, merged_schema, write_attributes
from memhier.arguments import counted
from memhier.store.store import Store

__all__ = ["ItemBuild", "build_items"]

Ints: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ItemBuild:
    """The user's choices; see :meth:`memhier.ann.MultiVectorIndex.build`."""

    dram: int
    grow_to: int
    seed: int


def build_items(store: Store, source: GivenItems, ids: Ints | None, attributes: Any, options: ItemBuild) -> None:
    """Build an index of items and commit it to the empty `store`."""
    count, seed = len(source), options.seed
    names = np.arange(count, dtype=np.int64) if ids is None else ids
    if len(names) != count:
        raise ValueError(f"ids has {counted(len(names), 'entry')} for {counted(count, 'item')}: expected one for each")
    columns = {} if attributes is None else as_columns(attributes, count)
    schema = merged_schema({}, columns, count)
    sizes = ItemSizes(
        max(1, count), int(source.lengths.sum()), source.dimension, source.dtype.itemsize,
        int(source.lengths.max(initial=1)), reader_bytes(store.path / "tmp", options.dram), filtered=bool(schema),
    )  # fmt: skip
    layout = plan_items(sizes.grown(options.grow_to), options.dram)
    book, entries, learnt = trained_book(source, layout, seed), list[dict[str, Any]](), Calibration()
    with store.begin() as tx:
        book.write(tx)
        if count:
            arrays = write_items(tx, "p0", source, names, book, seed)
            if columns:
                write_attributes(tx, "p0-a-", schema, columns, np.arange(count))
            learnt, entries = learn(book, arrays, source, seed), [ItemPart.entry_of("p0", arrays)]
        ItemDescription(
            source.dtype.name, source.dimension, book.scale, book.lists, book.book.code_bytes, options.dram,
            layout.searches, seed, schema, next_part=1, next_id=max(0, int(names.max(initial=-1)) + 1),
            trained_on=count, changes=0, calibration=learnt, parts=entries,
        ).write(tx)  # fmt: skip
        tx.commit()
