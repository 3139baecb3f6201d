"""Which rows are in DRAM: slots for those that come, and the way out for those that leave."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from memhier._tickets import Pins
from memhier._tiered_sizes import Sizes, make_policy
from memhier._write_queue import WriteQueue
from memhier.codecs import Codec
from memhier.errors import BudgetError
from memhier.policies import Policy
from memhier.slab import Slab
from memhier.slots import SlotMap

__all__ = ["Residents"]

Ints = NDArray[np.int64]

_NONE = np.empty(0, np.int64)


class Residents:
    """The map from keys to slots, kept in step with the policy; for one thread at a time."""

    def __init__(
        self, sizes: Sizes, capacity: int, policy: str | Policy, slab: Slab, queue: WriteQueue, codec: Codec
    ) -> None:
        self._sizes = sizes
        self._slab = slab
        self._queue = queue
        self._codec = codec
        self.policy = make_policy(policy, capacity)
        self.map = SlotMap(capacity, key_space=sizes.needs.key_space, batch=sizes.batch)
        self.pins = Pins(capacity)
        self.dirty = np.zeros(capacity, np.bool_)
        self._outgoing = np.empty((sizes.outgoing, *slab.shape), slab.dtype)
        # Rows that are stored as they are need no second buffer.
        self._encoded = np.empty((0 if codec.lossless else sizes.outgoing, sizes.needs.encoded_bytes), np.uint8)
        # Victims of the policy that have not all reached the write queue: an interrupt may come between.
        self._leaving = _NONE
        self.accesses = self.misses = self.evictions = 0

    @property
    def memory_bytes(self) -> int:
        """DRAM held, in bytes; slab and queue aside."""
        parts = self.map.memory_bytes + self.policy.memory_bytes + self.pins.memory_bytes
        return parts + self.dirty.nbytes + self._outgoing.nbytes + self._encoded.nbytes

    def admit(self, keys: Ints, slots: Ints, accessed: Ints) -> Ints:
        """Give slots to the keys that have none, letting others leave.

        Parameters
        ----------
        keys
            int64 [u], distinct.
        slots
            int64 [u]: the slot of each, -1 where it has none; filled in.
        accessed
            int64 [n]: what the policy sees, with repeats; all keys without a slot are among them.

        Returns
        -------
        numpy.ndarray
            int64 [m]: the slots that are new, whose rows are still to be filled.
        """
        if not len(accessed):
            return _NONE
        held = self._check_fits(slots)
        self._finish_leaving()
        missing = slots < 0
        # Keys of this call that the policy does not see must not make room for the others.
        stay = np.concatenate((self.map.keys_of(held), keys[~missing]))
        self._leaving = self.policy.access(accessed, pinned=stay).evicted
        try:
            self._finish_leaving()
            slots[missing] = self.map.insert(keys[missing])
        except BaseException:
            self.policy.discard(keys[missing])
            raise
        self.accesses += len(accessed)
        self.misses += int(np.count_nonzero(missing))
        return slots[missing]

    def check_rows(self, rows: NDArray[Any]) -> None:
        """Raise ValueError for rows, [n, *shape], that could not be encoded when they leave."""
        if self._codec.lossless:
            return
        rows = rows.reshape(len(rows), -1)
        for start in range(0, len(rows), len(self._encoded)):
            part = rows[start : start + len(self._encoded)]
            self._codec.encode(part, out=self._encoded[: len(part)])

    def flush(self) -> None:
        """Hand all changed rows to the write queue, and wait until the log has them."""
        self._finish_leaving()
        slots = np.flatnonzero(self.dirty)
        self._write_out(self.map.keys_of(slots), slots)
        self._queue.drain()

    def _check_fits(self, slots: Ints) -> Ints:
        """Return the held slots; raise BudgetError when they and the call's own are more than there are."""
        held = self.pins.held()
        known = slots[slots >= 0]
        needed = len(held) + len(slots) - int(np.count_nonzero(self.pins.is_held(known)))
        if needed > self.map.capacity:
            raise BudgetError(
                f"keys: {len(slots)} distinct rows beside {len(held)} that are pinned or held by tickets need {needed} "
                f"slots, but there are {self.map.capacity}; dram={self._sizes.enough(needed)} would be enough, or "
                "smaller batches"
            )
        return held

    def _finish_leaving(self) -> None:
        """Hand the changed ones among the victims to the write queue, then free their slots."""
        if not len(self._leaving):
            return
        slots = self.map.find(self._leaving)
        changed = self.dirty[slots]
        self._write_out(self._leaving[changed], slots[changed])
        self.map.erase(self._leaving)
        self.evictions += len(slots)
        self._leaving = _NONE

    def _write_out(self, keys: Ints, slots: Ints) -> None:
        for start in range(0, len(keys), len(self._outgoing)):
            part = slots[start : start + len(self._outgoing)]
            rows = self._slab.gather(part, out=self._outgoing[: len(part)])
            if self._codec.lossless:
                encoded = rows.reshape(len(part), -1).view(np.uint8)
            else:
                encoded = self._codec.encode(rows.reshape(len(part), -1), out=self._encoded[: len(part)])
            self._queue.put(keys[start : start + len(part)], encoded)
            self.dirty[part] = False
