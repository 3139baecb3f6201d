"""The description of an index of items in the store's catalog."""

import json
from dataclasses import asdict, dataclass, field
from typing import Any, Self

import numpy as np

from memhier.ann.multivector.coding.calibration import Calibration
from memhier.ann.zoom.filters.attributes import Schema
from memhier.ann.zoom.storage.catalog import COMMON_FIELDS, NAME_FIELDS
from memhier.ann.zoom.storage.ids import IdKind
from memhier.errors import CorruptionError, FormatError
from memhier.fields import decode_json, described, integer, one_of, optional, real, record, row, sequence, text
from memhier.store.store import Store, Transaction

__all__ = ["KEY", "KIND", "VERSION", "ItemDescription"]

KIND = "multivector-index"
KEY = "items"
VERSION = 4

_PART = record(
    {
        "name": text(r"p[0-9]{1,18}"), "items": integer(1, 2**40), "tokens": integer(1, 2**40),
        "ids": one_of("<u4", "<i8"), "starts": one_of("<u4", "<i8"), "gaps": one_of("|u1", "<u2"),
        "alive": optional(text(r"[A-Za-z0-9_-]{1,100}")),
    }
)  # fmt: skip
_FIELDS = COMMON_FIELDS | {
    "dimension": integer(1, 2**20),
    "scale": real(5e-324, 1e308),
    "lists": integer(1, 2**16),
    "code_bytes": integer(1, 2**22),
    "changes": integer(),
    "parts": sequence(_PART),
    "pending": sequence(_PART),
}
_EFFORTS = sequence(row(real(0, 1), integer(1, 2**31), real(), real()))
_LEARNT = {"vectors": integer(1, 2**31), "biases": row(real(), real()), "efforts": _EFFORTS}
_CHECKS = {
    1: record(_FIELDS | {"calibration": record({"foreign": real(0)})}),
} | {
    version: record(
        _FIELDS | NAME_FIELDS | {"calibration": record({"learnt": sequence(record(learnt)), "foreign": real(0)})}
    )
    for version, learnt in (
        (2, _LEARNT),
        (3, _LEARNT | {"nearness": real()}),
        (VERSION, _LEARNT | {"nearness": real(), "listed": sequence(real())}),
    )
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ItemDescription:
    """The value ``items`` of the catalog: the description of an index.

    Attributes
    ----------
    dtype, dimension
        Of a token.
    scale, lists, code_bytes
        Of the token book.
    dram, seed
        As given at build.
    searches
        Searches at a time.
    schema
        Types of the attributes.
    next_part, next_id
        Number of the next part, and the next free id.
    trained_on, changes
        Items when lists and codes were last made, and items added and removed since.
    calibration
        The effort for each recall.
    parts
        Entries of the parts.
    pending
        Entries of parts that no commit of the index has taken over.
    id_kind
        The type of the ids.
    documents
        Names of the documents, in the order of their numbers.
    """

    dtype: str
    dimension: int
    scale: float
    lists: int
    code_bytes: int
    dram: int
    searches: int
    seed: int
    schema: Schema
    next_part: int
    next_id: int
    trained_on: int
    changes: int
    calibration: Calibration
    parts: list[dict[str, Any]] = field(default_factory=list)
    pending: list[dict[str, Any]] = field(default_factory=list)
    id_kind: IdKind = "int64"
    documents: list[str] = field(default_factory=list)

    @property
    def token_dtype(self) -> np.dtype[Any]:
        """The dtype of a token."""
        return np.dtype(self.dtype)

    @property
    def shape(self) -> tuple[object, ...]:
        """The facts that an open index keeps from commit to commit."""
        return self.dtype, self.dimension, self.dram, self.searches, self.id_kind

    def write(self, tx: Transaction) -> None:
        """Make it the description of the index."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        values |= {"version": VERSION, "calibration": asdict(self.calibration)}
        tx.put(KEY, json.dumps(values).encode())

    @classmethod
    def load(cls, store: Store) -> Self:
        """Return the description of a store.

        Raises
        ------
        FormatError, CorruptionError
            When there is none, it is of another version, or no description of an index of items.
        """
        raw, where = store.get(KEY), f"{store.path}: the value {KEY!r}"
        if raw is None:
            raise FormatError(f"{store.path}: the catalog does not describe an index of items")
        version = decode_json(raw, where, record({"version": integer()})).get("version")
        if version not in _CHECKS:
            raise FormatError(f"{store.path}: format {version} of items, this memhier reads {VERSION}; build it again")
        values = decode_json(raw, where, _CHECKS[version])
        del values["version"]
        if version == 1:  # its efforts are not taken over
            values["calibration"] = {"learnt": [], "foreign": values["calibration"]["foreign"]}
        with described(where):
            values["calibration"] = Calibration.of_json(values["calibration"])
            found = cls(**values)
        if len({*found.documents, *found.schema}) != len(found.documents) + len(found.schema):
            raise CorruptionError(f"{where}: attributes and documents of one name")
        return found
