"""Caches as a textbook has them, one access at a time: slow, plain, and written apart from the policies they check.

Each function takes a list of keys and a capacity and returns, for every access, whether it hit.
"""

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence

__all__ = ["PLAIN_CACHES"]


def _lru(keys: Sequence[int], capacity: int) -> list[bool]:
    last: dict[int, int] = {}
    by_age: deque[tuple[int, int]] = deque()  # every access; those that are not a key's last are passed over
    hits = []
    for time, key in enumerate(keys):
        hits.append(key in last)
        if key not in last and len(last) == capacity:
            while last.get(by_age[0][1]) != by_age[0][0]:
                by_age.popleft()
            del last[by_age.popleft()[1]]
        last[key] = time
        by_age.append((time, key))
    return hits


def _lfu(keys: Sequence[int], capacity: int) -> list[bool]:
    state: dict[int, tuple[int, int]] = {}  # uses, time of the last one
    heap: list[tuple[int, int, int]] = []  # as state was at some time
    hits = []
    for time, key in enumerate(keys):
        hits.append(key in state)
        if key not in state and len(state) == capacity:
            while True:
                uses, last, victim = heapq.heappop(heap)
                if state.get(victim) == (uses, last):
                    break
            del state[victim]
        state[key] = (state.get(key, (0, 0))[0] + 1, time)
        heapq.heappush(heap, (*state[key], key))
    return hits


def _s3fifo(keys: Sequence[int], capacity: int) -> list[bool]:
    """Algorithm 1 of the paper; access bits are cleared when a key moves to the main queue, as its text says."""
    small: OrderedDict[int, None] = OrderedDict()
    main: OrderedDict[int, None] = OrderedDict()
    ghost: OrderedDict[int, None] = OrderedDict()
    freq: dict[int, int] = {}
    small_size = max(1, capacity // 10)
    main_size = capacity - small_size

    def evict_main() -> None:
        while main:
            tail = next(iter(main))
            del main[tail]
            if freq[tail] == 0:
                del freq[tail]
                return
            freq[tail] -= 1
            main[tail] = None

    def evict_small() -> None:
        while small:
            tail = next(iter(small))
            del small[tail]
            if freq[tail] <= 1:
                del freq[tail]
                ghost[tail] = None
                while len(ghost) > main_size:
                    ghost.popitem(last=False)
                return
            freq[tail] = 0
            main[tail] = None
            if len(main) > main_size:
                evict_main()

    hits = []
    for key in keys:
        hits.append(key in freq)
        if key in freq:
            freq[key] = min(freq[key] + 1, 3)
            continue
        while len(freq) >= capacity:
            if len(small) >= small_size or not main:
                evict_small()
            else:
                evict_main()
        if key in ghost:
            del ghost[key]
            main[key] = None
        else:
            small[key] = None
        freq[key] = 0
    return hits


def _belady(keys: Sequence[int], capacity: int) -> list[bool]:
    never = len(keys)
    following = [never] * len(keys)
    ahead: dict[int, int] = {}
    for time in range(len(keys) - 1, -1, -1):
        following[time] = ahead.get(keys[time], never)
        ahead[keys[time]] = time
    resident: dict[int, int] = {}  # key -> its next access
    heap: list[tuple[int, int]] = []  # farthest first; as resident was at some time
    hits = []
    for time, key in enumerate(keys):
        hits.append(key in resident)
        if key not in resident and len(resident) == capacity:
            while True:
                negated, victim = heapq.heappop(heap)
                if resident.get(victim) == -negated:
                    break
            del resident[victim]
        resident[key] = following[time]
        heapq.heappush(heap, (-following[time], key))
    return hits


PLAIN_CACHES: dict[str, Callable[[Sequence[int], int], list[bool]]] = {
    "lru": _lru,
    "lfu": _lfu,
    "s3fifo": _s3fifo,
    "belady": _belady,
}
