"""The search of one query: candidates from lists, estimates from codes, then exact items in rounds of reads."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.multivector.book import QueryTables
from memhier.ann.multivector.calibration import NEIGHBOURS, Effort
from memhier.ann.multivector.items import BLOCK_BYTES, spans
from memhier.ann.multivector.scores import estimates, list_scores, max_sims, upper_bounds
from memhier.ann.multivector.snapshot import ItemSnapshot
from memhier.ann.zoom.filters.bitmaps import unpack
from memhier.ann.zoom.filters.where import evaluate, parse_for
from memhier.io.ranges import CountedReads, read_together
from memhier.io.reader import Reader
from memhier.rows.rank_request import round_limit

__all__ = ["Allowed", "search_items", "workspace_bytes"]

Floats: TypeAlias = npt.NDArray[np.float32]
Ints: TypeAlias = npt.NDArray[np.int64]

_FIRST_ROUND = 16  # items read at first
_FEW_ALLOWED = 2048  # items that a filter leaves, which are all candidates
_FIRST_CODES = 256  # items whose codes are scored before a k-th best estimate is known
ITEM_BYTES = 48  # of a candidate: its number, scores, and the order of all


@dataclass(frozen=True)
class Allowed:
    """The items that a search may find.

    Attributes
    ----------
    parts
        bool ``[n]`` of each part; None for all of its items.
    waiting
        bool ``[n]`` of the items that wait.
    """

    parts: Sequence[npt.NDArray[np.bool_] | None]
    waiting: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, snapshot: ItemSnapshot, where: str | None) -> "Allowed":
        """Return the items that fulfil a filter and were not removed."""
        if where is None:
            alive = [None if part.alive is None else part.is_alive() for part in snapshot.parts]
            return cls(alive, np.ones(len(snapshot.waiting), np.bool_))
        expression = parse_for(where, snapshot.schema)
        parts = []
        for part in snapshot.parts:
            assert part.attributes is not None
            parts.append(unpack(part.attributes.bitmap(expression), len(part)) & part.is_alive())
        waiting = evaluate(expression, snapshot.waiting.attributes) if len(snapshot.waiting) else np.ones(0, np.bool_)
        return cls(parts, waiting)

    def count(self, snapshot: ItemSnapshot) -> int:
        """Return the number of items on SSD that may be found."""
        pairs = zip(self.parts, snapshot.parts, strict=True)
        return sum(len(part) if each is None else int(each.sum()) for each, part in pairs)


def workspace_bytes(lists: int, columns: int, items: int, longest_bytes: int) -> int:
    """Return the DRAM of a search: tables of products, candidates, and the items read together, thrice."""
    return 4 * (lists + 1024) * columns + 12 * lists + ITEM_BYTES * items + 8 * max(BLOCK_BYTES, longest_bytes)


def search_items(
    snapshot: ItemSnapshot, reader: Reader, query: Floats, k: int, effort: Effort | None, allowed: Allowed
) -> tuple[Ints, Floats, dict[str, int]]:
    """Return ids and scores of the `k` best items, best first, and counts of the work done.

    Parameters
    ----------
    snapshot, reader
        Of the index.
    query
        float32 ``[v, d]``.
    effort
        None takes bounds that hold for certain, and all items as candidates.
    """
    reads = CountedReads(reader)
    best = _Best(k)
    tally = dict.fromkeys(("probed", "candidates", "estimated", "ranked"), 0)
    waiting = np.flatnonzero(allowed.waiting)
    if len(waiting):
        some = snapshot.waiting.take(waiting)
        best.offer(max_sims(query, some.tokens, some.starts), some.ids)
        tally["ranked"] += len(waiting)
    if snapshot.parts and allowed.count(snapshot):
        tables = QueryTables(snapshot.book, query)
        if effort is None:
            found = _bounded(snapshot, tables, allowed, tally)
        else:
            found = _estimated(snapshot, tables, k, effort, allowed, tally)
        tally["ranked"] += _rank(snapshot, reads, query, best, found)
    ids, scores = best.sorted()
    done = {name: int(reads.tally[name][0]) for name in ("reads", "pages", "bytes")}
    return ids, scores, tally | done | {"rounds": reads.rounds}


class _Best:
    """The `k` best items so far."""

    def __init__(self, k: int) -> None:
        self._k = k
        self._scores, self._ids = np.empty(0, np.float32), np.empty(0, np.int64)

    def offer(self, scores: Floats, ids: Ints) -> None:
        """Take items in."""
        scores, ids = np.concatenate([self._scores, scores]), np.concatenate([self._ids, ids.astype(np.int64)])
        order = np.lexsort((ids, -scores))[: self._k]
        self._scores, self._ids = scores[order], ids[order]

    @property
    def kth(self) -> float:
        """The score that a further item has to reach."""
        return float(self._scores[-1]) if len(self._scores) == self._k else -np.inf

    def sorted(self) -> tuple[Ints, Floats]:
        """Return ids and scores, best first."""
        return self._ids, self._scores


@dataclass(frozen=True, slots=True)
class _Candidates:
    """Items by part, and the score that each has at most."""

    parts: npt.NDArray[np.int32]
    items: Ints
    upper: Floats


def _bounded(snapshot: ItemSnapshot, tables: QueryTables, allowed: Allowed, tally: dict[str, int]) -> _Candidates:
    """Return all allowed items with bounds that hold for certain."""
    book, numbers, every, upper = snapshot.book, [], [], []
    for number, part in enumerate(snapshot.parts):
        flags = allowed.parts[number]
        items = np.arange(len(part)) if flags is None else np.flatnonzero(flags)
        numbers.append(np.full(len(items), number, np.int32))
        every.append(items)
        upper.append(upper_bounds(book, tables, part.arrays.coded, part.arrays.starts, items))
    tally["probed"] = book.lists
    tally["candidates"] = sum(map(len, every))
    return _Candidates(np.concatenate(numbers), np.concatenate(every), np.concatenate(upper))


def _estimated(
    snapshot: ItemSnapshot, tables: QueryTables, k: int, effort: Effort, allowed: Allowed, tally: dict[str, int]
) -> _Candidates:
    """Return the items that may be among the best, with estimates widened by the effort's errors."""
    first, second = snapshot.calibration.biases
    numbers, items, listed = _listed(snapshot, tables, k, effort, allowed, tally)
    order = np.argsort(-listed, kind="stable")
    numbers, items, listed = numbers[order], items[order], listed[order]
    beyond = np.float32(first * tables.length + effort.gap * tables.unit)
    estimated = np.empty(len(items), np.float32)
    done, kth = 0, -np.inf
    while done < len(items):
        stop = min(len(items), 2 * done if done else max(_FIRST_CODES, 4 * k))
        # Those whose list score stands too far below the k-th best estimate are left; so are all that follow.
        stop = min(stop, int(np.searchsorted(-listed, beyond - (kth + second * tables.length), side="right")))
        if stop <= done:
            break
        estimated[done:stop] = _by_part(snapshot, tables, numbers[done:stop], items[done:stop])
        done = stop
        if done >= k:
            kth = float(np.partition(estimated[:done], done - k)[done - k])
    tally["estimated"] = done
    upper = estimated[:done] + np.float32(second * tables.length + effort.eps * tables.unit)
    return _Candidates(numbers[:done], items[:done], upper)


def _listed(
    snapshot: ItemSnapshot, tables: QueryTables, k: int, effort: Effort, allowed: Allowed, tally: dict[str, int]
) -> tuple[npt.NDArray[np.int32], Ints, Floats]:
    """Return the candidates' parts, items and list scores."""
    total, left = sum(map(len, snapshot.parts)), allowed.count(snapshot)
    # With a filter, or for more neighbours than were calibrated, neighbours lie further: more lists are looked at.
    probes = effort.probes * max(1, -(-k // NEIGHBOURS)) * -(-total // left)
    lists = None
    if left > max(_FEW_ALLOWED, 2 * k) and probes < snapshot.book.lists:
        lists = _nearest_lists(tables, probes)
    tally["probed"] = snapshot.book.lists if lists is None else len(lists)
    numbers, every, listed = [], [], []
    for number, part in enumerate(snapshot.parts):
        arrays, flags = part.arrays, allowed.parts[number]
        if lists is None:
            items = np.arange(len(part)) if flags is None else np.flatnonzero(flags)
        else:
            marks = np.zeros(len(part), np.bool_)
            for low, high in zip(
                arrays.list_starts[lists].tolist(), arrays.list_starts[lists + 1].tolist(), strict=True
            ):
                marks[arrays.list_items[low:high]] = True
            items = np.flatnonzero(marks if flags is None else marks & flags)
        numbers.append(np.full(len(items), number, np.int32))
        every.append(items)
        listed.append(list_scores(tables, arrays.coded, arrays.starts, items))
    tally["candidates"] = sum(map(len, every))
    return np.concatenate(numbers), np.concatenate(every), np.concatenate(listed)


def _nearest_lists(tables: QueryTables, probes: int) -> Ints:
    """Return the lists whose centroids are among the `probes` nearest of a vector of the query, ascending."""
    marks: npt.NDArray[np.bool_] | None = None
    for table in tables.blocks():
        marks = np.zeros(len(table.products), np.bool_) if marks is None else marks
        for column in table.products.T:
            marks[np.argpartition(-column, probes - 1)[:probes]] = True
    return np.flatnonzero(marks)


def _by_part(snapshot: ItemSnapshot, tables: QueryTables, numbers: npt.NDArray[np.int32], items: Ints) -> Floats:
    out = np.empty(len(items), np.float32)
    for number, part in enumerate(snapshot.parts):
        here = np.flatnonzero(numbers == number)
        if len(here):
            arrays = part.arrays
            out[here] = estimates(snapshot.book, tables, arrays.coded, arrays.starts, items[here])
    return out


def _rank(snapshot: ItemSnapshot, reads: CountedReads, query: Floats, best: _Best, found: _Candidates) -> int:
    """Read items by descending bound, in rounds, until no bound left reaches the k-th best; return their number."""
    order = np.lexsort((found.items, found.parts, -found.upper))
    numbers, items, upper = found.parts[order], found.items[order], found.upper[order]
    done = rounds = 0
    while done < len(items) and upper[done] >= best.kth:
        stop = done + min(len(items) - done, round_limit(rounds, done, _FIRST_ROUND))
        stop = min(stop, int(np.searchsorted(-upper, -best.kth, side="right")))
        _read_round(snapshot, reads, query, best, numbers[done:stop], items[done:stop])
        done, rounds = stop, rounds + 1
    return done


def _read_round(
    snapshot: ItemSnapshot, reads: CountedReads, query: Floats, best: _Best, numbers: npt.NDArray[np.int32], items: Ints
) -> None:
    """Read and score items: one submission, or several where they are more than a search has room for."""
    lengths = np.empty(len(items), np.int64)
    for number in np.unique(numbers).tolist():
        here, starts = numbers == number, snapshot.parts[number].arrays.starts
        lengths[here] = starts[items[here] + 1] - starts[items[here]]
    ends = np.concatenate([[0], np.cumsum(lengths)])
    for low, high in spans(ends, snapshot.parts[0].token_bytes):
        some = {
            number: low + np.flatnonzero(numbers[low:high] == number)
            for number in np.unique(numbers[low:high]).tolist()
        }
        readings = {number: snapshot.parts[number].reading(items[here]) for number, here in some.items()}
        for number, tokens in read_together(reads, readings).items():
            here = some[number]
            starts = np.concatenate([[0], np.cumsum(lengths[here])])
            best.offer(max_sims(query, tokens, starts), snapshot.parts[number].arrays.ids[items[here]])
