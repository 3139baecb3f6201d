"""A machine to plan for: its cores, its DRAM and its drives."""

import math
import re
from dataclasses import dataclass
from typing import Self

from memhier.arguments import check_int, check_number
from memhier.budget import format_bytes, parse_bytes
from memhier.io.device_profile import DeviceProfile

__all__ = ["Node"]

_READ_US = 90.0  # mean of one page read from an idle NVMe drive; makers state 45 to 110
_TAIL = 3.0  # times the mean: the 99th percentile of such reads
_ROUND = 8  # reads in flight in a round of a search, or some more
_Z99 = 2.326  # of the normal distribution
_MILLION = 1e6
_SCALES = {"": 1.0, "k": 1e3, "m": 1e6}
_CORES = re.compile(r"(\d+)\s*(?:v?cpus?|cores?)", re.IGNORECASE)
_DRIVES = re.compile(r"(?:(\d+)\s*x\s*)?[a-z][\w-]*\s+(.*)", re.IGNORECASE)
_IOPS = re.compile(r"(\d+(?:\.\d+)?)\s*([km]?)\s*iops", re.IGNORECASE)
_READ = re.compile(r"(\d+(?:\.\d+)?)\s*us", re.IGNORECASE)
_SIZE = re.compile(r"\d+(?:\.\d+)?\s*[kmgt]i?b", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Node:
    """One machine.

    Attributes
    ----------
    cores
        Cores that searches may use.
    dram
        Bytes of DRAM.
    drives
        Number of equal drives.
    drive_iops
        Reads of one page per second that each drive reaches.
    drive_bytes
        Capacity of each drive; None where it does not matter.
    read_us, read_p99_us
        Mean and 99th percentile of the microseconds of one page read from an idle drive.

    Examples
    --------
    >>> from memhier.planning.node import Node
    >>> node = Node.parse("16 cores, 64 GiB, 2x NVMe 800k IOPS")
    >>> node.cores, node.drives, node.iops, node.channels
    (16, 2, 1600000.0, 72)
    """

    cores: int
    dram: int
    drives: int = 1
    drive_iops: float = 500_000.0
    drive_bytes: int | None = None
    read_us: float = _READ_US
    read_p99_us: float = _TAIL * _READ_US

    def __post_init__(self) -> None:
        for name in ("cores", "dram", "drives"):
            check_int(name, getattr(self, name), 1)
        check_number("drive_iops", self.drive_iops, 0, above=True)
        check_number("read_us", self.read_us, 0, above=True)
        check_number("read_p99_us", self.read_p99_us, 0, above=True)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the machine that a text describes.

        Parameters
        ----------
        text
            Cores, DRAM and drives with commas between them, such as ``"16 cores, 64 GiB, 2x NVMe 800k IOPS"``. Behind a
            drive's IOPS may stand its capacity and the mean time of a read: ``"NVMe 800k IOPS 3.84 TB 80 us"``.

        Raises
        ------
        ValueError
            When a part cannot be read, or cores, DRAM or drives are missing; the message names it.
        """
        found: dict[str, int | float] = {}
        for part in (part.strip() for part in text.split(",")):
            if match := _CORES.fullmatch(part):
                found["cores"] = int(match[1])
            elif match := _SIZE.match(part):
                found["dram"] = parse_bytes(match[0], "node")
            elif (match := _DRIVES.fullmatch(part)) and (iops := _IOPS.search(match[2])):
                found |= {"drives": int(match[1] or 1), "drive_iops": float(iops[1]) * _SCALES[iops[2].lower()]}
                if size := _SIZE.search(match[2]):
                    found["drive_bytes"] = parse_bytes(size[0], "node")
                if read := _READ.search(match[2]):
                    found |= {"read_us": float(read[1]), "read_p99_us": _TAIL * float(read[1])}
            else:
                raise ValueError(f"node={text!r}: {part!r} is no cores, DRAM or drives: expected {_FORM}")
        for name in ("cores", "dram", "drives"):
            if name not in found:
                raise ValueError(f"node={text!r}: {name} missing: expected {_FORM}")
        return cls(**found)  # type: ignore[arg-type]

    @classmethod
    def of_probe(cls, profile: DeviceProfile, cores: int, dram: int) -> Self:
        """Return a machine with the one drive that :func:`memhier.io.device.probe` measured.

        The time of a read is that at the depth nearest to eight: a round of a search has about as many in flight.
        """
        row = min(profile.depths, key=lambda row: abs(math.log(row.depth / _ROUND)))
        mean = row.depth / row.iops * _MILLION
        most = max(row.iops for row in profile.depths)
        return cls(cores, dram, 1, most, None, mean, max(mean, row.latency_p99_us))

    @property
    def iops(self) -> float:
        """Page reads per second of all drives."""
        return self.drives * self.drive_iops

    @property
    def channels(self) -> int:
        """Reads that one drive serves at a time: as many as reach its IOPS when each takes `read_us`."""
        return max(1, round(self.drive_iops * self.read_us / _MILLION))

    @property
    def disk_bytes(self) -> float:
        """Bytes that all drives hold; infinity where their capacity is not given."""
        return math.inf if self.drive_bytes is None else float(self.drives * self.drive_bytes)

    def read_law(self) -> tuple[float, float]:
        """Return mu and sigma of the log-normal seconds of one read.

        Its mean gives `drive_iops` with all channels busy; its 99th percentile is `read_p99_us` times mean of a read at
        that load over `read_us`.
        """
        mean = self.channels / self.drive_iops
        # mean * ratio = exp(mu + z sigma) with mu = log(mean) - sigma**2 / 2; beyond sigma = z the tail falls again
        ratio = min(max(1.0, self.read_p99_us / self.read_us), 0.99 * math.exp(_Z99**2 / 2))
        sigma = _Z99 - math.sqrt(_Z99**2 - 2 * math.log(ratio))
        return math.log(mean) - sigma**2 / 2, sigma

    def __str__(self) -> str:
        capacity = "" if self.drive_bytes is None else f" {self.drive_bytes / 1e12:.3g} TB"
        return (
            f"{self.cores} cores, {format_bytes(self.dram)}, {self.drives}x drive of {self.drive_iops:,.0f} IOPS"
            f"{capacity}, a read {self.read_us:.0f} us, {self.read_p99_us:.0f} us at p99"
        )


_FORM = "such as '16 cores, 64 GiB, 2x NVMe 800k IOPS'"
