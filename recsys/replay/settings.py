"""Settings of a replay buffer, and the samples that its budgets hold."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from memhier.arguments import check_int
from memhier.budget import parse_bytes
from memhier.errors import BudgetError, FormatError
from memhier.fields import described
from memhier.io.page_file import PAGE_BYTES
from memhier.recsys.replay.codecs.encoding import Encoding
from memhier.recsys.replay.placement.admit import Admission, Everything
from memhier.recsys.replay.placement.memory import Memory
from memhier.recsys.replay.policies import SwapPolicy
from memhier.recsys.replay.product import ProductCodes
from memhier.recsys.replay.schema import Schema
from memhier.recsys.replay.storage.room import Copies, samples_within, storage_bytes
from memhier.store.store import Store

__all__ = ["CODES", "BufferSettings", "as_schema", "stored_schema"]

CODES = "replay/codes/"
"""Prefix of the names of values with product codes."""
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

    @cached_property
    def encoding(self) -> Encoding:
        """The way to samples as the tiers hold them, and back."""
        return Encoding(self.schema)

    @property
    def held(self) -> Schema:
        """The schema of samples as the tiers hold them."""
        return self.encoding.held

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
        budget, each = parse_bytes(memory, "memory"), Memory.slot_bytes(self.held) + _SLOT_BYTES
        slots = budget // each
        while slots > 0 and (excess := self._memory_bytes(slots) - budget) > 0:
            slots -= max(1, excess // each)
        if slots < 1:
            raise BudgetError(
                f"memory={memory!r}: one sample takes {self._memory_bytes(1)} bytes; use at least as many"
            )
        return slots

    def _memory_bytes(self, slots: int) -> int:
        return Memory.bytes_for(self.held, slots) + slots * _SLOT_BYTES

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
        budget = max(0, parse_bytes(storage, "storage") - self._codes_bytes)
        limit = samples_within(budget, self.held, self.codecs, slots, self.copies)
        if limit < 1:
            least = self.storage_bytes(1, slots)
            raise BudgetError(
                f"storage={storage!r}: one sample, with the parts that every store has, needs up to {least} bytes"
            )
        return limit

    def storage_bytes(self, limit: int, slots: int) -> int:
        """Return the bytes on SSD that `limit` samples take at most, beside a memory of `slots`."""
        return self.log_bytes(limit, slots) + self._codes_bytes

    def log_bytes(self, limit: int, slots: int) -> int:
        """Return those of them that are not of product codes."""
        return storage_bytes(limit, self.held, self.codecs, slots, self.copies)

    @property
    def codes(self) -> dict[str, ProductCodes]:
        """The product codes by field, which the store keeps beside the samples."""
        return {
            name: field.codec for name, field in self.schema.fields.items() if isinstance(field.codec, ProductCodes)
        }

    @property
    def _codes_bytes(self) -> int:
        """On SSD, in the catalog."""
        return sum(len(codes.value) + 2 * PAGE_BYTES for codes in self.codes.values())


def stored_schema(store: Store, meta: Mapping[str, Any], expected: Schema | Mapping[str, Any] | None) -> Schema:
    """Return the schema of a checkpoint.

    Raises
    ------
    FormatError
        If it differs from the expected one.
    """
    with described(f"{store.path}: the schema"):
        codecs = {name: _stored_codec(store, name, codec) for name, codec in meta.get("field_codecs", {}).items()}
        there = Schema.decode(meta["schema"], codecs, meta.get("means", {}))
    if expected is not None and (wanted := as_schema(expected)) != there:
        raise FormatError(f"{store.path}: holds samples of {there}, expected {wanted}")
    return there


def _stored_codec(store: Store, name: str, codec: str) -> str | ProductCodes:
    """Return the codec of a field; product codes lie in the catalog."""
    if not codec.startswith("product:"):
        return codec
    value = store.get(f"{CODES}{name}")
    if value is None:
        raise ValueError(f"no value {CODES}{name}")
    with described(f"{store.path}: the value {CODES}{name}"):
        codes = ProductCodes.decoded(value)
    if codes.digest != codec:
        raise ValueError(f"{CODES}{name} is {codes.digest}, expected {codec}")
    return codes


def as_schema(schema: Schema | Mapping[str, Any]) -> Schema:
    """Return a schema, made from its fields if they are given."""
    return schema if isinstance(schema, Schema) else Schema(schema)
