"""Settings of a replay buffer, and the samples that its budgets hold."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memhier.arguments import check_int
from memhier.budget import parse_bytes
from memhier.errors import BudgetError, FormatError
from memhier.fields import described
from memhier.recsys.replay.placement.admit import Admission, Everything
from memhier.recsys.replay.placement.memory import Memory
from memhier.recsys.replay.policies import SwapPolicy
from memhier.recsys.replay.schema import Schema
from memhier.recsys.replay.storage.room import Copies, samples_within, storage_bytes

__all__ = ["BufferSettings", "as_schema", "stored_schema"]

_SLOT_BYTES = 8 * 5 + 2  # of a placement, for each slot


@dataclass(frozen=True)
class BufferSettings:
    """The settings of a buffer; those of `CarouselBuffer` but for the sizes of its tiers.

    Attributes
    ----------
    same_class
        Whether swaps keep classes; None if that was left open: they do not.
    way_back
        Whether a checkpoint keeps the one before it.
    """

    schema: Schema
    codecs: dict[str, str]
    admission: Admission
    policy: SwapPolicy | None
    seed: int
    delay: int
    same_class: bool | None
    way_back: bool = False

    @property
    def by_class(self) -> bool:
        """Whether a group of samples is a class."""
        return bool(self.same_class) or self.admission.by_class

    @property
    def copies(self) -> Copies:
        """How often storage may have a sample beside the last checkpoint."""
        return Copies(not isinstance(self.admission, Everything), self.way_back)

    def memory_slots(self, memory: int | str) -> int:
        """Return how many samples a budget of the memory tier holds.

        Raises
        ------
        BudgetError
            If it holds none.
        """
        if not isinstance(memory, str):
            return check_int("memory", memory, 1, 2**31 - 1, "samples")
        budget, each = parse_bytes(memory, "memory"), self.schema.sample_bytes + _SLOT_BYTES + 20
        slots = budget // each
        while slots > 0 and (excess := self._memory_bytes(slots) - budget) > 0:
            slots -= max(1, excess // each)
        if slots < 1:
            raise BudgetError(
                f"memory={memory!r}: one sample takes {self._memory_bytes(1)} bytes; use at least as many"
            )
        return slots

    def _memory_bytes(self, slots: int) -> int:
        return Memory.bytes_for(self.schema, slots) + slots * _SLOT_BYTES

    def storage_limit(self, storage: int | str | None, slots: int) -> int | None:
        """Return how many samples a budget of the storage tier holds beside a memory of `slots`; None for no budget.

        Raises
        ------
        BudgetError
            If it holds none.
        """
        if storage is None:
            return None
        if not isinstance(storage, str):
            return check_int("storage", storage, 1, 2**40, "samples")
        limit = samples_within(parse_bytes(storage, "storage"), self.schema, self.codecs, slots, self.copies)
        if limit < 1:
            least = self.storage_bytes(1, slots)
            raise BudgetError(
                f"storage={storage!r}: one sample, with the parts that every store has, needs up to {least} bytes"
            )
        return limit

    def storage_bytes(self, limit: int, slots: int) -> int:
        """Return the bytes on SSD that `limit` samples take at most, beside a memory of `slots`."""
        return storage_bytes(limit, self.schema, self.codecs, slots, self.copies)


def stored_schema(meta: Mapping[str, Any], path: Path, expected: Schema | Mapping[str, Any] | None) -> Schema:
    """Return the schema of a checkpoint.

    Raises
    ------
    FormatError
        If it differs from the expected one.
    """
    with described(f"{path}: the schema"):
        there = Schema.decode(meta["schema"])
    if expected is not None and (wanted := as_schema(expected)) != there:
        raise FormatError(f"{path}: holds samples of {there}, expected {wanted}")
    return there


def as_schema(schema: Schema | Mapping[str, Any]) -> Schema:
    """Return a schema, made from its fields if they are given."""
    return schema if isinstance(schema, Schema) else Schema(schema)
