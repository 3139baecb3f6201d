"""The contents of a store at one generation, and the entries of the catalog that describe them.

The checksums of a segment's pages lie here and not in the pages: rows keep their powers of two, and a page that was
written to the wrong place is found as well.
"""

import re
import struct
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from memhier.errors import CorruptionError, FormatError
from memhier.io.page_file import PAGE_BYTES

__all__ = ["CHUNK_PAGES", "PAGE_BYTES", "Contents", "SegmentInfo", "check_kind", "segment_file_name"]

_VERSION = 1
_GENERATION_MAX = 2**62  # no store has seen as many commits
CHUNK_PAGES = 8192  # checksums per catalog entry: 32 MiB of a segment in 32 KiB
_HEADER_KEY = b"store"
_HEADER = struct.Struct("<IQ")  # format version, generation; the kind follows
_SEGMENT_RECORD = struct.Struct("<QQQ")  # generation in the file's name, length, payload
_VALUE = b"value/"
_SEGMENT = b"segment/"
_NAME = re.compile(r"[A-Za-z0-9_-]{1,100}")


@dataclass(frozen=True, slots=True, eq=False)
class SegmentInfo:
    """A committed segment.

    Attributes
    ----------
    name
        Its name in the catalog.
    path
        Its file.
    length
        Committed bytes, a whole number of pages; the file may be longer, and the rest does not exist.
    payload
        Bytes that were appended; up to a page less than `length`.
    checksums
        uint32 [length / 4096], CRC32C per page; None if the store was opened with ``verify="off"``.
    """

    name: str
    path: Path
    generation: int
    length: int
    payload: int
    checksums: NDArray[np.uint32] | None

    @classmethod
    def decode(cls, name: str, directory: Path, entries: Mapping[bytes, bytes], checked: bool) -> "SegmentInfo":
        """Assemble a segment from the entries of a catalog, with its checksums if `checked`."""
        record = entries[_SEGMENT + name.encode()]
        if len(record) != _SEGMENT_RECORD.size:
            raise CorruptionError(f"{directory}: the record of segment {name!r} has {len(record)} bytes")
        if not _NAME.fullmatch(name):
            raise CorruptionError(f"{directory}: a segment is named {name!r}, which is no name of one")
        generation, length, payload = _SEGMENT_RECORD.unpack(record)
        if length % PAGE_BYTES or length >= 2**63 or not 0 <= length - payload < PAGE_BYTES or generation >= 2**63:
            raise CorruptionError(
                f"{directory}: the record of segment {name!r} says generation {generation}, {payload} bytes in "
                f"pages of {length}"
            )
        checksums = None
        if checked:
            # The chunks are found before memory is taken for them: a damaged length could be anything.
            chunks: list[bytes] = []
            for key, pages in _chunks(name, generation, length):
                chunk = entries.get(key, b"")
                if len(chunk) != 4 * (pages.stop - pages.start):
                    raise CorruptionError(f"{directory}: {len(chunk)} bytes of checksums for {key!r}")
                chunks.append(chunk)
            checksums = np.frombuffer(b"".join(chunks), "<u4").astype(np.uint32)
            checksums.flags.writeable = False
        return cls(name, directory / segment_file_name(name, generation), generation, length, payload, checksums)

    def encode(self) -> dict[bytes, bytes]:
        """Return the entries of the catalog that describe this segment."""
        assert self.checksums is not None
        record = _SEGMENT_RECORD.pack(self.generation, self.length, self.payload)
        entries = {_SEGMENT + self.name.encode(): record}
        for key, pages in _chunks(self.name, self.generation, self.length):
            entries[key] = self.checksums[pages].astype("<u4").tobytes()
        return entries

    def keys(self) -> list[bytes]:
        """Return the keys of the entries of `encode`."""
        chunks = _chunks(self.name, self.generation, self.length)
        return [_SEGMENT + self.name.encode(), *(key for key, _ in chunks)]

    def is_same(self, other: "SegmentInfo") -> bool:
        """Whether both are one file with equal bytes; False where checksums were not kept."""
        if self.checksums is None or other.checksums is None:
            return False
        named = (self.path, self.payload) == (other.path, other.payload)
        return named and np.array_equal(self.checksums, other.checksums)

    @property
    def memory_bytes(self) -> int:
        """DRAM held by the checksums."""
        return 0 if self.checksums is None else self.checksums.nbytes


@dataclass(frozen=True, slots=True)
class Contents:
    """Values and segments of one generation; 0 is the empty one before the first commit."""

    kind: str
    generation: int = 0
    values: Mapping[str, bytes] = field(default_factory=dict)
    segments: Mapping[str, SegmentInfo] = field(default_factory=dict)

    def without(self, keys: Collection[str]) -> "Contents":
        """Return the contents without some values."""
        return replace(self, values={key: value for key, value in self.values.items() if key not in keys})

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
        directory = root / "segments"
        segments = {name: SegmentInfo.decode(name, directory, entries, checked) for name in names}
        return cls(kind, generation, values, segments)

    def header(self) -> dict[bytes, bytes]:
        """Return the catalog's entry for the generation itself."""
        return {_HEADER_KEY: _HEADER.pack(_VERSION, self.generation) + self.kind.encode()}

    def entries(self) -> dict[bytes, bytes]:
        """Return all entries of the catalog."""
        found = self.header() | {_VALUE + key.encode(): value for key, value in self.values.items()}
        for info in self.segments.values():
            found |= info.encode()
        return found

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
    """Raise unless `kind` may be the kind of a store."""
    if not isinstance(kind, str):
        raise TypeError(f"kind={kind!r}: expected text")
    if not 1 <= len(kind.encode()) <= 100:
        raise ValueError(f"kind={kind!r}: expected 1 to 100 bytes of UTF-8")


def segment_file_name(name: str, generation: int) -> str:
    """Return the name of a segment's file, or raise unless `name` makes one; no two segments ever share it."""
    if not isinstance(name, str):
        raise TypeError(f"name={name!r}: expected text")
    if not _NAME.fullmatch(name):
        raise ValueError(f"name={name!r}: expected 1 to 100 letters, digits, '-' or '_'")
    return f"{name}.{generation:08d}.seg"


def _chunks(name: str, generation: int, length: int) -> Iterator[tuple[bytes, slice]]:
    """Yield the keys of a segment's checksums, and the pages that each covers."""
    pages = length // PAGE_BYTES
    for start in range(0, pages, CHUNK_PAGES):
        key = f"pages/{name}.{generation:08d}/{start // CHUNK_PAGES:08d}"
        yield key.encode(), slice(start, min(start + CHUNK_PAGES, pages))
