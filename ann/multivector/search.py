"""The search of one query: candidates from lists, estimates from codes, then exact items in rounds of reads."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.limits import NO_LIMITS
from memhier.ann.multivector.allowance import Allowance
from memhier.ann.multivector.coding.book import QueryTables
from memhier.ann.multivector.coding.calibration import NEIGHBOURS, Effort
from memhier.ann.multivector.coding.scores import estimates, list_scores, max_sims, upper_bounds
from memhier.ann.multivector.items import spans
from memhier.ann.multivector.storage.snapshot import ItemSnapshot
from memhier.ann.multivector.trace import ItemTrace
from memhier.ann.zoom.filters.bitmaps import Words, pack, unpack
from memhier.ann.zoom.filters.where import evaluate, parse_for
from memhier.ann.zoom.ids.collection import collected
from memhier.ann.zoom.preview.scan_arguments import positions_of, split_positions
from memhier.ann.zoom.storage.ids import locate, with_repeats
from memhier.io.page_file import PAGE_BYTES
from memhier.io.ranges import CountedReads, read_together
from memhier.io.reader import Reader
from memhier.rows.rank_request import STOPS, round_limit

__all__ = ["TALLY", "Allowed", "Best", "ItemSearch"]

Floats: TypeAlias = npt.NDArray[np.float32]
Ints: TypeAlias = npt.NDArray[np.int64]
Flags: TypeAlias = npt.NDArray[np.bool_]

TALLY = (
    "probed", "candidates", "estimated", "ranked", "reads", "pages", "bytes", "rounds", "escalated", "stopped_early"
)  # fmt: skip
_FIRST_ROUND = 16  # items read at first
_IN_ORDER = 8  # times the bytes that are read together, where most items are read in their order
_FEW_ALLOWED = 2048  # items that a filter leaves, which are all candidates
_SAMPLED = 64  # items whose bounds tell how many these leave out
_WORTH = 0.5  # of the items left, up to which bounds are worth their work
_UNLIKE = 0.9  # of the candidates, whose list scores rule out no more than the others
_FIRST_CODES = 256  # items whose codes are scored before a k-th best estimate is known


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

    parts: Sequence[Flags | None]
    waiting: Flags

    @classmethod
    def of(cls, snapshot: ItemSnapshot, where: str | None, allow: object = None, deny: object = None) -> "Allowed":
        """Return the items that fulfil a filter, have one of the ids `allow` and none of `deny`, and were not removed.

        Raises
        ------
        ValueError, TypeError
            When it is no filter of this index, or the ids are none.
        """
        parts = [None if part.alive is None else part.alive_flags() for part in snapshot.parts]
        waiting = np.ones(len(snapshot.waiting), np.bool_)
        if where is not None:
            expression = parse_for(where, snapshot.schema)
            for number, part in enumerate(snapshot.parts):
                assert part.attributes is not None
                parts[number] = _both(parts[number], unpack(part.attributes.bitmap(expression), len(part)))
            if len(waiting):
                waiting = evaluate(expression, snapshot.fresh.attributes)
        for ids, name, wanted in ((allow, "allow", True), (deny, "deny", False)):
            if ids is not None:
                wanted_ids = with_repeats(collected(ids, name), snapshot.id_kind, name)[0]
                places = locate(snapshot.parts, snapshot.fresh, wanted_ids)
                numbers, rows = split_positions(places.positions)
                for number, part in enumerate(snapshot.parts):
                    there = np.full(len(part), not wanted)
                    there[rows[(numbers == number) & (places.positions >= 0)]] = wanted
                    parts[number] = _both(parts[number], there)
                there = np.full(len(waiting), not wanted)
                there[places.fresh[places.fresh >= 0]] = wanted
                waiting = waiting & there
        return cls(parts, waiting)

    def words(self, snapshot: ItemSnapshot) -> list[Words]:
        """Return the items of each part that may be found, a bit for each."""
        pairs = zip(self.parts, snapshot.parts, strict=True)
        return [pack(np.ones(len(part), np.bool_) if each is None else each) for each, part in pairs]

    def count(self, snapshot: ItemSnapshot) -> int:
        """Return the number of items on SSD that may be found."""
        pairs = zip(self.parts, snapshot.parts, strict=True)
        return sum(len(part) if each is None else int(each.sum()) for each, part in pairs)

    def numbers(self, snapshot: ItemSnapshot) -> Ints:
        """Return the items on SSD that may be found."""
        pairs = zip(self.parts, snapshot.parts, strict=True)
        some = [np.arange(len(part)) if each is None else np.flatnonzero(each) for each, part in pairs]
        found = [items + base for items, base in zip(some, snapshot.bases, strict=False)]
        return np.concatenate([np.empty(0, np.int64), *found])


def _both(first: Flags | None, second: Flags) -> Flags:
    return second if first is None else first & second


class Best:
    """The `k` best items so far; of equal scores, the smaller ids."""

    def __init__(self, k: int) -> None:
        self.k: int = k
        self.scores: Floats = np.empty(0, np.float32)
        self.ids: Ints = np.empty(0, np.int64)
        self.positions: Ints = np.empty(0, np.int64)

    def offer(self, scores: Floats, ids: npt.NDArray[Any], positions: Ints) -> None:
        """Take items in; a position of -1 is that of one that waits."""
        scores, ids = np.concatenate([self.scores, scores]), np.concatenate([self.ids, ids.astype(np.int64)])
        order = np.lexsort((ids, -scores))[: self.k]
        self.positions = np.concatenate([self.positions, positions])[order]
        self.scores, self.ids = scores[order], ids[order]

    @property
    def kth(self) -> float:
        """The score that a further item has to reach."""
        return float(self.scores[-1]) if len(self.scores) == self.k else -np.inf

    def keep(self, k: int) -> None:
        """Keep the `k` best alone."""
        self.k = k
        self.scores, self.ids, self.positions = self.scores[:k], self.ids[:k], self.positions[:k]


class ItemSearch:
    """A search of one query.

    Parameters
    ----------
    snapshot, reader
        Of the index.
    query
        float32 ``[v, d]``.
    k
        Items wanted.
    allowed
        Those that may be found.
    allowance
        The reads that it may make; None for any.
    trace
        Takes down its decisions; None where nothing asks.

    Attributes
    ----------
    tables
        Of the query.
    stopped
        Why it ended: one of `memhier.rows.ranking.STOPS`.
    """

    def __init__(
        self, snapshot: ItemSnapshot, reader: Reader, query: Floats, k: int, allowed: Allowed,
        *, allowance: Allowance | None = None, trace: ItemTrace | None = None,
    ) -> None:  # fmt: skip
        self._snapshot, self._reads = snapshot, CountedReads(reader)
        self._query, self._k, self._allowed, self._together = query, k, allowed, snapshot.scan_bytes
        self._allowance, self._trace = allowance or Allowance(NO_LIMITS, 0.0), trace
        self._best = Best(k)
        self._tally = dict.fromkeys(TALLY, 0)
        self.tables: QueryTables = QueryTables(snapshot.book, query)
        self.stopped: str = "all_read"

    def run(self, effort: Effort | None) -> tuple[Best, dict[str, int]]:
        """Return the best items, best first, and counts of the work done.

        `effort` None takes bounds that hold for certain, and all items as candidates.
        """
        snapshot, best, tally = self._snapshot, self._best, self._tally
        if effort is not None:  # it was learnt from so many: errors of the first few alone stand further below the k-th
            best.k = max(self._k, NEIGHBOURS)
        waiting = np.flatnonzero(self._allowed.waiting)
        for low, high in spans(snapshot.waiting.starts, snapshot.token_bytes, self._together):
            some = waiting[np.searchsorted(waiting, low) : np.searchsorted(waiting, high)]
            if len(some):
                scores = max_sims(self._query, snapshot.waiting.tokens, *snapshot.waiting.bounds(some))
                best.offer(scores, snapshot.fresh.ids[some], np.full(len(some), -1))
        tally["ranked"] += len(waiting)
        left = self._allowed.count(snapshot)
        if left and self._allowance.is_over():
            self.stopped = self._allowance.stopped
        elif left:
            found = None if effort is None else self._estimated(self.tables, effort, left)
            tally["escalated"] = int(effort is not None and found is None)
            if found is None:
                best.keep(self._k)
            tally["ranked"] += self._exact(self.tables) if found is None else self._rank(*found)
        best.keep(self._k)
        for name in ("reads", "pages", "bytes"):
            tally[name] = int(self._reads.tally[name][0])
        tally["rounds"] = self._reads.rounds
        tally["stopped_early"] = int(STOPS.index(self.stopped) >= STOPS.index("max_reads"))
        return best, tally

    def _exact(self, tables: QueryTables) -> int:
        """Read the allowed items that may be among the best by bounds that hold for certain; return their number.

        A sample of the bounds tells whether they leave out many items; otherwise they are not worth their work.
        """
        snapshot, numbers = self._snapshot, self._allowed.numbers(self._snapshot)
        self._tally["probed"], self._tally["candidates"] = snapshot.book.lists, len(numbers)
        listed = self._list_scores(tables, numbers)
        some = numbers[np.argsort(-listed, kind="stable")[: max(_FIRST_CODES, 4 * self._k)]]
        estimated = self._estimates(tables, some)
        first = some[np.argsort(-estimated, kind="stable")[: max(_FIRST_ROUND, self._k)]]
        first = np.sort(first[: self._allowance.take(self._pages(first))])
        self._tally["estimated"] = len(some)
        self._read_round(first, np.full(len(first), np.inf, np.float32))
        rest = np.delete(numbers, np.searchsorted(numbers, first))
        upper = np.full(len(rest), np.inf, np.float32)
        sample = np.unique(np.linspace(0, len(rest) - 1, min(_SAMPLED, len(rest))).astype(np.int64))
        left = self._upper_bounds(tables, rest[sample]) >= self._best.kth
        if self._allowance.limited or np.count_nonzero(left) <= _WORTH * len(sample):
            upper = self._upper_bounds(tables, rest)  # with limits, the order counts as well
        return len(first) + self._rank(rest, upper, len(first))

    def _list_scores(self, tables: QueryTables, numbers: Ints) -> Floats:
        listed = np.empty(len(numbers), np.float32)
        for part, here, rows in self._snapshot.by_part(numbers):
            listed[here] = list_scores(tables, part.arrays.coded, *part.arrays.bounds(rows))
        if self._trace is not None:
            self._trace.listed[numbers] = listed
        return listed

    def _estimates(self, tables: QueryTables, numbers: Ints) -> Floats:
        estimated = np.empty(len(numbers), np.float32)
        for part, here, rows in self._snapshot.by_part(numbers):
            estimated[here] = estimates(self._snapshot.book, tables, part.arrays.coded, *part.arrays.bounds(rows))
        if self._trace is not None:
            self._trace.estimated[numbers] = estimated
        return estimated

    def _upper_bounds(self, tables: QueryTables, numbers: Ints) -> Floats:
        upper = np.empty(len(numbers), np.float32)
        for part, here, rows in self._snapshot.by_part(numbers):
            upper[here] = upper_bounds(self._snapshot.book, tables, part.arrays.coded, *part.arrays.bounds(rows))
        return upper

    def _estimated(self, tables: QueryTables, effort: Effort, left: int) -> tuple[Ints, Floats] | None:
        """Return the items that may be among the best, with estimates widened by the effort's errors.

        Those unlike the items that the effort was learnt from have bounds that hold for certain. None where the query
        is unlike those that it was learnt from: it lies further from the lists or from its candidates, or list scores
        rule few items out.
        """
        k = self._best.k
        if tables.nearness < effort.nearness:
            return None
        first, second = effort.biases
        foreign = self._foreign()
        numbers = np.setdiff1d(self._candidates(tables, effort, left), foreign, assume_unique=True)
        self._tally["candidates"] = len(numbers) + len(foreign)
        listed = self._list_scores(tables, numbers)
        order = np.argsort(-listed, kind="stable")
        numbers, listed = numbers[order], listed[order]
        if self._is_far(tables, effort, listed, left - len(foreign)):
            return None
        estimated = np.empty(len(numbers), np.float32)
        done, kth, bias = 0, -np.inf, (first - second) * tables.length
        while done < len(numbers):
            stop = min(len(numbers), 2 * done if done else max(_FIRST_CODES, 4 * k))
            # Those whose list score stands too far below the k-th best estimate are left; so are all that follow.
            beyond = np.float32(kth - bias - effort.gap * tables.unit)
            stop = min(stop, int(np.searchsorted(-listed, -beyond, side="right")))
            if stop <= done:
                break
            estimated[done:stop] = self._estimates(tables, numbers[done:stop])
            done = stop
            if done >= k:
                known = np.where(np.isfinite(estimated[:done]), estimated[:done], -np.inf)
                best = np.argpartition(known, done - k)[done - k :]
                kth = float(known[best].min())
                if np.isfinite(kth):  # some may have come later, to one side of their centroids
                    bias = max(bias, float(np.sort(known[best] - listed[best])[k // 2 :].mean()))
        self._tally["estimated"] = done
        if done > max(_FIRST_CODES, 4 * k, _UNLIKE * len(numbers)):
            return None
        upper = estimated[:done] + np.float32(second * tables.length + effort.eps * tables.unit)
        every = np.concatenate([numbers[:done], foreign])
        return every, np.concatenate([upper, self._upper_bounds(tables, foreign)])

    def _is_far(self, tables: QueryTables, effort: Effort, listed: Floats, left: int) -> bool:
        """Whether the candidates lie further from the query than those of all queries that the effort was learnt from.

        Parameters
        ----------
        listed
            Their list scores, descending.
        left
            Items that may be found, and have an effort.
        """
        k, total = self._best.k, int(self._snapshot.bases[-1])
        if len(listed) < k:
            return len(listed) < left
        if not effort.listed:
            return any(flags is not None for flags in self._allowed.parts)
        rank = k * total / (NEIGHBOURS * left)  # of the k-th where those left lie as all do, in the unit of `listed`
        step = min(1 + math.floor(math.log2(max(1.0, rank))), len(effort.listed) - 1)
        return float(listed[k - 1]) < effort.listed[step] * tables.length

    def _foreign(self) -> Ints:
        """Return the allowed items that are foreign; see `ItemPart`."""
        found = [np.empty(0, np.int64)]
        for part, base, flags in zip(self._snapshot.parts, self._snapshot.bases, self._allowed.parts, strict=False):
            rows = part.foreign if flags is None else part.foreign[flags[part.foreign]]
            found.append(rows + base)
        return np.concatenate(found)

    def _candidates(self, tables: QueryTables, effort: Effort, left: int) -> Ints:
        """Return the allowed items with a token in a list near the query."""
        snapshot = self._snapshot
        total, lists = int(snapshot.bases[-1]), snapshot.book.lists
        # With a filter, or for more neighbours than were calibrated, neighbours lie further: more lists are looked at.
        probes, wanted = effort.probes * -(-self._best.k // NEIGHBOURS), 0
        if left <= max(_FEW_ALLOWED, 2 * self._best.k):
            probes = lists
        elif left < total and probes < lists:
            wanted = int(np.count_nonzero(self._marked(tables, probes))) // 2
            probes *= (total + left // 2) // left
        while probes < lists:
            marks = self._marked(tables, probes)
            for number, flags in enumerate(self._allowed.parts):
                if flags is not None:
                    marks[snapshot.bases[number] : snapshot.bases[number + 1]] &= flags
            numbers = np.flatnonzero(marks)
            if len(numbers) >= wanted:  # otherwise those near the query are left out more often than others
                return numbers
            probes *= 2
        self._tally["probed"] = lists
        return self._allowed.numbers(snapshot)

    def _marked(self, tables: QueryTables, probes: int) -> Flags:
        """Return which items have a token in the `probes` lists nearest to a vector of the query, bool ``[n]``."""
        snapshot, lists = self._snapshot, _nearest_lists(tables, probes)
        self._tally["probed"] = len(lists)
        marks = np.zeros(int(snapshot.bases[-1]), np.bool_)
        for number, part in enumerate(snapshot.parts):
            part.arrays.postings.mark(lists, marks[snapshot.bases[number] : snapshot.bases[number + 1]])
        return marks

    def _rank(self, numbers: Ints, upper: Floats, before: int = 0) -> int:
        """Read items by descending bound, in rounds, until no bound left reaches the k-th best; return their number.

        Once those left lie on most of all pages, one round reads them in their order on SSD, each page once; with
        limits, the rounds go on.

        Parameters
        ----------
        before
            Items that were read already.
        """
        order = np.lexsort((numbers, -upper))
        numbers, upper = numbers[order], upper[order]
        if self._trace is not None:
            self._trace.upper[numbers] = upper
        done, rounds, read = 0, int(before > 0), before
        while done < len(numbers) and upper[done] >= self._best.kth:
            end = int(np.searchsorted(-upper, -self._best.kth, side="right"))
            stop = min(end, done + round_limit(rounds, read, _FIRST_ROUND))
            limited = self._allowance.limited
            most = rounds > 0 and not limited and 2 * self._pages(numbers[done:end]).sum() > self._snapshot.pages
            stop = end if most else stop
            if limited:
                stop = done + self._allowance.take(self._pages(numbers[done:stop]))
                if stop == done:
                    break
            order = np.argsort(numbers[done:stop])
            read_items = self._read_in_order if most else self._read_round
            read_items(numbers[done:stop][order], upper[done:stop][order])
            read += stop - done
            done, rounds = stop, rounds + 1
        if done < len(numbers):
            self.stopped = "bound" if upper[done] < self._best.kth else self._allowance.stopped
        return done

    def _pages(self, numbers: Ints) -> Ints:
        """Return the pages of each item; one that several share counts for each."""
        (lows, highs), size = self._snapshot.token_bounds(numbers), self._snapshot.token_bytes
        pages: Ints = (highs * size - 1) // PAGE_BYTES - lows * size // PAGE_BYTES + 1
        return pages

    def _read_in_order(self, numbers: Ints, upper: Floats) -> None:
        """Read and score ascending items, most of all, with those between: long pieces of the files, one at a time.

        Items whose bound no longer reaches the k-th best by then are left.
        """
        for number, part, here, rows in self._snapshot.numbered(numbers):
            lows, highs = part.arrays.bounds(rows)
            for low, high in spans(np.append(lows, highs[-1:]), part.token_bytes, _IN_ORDER * self._together):
                some = np.flatnonzero(upper[here[low:high]] >= self._best.kth) + low
                if len(some):
                    first = int(lows[some[0]])
                    tokens = part.run(self._reads, first, int(highs[some[-1]]))
                    self._score(number, rows[some], tokens, lows[some] - first, highs[some] - first)

    def _score(self, number: int, rows: Ints, tokens: npt.NDArray[Any], lows: Ints, highs: Ints) -> None:
        """Take in the items in `rows` of a part, each of the tokens from `lows` to `highs`."""
        scores = max_sims(self._query, tokens, lows, highs)
        if self._trace is not None:
            numbers = self._snapshot.bases[number] + rows
            self._trace.scores[numbers], self._trace.rounds[numbers] = scores, self._reads.rounds
        near = scores >= self._best.kth
        if not near.all():
            rows, scores = rows[near], scores[near]
        if not len(rows):
            return
        ids = self._snapshot.parts[number].arrays.ids[rows]
        self._best.offer(scores, ids, positions_of(np.full(len(rows), number), rows))

    def _read_round(self, numbers: Ints, upper: Floats) -> None:
        """Read and score ascending items: one submission, or several where a search has room for fewer at a time.

        Items whose bound no longer reaches the k-th best by then are left.
        """
        snapshot = self._snapshot
        lows, highs = snapshot.token_bounds(numbers)
        ends = np.concatenate([[0], np.cumsum(highs - lows)])
        for low, high in spans(ends, snapshot.token_bytes, self._together):
            there = np.flatnonzero(upper[low:high] >= self._best.kth) + low
            some = {each[0]: each[1:] for each in snapshot.numbered(numbers[there])}
            readings = {number: part.reading(rows) for number, (part, _, rows) in some.items()}
            for number, tokens in read_together(self._reads, readings).items():
                _, here, rows = some[number]
                lengths = (highs - lows)[there[here]]
                stops = np.cumsum(lengths)
                self._score(number, rows, tokens, stops - lengths, stops)


def _nearest_lists(tables: QueryTables, probes: int) -> Ints:
    """Return the lists whose centroids are among the `probes` nearest of a vector of the query, ascending."""
    marks: Flags | None = None
    for table in tables.blocks():
        marks = np.zeros(len(table.products), np.bool_) if marks is None else marks
        for column in table.products.T:
            marks[np.argpartition(-column, probes - 1)[:probes]] = True
    assert marks is not None
    return np.flatnonzero(marks)
