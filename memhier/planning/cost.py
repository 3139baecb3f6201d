"""The cost of reads on a device: from its measured profile, or from the stated figures of a class of devices.

The model has three figures for a device: reads per second at each queue depth, and sequential bandwidth. A batch of n
page reads keeps ``min(n, depth)`` of them in flight, so it takes n / rate(that depth), and no less than its bytes take
at sequential bandwidth. Evicted rows are appended to a log, at sequential bandwidth.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from memhier.arguments import check_int
from memhier.errors import FormatError
from memhier.io.device_profile import DeviceProfile
from memhier.io.page_file import PAGE_BYTES

__all__ = ["CostModel", "Forecast"]

Floats = npt.NDArray[np.float64]

_DEPTH = 128


@dataclass(frozen=True, slots=True)
class Forecast:
    """The predicted times of a sequence of steps.

    Attributes
    ----------
    io_s, compute_s
        Seconds of I/O and of computation, each on its own.
    stall_s
        Seconds in which computation waits for reads.
    """

    io_s: float
    compute_s: float
    stall_s: float

    @property
    def total_s(self) -> float:
        """Seconds from the first step's beginning to the last one's end."""
        return self.compute_s + self.stall_s

    @property
    def hidden(self) -> float:
        """The share of I/O time that computation hides, 0 to 1."""
        return 1.0 - self.stall_s / self.io_s if self.io_s else 1.0


@dataclass(frozen=True, slots=True)
class CostModel:
    """Predicts the time of page reads on a device.

    Attributes
    ----------
    name
        The device's class or path.
    depths
        int, ascending: numbers of reads in flight.
    iops
        Reads of one page per second at each of them.
    sequential_mb_per_s
        In 10**6 bytes per second.

    Examples
    --------
    >>> from memhier import CostModel
    >>> disk = CostModel.of("sata-ssd")
    >>> round(disk.reads_per_s(32)), f"{disk.batch_s(1000):.4f}"
    (98000, '0.0102')
    >>> forecast = disk.forecast([400] * 100, compute_s=0.01, ahead=1)
    >>> f"{forecast.hidden:.2f}"
    '0.99'
    """

    name: str
    depths: tuple[int, ...]
    iops: tuple[float, ...]
    sequential_mb_per_s: float

    CLASSES: ClassVar[dict[str, "CostModel"]]
    """Classes of devices by name, each with a maker's stated figures."""

    def __post_init__(self) -> None:
        if not self.depths or len(self.depths) != len(self.iops) or list(self.depths) != sorted(set(self.depths)):
            raise ValueError(f"depths={self.depths}, iops={self.iops}: expected ascending depths, a rate for each")
        rates = (*self.iops, self.sequential_mb_per_s)
        if min(self.depths) < 1 or not all(math.isfinite(rate) and rate > 0 for rate in rates):
            raise ValueError(
                f"depths={self.depths}, iops={self.iops}, sequential_mb_per_s={self.sequential_mb_per_s}: "
                "expected positive, finite numbers"
            )

    @classmethod
    def of(cls, device: "str | DeviceProfile | CostModel") -> "CostModel":
        """Return the model of a device.

        Parameters
        ----------
        device
            The name of a class (a key of :data:`CLASSES`), a profile measured by :func:`memhier.io.device.probe` (or
            its JSON text), or a model, which is returned as it is.

        Raises
        ------
        ValueError, TypeError
            When it is none of these.
        """
        if isinstance(device, CostModel):
            return device
        if isinstance(device, str):
            if device in cls.CLASSES:
                return cls.CLASSES[device]
            try:
                device = DeviceProfile.from_json(device)
            except FormatError as error:
                known = ", ".join(cls.CLASSES)
                raise ValueError(f"device: expected one of {known}, or the JSON of a probe ({error})") from None
        if not isinstance(device, DeviceProfile):
            raise TypeError(f"device={device!r}: expected a class's name, a DeviceProfile or a CostModel")
        rows = sorted(device.depths, key=lambda row: row.depth)
        # A bandwidth in the middle of a burst of a neighbour's I/O can be below what random reads reach.
        bandwidth = max(device.sequential_mb_per_s, *(row.mb_per_s for row in rows))
        return cls(device.path, tuple(row.depth for row in rows), tuple(row.iops for row in rows), bandwidth)

    def reads_per_s(self, depth: npt.ArrayLike) -> float | Floats:
        """Return page reads per second with `depth` reads in flight: a number, or float64 of the shape of `depth`.

        Between the known depths the rate follows a straight line in logarithms; outside, the nearest depth counts.
        """
        wanted = np.log(np.maximum(np.asarray(depth, np.float64), 1.0))
        rate = np.exp(np.interp(wanted, np.log(self.depths), np.log(self.iops)))
        return float(rate) if rate.ndim == 0 else rate

    def latency_s(self, depth: int = 1) -> float:
        """Return the mean seconds that one read takes with `depth` in flight, by Little's law."""
        return _check_depth(depth) / float(self.reads_per_s(depth))

    def batch_s(
        self, reads: npt.ArrayLike, *, depth: int = _DEPTH, read_bytes: npt.ArrayLike = PAGE_BYTES
    ) -> float | Floats:
        """Return the seconds that a batch of page reads takes.

        Parameters
        ----------
        reads
            Reads in the batch, or int [n] for several batches on their own.
        depth
            Reads kept in flight at most.
        read_bytes
            Bytes of one read, or float [n]: their mean in each batch.

        Returns
        -------
        seconds
            A float, or float64 [n].

        Raises
        ------
        ValueError
            For a negative number of reads or bytes, or a depth below 1.
        """
        count = _not_negative("reads", reads)
        by_rate = count / self.reads_per_s(np.clip(count, 1, _check_depth(depth)))
        seconds = np.maximum(
            by_rate, count * _not_negative("read_bytes", read_bytes) / (self.sequential_mb_per_s * 1e6)
        )
        return float(seconds) if seconds.ndim == 0 else seconds

    def append_s(self, size: npt.ArrayLike) -> float | Floats:
        """Return the seconds that appending `size` bytes to a log takes."""
        seconds = _not_negative("size", size) / (self.sequential_mb_per_s * 1e6)
        return float(seconds) if seconds.ndim == 0 else seconds

    def forecast(
        self,
        reads: npt.ArrayLike,
        *,
        compute_s: float,
        ahead: int,
        written_bytes: npt.ArrayLike = 0,
        depth: int = _DEPTH,
        read_bytes: npt.ArrayLike = PAGE_BYTES,
    ) -> Forecast:
        """Predict how long steps take whose reads run while earlier steps compute.

        Parameters
        ----------
        reads
            int [n]: page reads that each step needs before it can compute.
        compute_s
            Seconds of computation in each step.
        ahead
            Steps that reads may run ahead: reads of step t start when step t - ahead starts to compute, one step
            after the other. With 0 a step starts its reads when its turn comes, and waits for them.
        written_bytes
            Bytes, or int [n] for each step, appended with the step's reads.
        depth, read_bytes
            As in :meth:`batch_s`.

        Returns
        -------
        Forecast
            Seconds ``io_s``, ``compute_s``, ``stall_s`` and ``total_s``, and ``hidden``, the share of I/O time that
            computation hides, 0 to 1.

        Raises
        ------
        ValueError, TypeError
            An argument is negative or not a number, or the arrays differ in length.
        """
        counts = _not_negative("reads", reads)
        if counts.ndim != 1:
            raise ValueError(f"reads has shape {list(counts.shape)}: expected [n], the reads of each step")
        for name, each in (("written_bytes", written_bytes), ("read_bytes", read_bytes)):
            if np.shape(each) not in ((), counts.shape):
                raise ValueError(f"{name} has shape {list(np.shape(each))}: expected a number, or {list(counts.shape)}")
        ahead = check_int("ahead", ahead, 0, unit="steps")
        compute_s = float(_not_negative("compute_s", compute_s))
        io = np.atleast_1d(self.batch_s(counts, depth=depth, read_bytes=read_bytes) + self.append_s(written_bytes))
        io = np.broadcast_to(io, counts.shape)
        compute = len(io) * compute_s
        if ahead == 0:
            return Forecast(float(io.sum()), compute, float(io.sum()))
        started = [0.0] * len(io)
        io_end = now = stall = 0.0
        for step, seconds in enumerate(io.tolist()):
            allowed = started[step - ahead] if step >= ahead else 0.0
            io_end = max(io_end, allowed) + seconds
            started[step] = max(now, io_end)
            stall += started[step] - now
            now = started[step] + compute_s
        return Forecast(float(io.sum()), compute, stall)


def _not_negative(name: str, values: npt.ArrayLike) -> Floats:
    """Return numbers as float64, or say which one cannot be."""
    array = np.asarray(values, np.float64)
    wrong = ~(np.isfinite(array) & (array >= 0))
    if wrong.any():
        raise ValueError(f"{name}: expected finite numbers from zero up, got {array[wrong].flat[0]}")
    return array


def _check_depth(depth: int) -> int:
    if depth < 1:
        raise ValueError(f"depth={depth!r}: expected at least one read in flight")
    return depth


def _saturating(name: str, first: float, limit: float, bandwidth: float) -> CostModel:
    """Return a device by its rates at depth 1 and at saturation: latency stays the same until the limit is reached."""
    depths = (1, 2, 4, 8, 16, 32, 64, 128)
    return CostModel(name, depths, tuple(min(depth * first, limit) for depth in depths), bandwidth)


CostModel.CLASSES = {
    # Samsung 870 EVO, maker's figures: 13,000 reads/s at depth 1, 98,000 at 32, 560 MB/s.
    "sata-ssd": _saturating("sata-ssd", 13_000, 98_000, 560.0),
    # Samsung 980 PRO, maker's figures: 22,000 reads/s at depth 1, at most 1,000,000, 7,000 MB/s.
    "nvme-gen4": _saturating("nvme-gen4", 22_000, 1_000_000, 7_000.0),
    # Amazon EBS gp3 as it comes: 3,000 reads/s, 125 MiB/s. Its maker says "single-digit milliseconds"; taken as 1 ms.
    "network-block": _saturating("network-block", 1_000, 3_000, 131.1),
}
