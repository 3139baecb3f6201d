"""The description of a pushed generation: objects of each segment, of its checksums, and of the catalog's values."""

import json
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b
from typing import Any

from memhier.errors import CorruptionError, FormatError
from memhier.fields import decode_json, integer, mapping, record, sequence, text
from memhier.store.contents import PAGE_BYTES, Contents, SegmentInfo

__all__ = ["Manifest", "PushedSegment", "checksums_of", "decode_values", "digest", "encode_values", "object_path"]

_VERSION = 1
_DIGEST_BYTES = 32
_PAIR = struct.Struct("<II")
_NAME = text(r"[0-9a-f]{64}")
_SEGMENT = record(
    {
        "generation": integer(),
        "length": integer(),
        "payload": integer(),
        "checksums": _NAME,
        "objects": sequence(_NAME),
    }
)
_CHECK = record(
    {
        "version": integer(),
        "kind": text(r"[\s\S]{1,100}"),
        "generation": integer(1, 2**62),
        "chunk_bytes": integer(PAGE_BYTES, 2**30),
        "values": _NAME,
        "values_bytes": integer(),
        "segments": mapping(_SEGMENT, text(r"[A-Za-z0-9_-]{1,100}")),
    }
)


def digest(contents: Any) -> str:
    """Return the name of an object with these contents: their BLAKE2b of 32 bytes, in hexadecimal."""
    return blake2b(contents, digest_size=_DIGEST_BYTES).hexdigest()


def object_path(name: str) -> str:
    """Return the path of an object below the place."""
    return f"objects/{name}"


@dataclass(frozen=True, slots=True)
class PushedSegment:
    """A segment on the far side.

    Attributes
    ----------
    generation, length, payload
        As in the catalog.
    checksums
        The object of its pages' checksums, u32 each.
    objects
        The objects of its bytes in order, `chunk_bytes` each, fewer in the last.
    """

    generation: int
    length: int
    payload: int
    checksums: str
    objects: tuple[str, ...] = ()

    @classmethod
    def of(cls, info: SegmentInfo) -> "PushedSegment":
        """Describe a segment; its objects stay open."""
        return cls(info.generation, info.length, info.payload, digest(checksums_of(info)))


def checksums_of(info: SegmentInfo) -> bytes:
    """Return the object of a segment's checksums."""
    assert info.checksums is not None
    return info.checksums.astype("<u4").tobytes()


@dataclass(frozen=True, slots=True)
class Manifest:
    """A generation of a store on the far side.

    Attributes
    ----------
    kind, generation
        Of the store.
    chunk_bytes
        Bytes of a segment in one object, whole pages.
    values, values_bytes
        The object of the catalog's values, and its length.
    segments
        By name.
    """

    kind: str
    generation: int
    chunk_bytes: int
    values: str
    values_bytes: int
    segments: Mapping[str, PushedSegment]

    def encode(self) -> bytes:
        """Return the text of the object: its digest, a line end, and JSON."""
        body = json.dumps({"version": _VERSION, **asdict(self)}, sort_keys=True).encode()
        return digest(body).encode() + b"\n" + body

    @classmethod
    def decode(cls, contents: bytes, where: str) -> "Manifest":
        """Read the text of an object; `where` is its URL.

        Raises
        ------
        CorruptionError
            When it is damaged.
        FormatError
            When it is of another version.
        """
        name, _, body = contents.partition(b"\n")
        if name != digest(body).encode():
            raise CorruptionError(f"{where}: does not match its own checksum; a push with verify=True removes it")
        found = decode_json(body, where, record({"version": integer()}))
        if found["version"] != _VERSION:
            raise FormatError(f"{where}: version {found['version']}, expected {_VERSION}; use a matching memhier")
        found = decode_json(body, where, _CHECK)
        segments = {
            name: PushedSegment(
                each["generation"], each["length"], each["payload"], each["checksums"], tuple(each["objects"])
            )
            for name, each in found["segments"].items()
        }
        chunk = found["chunk_bytes"]
        for name, each in segments.items():
            padding = each.length - each.payload
            if each.length % PAGE_BYTES or not 0 <= padding < PAGE_BYTES or chunk % PAGE_BYTES:
                raise CorruptionError(f"{where}: segment {name!r} has {each.payload} bytes in pages of {each.length}")
            if len(each.objects) != -(-each.length // chunk):
                raise CorruptionError(f"{where}: segment {name!r} has {len(each.objects)} objects, {each.length} bytes")
        return cls(found["kind"], found["generation"], chunk, found["values"], found["values_bytes"], segments)

    def describes(self, contents: Contents) -> bool:
        """Whether this generation has the same values and segments as a store."""
        described = {name: replace(each, objects=()) for name, each in self.segments.items()}
        return self.values == digest(encode_values(contents.values)) and described == {
            name: PushedSegment.of(info) for name, info in contents.segments.items()
        }

    def sizes(self) -> dict[str, int]:
        """Return the objects of the generation with their bytes."""
        found = {self.values: self.values_bytes}
        for segment in self.segments.values():
            found[segment.checksums] = segment.length // PAGE_BYTES * 4
            starts = range(0, segment.length, self.chunk_bytes)
            for start, name in zip(starts, segment.objects, strict=True):
                found[name] = min(self.chunk_bytes, segment.length - start)
        return found


def encode_values(values: Mapping[str, bytes]) -> bytes:
    """Return the values of a catalog as one piece: of each, by ascending keys, two lengths, the key and the value."""
    parts = []
    for key in sorted(values):
        name = key.encode()
        parts += [_PAIR.pack(len(name), len(values[key])), name, values[key]]
    return b"".join(parts)


def decode_values(contents: bytes, where: str) -> dict[str, bytes]:
    """Return the values of a catalog; `where` is the URL of the object.

    Raises
    ------
    CorruptionError
        When the lengths do not fit the object, or a key is no text.
    """
    values, at = {}, 0
    try:
        while at < len(contents):
            key_bytes, value_bytes = _PAIR.unpack_from(contents, at)
            at += _PAIR.size
            stop = at + key_bytes + value_bytes
            if stop > len(contents):
                raise CorruptionError(f"{where}: ends within a value")
            values[contents[at : at + key_bytes].decode()] = contents[at + key_bytes : stop]
            at = stop
    except (struct.error, UnicodeDecodeError) as error:
        raise CorruptionError(f"{where}: not the values of a catalog: {error}") from error
    return values
