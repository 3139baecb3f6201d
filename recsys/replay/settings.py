"""Settings of a replay buffer, and the samples that its budgets hold."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from memhier.arguments import check_int
from memhier.budget import format_bytes, parse_bytes
from memhier.errors import BudgetError, FormatError
from memhier.fields import described
from memhier.io.page_file import PAGE_BYTES
from memhier.recsys.replay.codecs.encoding import Encoding
from memhier.recsys.replay.division import Buffers
from memhier.recsys.replay.placement.admit import Admission, Everything
from memhier.recsys.replay.placement.memory import Memory
from memhier.recsys.replay.policies import SwapPolicy
from memhier.recsys.replay.product import ProductCodes
from memhier.recsys.replay.schema import Schema
from memhier.recsys.replay.storage.index import INDEX_ROW_BYTES
from memhier.recsys.replay.storage.records import SampleCodec
from memhier.recsys.replay.storage.room import Copies, samples_within, storage_bytes
from memhier.store.store import Store

__all__ = ["CODES", "BufferSettings", "Tiers", "as_schema", "stored_schema"]

CODES = "replay/codes/"
"""Prefix of the names of values with product codes."""
_SLOT_BYTES = 8 * 5 + 2  # of a placement, for each slot
_CLASS_SLOT_BYTES = 5  # where slots are kept by class
# The entry of a stored sample, the places of its record and in its group.
_STORED_BYTES = 24 + 8 + 8
_CLASS_STORED_BYTES = 10  # while an array of positions of one class grows
_BESIDE_BYTES = 4  # the group of a field, or the key
_LENGTH_BYTES = 4  # of a record, where they differ
_SIDE_BYTES = 8  # the place of the record of mutable fields
_CHECKSUM_SHARE = 680  # bytes on SSD for one of checksums, also while arrays of them grow


@dataclass(frozen=True, slots=True)
class Tiers:
    """The sizes of both tiers.

    Attributes
    ----------
    slots
        Of memory.
    limit
        Samples in storage at most; None for no limit.
    dram
        The budget in bytes that they came from; None where memory was given in samples.
    buffers
        Beside them.
    rated
        The samples of mean lengths that a storage in bytes has room for; None where samples count as the longest.
    """

    slots: int
    limit: int | None
    dram: int | None
    buffers: Buffers
    rated: int | None = None


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
    def _records(self) -> list[int]:
        """The bytes of a record of each log, 0 where they differ."""
        held, mutable = self.held, self.held.mutable
        fixed = SampleCodec(held, [name for name in held.fields if name not in mutable], self.codecs)
        sizes = [INDEX_ROW_BYTES, fixed.row_bytes if fixed.row_bytes is None else max(1, fixed.row_bytes)]
        if mutable:
            sizes.append(SampleCodec(held, mutable, self.codecs).row_bytes)
        return [size or 0 for size in sizes]

    @property
    def by_class(self) -> bool:
        """Whether a group of samples is a class."""
        return bool(self.same_class) or self.admission.by_class

    def copies(self, packed: bool) -> Copies:
        """How often storage may have a sample beside the last checkpoint."""
        return Copies(not isinstance(self.admission, Everything), self.way_back, packed)

    def tiers(
        self, memory: int | str, storage: int | str | None, kept: int | None = None, buffers: Buffers | None = None
    ) -> "Tiers":
        """Return the sizes of both tiers.

        Parameters
        ----------
        memory, storage
            As of `CarouselBuffer`.
        kept
            The limit in samples that storage keeps if `storage` is None; None for no limit.
        buffers
            Those that are there; None for new ones.

        Raises
        ------
        BudgetError
            If a budget holds no sample.
        """
        if not isinstance(memory, str):
            slots = check_int("memory", memory, 1, 2**31 - 1, "samples")
            limit = kept if storage is None else self.storage_limit(storage, slots)
            return Tiers(slots, limit, None, buffers or Buffers(), self._rated(storage, limit))
        dram = parse_bytes(memory, "memory")
        limit = kept if storage is None else self.storage_limit(storage, max(1, self.slots_within(dram)))
        slots = self._slots(dram, limit, buffers)
        if slots < 1:
            self._refuse(memory, dram, limit, buffers)
        return Tiers(slots, limit, dram, buffers or Buffers.within(dram, limit), self._rated(storage, limit))

    def _rated(self, storage: int | str | None, limit: int | None) -> int | None:
        return limit if isinstance(storage, str) and self._packs else None

    @property
    def _packs(self) -> bool:
        """Whether a storage in bytes counts samples by mean lengths."""
        return bool(self.held.means) and self._records[1] == 0

    def _refuse(self, memory: str, dram: int, limit: int | None, buffers: Buffers | None) -> None:
        """Raise for a budget that holds no sample."""
        low, high = dram, max(dram, 2**20)
        while self._slots(high, limit, buffers) < 1:
            high *= 2
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._slots(middle, limit, buffers) >= 1 else (middle, high)
        stored = "" if limit is None else f", the index of {limit} stored samples"
        raise BudgetError(
            f"memory={memory!r}: too little for one sample of {self.held.sample_bytes} bytes{stored} and buffers; "
            f"memory={f'{high}B'!r} ({format_bytes(high)}) would be enough"
            + ("" if limit is None else ", or a smaller storage")
        )

    def _slots(self, dram: int, limit: int | None, buffers: Buffers | None) -> int:
        """Return how many slots a budget holds beside everything else."""
        beside = (
            (buffers or Buffers.within(dram, limit)).bytes_for(self._records)
            + self._codes_bytes
            + self.codes_memory_bytes
        )
        if limit is not None:
            beside += limit * self._stored_bytes + self.storage_bytes(limit, 1) // _CHECKSUM_SHARE
        return self.slots_within(dram - beside)

    @property
    def _stored_bytes(self) -> int:
        """DRAM of the index for a stored sample."""
        records = self._records
        own = _STORED_BYTES + (_CLASS_STORED_BYTES if self.by_class else 0)
        own += _BESIDE_BYTES * (self.admission.beside is not None)
        return own + _LENGTH_BYTES * (records[1] == 0) + _SIDE_BYTES * (len(records) > 2)

    def slots_within(self, dram: int) -> int:
        """Return how many slots so many bytes hold, without an index of storage and buffers; 0 for none."""
        each = Memory.slot_bytes(self.held) + self._slot_bytes
        slots = min(max(0, dram // each), 2**31 - 1)
        while slots > 0 and (excess := self._memory_bytes(slots) - dram) > 0:
            slots -= max(1, excess // each)
        return max(0, slots)

    @property
    def _slot_bytes(self) -> int:
        return _SLOT_BYTES + (_CLASS_SLOT_BYTES if self.by_class else 0)

    def _memory_bytes(self, slots: int) -> int:
        return Memory.bytes_for(self.held, slots) + slots * self._slot_bytes

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
        limit = samples_within(budget, self.held, self.codecs, slots, self.copies(self._packs))
        if limit < 1:
            least = self.log_bytes(1, slots, self._packs) + self._codes_bytes
            raise BudgetError(
                f"storage={storage!r}: one sample, with the parts that every store has, needs up to {least} bytes"
            )
        return limit

    def storage_bytes(self, limit: int, slots: int) -> int:
        """Return the bytes on SSD that `limit` samples take at most, beside a memory of `slots`."""
        return self.log_bytes(limit, slots) + self._codes_bytes

    def log_bytes(self, limit: int, slots: int, packed: bool = False) -> int:
        """Return those of them that are not of product codes; `packed`, by mean lengths."""
        return storage_bytes(limit, self.held, self.codecs, slots, self.copies(packed))

    @property
    def codes(self) -> dict[str, ProductCodes]:
        """The product codes by field, which the store keeps beside the samples."""
        return {
            name: field.codec for name, field in self.schema.fields.items() if isinstance(field.codec, ProductCodes)
        }

    @property
    def codes_memory_bytes(self) -> int:
        """DRAM of the product codes, beside the catalog."""
        return sum(codes.memory_bytes for codes in self.codes.values())

    @property
    def _codes_bytes(self) -> int:
        """Of the product codes in the catalog, on SSD and in DRAM."""
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
