"""Rows with ids, attributes and documents, as look-ups see them: those of vectors, and those of items of many."""

from collections.abc import Sequence
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from memhier.ann.zoom.filters.attributes import Attributes, Schema
from memhier.ann.zoom.filters.bitmaps import Words
from memhier.ann.zoom.ids.stored_texts import StoredTexts
from memhier.ann.zoom.payload.stored import StoredRecords
from memhier.ann.zoom.storage.changed_attributes import ChangedAttributes
from memhier.ann.zoom.storage.fresh import Fresh
from memhier.io.reader import Reader
from memhier.store.store import Store

__all__ = ["IdKind", "RowArrays", "RowPart", "RowState", "misposted", "open_fields"]

IdKind: TypeAlias = Literal["int64", "str"]
Ints: TypeAlias = npt.NDArray[np.int64]


class RowArrays(Protocol):
    """The arrays of a part."""

    def ids_of(self, rows: Ints) -> npt.NDArray[Any]:
        """Return the ids of rows, in any order."""


class RowPart(Protocol):
    """Rows that were written together."""

    @property
    def name(self) -> str:
        """Prefix of their segments."""

    @property
    def arrays(self) -> RowArrays:
        """Their arrays."""

    @property
    def alive(self) -> Words | None:
        """A bit for each row that was not removed; None while all are there."""

    @property
    def attributes(self) -> Attributes | ChangedAttributes | None:
        """Their attributes; None where the index has none."""

    @property
    def texts(self) -> StoredTexts | None:
        """The strings that the ids are hashes of; None where ids are integers."""

    @property
    def records(self) -> StoredRecords | None:
        """Their documents; None where no row has any."""

    def __len__(self) -> int: ...

    def is_alive(self, rows: Ints) -> npt.NDArray[np.bool_]:
        """Return which of the rows were not removed, bool ``[n]``."""


class RowState(Protocol):
    """An index at one moment."""

    @property
    def schema(self) -> Schema:
        """Types of the attributes."""

    @property
    def documents(self) -> tuple[str, ...]:
        """Names of the documents, in the order of their numbers."""

    @property
    def parts(self) -> Sequence[RowPart]:
        """Rows on SSD."""

    @property
    def fresh(self) -> Fresh:
        """Rows that wait in DRAM."""

    @property
    def id_kind(self) -> IdKind:
        """The type of the ids."""

    @property
    def scan_bytes(self) -> int:
        """DRAM for pages that are read together."""


def open_fields(
    store: Store, name: str, count: int, reader: Reader, *, texts: bool
) -> tuple[StoredTexts | None, StoredRecords | None]:
    """Return the strings, with `texts`, and the documents of the `count` rows of a part, where it has any."""
    names = StoredTexts(store, f"{name}-texts", count, reader) if texts else None
    has_records = f"{name}-docs" in store.segments()
    return names, StoredRecords.load(store, f"{name}-docs", count, reader) if has_records else None


def misposted(parts: Sequence[RowPart]) -> list[str]:
    """Return a sentence for each attribute of a part whose postings do not tell the items of its lists."""
    kept = {part.name: part.attributes for part in parts if part.attributes is not None}
    found = {name: attributes.misposted() for name, attributes in kept.items()}
    return [f"part {name}: {each!r} has postings unlike its lists" for name, every in found.items() for each in every]
