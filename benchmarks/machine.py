"""What a figure was measured on: it stands beside every result."""

import json
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

__all__ = ["describe_machine", "is_loaded", "profile_device"]

_PACKAGES = ("memhier", "numpy", "faiss-cpu", "lmdb")
_PROBE_BYTES = "256MiB"
_PROBE_SECONDS = 2.0


def describe_machine() -> dict[str, str | int | float]:
    """Return processor, cores, memory, kernel, load and the versions of what is measured."""
    machine: dict[str, str | int | float] = {
        "processor": _first_field("/proc/cpuinfo", "model name") or platform.processor(),
        "cores": os.cpu_count() or 0,
        "memory": _first_field("/proc/meminfo", "MemTotal"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load": os.getloadavg()[0],
    }
    return machine | {name: _version(name) for name in _PACKAGES}


def is_loaded(machine: dict[str, Any]) -> bool:
    """Return whether others kept half of a core or more busy: the clock's figures then say little."""
    return float(machine["load"]) > 0.5


def profile_device(folder: Path) -> dict[str, Any]:
    """Return a short probe of the device under `folder`, or why there is none."""
    from memhier.device import probe

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
