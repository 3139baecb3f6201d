"""The keys in DRAM: a slot for each, the policy that chooses which leave, and the slots that must not leave."""

import weakref
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from memhier.cache.slots import SlotMap
from memhier.errors import BudgetError
from memhier.policies import LFU, LRU, S3FIFO, Belady, Policy
from memhier.table.keep_all import KeepAll
from memhier.table.shortage import Shortage

__all__ = ["Cache", "Pins", "PrefetchedSlots"]

Ints = NDArray[np.int64]

_NONE = np.empty(0, np.int64)
_TICKETS_MAX = 1024
# Policies that evict only to make room; others may let a key go beside free slots.
_LATE = (Belady, KeepAll, LFU, LRU, S3FIFO)


class PrefetchedSlots:
    """The slots that a ticket still holds, int32 [n].

    Parameters
    ----------
    keys
        The keys of the ticket's call.
    distinct, slots
        The distinct keys among them, and their slots.
    """

    __slots__ = ("_keys", "slots")

    def __init__(self, keys: Ints, distinct: Ints, slots: Ints) -> None:
        self.slots: NDArray[np.int32] = slots.astype(np.int32)
        # An array that cannot change, of distinct keys, which therefore keep their order: to know it again later
        # without comparing keys.
        is_fixed = keys.flags.owndata and not keys.flags.writeable and len(distinct) == keys.size
        self._keys = weakref.ref(keys) if is_fixed else None

    def __len__(self) -> int:
        return len(self.slots)

    def is_of(self, keys: Ints) -> bool:
        """Return whether this is known to be the array of the ticket's call, unchanged."""
        return self._keys is not None and self._keys() is keys


class Pins:
    """Slots that must not be evicted: how often each is pinned, and the open tickets, oldest first."""

    def __init__(self, slots: int) -> None:
        self._pinned = np.zeros(slots, np.int32)
        self._ahead = np.zeros(slots, np.uint16)  # tickets that hold a slot
        self._marks = np.zeros(slots, np.bool_)
        self._tickets: list[PrefetchedSlots] = []
        self._rows_ahead = 0
        # The slots of each loan, by the identity of the array; None once slots were pinned for other reasons.
        self._loans: dict[int, Ints] | None = {}

    @staticmethod
    def bytes_for(slots: int) -> int:
        """Return the most that `memory_bytes` can be for so many slots."""
        return slots * (4 + 2 + 1 + 4 * _rows_max(1))

    @property
    def memory_bytes(self) -> int:
        """DRAM held, in bytes."""
        return self._pinned.nbytes + self._ahead.nbytes + self._marks.nbytes + 4 * self._rows_ahead

    @property
    def tickets(self) -> int:
        """The number of open tickets."""
        return len(self._tickets)

    def held(self) -> Ints:
        """Return the slots that must not be evicted, int64 [m]; some may come several times."""
        if self._loans is None:
            return np.flatnonzero((self._pinned > 0) | (self._ahead > 0))
        # To look through millions of slots would take longer than a step.
        return np.concatenate((_NONE, *self._loans.values(), *(ahead.slots for ahead in self._tickets)))

    def is_held(self, slots: Ints) -> NDArray[np.bool_]:
        """Return which of these slots must not be evicted."""
        held: NDArray[np.bool_] = (self._pinned[slots] > 0) | (self._ahead[slots] > 0)
        return held

    def is_ahead(self, slots: Ints) -> NDArray[np.bool_]:
        """Return which of these slots a ticket holds."""
        ahead: NDArray[np.bool_] = self._ahead[slots] > 0
        return ahead

    def is_pinned(self, slots: Ints) -> NDArray[np.bool_]:
        """Return which of these slots are pinned; tickets do not count."""
        pinned: NDArray[np.bool_] = self._pinned[slots] > 0
        return pinned

    def pin(self, slots: Ints) -> None:
        """Pin distinct slots once more."""
        self._pinned[slots] += 1
        self._loans = None

    def lend(self, slots: Ints) -> None:
        """Pin the distinct slots of a loan once more, until `unpin` gets the same array."""
        self._pinned[slots] += 1
        if self._loans is not None:
            self._loans[id(slots)] = slots

    def unpin(self, slots: Ints) -> None:
        """Take one pin from each of these distinct slots, which are all pinned."""
        self._pinned[slots] -= 1
        if self._loans is not None and self._loans.pop(id(slots), None) is None:
            self._loans = None

    def check_room(self, rows: int) -> None:
        """Raise BudgetError when a ticket for so many rows would be one too many."""
        limit = _rows_max(len(self._pinned))
        if len(self._tickets) == _TICKETS_MAX or self._rows_ahead + rows > limit:
            raise BudgetError(
                f"keys: {rows} rows beside {len(self._tickets)} open tickets for {self._rows_ahead} rows; expected at "
                f"most {_TICKETS_MAX} tickets and {limit} rows in all: gather their rows, or release them"
            )

    def hold(self, ahead: PrefetchedSlots) -> None:
        """Hold the slots of a new ticket, which are distinct."""
        self._ahead[ahead.slots.astype(np.int64)] += np.uint16(1)
        self._rows_ahead += len(ahead)
        self._tickets.append(ahead)

    def gathered(self, slots: Ints) -> None:
        """Let go of distinct slots that were gathered; if several tickets hold a slot, the oldest lets go."""
        if not self._tickets:
            return
        self._marks[slots] = True
        for ahead in self._tickets:
            taken = self._marks[ahead.slots]
            self._marks[ahead.slots[taken]] = False
            self._take(ahead, taken)
        self._marks[slots] = False
        self._tickets = [ahead for ahead in self._tickets if len(ahead)]

    def release(self, ahead: PrefetchedSlots) -> None:
        """Let go of all slots that a ticket still holds."""
        self._ahead[ahead.slots.astype(np.int64)] -= np.uint16(1)
        self._rows_ahead -= len(ahead)
        ahead.slots = ahead.slots[:0]
        self._tickets = [other for other in self._tickets if other is not ahead]

    def _take(self, ahead: PrefetchedSlots, taken: NDArray[np.bool_]) -> None:
        if not taken.any():
            return
        self._ahead[ahead.slots[taken]] -= np.uint16(1)
        ahead.slots = ahead.slots[~taken]
        self._rows_ahead -= int(np.count_nonzero(taken))


class Cache:
    """The map from keys to slots, kept in step with the policy. For one thread at a time; it touches no row.

    A call makes its keys resident in two steps. `access` asks the policy, which names keys to evict. The caller then
    empties the slots of the `victims`, and `exchange` gives these slots to the keys that enter. If the caller fails in
    between, `unfinished` says so, and the next call does the rest.

    Parameters
    ----------
    policy
        Chooses the keys to evict. Its capacity is the number of slots.
    map_of
        Makes the map of so many slots.
    enough
        Returns the budget that has so many slots, for error messages.
    """

    def __init__(self, policy: Policy, map_of: Callable[[int], SlotMap], enough: Callable[[int], int]) -> None:
        self.policy = policy
        self.capacity: int = policy.capacity
        self.pins: Pins = Pins(self.capacity)
        self._map = map_of(self.capacity)
        self._enough = enough
        self._evicts_early = type(policy) not in _LATE
        # Decided by the policy and not done yet: a call may fail in between.
        self._leaving = self._entering = _NONE
        # The keys of the call under way. A call that failed is not counted again when it is repeated.
        self._asked = _NONE
        self.accesses: int
        self.evictions: int
        self.misses: int
        self.accesses = self.misses = self.evictions = 0

    def __len__(self) -> int:
        """Return the number of resident keys."""
        return len(self._map)

    @property
    def memory_bytes(self) -> int:
        """DRAM held, in bytes."""
        return self._map.memory_bytes + self.policy.memory_bytes + self.pins.memory_bytes + self._asked.nbytes

    @property
    def unfinished(self) -> bool:
        """Whether the policy has decided an exchange that is not done."""
        return len(self._leaving) + len(self._entering) > 0

    def find(self, keys: Ints) -> tuple[Ints, Ints, Ints]:
        """Return the distinct keys, the position of each key among them, and the slot of each; -1 if it has none."""
        return self._map.unique_find(keys)

    def slots_of(self, keys: Ints) -> Ints:
        """Return the slot of each key; -1 if it has none."""
        return self._map.find(keys)

    def keys_of(self, slots: Ints) -> Ints:
        """Return the key in each slot."""
        return self._map.keys_of(slots)

    def is_for(self, ahead: PrefetchedSlots, keys: Ints) -> bool:
        """Return whether a ticket holds exactly these keys, each once, in this order."""
        # A ticket's slots are distinct, and so are the keys in them. Slots that it has let go may be free by now.
        if keys.ndim != 1 or len(ahead) != len(keys):
            return False
        return ahead.is_of(keys) or np.array_equal(self._map.keys_of(ahead.slots), keys)

    def not_ahead(self, keys: Ints, inverse: Ints | slice, slots: Ints) -> Ints:
        """Return the keys that no ticket holds; the others were accessed when they were prefetched."""
        if not self.pins.tickets:
            return keys.reshape(-1)
        ahead = slots >= 0
        resident = np.flatnonzero(ahead)
        ahead[resident] = self.pins.is_ahead(slots[resident])
        accessed: Ints = keys[~ahead[inverse]] if ahead.any() else keys.reshape(-1)
        return accessed

    def check_pinned(self, keys: Ints, slots: Ints) -> None:
        """Raise ValueError for a key that is not pinned."""
        pinned = slots >= 0
        pinned[pinned] = self.pins.is_pinned(slots[pinned])
        if not pinned.all():
            raise ValueError(f"keys: {int(keys[~pinned][0])} is not pinned")

    def access(self, keys: Ints, slots: Ints, accessed: Ints) -> bool:
        """Tell the policy of a call's keys; return whether keys enter, so that the caller has to finish an exchange.

        Until `served` ends the call, the same keys asked for again are the same access: a batch that was announced to
        Belady comes only once.

        Parameters
        ----------
        keys
            int64 [u], distinct.
        slots
            int64 [u], the slot of each; -1 if it has none.
        accessed
            int64 [n], the accesses that the policy sees: either all keys, with repeats, but those that tickets hold; or
            the keys without a slot, each once.
        """
        asked, self._asked = self._asked, _NONE
        if not len(accessed):
            return False
        if len(asked) == len(keys) and np.array_equal(np.sort(asked), np.sort(keys)):
            self._asked = asked
            return False
        missing, stay = slots < 0, _NONE
        if self._evicts_early or len(self._map) + int(np.count_nonzero(missing)) > self.capacity:  # or nothing leaves
            held = self._check_fits(slots)
            stay = self._map.keys_of(held) if len(held) else held
            if len(accessed) < len(keys):
                # Keys of this call that the policy does not see must not make room for the others.
                stay = np.concatenate((stay, keys[np.flatnonzero(~missing)]))
        self._leaving = self.policy.access(accessed, pinned=stay).evicted
        self._entering, self._asked = keys[np.flatnonzero(missing)], keys
        self.accesses += len(accessed)
        self.misses += len(self._entering)
        return len(self._leaving) + len(self._entering) > 0

    def victims(self) -> tuple[Ints, Ints]:
        """Return the keys that leave in the unfinished exchange, and their slots."""
        return self._leaving, self._map.find(self._leaving) if len(self._leaving) else _NONE

    def exchange(self) -> Ints:
        """Give the emptied slots of the victims to the keys that enter; return the slots of these."""
        if len(self._leaving):
            self.evictions += len(self._map.erase(self._leaving))
            self._leaving = _NONE
        slots = self._map.insert(self._entering) if len(self._entering) else _NONE
        self._entering = _NONE
        return slots

    def served(self) -> None:
        """Note that the call is over whose keys were accessed last."""
        self._asked = _NONE

    def _check_fits(self, slots: Ints) -> Ints:
        """Return the held slots; raise Shortage when they and those of the call are more than there are."""
        held = self.pins.held()
        if len(held) + len(slots) <= self.capacity:
            return held
        held, known = np.unique(held), slots[slots >= 0]
        needed = len(held) + len(slots) - int(np.count_nonzero(self.pins.is_held(known)))
        if needed > self.capacity:
            enough = self._enough(needed)
            raise Shortage(
                f"keys: {len(slots)} distinct rows beside {len(held)} that are pinned or held by tickets need {needed} "
                f"slots, but there are {self.capacity}; dram={enough} would be enough, or smaller batches",
                "slots", needed=len(slots), held=len(held), room=self.capacity, enough=enough,
            )  # fmt: skip
        return held


def _rows_max(slots: int) -> int:
    # Tickets of neighbouring batches share rows, so tickets may hold more rows than there are slots, up to a limit.
    return 2 * slots
