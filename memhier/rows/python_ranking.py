"""The rounds of `memhier.rows.ranking` without the compiled core."""

import time

import numpy as np
import numpy.typing as npt

from memhier.io.kernels import distances
from memhier.io.page_file import PAGE_BYTES
from memhier.io.read_arguments import Tallies
from memhier.io.reader import Reader
from memhier.rows.rank_request import RANK_TALLY, HotPages, Ranking, RankRequest, page_keys, round_limit

__all__ = ["rank"]

_PAGES = 64  # read together; the compiled core ranks each as it lands
_ROUNDING = 1 / 1024  # of a bound, beyond which a candidate lies nearer than it: less may be rounding
_BOUND, _ALL_READ, _MAX_READS, _DEADLINE = range(4)

Ints = npt.NDArray[np.int64]


def rank(
    reader: Reader,
    request: RankRequest,
    workspace: npt.NDArray[np.uint8],
    hot: HotPages,
    found: Ranking,
    tally: Tallies,
    rounds: npt.NDArray[np.int32] | None = None,
) -> None:
    """Fill `found`, and `rounds`; see `memhier.rows.ranking.rank_rows`."""
    end = time.monotonic() + request.deadline
    keys = page_keys(request.files, request.offsets // PAGE_BYTES)
    states = [_Query(request, hot, keys, number) for number in range(len(request.queries))]
    active = states
    rows = max(1, _PAGES * PAGE_BYTES // request.row_bytes)
    room = workspace if len(workspace) else np.empty((rows, request.row_bytes), np.uint8)
    step = len(room) if request.page_rows is None else _PAGES
    while active:
        active = [state for state in active if state.choose()]
        wanted = sorted(
            ((state, at) for state in active for at in state.wanted),
            key=lambda item: (request.files[item[1]], request.offsets[item[1]]),
        )
        if rounds is not None:
            for state, at in wanted:
                rounds[at] = state.tally["rounds"]
        for start in range(0, len(wanted), step):
            if request.page_rows is None:
                _rank_part(reader, request, wanted[start : start + step], room, tally)
            else:
                _rank_pages(reader, request, wanted[start : start + step], tally)
        if request.deadline < np.inf and time.monotonic() >= end:
            for state in active:
                state.tally["stopped"] = _DEADLINE
            break
    for number, state in enumerate(states):
        nearest, found.tally[number] = state.nearest, tuple(state.tally.values())
        found.ids[number], found.distances[number] = -1, np.inf
        found.files[number], found.offsets[number] = -1, -1
        for place, (near, name, file, offset) in enumerate(nearest):
            found.ids[number, place], found.distances[number, place] = name, near
            found.files[number, place], found.offsets[number, place] = file, offset


class _Query:
    """The state of one query: the nearest so far, and the candidates taken."""

    def __init__(self, request: RankRequest, hot: HotPages, keys: Ints, number: int) -> None:
        self.number, self.tally = number, dict.fromkeys(RANK_TALLY.names or (), 0)
        self.nearest: list[tuple[float, int, int, int]] = []  # distance, id, file and offset
        self.wanted: list[int] = []
        self._request, self._hot, self._keys = request, hot, keys
        self._next, self._stop = int(request.first[number]), int(request.first[number + 1])
        self._taken: set[int] = set()
        self._read: set[int] = set()  # pages that are ranked whole
        self._misled = True  # whether each candidate read lies nearer than its bound

    def choose(self) -> bool:
        """Set `wanted` to the candidates that this round ranks; return False once nothing more is needed."""
        request = self._request
        most = min(float(request.thresholds[self.number]), self._kth())
        done = self.tally
        before = done["ranked"] if request.page_rows is None else done["page_requests"] + done["hot_pages"]
        quota = round_limit(done["rounds"], before, request.first_round)
        bounded = done["rounds"] == 0 or not self._misled
        self.wanted, pages, reason = [], set[int](), _ALL_READ
        while self._next < self._stop and len(self.wanted) < quota:
            if bounded and request.lower[self._next] > most:
                reason = _BOUND
                break
            wants = self._want_page(self._next) if request.page_rows is not None else self._want(self._next, pages)
            if not wants:
                reason = _MAX_READS
                break
            self._next += 1
        if not self.wanted:
            done["stopped"] = reason
            return False
        for at in range(self._next, self._stop if request.page_rows is None else self._next):
            if request.lower[at] > most:
                break
            if at not in self._taken and self._in_one_page(at) and self.page_key(at) in pages:
                self._taken.add(at)
                self.wanted.append(at)
        done["rounds"] += 1
        return True

    def compare(self, at: int, distance: float) -> None:
        """Note whether a candidate that was read keeps its bound."""
        lower = float(self._request.lower[at])
        if not lower - distance > _ROUNDING * abs(lower):
            self._misled = False

    def offer(self, distance: float, name: int, file: int, offset: int) -> None:
        """Take in the exact distance of a row, and where it lies."""
        self.tally["ranked"] += 1
        self.nearest = sorted([*self.nearest, (distance, name, file, offset)])[: self._request.k]

    def page_key(self, at: int) -> int:
        """Return the key of a candidate's first page."""
        return int(self._keys[at])

    def hot_page(self, at: int) -> npt.NDArray[np.uint8] | None:
        """Return the page of a candidate where it is held in DRAM."""
        key = self.page_key(at)
        known = self._in_one_page(at) and self._is_hot(key)
        return self._hot.pages[int(np.searchsorted(self._hot.keys, key))] if known else None

    def _is_hot(self, key: int) -> bool:
        place = int(np.searchsorted(self._hot.keys, key))
        return place < len(self._hot.keys) and int(self._hot.keys[place]) == key

    def _kth(self) -> float:
        return self.nearest[-1][0] if len(self.nearest) == self._request.k else np.inf

    def _in_one_page(self, at: int) -> bool:
        return int(self._request.offsets[at]) % PAGE_BYTES + self._request.row_bytes <= PAGE_BYTES

    def _want_page(self, at: int) -> bool:
        """Take the page of a candidate, unless it was taken before; False where it is more than may be read."""
        key = self.page_key(at)
        if key in self._read:
            return True
        is_hot = self._is_hot(key)
        if not is_hot and self.tally["page_requests"] >= self._request.max_reads:
            return False
        self.tally["hot_pages" if is_hot else "page_requests"] += 1
        self._read.add(key)
        self.wanted.append(at)
        return True

    def _want(self, at: int, pages: set[int]) -> bool:
        if at in self._taken:
            return True
        first = self.page_key(at)
        last = first + (int(self._request.offsets[at]) % PAGE_BYTES + self._request.row_bytes - 1) // PAGE_BYTES
        is_hot = self.hot_page(at) is not None
        # A row that straddles pages is read whole, whatever of it is held. Those between its ends are of no other row.
        had = {key for key in (first, last) if key in pages and (first == last or not self._is_hot(key))}
        count = last - first + 1 - len(had)
        if not is_hot and self.tally["page_requests"] + count > self._request.max_reads:
            return False
        self.tally["hot_pages" if is_hot else "page_requests"] += count
        pages |= {first, last}
        self._taken.add(at)
        self.wanted.append(at)
        return True


def _rank_part(
    reader: Reader,
    request: RankRequest,
    wanted: list[tuple[_Query, int]],
    workspace: npt.NDArray[np.uint8],
    tally: Tallies,
) -> None:
    cold = [item for item in wanted if item[0].hot_page(item[1]) is None]
    places = np.array([at for _, at in cold], np.int64)
    rows = workspace[: len(wanted)]
    if cold:
        reader.read(request.files[places], request.offsets[places], request.row_bytes, rows[: len(cold)], tally=tally)
    warm = [item for item in wanted if item[0].hot_page(item[1]) is not None]
    for row, (state, at) in zip(rows[len(cold) :], warm, strict=True):
        page, within = state.hot_page(at), int(request.offsets[at]) % PAGE_BYTES
        assert page is not None
        row[:] = page[within : within + request.row_bytes]
    everything = cold + warm
    dtype = np.dtype(np.uint16 if request.dtype == "bfloat16" else request.dtype)
    vectors = rows[:, : dtype.itemsize * request.queries.shape[1]].view(dtype)
    query_of_row = np.array([state.number for state, _ in everything], np.int32)
    near = distances(request.queries, vectors, request.metric, dtype=request.dtype, query_of_row=query_of_row)
    if request.metric == "cosine":
        near = np.maximum(near, 0)  # rounding takes equal directions just below
    for (state, at), distance in zip(everything, near.tolist(), strict=True):
        state.compare(at, distance)
        state.offer(distance, int(request.ids[at]), int(request.files[at]), int(request.offsets[at]))


def _rank_pages(reader: Reader, request: RankRequest, wanted: list[tuple[_Query, int]], tally: Tallies) -> None:
    """Rank all that is on the pages of some candidates."""
    pages = np.empty((len(wanted), PAGE_BYTES), np.uint8)
    cold = [item for item in wanted if item[0].hot_page(item[1]) is None]
    warm = [item for item in wanted if item[0].hot_page(item[1]) is not None]
    places = np.array([at for _, at in cold], np.int64)
    if cold:
        offsets = request.offsets[places] // PAGE_BYTES * PAGE_BYTES
        reader.read(request.files[places], offsets, PAGE_BYTES, pages[: len(cold)], tally=tally)
    for page, (state, at) in zip(pages[len(cold) :], warm, strict=True):
        page[:] = state.hot_page(at)
    per_page = PAGE_BYTES // request.row_bytes
    dtype = np.dtype(np.uint16 if request.dtype == "bfloat16" else request.dtype)
    for page, (state, at) in zip(pages, cold + warm, strict=True):
        (known,) = [each for each in request.page_rows or () if each.file == request.files[at]]
        start = int(request.offsets[at]) // PAGE_BYTES
        count = min(per_page, len(known.ids) - start * per_page)
        rows = page[: count * request.row_bytes].reshape(count, request.row_bytes)
        vectors = rows[:, : dtype.itemsize * request.queries.shape[1]].view(dtype)
        near = distances(request.queries[state.number], vectors, request.metric, dtype=request.dtype)
        if request.metric == "cosine":
            near = np.maximum(near, 0)  # rounding takes equal directions just below
        state.compare(at, float(near[int(request.offsets[at]) % PAGE_BYTES // request.row_bytes]))
        for within, distance in enumerate(near.tolist()):
            row = start * per_page + within
            if known.allowed is None or int(known.allowed[row >> 6]) >> (row & 63) & 1:
                offset = start * PAGE_BYTES + within * request.row_bytes
                state.offer(distance, int(known.ids[row]), known.file, offset)
