"""An index of items made anew beside its commits: lists, codes and calibration for the items that it has by then.

The index goes on changing meanwhile. The old parts stay, and items are removed from them; the order of the new items
tells later which of these are gone. Parts written meanwhile are coded with the new book in turn, until a commit can
code the few that are left. All segments here are staged: no catalog names them before that commit, and without it
nothing has happened.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.multivector.coding.book import TokenBook
from memhier.ann.multivector.coding.calibration import Calibration, learn
from memhier.ann.multivector.construction import trained_book, write_items
from memhier.ann.multivector.storage.layout import ItemLayout
from memhier.ann.multivector.storage.part import ItemArrays, ItemPart, PartOpener
from memhier.ann.multivector.storage.stored import StoredItems
from memhier.ann.zoom.filters.attributes import Schema
from memhier.ann.zoom.filters.bitmaps import BitmapCache, Words, pack
from memhier.ann.zoom.renewal.anew import Anew
from memhier.ann.zoom.renewal.merge import write_carried
from memhier.io.reader import Reader
from memhier.store.store import Staging, Store, Transaction

__all__ = ["ItemTask", "RenewedItems", "RenewedPart", "follow_items", "renew_items"]

Ints: TypeAlias = npt.NDArray[np.int64]

_DEPTH = 16  # reads in flight


@dataclass(frozen=True, slots=True)
class ItemTask:
    """The parts to write anew as one, and how.

    Attributes
    ----------
    store
        Holds the parts; the new segments are staged in it.
    name
        Of the new part.
    parts
        The parts as they are now, at least one, with at least one item.
    schema
        Types of the attributes.
    texts
        Whether ids are strings.
    seed
        As given at build.
    work_bytes
        DRAM for attributes and documents on their way.
    """

    store: Store
    name: str
    parts: tuple[ItemPart, ...]
    schema: Schema
    texts: bool
    seed: int
    work_bytes: int

    @contextmanager
    def opened(self) -> Iterator[StoredItems]:
        """Open the parts with a reader of their own, which no search uses, and which keeps their files open."""
        first = self.parts[0]
        with Reader(depth=_DEPTH) as reader:
            opener = PartOpener(
                self.store, reader, BitmapCache(1), first.dimension, first.dtype, self.work_bytes, texts=self.texts
            )
            parts = [opener.open(part.name, part.arrays, self.schema, 0.0) for part in self.parts]
            parts = [replace(part, alive=known.alive) for part, known in zip(parts, self.parts, strict=True)]
            yield StoredItems(parts, reader)

    def write(self, tx: Transaction | Staging, source: StoredItems, book: TokenBook) -> ItemArrays:
        """Write the items of the opened parts as one part, coded with a book, and return its arrays."""
        arrays = write_items(tx, self.name, source, source.ids, book, self.seed)
        write_carried(tx, self.name, source.parts, self.schema, source.order, self.work_bytes)
        return arrays


@dataclass(frozen=True, slots=True)
class RenewedPart:
    """A written part that no transaction has taken over.

    Attributes
    ----------
    name
        Of the part.
    replaced
        Names of the parts that it replaces, and how many items each has, removed ones counted.
    arrays
        Its codes, ids and lists.
    staging
        Its segments, finished.
    order
        int64 ``[n]``: the number of each of its items among all items of the replaced parts.
    """

    name: str
    replaced: dict[str, int]
    arrays: ItemArrays
    staging: Staging
    order: Ints

    def alive(self, parts: Sequence[ItemPart]) -> Words | None:
        """Return the bitmap of its items that are still alive in an index with these parts; None for all."""
        there = {part.name: part.alive_flags() for part in parts if part.name in self.replaced}
        flags = [there.get(name, np.zeros(count, np.bool_)) for name, count in self.replaced.items()]
        kept = np.concatenate(flags)[self.order]
        return None if kept.all() else pack(kept)

    def drop(self) -> None:
        """Remove its segments."""
        self.staging.drop()


RenewedItems: TypeAlias = Anew[RenewedPart, TokenBook, Calibration]
"""An index made anew, as far as its parts are done."""


def renew_items(task: ItemTask, layout: ItemLayout, changes: int) -> RenewedItems:
    """Write the parts as one, with lists, codes and calibration made for their items."""
    with task.store.stage() as lists, task.opened() as source:
        book = trained_book(source, layout, task.seed)
        book.write(lists)
        part = _staged(task, source, book)
        try:
            learnt = learn(book, part.arrays, source, task.seed)
            lists.finish()
        except BaseException:
            part.drop()
            raise
        return RenewedItems((part,), book, learnt, lists, changes)


def follow_items(task: ItemTask, renewed: RenewedItems) -> RenewedItems:
    """Write newer parts as one, with the lists and codes of `renewed`."""
    try:
        with task.opened() as source:
            part = _staged(task, source, renewed.book)
    except BaseException:
        renewed.drop()
        raise
    return replace(renewed, parts=(*renewed.parts, part), rounds=renewed.rounds + 1)


def _staged(task: ItemTask, source: StoredItems, book: TokenBook) -> RenewedPart:
    with task.store.stage() as staging:
        arrays = task.write(staging, source, book)
        staging.finish()
    replaced = {part.name: len(part) for part in task.parts}
    return RenewedPart(task.name, replaced, arrays, staging, source.order)
