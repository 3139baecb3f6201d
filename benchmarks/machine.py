"""The machine that a figure was measured on; it stands beside every result."""

import json
import os
import platform
import time
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType
from typing import Any, Self

__all__ = ["Neighbours", "describe_machine", "is_loaded", "profile_device"]

_PACKAGES = ("memhier", "numpy", "faiss-cpu", "lmdb")
_PROBE_BYTES = "256MiB"
_PROBE_SECONDS = 2.0


def describe_machine() -> dict[str, str | int | float]:
    """Return the date, processor, cores, memory, kernel, load and the versions of the measured packages."""
    machine: dict[str, str | int | float] = {
        "date": datetime.now(UTC).date().isoformat(),
        "processor": _first_field("/proc/cpuinfo", "model name") or platform.processor(),
        "cores": os.cpu_count() or 0,
        "memory": _first_field("/proc/meminfo", "MemTotal"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0,
    }
    return machine | {name: _version(name) for name in _PACKAGES}


class Neighbours:
    """The load that others put on this machine while a block ran.

    Attributes
    ----------
    cores
        The mean number of cores that neither this process nor the children it waited for kept busy; time that a
        hypervisor took away counts. 0 if the system does not tell.

    Examples
    --------
    >>> with Neighbours() as neighbours:
    ...     total = sum(range(1000))
    >>> neighbours.cores >= 0
    True
    """

    def __enter__(self) -> Self:
        self.cores = 0.0
        self._before = _busy_seconds(), _own_seconds(), time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        busy, own, started = self._before
        seconds = max(time.perf_counter() - started, 1e-9)
        self.cores = max(0.0, (_busy_seconds() - busy - (_own_seconds() - own)) / seconds)


def is_loaded(row: dict[str, Any]) -> bool:
    """Return whether others kept half of a core or more busy: the clock's figures then say little.

    A row of results holds the cores that :class:`Neighbours` counted; a row of a machine holds its load.
    """
    return float(row.get("others", row.get("load", 0.0))) > 0.5


def _busy_seconds() -> float:
    """Return the seconds that all cores were busy since the start: user, nice, system, interrupts and stolen time."""
    ticks = [int(field) for field in _first_line("/proc/stat").split()[1:9]]
    return (sum(ticks) - sum(ticks[3:5])) / os.sysconf("SC_CLK_TCK")


def _own_seconds() -> float:
    return sum(os.times()[:4])  # user and system time, own and of children


def _first_line(path: str) -> str:
    try:
        return Path(path).read_text().partition("\n")[0]
    except OSError:
        return ""


def profile_device(folder: Path) -> dict[str, Any]:
    """Return a short probe of the device under `folder`, or the error that prevented it."""
    from memhier.io.device import probe

    try:
        profile: dict[str, Any] = json.loads(probe(folder, size=_PROBE_BYTES, seconds=_PROBE_SECONDS).to_json())
    except (OSError, RuntimeError, ValueError) as error:
        return {"error": str(error)}
    return profile


def _first_field(path: str, name: str) -> str:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return ""
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(name)), "")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "missing"
