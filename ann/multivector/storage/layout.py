"""The division of a DRAM budget: the number of lists, and the bytes of code for each token."""

from dataclasses import dataclass, replace

from memhier.ann.multivector.coding.book import COLUMNS, NUMBER_BYTES
from memhier.ann.multivector.coding.postings import MARK_BYTES, postings_bytes
from memhier.ann.multivector.coding.scores import SCORE_BYTES
from memhier.ann.zoom.filters.bitmaps import bitmap_bytes
from memhier.ann.zoom.ids.stored_texts import PAGE_DRAM
from memhier.ann.zoom.payload.stored import records_bytes
from memhier.ann.zoom.storage.layout import attribute_bytes, fresh_bytes, read_contexts
from memhier.budget import format_bytes
from memhier.errors import BudgetError
from memhier.io.page_file import PAGE_BYTES

__all__ = [
    "CODER_TIMES",
    "ItemLayout",
    "ItemSizes",
    "lists_for",
    "plan_items",
    "read_bytes",
    "token_bytes_held",
    "workspace_bytes",
]

_TOKENS_PER_LIST = 128
_LISTS_TIMES = 16  # the root of the tokens, at most: as PLAID has it
_LISTS_MOST = 1 << 16
_SHORTER = (1, 2, 4, 8, 16)  # times as many tokens for each list, where a budget is small
_BITS_MOST = 4  # an axis
_ROTATION_SHARE = 0.2  # of the budget, at most
_SEARCHES_SHARE, _SEARCHES_MOST = 0.08, 8
_CATALOG_BYTES = 16 << 10
_SEGMENTS_BYTES = 4096  # the last pages of the segments of a part, in checksums
_ITEM_BYTES = 64  # of a candidate: its number, scores, and the order of all
_READ_TIMES = 8  # bytes for each of tokens that are read together: mostly pages, of which items take a part
CODER_TIMES = 4  # bytes for each value of a centroid while items are coded


@dataclass(frozen=True, slots=True)
class ItemSizes:
    """The sizes of an index that its user decides on.

    Attributes
    ----------
    items, tokens
        Their numbers.
    dimension, itemsize
        Of a token.
    longest
        Tokens of the longest item.
    reader_bytes
        DRAM of the reader's buffers for one thread.
    filtered
        Whether there are attributes to filter by.
    growing
        Whether some of the items are still to come.
    text_pages
        Pages of the strings that are ids.
    record_bytes
        Of the documents of all items.
    """

    items: int
    tokens: int
    dimension: int
    itemsize: int
    longest: int
    reader_bytes: int
    filtered: bool = False
    growing: bool = False
    text_pages: int = 0
    record_bytes: int = 0

    def grown(self, items: int) -> "ItemSizes":
        """Return the sizes of as many items like these."""
        if items <= self.items:
            return self
        sizes = (max(1, self.tokens), self.text_pages, self.record_bytes)
        tokens, pages, records = (-(-items * size // max(1, self.items)) for size in sizes)
        return replace(self, items=items, tokens=tokens, text_pages=pages, record_bytes=records, growing=True)


@dataclass(frozen=True, slots=True)
class ItemLayout:
    """The layout of an index in DRAM, decided before it is built.

    Attributes
    ----------
    lists
        Number of lists.
    code_bytes
        Bytes of code for each token.
    rotate
        Whether a matrix of ``4 d^2`` bytes turns tokens into the axes of the codes.
    searches
        Searches at a time.
    memory_bytes
        DRAM that the index will hold when open, at most.
    """

    lists: int
    code_bytes: int
    rotate: bool
    searches: int
    memory_bytes: int


def read_bytes(dram: int) -> int:
    """Return the bytes of tokens that a search reads together, where an item alone has not more."""
    return max(32 << 10, min(1 << 20, dram // 256))


def token_bytes_held(code_bytes: int) -> int:
    """Return the DRAM of a token, postings apart."""
    return code_bytes + NUMBER_BYTES


def workspace_bytes(lists: int, items: int, together: int, token_bytes: int, longest: int) -> int:
    """Return the DRAM of a search: tables of products, candidates, and items read and scored together.

    Parameters
    ----------
    lists, items
        Of the index.
    together
        Bytes of tokens that are read together.
    token_bytes
        Of a token on SSD.
    longest
        Tokens of the longest item.
    """
    tables = 4 * COLUMNS * (lists + 512) + 12 * lists
    reads = SCORE_BYTES + _READ_TIMES * max(together, longest * token_bytes)
    return tables + _ITEM_BYTES * items + max(MARK_BYTES, reads)  # first the one, then the other


def lists_for(tokens: int) -> int:
    """Return the number of lists for so many tokens, where DRAM allows it."""
    return max(1, min(tokens // _TOKENS_PER_LIST, int(_LISTS_TIMES * tokens**0.5), _LISTS_MOST))


def plan_items(sizes: ItemSizes, dram: int) -> ItemLayout:
    """Return the layout with the longest codes that fits `dram` bytes.

    Raises
    ------
    BudgetError
        When even the shortest codes do not fit; the message names a budget that is enough.
    """
    found = _fit(sizes, dram)
    if found is not None:
        return found
    enough = dram + 1
    while _fit(sizes, enough) is None:
        enough = enough * 17 // 16 + 1  # buffers grow with the budget
    raise BudgetError(
        f"dram={format_bytes(dram)} is too small for {sizes.items:,} items with {sizes.tokens:,} tokens of dimension "
        f"{sizes.dimension}: at least {format_bytes(enough)} ({enough} bytes) is needed"
    )


def _fit(sizes: ItemSizes, dram: int) -> ItemLayout | None:
    """Return the layout with the longest codes; shorter lists come first while codes have half a bit an axis."""
    best: ItemLayout | None = None
    for times in _SHORTER:
        found = _with_lists(sizes, dram, times)
        if found is not None and found.code_bytes >= -(-sizes.dimension // 16):
            return found
        if best is None or (found is not None and found.code_bytes > best.code_bytes):
            best = found
    return best


def _with_lists(sizes: ItemSizes, dram: int, times: int) -> ItemLayout | None:
    dimension = sizes.dimension
    rotate = 4 * dimension * dimension <= _ROTATION_SHARE * dram
    book = 16 * dimension + 4 * dimension * dimension * rotate
    most = -(-dimension * _BITS_MOST // 8)
    lists = max(1, lists_for(sizes.tokens) // times)
    each = workspace_bytes(
        lists, sizes.items, read_bytes(dram), dimension * sizes.itemsize, sizes.longest
    ) + bitmap_bytes(sizes.items) * (1 + sizes.filtered)
    searches = max(1, min(_SEARCHES_MOST, int(_SEARCHES_SHARE * dram) // (each + sizes.reader_bytes)))
    fixed = searches * each + min(searches, read_contexts(dram)) * sizes.reader_bytes + _CATALOG_BYTES + _SEGMENTS_BYTES
    fixed += book + 2 * dimension * lists + postings_bytes(sizes.tokens, sizes.items, lists) + 12 * sizes.items
    fixed += 2 * bitmap_bytes(sizes.items) + attribute_bytes(dram) * sizes.filtered
    fixed += PAGE_DRAM * sizes.text_pages + records_bytes(sizes.items, sizes.record_bytes)
    fixed += (2 * fresh_bytes(dram) + CODER_TIMES * dimension * lists) * sizes.growing
    per_token = token_bytes_held(1) - 1
    stored = sizes.tokens * (dimension * sizes.itemsize + per_token) + fixed
    fixed += 4 * (stored // PAGE_BYTES)
    room = (dram - fixed) * PAGE_BYTES // (PAGE_BYTES + 4) - sizes.tokens * per_token
    code_bytes = min(most, room // max(1, sizes.tokens))
    if code_bytes >= 1:
        total = fixed + int(sizes.tokens * (per_token + code_bytes) * (1 + 4 / PAGE_BYTES)) + 4
        return ItemLayout(lists, int(code_bytes), rotate, searches, total)
    return None
