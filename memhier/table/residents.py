"""Which rows are in DRAM: slots for those that come, and the way out for those that leave."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memhier.cache.slab import Slab
from memhier.cache.slots import SlotMap
from memhier.codecs import Codec
from memhier.policies import Policy
from memhier.table.shortage import Shortage
from memhier.table.sizes import Sizes, make_policy
from memhier.table.tickets import Pins, Ticket
from memhier.table.write_queue import WriteQueue

__all__ = ["Residents"]

Ints = NDArray[np.int64]

_NONE = np.empty(0, np.int64)
_SAVE_BYTES = 2**20  # of an image written between two calls: about a millisecond
_FLUSH_SLOTS = 2**16  # looked through at a time, so that the numbers of all slots need not be held at once


class Residents:
    """The map from keys to slots, kept in step with the policy; for one thread at a time."""

    def __init__(
        self,
        sizes: Sizes,
        capacity: int,
        policy: str | Policy,
        slab: Slab,
        queue: WriteQueue,
        codec: Codec,
        vacate: Callable[[Ints], None],
    ) -> None:
        self._sizes = sizes
        self._vacate = vacate  # called with slots whose rows have left
        self._slab = slab
        self._queue = queue
        self._codec = codec
        self.policy = make_policy(policy, capacity)
        self.map = SlotMap(capacity, key_space=sizes.map_key_space(capacity), batch=sizes.batch)
        self.pins = Pins(capacity)
        self.dirty = np.zeros(capacity, np.bool_)
        # Slots whose rows are part of the image that is being taken, and not in the log yet; all of them are dirty.
        self._of_image = np.zeros(capacity, np.bool_)
        self._of_image_from = 0  # none before this one
        self.unsaved = False  # whether there may be any
        self._outgoing = np.empty((sizes.outgoing, *slab.shape), slab.dtype)
        self._at_once = max(1, min(sizes.outgoing, _SAVE_BYTES // max(1, sizes.needs.encoded_bytes)))
        # Rows that are stored as they are need no second buffer.
        self._encoded = np.empty((0 if codec.lossless else sizes.outgoing, sizes.needs.encoded_bytes), np.uint8)
        # What the policy has decided and is not done yet: an interrupt may come between.
        self._leaving = self._entering = _NONE
        # The keys of a call, until it is over: one that failed is not counted again when it is repeated.
        self._asked = _NONE
        self.accesses = self.misses = self.evictions = self.writes = 0

    @property
    def memory_bytes(self) -> int:
        """DRAM held, in bytes; slab and queue aside."""
        parts = self.map.memory_bytes + self.policy.memory_bytes + self.pins.memory_bytes
        arrays = (self.dirty, self._of_image, self._outgoing, self._encoded, self._asked)
        return parts + sum(array.nbytes for array in arrays)

    def admit(self, keys: Ints, slots: Ints, accessed: Ints) -> None:
        """Give slots to the keys that have none, letting others leave.

        Until `served` says that the call was, the same keys asked for again are the same access: a batch that Belady
        was told of comes only once.

        Parameters
        ----------
        keys
            int64 [u], distinct.
        slots
            int64 [u]: the slot of each, -1 where it has none; filled in.
        accessed
            int64 [n]: what the policy sees, with repeats: all keys but those that are held; or, each once, those
            without a slot.
        """
        asked, self._asked = self._asked, _NONE
        if not len(accessed):
            return
        if len(asked) == len(keys) and np.array_equal(np.sort(asked), np.sort(keys)):
            self._asked = asked
            return
        held = self._check_fits(slots)
        missing = slots < 0
        stay = self.map.keys_of(held)
        if len(accessed) < len(keys):
            # Keys of this call that the policy does not see must not make room for the others.
            stay = np.concatenate((stay, keys[~missing]))
        self._leaving = self.policy.access(accessed, pinned=stay).evicted
        self._entering, self._asked = keys[missing], keys
        self.accesses += len(accessed)
        self.misses += len(self._entering)
        self.resume()
        slots[missing] = self.map.find(keys[missing])

    def not_ahead(self, keys: Ints, inverse: Ints, slots: Ints) -> Ints:
        """Return the keys that no ticket holds: the others were accessed when they were prefetched."""
        ahead = slots >= 0
        ahead[ahead] = self.pins.is_ahead(slots[ahead])
        accessed: Ints = keys[~ahead[inverse]] if ahead.any() else keys.reshape(-1)
        return accessed

    def is_for(self, ticket: Ticket, keys: Ints) -> bool:
        """Return whether a ticket holds just these keys, each once, in this order."""
        # Slots of one ticket are distinct, and so are the keys in them. Slots that it has let go may be free by now.
        if keys.ndim != 1 or len(ticket) != len(keys):
            return False
        return ticket.is_of(keys) or np.array_equal(self.map.keys_of(ticket.slots), keys)

    def check_pinned(self, keys: Ints, slots: Ints) -> None:
        """Raise ValueError for a key that is not pinned."""
        pinned = slots >= 0
        pinned[pinned] = self.pins.is_pinned(slots[pinned])
        if not pinned.all():
            raise ValueError(f"keys: {int(keys[~pinned][0])} is not pinned")

    def served(self) -> None:
        """Note that the call is over whose keys were admitted last."""
        self._asked = _NONE

    def resume(self) -> None:
        """Do what the policy has decided, unless that is done: empty the victims' slots, and give them to others."""
        if len(self._leaving):
            slots = self.map.find(self._leaving)
            changed = self.dirty[slots]
            self._write_out(self._leaving[changed], slots[changed])
            self._vacate(slots)
            self.map.erase(self._leaving)
            self.evictions += len(slots)
            self._leaving = _NONE
        if len(self._entering):
            self.map.insert(self._entering)
            self._entering = _NONE

    def as_rows(self, rows: Any, keys: Ints) -> NDArray[Any]:
        """Return rows of keys, [*keys.shape, *shape]; ValueError where they could not be encoded as they leave."""
        array: NDArray[Any] = np.asarray(rows)
        if array.dtype != self._slab.dtype:
            raise TypeError(f"rows: expected an array of {self._slab.dtype}, got {array.dtype}")
        if array.shape != keys.shape + self._slab.shape:
            raise ValueError(f"rows: expected shape {keys.shape + self._slab.shape}, got {array.shape}")
        if self._codec.lossless or not keys.size:
            return array
        flat = array.reshape(keys.size, -1)
        for start in range(0, keys.size, len(self._encoded)):
            part = flat[start : start + len(self._encoded)]
            self._codec.encode(part, out=self._encoded[: len(part)])
        return array

    def flush(self) -> None:
        """Hand all changed rows to the write queue, and wait until the log has them."""
        for start in range(0, len(self.dirty), _FLUSH_SLOTS):
            slots = np.flatnonzero(self.dirty[start : start + _FLUSH_SLOTS]) + start
            self._write_out(self.map.keys_of(slots), slots)
        self._queue.drain()

    def begin_image(self) -> None:
        """Take an image of this moment: `save_some` brings the log what is part of it, until nothing is unsaved.

        Then the queue is drained, and once the log has been committed, released.
        """
        np.copyto(self._of_image, self.dirty)
        self.unsaved, self._of_image_from = True, 0
        self._queue.begin_image()

    def keep_image(self, slots: Ints) -> None:
        """Hand rows that are about to change to the write queue, where they are unsaved."""
        if self.unsaved:
            slots = slots[self._of_image[slots]]
            self._write_out(self.map.keys_of(slots), slots)

    def save_some(self) -> None:
        """Append some unsaved rows to the log, about a megabyte; older rows of their keys have left the queue."""
        while self.unsaved:
            begin = self._of_image_from
            slots = np.flatnonzero(self._of_image[begin : begin + _FLUSH_SLOTS])[: self._at_once] + begin
            if len(slots):
                self._queue.write_through(self.map.keys_of(slots), self._encode(slots))
                self._wrote(slots)
                self._of_image_from = int(slots[-1]) + 1
                return
            self._of_image_from += _FLUSH_SLOTS
            self.unsaved = self._of_image_from < len(self._of_image)

    def drop_image(self) -> None:
        """Take no image any more."""
        self._of_image[:] = False
        self.unsaved = False

    def _check_fits(self, slots: Ints) -> Ints:
        """Return the held slots; raise BudgetError when they and the call's own are more than there are."""
        held = self.pins.held()
        known = slots[slots >= 0]
        needed = len(held) + len(slots) - int(np.count_nonzero(self.pins.is_held(known)))
        if needed > self.map.capacity:
            enough = self._sizes.enough(needed)
            raise Shortage(
                f"keys: {len(slots)} distinct rows beside {len(held)} that are pinned or held by tickets need {needed} "
                f"slots, but there are {self.map.capacity}; dram={enough} would be enough, or smaller batches",
                "slots", needed=len(slots), held=len(held), room=self.map.capacity, enough=enough,
            )  # fmt: skip
        return held

    def _write_out(self, keys: Ints, slots: Ints) -> None:
        if self.unsaved:
            mine = self._of_image[slots]
            self._put(keys[mine], slots[mine], of_image=True)
            keys, slots = keys[~mine], slots[~mine]
        self._put(keys, slots)

    def _put(self, keys: Ints, slots: Ints, *, of_image: bool = False) -> None:
        for start in range(0, len(keys), len(self._outgoing)):
            some, part = (each[start : start + len(self._outgoing)] for each in (keys, slots))
            if not of_image and not self._queue.has_room(some):
                # These wait for the end of the image, which its thread cannot bring about while this call is under way.
                self._queue.drain()
                while self.unsaved:
                    self.save_some()
            self._queue.put(some, self._encode(part), of_image=of_image)
            self._wrote(part)

    def _encode(self, slots: Ints) -> NDArray[np.uint8]:
        """Return rows as they are written, valid until others are."""
        rows = self._slab.gather(slots, out=self._outgoing[: len(slots)]).reshape(len(slots), -1)
        if self._codec.lossless:
            return rows.view(np.uint8)
        try:
            return self._codec.encode(rows, out=self._encoded[: len(slots)])
        except ValueError:
            for slot, row in zip(slots, rows, strict=True):
                self._check_encodable(slot, row)
            raise

    def _check_encodable(self, slot: Any, row: NDArray[Any]) -> None:
        try:
            self._codec.encode(row[None], out=self._encoded[:1])
        except ValueError as error:
            key = int(self.map.keys_of(np.array([slot]))[0])
            raise ValueError(
                f"the row of key {key} cannot be written: {error}; what was committed is still there"
            ) from error

    def _wrote(self, slots: Ints) -> None:
        self._of_image[slots] = False
        self.dirty[slots] = False
        self.writes += len(slots)
