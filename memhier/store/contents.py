"""What a store holds at one generation, and how the catalog's entries spell it."""

import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from memhier.errors import CorruptionError, FormatError
from memhier.store.segments import SegmentInfo

__all__ = ["Contents", "check_kind"]

_VERSION = 1
_GENERATION_MAX = 2**62  # no store has seen as many commits
_HEADER_KEY = b"store"
_HEADER = struct.Struct("<IQ")  # format version, generation; the kind follows
_VALUE = b"value/"
_SEGMENT = b"segment/"


@dataclass(frozen=True, slots=True)
class Contents:
    """Values and segments of one generation; 0 is the empty one before the first commit."""

    kind: str
    generation: int = 0
    values: Mapping[str, bytes] = field(default_factory=dict)
    segments: Mapping[str, SegmentInfo] = field(default_factory=dict)

    @classmethod
    def decode(cls, entries: Mapping[bytes, bytes], root: Path, checked: bool) -> "Contents":
        """Assemble a generation from the catalog of the store at `root`; with the pages' checksums if `checked`."""
        header = entries.get(_HEADER_KEY, b"")
        if len(header) < _HEADER.size:
            raise FormatError(f"{root}: the catalog is not that of a memhier store")
        version, generation = _HEADER.unpack_from(header)
        if version != _VERSION:
            raise FormatError(f"{root}: format version {version}, expected {_VERSION}; use a matching memhier")
        if generation > _GENERATION_MAX:
            raise CorruptionError(f"{root}: generation {generation}, expected at most {_GENERATION_MAX}")
        try:
            kind = header[_HEADER.size :].decode()
            values = {
                key.removeprefix(_VALUE).decode(): value for key, value in entries.items() if key.startswith(_VALUE)
            }
            names = [key.removeprefix(_SEGMENT).decode() for key in entries if key.startswith(_SEGMENT)]
        except UnicodeDecodeError as error:
            raise CorruptionError(f"{root}: a name in the catalog is no UTF-8: {error}") from error
        segments = root / "segments"
        return cls(
            kind, generation, values, {name: SegmentInfo.decode(name, segments, entries, checked) for name in names}
        )

    def header(self) -> dict[bytes, bytes]:
        """Return the catalog's entry for the generation itself."""
        return {_HEADER_KEY: _HEADER.pack(_VERSION, self.generation) + self.kind.encode()}

    def changed(
        self, values: Mapping[str, bytes | None], written: Collection[SegmentInfo], dropped: Collection[str]
    ) -> tuple["Contents", dict[bytes, bytes | None]]:
        """Return the next generation, and the changes of the catalog that lead there (None deletes)."""
        segments = {name: info for name, info in self.segments.items() if name not in dropped}
        segments |= {info.name: info for info in written}
        merged = {**self.values, **values}
        kept = {key: value for key, value in merged.items() if value is not None}
        following = Contents(self.kind, self.generation + 1, kept, segments)

        changes: dict[bytes, bytes | None] = {_VALUE + key.encode(): value for key, value in values.items()}
        for name, info in self.segments.items():
            if segments.get(name) is not info:
                changes |= dict.fromkeys(info.keys(), None)
        for info in written:
            changes |= info.encode()
        return following, changes | following.header()

    @property
    def memory_bytes(self) -> int:
        """DRAM held by values and checksums, in bytes."""
        held = sum(len(key) + len(value) for key, value in self.values.items())
        return held + sum(info.memory_bytes for info in self.segments.values())


def check_kind(kind: str) -> None:
    """Refuse what could not be the kind of a store."""
    if not isinstance(kind, str):
        raise TypeError(f"kind={kind!r}: expected text")
    if not 1 <= len(kind.encode()) <= 100:
        raise ValueError(f"kind={kind!r}: expected 1 to 100 bytes of UTF-8")
