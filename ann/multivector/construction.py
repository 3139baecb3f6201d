"""Items become lists, codes and tokens on SSD: for a build, for items that wait, and for an index made anew."""

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.multivector.coding.book import Coded, TokenBook, TokenCoder
from memhier.ann.multivector.items import ItemSource
from memhier.ann.multivector.storage.layout import ItemLayout
from memhier.ann.multivector.storage.part import ItemArrays
from memhier.ann.zoom.pauses import pause
from memhier.ann.zoom.preview.clusters import training_rows
from memhier.store.store import Staging, Transaction

__all__ = ["stored_bytes", "trained_book", "write_items"]

Ints: TypeAlias = npt.NDArray[np.int64]

_SAMPLE_LEAST = 4096


def trained_book(source: ItemSource, layout: ItemLayout, seed: int) -> TokenBook:
    """Return lists and codes for the tokens of a source; random ones where it has none."""
    total = int(source.lengths.sum())
    if not total:
        stand_in = np.random.default_rng(seed).normal(size=(64, source.dimension)).astype(np.float32)
        return TokenBook.train(stand_in, 1, layout.code_bytes, seed, rotate=layout.rotate)
    count = min(total, training_rows(layout.lists, source.dimension, _SAMPLE_LEAST))
    wanted = np.sort(np.random.default_rng([seed, 1]).choice(total, count, replace=False))
    sample, first, taken = np.empty((count, source.dimension), source.dtype), 0, 0
    for block in source.blocks():
        pause()
        stop = taken + int(np.searchsorted(wanted[taken:], first + len(block.tokens)))
        sample[taken:stop] = block.tokens[wanted[taken:stop] - first]
        first, taken = first + len(block.tokens), stop
    return TokenBook.train(sample, layout.lists, layout.code_bytes, seed, rotate=layout.rotate)


def write_items(
    tx: Transaction | Staging, name: str, source: ItemSource, ids: Ints, book: TokenBook, seed: int
) -> ItemArrays:
    """Write items as the part `name`, attributes apart, and return its arrays."""
    coder, coded = TokenCoder(book, seed), list[Coded]()
    tokens = tx.segment(f"{name}-tokens")
    for block in source.blocks():
        pause()
        coded.append(coder.encode(block.tokens))
        tokens.append(stored_bytes(block.tokens))
    arrays = ItemArrays.of(source.lengths, ids, Coded.joined(coded), book.lists)
    arrays.write(tx, name)
    return arrays


def stored_bytes(tokens: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """Return tokens as they lie on SSD."""
    return np.ascontiguousarray(tokens, tokens.dtype.newbyteorder("<")).reshape(-1).view(np.uint8)
