"""The parts of a replay buffer, and how they are made."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memhier.arguments import check_int
from memhier.budget import parse_bytes
from memhier.errors import BudgetError
from memhier.recsys.replay.ahead import Ahead
from memhier.recsys.replay.placement.admit import Admission, Everything
from memhier.recsys.replay.placement.memory import MemoryTier
from memhier.recsys.replay.placement.tiers import Tiers
from memhier.recsys.replay.schema import Columns, Schema
from memhier.recsys.replay.storage.room import samples_within, storage_bytes
from memhier.recsys.replay.storage.storage import StorageTier
from memhier.recsys.replay.streams import Purpose, Uniforms
from memhier.recsys.replay.swap.carousel import Carousel
from memhier.recsys.replay.swap.policies import SwapPolicy

__all__ = ["Parts", "Settings", "as_codecs", "memory_slots", "replaces", "stats", "storage_limit"]

Ints = NDArray[np.int64]

_SLOT_BYTES = 8 * 5 + 2  # what residents hold of each


@dataclass
class Settings:
    """What a buffer was made with.

    Attributes
    ----------
    same_class
        Whether swaps keep classes; None where that was left open: they do not.
    """

    schema: Schema
    codecs: dict[str, str]
    seed: int
    delay: int
    same_class: bool | None


class Parts:
    """Everything that a buffer consists of, in a consistent state between its calls.

    Attributes
    ----------
    at_odds
        Whether a change was begun and not ended that leaves one part with what another does not know of.
    """

    def __init__(
        self, settings: Settings, storage: StorageTier, slots: int, limit: int | None, admission: Admission,
        policy: SwapPolicy | None,
    ) -> None:  # fmt: skip
        self.settings = settings
        self.storage = storage
        self.admission = admission
        self.policy = policy
        self.tiers = Tiers(settings.seed, slots, limit, bool(settings.same_class) or admission.by_class)
        self.memory = MemoryTier.make(settings.schema, slots)
        self.carousel = Carousel(storage, settings.schema)
        self.draws = Uniforms(settings.seed, Purpose.SAMPLE)
        self.ahead = Ahead(settings.schema)
        self.at_odds = False
        self.step = 0
        self.errors = 0
        self.last_boundary = time.perf_counter()
        self.keep_within()

    def keep_within(self) -> None:
        """Let storage take no more bytes than the samples that it may hold."""
        limit, settings = self.tiers.limit, self.settings
        if limit is None:
            return
        slots = self.tiers.residents.slots
        self.storage.keep_within(
            storage_bytes(limit, settings.schema, settings.codecs, slots, replaces(self.admission))
        )

    @property
    def memory_bytes(self) -> int:
        """DRAM held by everything."""
        held = self.memory.slab.memory_bytes + self.tiers.memory_bytes + self.carousel.memory_bytes
        return held + self.ahead.memory_bytes + self.storage.memory_bytes

    @contextmanager
    def together(self) -> Iterator[None]:
        """Make changes inside the block that belong together: where it fails, the parts are at odds for good."""
        self.at_odds = True
        yield
        self.at_odds = False

    def write_back(self, positions: Ints, slots: Ints) -> None:
        """Give storage the mutable fields that memory has of samples which leave it.

        Swaps that are under way and bring them back have read them before.
        """
        if len(positions) == 0:
            return
        columns = {name: self.memory.views[name][slots] for name in self.settings.schema.mutable}
        self.storage.append_side(positions, columns)
        for index, position in enumerate(positions.tolist()):
            one = {name: values[index : index + 1] for name, values in columns.items()}
            self.arrive_late(position, one)

    def empty(self, slots: Ints) -> None:
        """Show nothing in slots any more, and overwrite what was there."""
        if len(slots):
            self.memory.clear(slots)
            for slot in slots.tolist():
                self.tiers.residents.hide(slot)

    def arrive_late(self, position: int, columns: Columns) -> None:
        """Let a swap that is bringing a position bring these values of it."""
        for swap in self.carousel.under_way:
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
        "storage_bytes": parts.storage.disk_bytes,
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


def storage_limit(
    storage: int | str | None, schema: Schema, codecs: Mapping[str, str], slots: int, replaces: bool
) -> int | None:
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
    limit = samples_within(parse_bytes(storage, "storage"), schema, codecs, slots, replaces)
    if limit < 1:
        least = storage_bytes(1, schema, codecs, slots, replaces)
        raise BudgetError(f"storage={storage!r}: one sample, with what every store takes, needs up to {least} bytes")
    return limit


def replaces(admission: Admission) -> bool:
    """Whether samples that come take the places of others in storage."""
    return not isinstance(admission, Everything)
