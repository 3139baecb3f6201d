"""The division of a DRAM budget: the number of lists, and the bytes of code for each vector."""

from dataclasses import dataclass, replace

from memhier.ann.zoom.filters.bitmaps import bitmap_bytes
from memhier.ann.zoom.ids.stored_texts import PAGE_DRAM
from memhier.ann.zoom.payload.stored import records_bytes
from memhier.ann.zoom.preview.blocks import BLOCK_ROWS
from memhier.ann.zoom.preview.codes import bytes_of_step
from memhier.ann.zoom.preview.preview import Coding
from memhier.ann.zoom.preview.routing.router import EXACT_LISTS, router_bytes_per_list
from memhier.ann.zoom.preview.scan import CODES_PER_BOOK
from memhier.ann.zoom.preview.space import Metric, core_dimension
from memhier.ann.zoom.preview.stored_codes import block_bytes
from memhier.ann.zoom.preview.stored_scan import WAVE_COPIES
from memhier.ann.zoom.storage.fullview import stored_bytes, workspace_bytes
from memhier.budget import format_bytes
from memhier.errors import BudgetError
from memhier.io.buffer_pool import held_page_bytes
from memhier.io.page_file import PAGE_BYTES
from memhier.io.reader import Reader

__all__ = [
    "PART_BYTES",
    "IndexLayout",
    "IndexSizes",
    "attribute_bytes",
    "codes_can_grow",
    "file_bytes",
    "filters_bytes",
    "fresh_bytes",
    "index_reader",
    "lists_anew",
    "plan_layout",
    "pool_pages",
    "read_contexts",
    "scan_bytes",
    "wave_bytes",
]

_VECTORS_PER_LIST = 100  # lists are 1 % of n; shorter lists probe finer, but each costs its centroid
_FEWER_LISTS = 16  # one list in so many makes room for longer codes, or the share by which they grow if that is less
_FEWEST_PER_LIST = 8  # in lists that were made for more
_SCAN_LEAST, _SCAN_MOST = 64 << 10, 512 << 10
_SCAN_PARTS, _SCAN_PARTS_MANY = 64, 320  # of the budget: one is a search's for candidates, where there are few and many
_LISTS_SHARE = 0.25  # of the budget, at most, for lists and their graph
_NUMBERS_BYTES = 4  # radius, factor and error
# An axis, on average: with more bits a search reads hardly less, and scans longer. Pages come after them. At equal DRAM
# two bits and more pages would read a quarter less of SIFT, but of whitened patches two bits read eight times as much
# as four, three bits twice (`python -m memhier.benchmarks.workloads.search.dram --data patches --code-bytes 16`).
_BITS_MOST = 4
# Of the budget for searches beyond the first; of them, with room for many candidates; and where these do not fit.
_SEARCHES_SHARE, _SEARCHES_MOST, _SEARCHES_MANY = 0.08, 8, 9
_SPARE_SHARE = 0.5  # of the DRAM that the longest codes leave, for more searches
_CONTEXTS, _DEPTH_LEAST = 4, 32  # of a reader: calls at a time, twice as many where each has so many reads in flight
_LONG_READ = 32  # pages of a read of codes on SSD, at most, in large budgets
PART_BYTES = PAGE_BYTES  # of a part, in catalog and description
_CATALOG_BYTES = 8192  # of the description, most of it efforts
_PARTS_MORE = 4  # that an index which grows has beside its first
_FRESH_SHARE = 1 / 32  # of the budget, for vectors that were not yet written
_FRESH_MOST = 8 << 20
_ATTRIBUTES_SHARE = 1 / 32  # of the budget, for facts about attributes and for bitmaps of filters
_ROTATION_SHARE = 0.4  # of the budget, at most, for the rotation; codes without one tell a third as much
# Of codes on SSD: bits an axis, at least, and the share of a vector that they take. Two bits in place of one for each
# of 128 float32 take a fifth off the reads, as fewer vectors are read, for a third more pages
# (`python -m memhier.benchmarks.workloads.search.scale --data "colour patches" --bytes 2 --single`).
_STORED_BITS, _STORED_SHARE = 1, 1 / 16
_LISTS_ROOM = 2  # times the bytes of all rows: blocks and pages are not full
_LONGEST_MEAN = 1600  # vectors of a list, where codes lie on SSD
_POOL_LEAST = 64  # a pool holds at least one page in so many: below, it costs as much time as it saves
_WIDEST, _NARROWEST = 32, 4  # axes that one byte of a product-quantised code describes


@dataclass(frozen=True, slots=True)
class IndexSizes:
    """The sizes of an index that its user decides on.

    Attributes
    ----------
    count, dimension, metric
        Of the vectors.
    coding
        Kind of the codes.
    row_bytes
        Bytes of one vector on SSD; a CRC is kept for each page of them.
    id_bytes
        Bytes of an id.
    reader_bytes
        DRAM of the reader's buffers for one thread.
    text_pages
        Pages of ids that are strings.
    filtered
        Whether there are attributes to filter by.
    growing
        Whether some of the vectors are still to come.
    record_bytes
        Of the documents of all vectors.
    item_bytes
        Of the items of all lists that are attributes.
    """

    count: int
    dimension: int
    metric: Metric
    coding: Coding
    row_bytes: int
    id_bytes: int
    reader_bytes: int
    text_pages: int = 0
    filtered: bool = False
    growing: bool = False
    record_bytes: int = 0
    item_bytes: int = 0


@dataclass(frozen=True, slots=True)
class IndexLayout:
    """The layout of an index in DRAM, decided before it is built.

    Attributes
    ----------
    lists
        Number of inverted lists.
    coding
        Kind of the codes.
    code_bytes
        Bytes of code for each vector, without its numbers.
    padded
        Dimension of the preview space.
    rotate
        Whether a matrix of ``4 padded^2`` bytes turns vectors into the axes of the codes.
    searches
        Searches at a time; each has its own buffers.
    memory_bytes
        DRAM the index will hold when open, everything counted.
    on_ssd
        Whether codes and ids stay on SSD.
    pool_pages
        Pages of vectors, and of codes and strings on SSD, that the rest of the budget holds once they were read.
    """

    lists: int
    coding: Coding
    code_bytes: int
    padded: int
    rotate: bool
    searches: int
    memory_bytes: int
    on_ssd: bool = False
    pool_pages: int = 0


def scan_bytes(dram: int, searches: int) -> int:
    """Return the DRAM for the candidates of queries that are searched together, in one of so many `searches`."""
    parts = _SCAN_PARTS if searches <= _SEARCHES_MOST else _SCAN_PARTS_MANY
    return max(_SCAN_LEAST, min(_SCAN_MOST, dram // parts))


def filters_bytes(scan: int) -> int:
    """Return the DRAM of the filters of one call beyond the first, out of `scan` bytes for candidates.

    The rest is room to evaluate a filter, which is done before there are candidates.
    """
    return (scan - _SCAN_LEAST) // 2


def wave_bytes(dram: int) -> int:
    """Return the bytes of codes on SSD that a scan reads at a time, at most."""
    return max(32 << 10, min(256 << 10, dram // 32))


def codes_can_grow(code_bytes: int, dimension: int, metric: Metric, coding: Coding) -> bool:
    """Return whether a larger budget makes codes longer than `code_bytes`."""
    return code_bytes < max(size for _, size, _ in _choices(core_dimension(metric, dimension), coding, 1))


def fresh_bytes(dram: int) -> int:
    """Return the most DRAM for vectors that wait to be written."""
    return min(_FRESH_MOST, int(_FRESH_SHARE * dram))


def attribute_bytes(dram: int) -> int:
    """Return the DRAM for attributes, most of it for bitmaps of filters."""
    return max(1, int(_ATTRIBUTES_SHARE * dram))


def read_contexts(dram: int) -> int:
    """Return how many searches read at a time; further ones compute meanwhile."""
    return 2 * _CONTEXTS if _reads(dram) >= 2 * _CONTEXTS * _DEPTH_LEAST else _CONTEXTS


def index_reader(dram: int, searches: int = 1, on_ssd: bool = False) -> Reader:
    """Return the reader of an index; large budgets with codes `on_ssd` have longer and fewer reads, in no more DRAM."""
    depth, contexts = _reads(dram) // read_contexts(dram), min(searches, read_contexts(dram))
    if on_ssd and (fewer := depth * 17 // 18) >= _LONG_READ:
        return Reader(depth=fewer, contexts=contexts, run_pages=_LONG_READ)
    return Reader(depth=depth, contexts=contexts)


def _reads(dram: int) -> int:
    return _CONTEXTS * max(_DEPTH_LEAST, min(128, dram // (128 * PAGE_BYTES)))


def pool_pages(room: int, pages: int) -> int:
    """Return how many of an index's pages `room` bytes of DRAM hold; none where these would be hardly any."""
    held = max(0, min(pages, room // held_page_bytes()))
    return held if held * _POOL_LEAST >= pages else 0


def plan_layout(sizes: IndexSizes, dram: int, *, on_ssd: bool = True) -> IndexLayout:
    """Return the layout with the longest codes that fits `dram` bytes; codes that do not fit stay on SSD.

    The rest holds pages.

    Parameters
    ----------
    on_ssd
        Whether they may.

    Raises
    ------
    BudgetError
        When even the shortest codes do not fit; the message names a budget that is enough.
    """
    # Without room for a rotation and codes, the rotation goes.
    fitting = _fit(sizes, dram, may_rotate=True) or _fit(sizes, dram, may_rotate=False)
    on_ssd = on_ssd and sizes.coding == "rabitq"
    if on_ssd and (fitting is None or fitting.code_bytes < _fair_bytes(fitting.padded)):
        fitting = _fit_on_ssd(sizes, dram) or fitting
    if fitting is not None:
        return _with_pool(fitting, sizes, dram)
    enough = dram + 1
    while _fit(sizes, enough, may_rotate=False) is None and not (on_ssd and _fit_on_ssd(sizes, enough)):
        enough = enough * 17 // 16 + 1  # buffers grow with the budget
    raise BudgetError(
        f"dram={format_bytes(dram)} is too small for {sizes.count:,} vectors of dimension {sizes.dimension}: "
        f"at least {format_bytes(enough)} ({enough} bytes) is needed"
    )


def _with_pool(layout: IndexLayout, sizes: IndexSizes, dram: int) -> IndexLayout:
    pages = stored_bytes(sizes.count, sizes.row_bytes) // PAGE_BYTES + sizes.text_pages
    if layout.on_ssd:
        pages += _stored_list_bytes(sizes, layout.code_bytes) // PAGE_BYTES
    held = pool_pages(dram - layout.memory_bytes, pages)
    return replace(layout, memory_bytes=layout.memory_bytes + held * held_page_bytes(), pool_pages=held)


def _stored_list_bytes(sizes: IndexSizes, code_bytes: int) -> int:
    """Return the bytes of codes on SSD, at most."""
    return int(_LISTS_ROOM * sizes.count * block_bytes(code_bytes, sizes.id_bytes)) // BLOCK_ROWS


def file_bytes(sizes: IndexSizes, layout: IndexLayout) -> int:
    """Return the bytes on SSD of an index without attributes and strings: vectors, codes, ids, lists and documents."""
    coded = layout.coding == "rabitq"
    book = 4 * layout.padded**2 * layout.rotate if coded else 4 * CODES_PER_BOOK * layout.padded
    each = layout.code_bytes + sizes.id_bytes + _NUMBERS_BYTES * coded
    lists = layout.lists * (_each_list(layout.padded, layout.lists) + 8)
    return stored_bytes(sizes.count, sizes.row_bytes) + sizes.count * each + lists + book + sizes.record_bytes


def _fit(sizes: IndexSizes, dram: int, *, may_rotate: bool) -> IndexLayout | None:
    """Return the layout with the longest codes that fits, None where none does."""
    coded, step = sizes.coding == "rabitq", bytes_of_step(sizes.dimension)
    fixed, searches = _fixed_bytes(sizes, dram)
    for length, code_bytes, padded in _choices(core_dimension(sizes.metric, sizes.dimension), sizes.coding, step):
        per_vector = code_bytes + sizes.id_bytes + (_NUMBERS_BYTES if coded else 0)
        per_list = _list_bytes(sizes.count, padded)
        rotate = may_rotate and coded and 4 * padded * padded <= _ROTATION_SHARE * dram
        book = 16 * padded + 4 * padded * padded * rotate if coded else 8 * CODES_PER_BOOK * padded
        without_lists = fixed + book + 8 + sizes.count * per_vector + _checksum_bytes(sizes.count * per_vector)
        wanted, more = _lists_within(sizes.count, padded, dram, length), 8 * _PARTS_MORE * sizes.growing
        room = dram - without_lists - more
        lists = min(wanted, (room - _checksum_bytes(room)) // (per_list + more))
        fewer = wanted // max(_FEWER_LISTS, code_bytes // step)
        if lists >= max(1, wanted - fewer):
            total = without_lists + lists * (per_list + more) + more + _checksum_bytes(lists * per_list)
            if not sizes.growing:
                searches, total = _more_searches(sizes, dram, searches, total)
            return IndexLayout(lists, sizes.coding, code_bytes, padded, rotate, searches, total)
    return None


def _fit_on_ssd(sizes: IndexSizes, dram: int) -> IndexLayout | None:
    """Return the layout with the shortest lists that fits, with codes on SSD; None where none does."""
    fixed, searches = _fixed_bytes(sizes, dram, WAVE_COPIES * wave_bytes(dram))
    padded = core_dimension(sizes.metric, sizes.dimension)
    code_bytes = max(1, padded * _STORED_BITS // 8, int(_STORED_SHARE * sizes.row_bytes))
    blocks = _stored_list_bytes(sizes, code_bytes)
    for rotate in (4 * padded * padded <= _ROTATION_SHARE * dram, False):
        total = fixed + 16 * padded + 4 * padded * padded * rotate + 24 + _checksum_bytes(blocks)
        room = dram - total - _checksum_bytes(dram - total)
        more = 8 + 16 * _PARTS_MORE * sizes.growing
        lists = min(max(1, sizes.count // _VECTORS_PER_LIST), _lists_in(room, padded, more))
        if lists >= max(1, sizes.count // _LONGEST_MEAN):
            total += lists * (_each_list(padded, lists) + more)
            total += _checksum_bytes(lists * _each_list(padded, lists))
            return IndexLayout(lists, sizes.coding, code_bytes, padded, rotate, searches, total, on_ssd=True)
    return None


def _lists_in(room: int, padded: int, more: int) -> int:
    """Return how many lists fit `room` bytes, with `more` bytes for each."""
    few = min(EXACT_LISTS, room // (_each_list(padded, EXACT_LISTS) + more))
    return max(few, room // (_each_list(padded, EXACT_LISTS + 1) + more))


def _searches_bytes(sizes: IndexSizes, dram: int, searches: int, waves: int = 0) -> int:
    """Return the DRAM of so many searches at a time, with `waves` bytes of each for codes on SSD."""
    each = workspace_bytes(sizes.row_bytes) + scan_bytes(dram, searches) + waves
    each += bitmap_bytes(sizes.count) * sizes.filtered
    return searches * each + min(searches, read_contexts(dram)) * sizes.reader_bytes


def _fixed_bytes(sizes: IndexSizes, dram: int, waves: int = 0) -> tuple[int, int]:
    """Return the DRAM beside lists and codes, and the number of searches; `waves` as above."""
    count = sizes.count
    bits = bitmap_bytes(count)
    choices = [_SEARCHES_MOST, _SEARCHES_MANY, *range(_SEARCHES_MOST - 1, 0, -1)]
    if sizes.filtered:  # filters take room that candidates leave
        choices.remove(_SEARCHES_MANY)
    share = int(_SEARCHES_SHARE * dram)
    searches = next((each for each in choices if _searches_bytes(sizes, dram, each, waves) <= share), 1)
    fixed = _searches_bytes(sizes, dram, searches, waves) + _CATALOG_BYTES
    fixed += PAGE_DRAM * sizes.text_pages + _checksum_bytes(stored_bytes(count, sizes.row_bytes))
    fixed += attribute_bytes(dram) * sizes.filtered + records_bytes(count, sizes.record_bytes)
    fixed += _checksum_bytes(sizes.item_bytes) if sizes.item_bytes else 0
    if sizes.coding == "rabitq":
        fixed += 2 * bits  # bitmaps of removed rows, before and after a removal
    if sizes.growing:
        fixed += 2 * fresh_bytes(dram) + _PARTS_MORE * PART_BYTES
    return fixed, searches


def _more_searches(sizes: IndexSizes, dram: int, searches: int, total: int) -> tuple[int, int]:
    """Return the number of searches with those that a share of the spare DRAM holds, and the DRAM in all."""
    most, beside = total + int(_SPARE_SHARE * (dram - total)), total - _searches_bytes(sizes, dram, searches)
    few = min(searches, _SEARCHES_MOST - 1)
    more = [each for each in range(few + 1, _SEARCHES_MOST + 1) if beside + _searches_bytes(sizes, dram, each) <= most]
    searches = max(more, default=searches)
    return searches, beside + _searches_bytes(sizes, dram, searches)


def _lists_within(count: int, padded: int, dram: int, length: int) -> int:
    """Return how many lists `count` vectors have: one for `length`, where a budget of `dram` bytes allows it."""
    return max(1, min(count // length, int(_LISTS_SHARE * dram) // _list_bytes(count, padded)))


def lists_anew(count: int, before: int, padded: int, dram: int, spare: int) -> int:
    """Return the number of lists for an index that has changed.

    Parameters
    ----------
    count
        Vectors there are now.
    before
        The number of lists before, perhaps chosen for more vectors to come.
    padded, dram
        As in :func:`plan_layout`.
    spare
        Free bytes of the budget.
    """
    wanted = _lists_within(count, padded, dram, _VECTORS_PER_LIST)
    if wanted <= before:
        return max(1, min(before, count // _FEWEST_PER_LIST))
    room = max(0, spare) + before * _each_list(padded, before)
    few = min(wanted, EXACT_LISTS, room // _each_list(padded, EXACT_LISTS))
    many = min(wanted, room // _each_list(padded, EXACT_LISTS + 1))  # with more lists, all of them have links
    return max(before, few, many if many > EXACT_LISTS else 0)


def _list_bytes(count: int, padded: int) -> int:
    return _each_list(padded, count // _VECTORS_PER_LIST)


def _each_list(padded: int, lists: int) -> int:
    return router_bytes_per_list(padded, lists) + 4


def _choices(core: int, coding: Coding, step: int) -> list[tuple[int, int, int]]:
    """Return choices of mean length of a list, bytes of a code in steps, and padded dimension, the best first.

    Longer lists free DRAM for codes; that pays if codes would otherwise have less than half a bit an axis.
    """
    if coding == "pq":
        widths = range(min(_NARROWEST, core), _WIDEST + 1)
        return [(_VECTORS_PER_LIST, -(-core // width), -(-core // width) * width) for width in widths]
    lengths = (_VECTORS_PER_LIST, 2 * _VECTORS_PER_LIST, 4 * _VECTORS_PER_LIST)
    most, fair, least = -(-core * _BITS_MOST // 8), _fair_bytes(core), -(-core // 64)
    sizes = [size for size in range(most, least - 1, -1) if size % step == 0 or size in (most, least)]
    choices = [(length, size, core) for length in lengths for size in sizes if size >= fair]
    return choices + [(lengths[-1], size, core) for size in sizes if size < fair]


def _fair_bytes(core: int) -> int:
    """Return the bytes of codes of half a bit an axis; with shorter ones a search reads more than codes on SSD take."""
    return -(-core // 16)


def _checksum_bytes(stored: int) -> int:
    return 4 * (stored // PAGE_BYTES + 8)
