"""The rounds of `memhier.ranking` without the compiled core."""

import time
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from memhier.kernels import distances
from memhier.reader import PAGE_BYTES, Reader

if TYPE_CHECKING:
    from memhier.ranking import HotPages, Ranking, RankRequest

__all__ = ["rank"]

_LEAST_ROUND = 8
_BOUND, _ALL_READ, _MAX_READS, _DEADLINE = range(4)

Ints = npt.NDArray[np.int64]


def rank(
    reader: Reader,
    request: "RankRequest",
    workspace: npt.NDArray[np.uint8],
    hot: "HotPages",
    found: "Ranking",
    tally: Ints,
) -> None:
    """Fill `found`; see `memhier.ranking.rank_rows`."""
    end = time.monotonic() + request.deadline
    states = [_Query(request, hot, number, found.tally[number]) for number in range(len(request.queries))]
    active = states
    while active:
        active = [state for state in active if state.choose()]
        wanted = sorted(
            ((state, at) for state in active for at in state.wanted),
            key=lambda item: (request.files[item[1]], request.offsets[item[1]]),
        )
        for start in range(0, len(wanted), len(workspace)):
            _rank_part(reader, request, hot, wanted[start : start + len(workspace)], workspace, tally)
        if request.deadline < np.inf and time.monotonic() >= end:
            for state in active:
                state.tally[4] = _DEADLINE
            break
    for number, state in enumerate(states):
        nearest = state.nearest
        found.ids[number], found.distances[number] = -1, np.inf
        found.ids[number, : len(nearest)] = [name for _, name in nearest]
        found.distances[number, : len(nearest)] = [near for near, _ in nearest]


class _Query:
    """What is known of one query: the nearest so far, and which candidates were taken."""

    def __init__(self, request: "RankRequest", hot: "HotPages", number: int, tally: Ints) -> None:
        self.number, self.tally = number, tally
        self.nearest: list[tuple[float, int]] = []
        self.wanted: list[int] = []
        self._request, self._hot = request, hot
        self._next, self._stop = int(request.first[number]), int(request.first[number + 1])
        self._taken: set[int] = set()

    def choose(self) -> bool:
        """Set `wanted` to what this round is to rank; False once nothing more is needed."""
        request = self._request
        most = min(float(request.thresholds[self.number]), self._kth())
        quota = request.first_round if self.tally[3] == 0 else max(_LEAST_ROUND, int(self.tally[0]) // 2)
        self.wanted, pages, reason = [], set[int](), _ALL_READ
        while self._next < self._stop and len(self.wanted) < quota:
            if request.lower[self._next] > most:
                reason = _BOUND
                break
            if self._next not in self._taken and not self._want(self._next, pages):
                reason = _MAX_READS
                break
            self._next += 1
        if not self.wanted:
            self.tally[4] = reason
            return False
        for at in range(self._next, self._stop):
            if request.lower[at] > most:
                break
            if at not in self._taken and self._in_one_page(at) and self.page_key(at) in pages:
                self._taken.add(at)
                self.wanted.append(at)
        self.tally[3] += 1
        return True

    def offer(self, distance: float, name: int) -> None:
        """Take in the exact distance of a candidate."""
        self.nearest = sorted([*self.nearest, (distance, name)])[: self._request.k]

    def page_key(self, at: int) -> int:
        """Return file and first page of a candidate as `HotPages` has them."""
        return int(self._request.files[at]) << 40 | int(self._request.offsets[at]) // PAGE_BYTES

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

    def _want(self, at: int, pages: set[int]) -> bool:
        first = self.page_key(at)
        last = first + (int(self._request.offsets[at]) % PAGE_BYTES + self._request.row_bytes - 1) // PAGE_BYTES
        is_hot = self.hot_page(at) is not None
        # A row that straddles pages is read whole, whatever of it is held. Those between its ends are of no other row.
        had = {key for key in (first, last) if key in pages and (first == last or not self._is_hot(key))}
        count = last - first + 1 - len(had)
        if not is_hot and self.tally[1] + count > self._request.max_reads:
            return False
        self.tally[2 if is_hot else 1] += count
        pages |= {first, last}
        self._taken.add(at)
        self.wanted.append(at)
        return True


def _rank_part(
    reader: Reader,
    request: "RankRequest",
    hot: "HotPages",
    wanted: list[tuple[_Query, int]],
    workspace: npt.NDArray[np.uint8],
    tally: Ints,
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
        state.tally[0] += 1
        state.offer(distance, int(request.ids[at]))
