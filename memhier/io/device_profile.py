"""The figures of a device that a probe found, as plain numbers that travel as JSON."""

import json
from dataclasses import asdict, dataclass, fields
from typing import Any

from memhier.errors import FormatError

__all__ = ["DepthProfile", "DeviceProfile"]

_JSON_FORMAT = "memhier.DeviceProfile/1"


@dataclass(frozen=True)
class DepthProfile:
    """Random page reads with `depth` of them in flight: medians over the rounds.

    Attributes
    ----------
    depth
        Reads kept in flight by one calling thread.
    iops
        Reads per second.
    mb_per_s
        Bandwidth of those reads, in 10**6 bytes per second.
    latency_p50_us, latency_p99_us
        Microseconds from handing one read to the kernel until its bytes are there.
    reads
        Reads measured, in all rounds together.
    """

    depth: int
    iops: float
    mb_per_s: float
    latency_p50_us: float
    latency_p99_us: float
    reads: int


@dataclass(frozen=True)
class DeviceProfile:
    """The figures of :func:`memhier.io.device.probe`, with the place and the way they were measured.

    Attributes
    ----------
    path
        The directory or file that was probed, absolute.
    file_system, device
        Type and source of the mount under the path (``"ext4"``, ``"/dev/nvme0n1p2"``), or ``"unknown"``.
    kernel
        Operating system and release.
    date
        When the measurement ended, ISO 8601, UTC.
    engine
        The reader's engine (``"uring"``, ``"aio"``, ``"threads"``, ``"python"``).
    direct
        Whether reads went past the page cache. When they did not, the cache was dropped before each measurement.
    page_bytes
        Size of one random read.
    span_bytes
        Size of the file, or of the part of it, over which the reads were scattered.
    seed
        Seed of the file's bytes and of the order of reads.
    sequential_mb_per_s
        Bandwidth of reading in file order, in 10**6 bytes per second.
    depths
        One row per queue depth, shallow first: ``depth``, ``iops``, ``mb_per_s``, ``latency_p50_us``,
        ``latency_p99_us`` and ``reads``, the number of reads measured.
    notes
        Reasons to doubt the figures; empty when there are none.

    Examples
    --------
    >>> import tempfile
    >>> from memhier import DeviceProfile, probe
    >>> profile = probe(tempfile.mkdtemp(), size="8MiB", seconds=0.1, depths=(1, 4))
    >>> profile.page_bytes, profile.span_bytes
    (4096, 8388608)
    >>> DeviceProfile.from_json(profile.to_json()) == profile
    True
    """

    path: str
    file_system: str
    device: str
    kernel: str
    date: str
    engine: str
    direct: bool
    page_bytes: int
    span_bytes: int
    seed: int
    sequential_mb_per_s: float
    depths: tuple[DepthProfile, ...]
    notes: tuple[str, ...]

    def to_json(self) -> str:
        """Return the profile as JSON text that :meth:`from_json` reads back."""
        return json.dumps({"format": _JSON_FORMAT, **asdict(self)}, indent=2)

    @classmethod
    def from_json(cls, text: str) -> "DeviceProfile":
        """Return the profile that :meth:`to_json` wrote.

        Raises
        ------
        FormatError
            When the text is not such a profile; the message names its missing or unknown fields.
        """
        try:
            record = json.loads(text)
        except json.JSONDecodeError as error:
            raise FormatError(f"not a device profile: not JSON ({error})") from None
        if not isinstance(record, dict) or record.pop("format", None) != _JSON_FORMAT:
            raise FormatError(f'not a device profile: expected JSON with "format": "{_JSON_FORMAT}"')
        _check_fields(cls, record)
        for row in record["depths"]:
            _check_fields(DepthProfile, row)
        record["depths"] = tuple(DepthProfile(**row) for row in record["depths"])
        record["notes"] = tuple(record["notes"])
        if not all(isinstance(note, str) for note in record["notes"]):
            raise FormatError(f"not a device profile: notes={record['notes']!r}, expected texts")
        return cls(**record)


# The types that JSON gives to a field of each annotation of the two classes above.
_JSON_TYPES: dict[Any, tuple[type, ...]] = {
    str: (str,), bool: (bool,), int: (int,), float: (int, float),
    tuple[DepthProfile, ...]: (list,), tuple[str, ...]: (list,),
}  # fmt: skip


def _check_fields(cls: type, record: object) -> None:
    if not isinstance(record, dict):
        raise FormatError(f"not a device profile: expected an object for {cls.__name__}, got {record!r}")
    expected = {field.name: field.type for field in fields(cls)}
    wrong = sorted(expected.keys() ^ record.keys())
    if wrong:
        raise FormatError(f"not a device profile: {cls.__name__} has missing or unknown fields: {', '.join(wrong)}")
    for name, kind in expected.items():
        value = record[name]
        if not isinstance(value, _JSON_TYPES[kind]) or (kind is not bool and isinstance(value, bool)):
            raise FormatError(f"not a device profile: {cls.__name__}.{name}={value!r}, expected {kind}")
