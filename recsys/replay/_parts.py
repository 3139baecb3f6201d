"""The parts of a replay buffer, and how they are made."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memhier._arguments import check_int
from memhier.budget import parse_bytes
from memhier.errors import BudgetError
from memhier.recsys.replay._ahead import Ahead
from memhier.recsys.replay._carousel import Carousel, Swap
from memhier.recsys.replay._memory import MemoryTier
from memhier.recsys.replay._records import RecordFormat
from memhier.recsys.replay._storage import StorageTier
from memhier.recsys.replay._streams import Purpose, Uniforms
from memhier.recsys.replay._tiers import Tiers
from memhier.recsys.replay.admit import Admission
from memhier.recsys.replay.schema import Columns, Schema
from memhier.recsys.replay.swap import SwapPolicy

__all__ = ["COMPACT_BELOW", "Parts", "Settings", "as_codecs", "memory_slots", "stats", "storage_limit"]

Ints = NDArray[np.int64]

# Of a storage tier with a limit, in which samples replace each other: it takes little more than its samples over this.
COMPACT_BELOW = 0.7
_SLOT_BYTES = 8 * 5 + 2  # what residents hold of each
_SLOT_INDEX_BYTES = 33  # on SSD


@dataclass
class Settings:
    """What a buffer was made with.

    Attributes
    ----------
    same_class
        Whether swaps keep classes; None until the first sample says whether there are labels.
    """

    schema: Schema
    codecs: dict[str, str]
    seed: int
    delay: int
    same_class: bool | None


class Parts:
    """Everything that a buffer consists of, in a consistent state between its calls."""

    def __init__(
        self, settings: Settings, storage: StorageTier, slots: int, limit: int | None, admission: Admission,
        policy: SwapPolicy | None,
    ) -> None:  # fmt: skip
        self.settings = settings
        self.storage = storage
        self.admission = admission
        self.policy = policy
        self.tiers = Tiers(settings.seed, slots, limit, bool(settings.same_class))
        self.memory = MemoryTier.make(settings.schema, slots)
        self.carousel = Carousel(storage, settings.schema)
        self.draws = Uniforms(settings.seed, Purpose.SAMPLE)
        self.ahead = Ahead(settings.schema)
        self.step = 0
        self.errors = 0
        self.last_boundary = time.perf_counter()

    @property
    def memory_bytes(self) -> int:
        """DRAM held by everything."""
        held = self.memory.slab.memory_bytes + self.tiers.memory_bytes + self.carousel.memory_bytes
        return held + self.ahead.memory_bytes + self.storage.memory_bytes

    def write_back(self, positions: Ints, slots: Ints, arriving: Sequence[Swap] = ()) -> None:
        """Give storage the mutable fields that memory has of samples which leave it.

        Swaps that are under way, or arriving just now, and bring them back have read them before.
        """
        if len(positions) == 0:
            return
        columns = {name: self.memory.views[name][slots] for name in self.settings.schema.mutable}
        self.storage.append_side(positions, columns)
        for index, position in enumerate(positions.tolist()):
            one = {name: values[index : index + 1] for name, values in columns.items()}
            self.arrive_late(position, one, arriving)

    def empty(self, slots: Ints) -> None:
        """Show nothing in slots any more, and overwrite what was there."""
        if len(slots):
            self.memory.clear(slots)
            for slot in slots.tolist():
                self.tiers.residents.hide(slot)

    def arrive_late(self, position: int, columns: Columns, arriving: Sequence[Swap] = ()) -> None:
        """Let a swap that is bringing a position bring these values of it."""
        for swap in (*self.carousel.under_way, *arriving):
            if (swap.positions == position).any():
                swap.late[position] = swap.late.get(position, {}) | columns

    def close(self) -> None:
        """Let go of everything."""
        self.carousel.close()
        self.storage.close()
        self.memory.slab.close()


def stats(parts: Parts) -> dict[str, Any]:
    """Return what `CarouselBuffer.stats` does."""
    tiers, carousel = parts.tiers, parts.carousel
    reads = parts.storage.reader.stats()
    return {
        "step": parts.step,
        "memory_samples": tiers.residents.count,
        "memory_slots": tiers.residents.slots,
        "storage_samples": tiers.members.size,
        "storage_limit": tiers.limit,
        "arrivals": tiers.arrivals,
        "seen": tiers.seen,
        "swapped": carousel.swapped,
        "under_way": sum(len(swap.slots) for swap in carousel.under_way),
        "stalls": carousel.stalls,
        "stall_s": carousel.stall_s,
        "read_s": carousel.read_s,
        "errors": parts.errors,
        "memory_bytes": parts.memory_bytes,
        "storage_bytes": sum(int(log.stats()["log_bytes"]) for log in parts.storage.logs),
        "reads": reads["reads"],
        "read_bytes": reads["bytes"],
    }


def as_codecs(codec: Mapping[str, str] | None) -> dict[str, str]:
    """Return codecs by field, or say that they are none."""
    if codec is not None and not isinstance(codec, Mapping):
        raise TypeError(f"codec={codec!r}: expected a dict from fields to codecs, such as {{'image': 'jpeg:90'}}")
    return dict(codec or {})


def memory_slots(memory: int | str, schema: Schema) -> int:
    """Return how many samples a budget of the memory tier holds.

    Raises
    ------
    BudgetError
        When it holds none.
    """
    if not isinstance(memory, str):
        return check_int("memory", memory, 1, 2**31 - 1, "samples")
    budget = parse_bytes(memory, "memory")
    slots = budget // (schema.sample_bytes + _SLOT_BYTES + 20)
    while slots > 0 and _memory_bytes(schema, slots) > budget:
        slots -= max(1, (_memory_bytes(schema, slots) - budget) // (schema.sample_bytes + _SLOT_BYTES + 20))
    if slots < 1:
        raise BudgetError(f"memory={memory!r}: one sample takes {_memory_bytes(schema, 1)} bytes; use at least as many")
    return slots


def _memory_bytes(schema: Schema, slots: int) -> int:
    return MemoryTier.bytes_for(schema, slots) + slots * _SLOT_BYTES


def storage_limit(storage: int | str | None, schema: Schema, codecs: Mapping[str, str], slots: int) -> int | None:
    """Return how many samples a budget of the storage tier holds beside a memory of so many slots; None for no budget.

    Raises
    ------
    BudgetError
        When it holds none.
    """
    if storage is None:
        return None
    if not isinstance(storage, str):
        return check_int("storage", storage, 1, 2**40, "samples")
    fixed = [name for name in schema.fields if name not in schema.mutable]
    formats = [RecordFormat(schema, names, codecs) for names in (fixed, schema.mutable)]
    # An entry of 12 bytes in each log, 24 in the index; samples that are dead but not compacted yet.
    sizes = [format.longest if format.row_bytes is None else format.row_bytes for format in formats]
    # Of what is given new values more is dead, wherever a commit leaves off.
    each = sum(size * slack + 12 for size, slack in zip(sizes, (1.1, 1.3), strict=True)) + 25
    # What the index says of the slots in use: no more than there are, or than there are samples.
    budget = parse_bytes(storage, "storage") * COMPACT_BELOW
    limit = int(max(budget / (each + _SLOT_INDEX_BYTES), (budget - slots * _SLOT_INDEX_BYTES) / each))
    if limit < 1:
        least = int((each + _SLOT_INDEX_BYTES) / COMPACT_BELOW) + 1
        raise BudgetError(f"storage={storage!r}: one sample takes up to {least} bytes")
    return limit
