"""What a figure was measured on: it stands beside every result."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

__all__ = ["describe_machine"]

_PACKAGES = ("memhier", "numpy", "faiss-cpu", "lmdb")


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
