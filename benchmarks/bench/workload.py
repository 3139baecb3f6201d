"""A workload: a TOML file that names data, parameters, budgets and peers, and the function that runs it."""

import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from memhier.io.outside import reading

__all__ = ["FOLDER", "GROUPS", "PeerEntry", "Size", "Workload", "load_workload", "load_workloads"]

FOLDER = Path(__file__).resolve().parents[1] / "workloads"
GROUPS = ("search", "tiers", "decode", "embedding", "replay")
Size = Literal["quick", "full"]


@dataclass(frozen=True, slots=True)
class PeerEntry:
    """One competitor in a workload: an adapter with its parameters, under a name of its own."""

    name: str
    adapter: str
    build: dict[str, Any] = field(default_factory=dict)
    open: dict[str, Any] = field(default_factory=dict)
    efforts: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Workload:
    """The contents of a workload file.

    Attributes
    ----------
    name, group, about
        Its name, one of :data:`GROUPS`, and one sentence.
    function
        ``"search"``, or ``"script"`` for a program of :mod:`memhier.benchmarks.workloads`.
    quick, full
        Parameters at either size; they replace those of `parameters`.
    parameters
        Those of both sizes.
    peers
        The competitors; empty if the function brings its own rivals.
    """

    name: str
    group: str
    about: str
    function: str
    quick: dict[str, Any]
    full: dict[str, Any]
    parameters: dict[str, Any]
    peers: tuple[PeerEntry, ...]

    def at(self, size: Size) -> dict[str, Any]:
        """Return all parameters at one size."""
        return self.parameters | (self.quick if size == "quick" else self.full)


def load_workload(path: Path) -> Workload:
    """Read one workload file.

    Raises
    ------
    ValueError
        When the file has another form; the message names file and key.
    """
    with reading(path):
        read = tomllib.loads(path.read_text(encoding="utf-8"))
    known = {"name", "group", "about", "function", "quick", "full", "parameters", "peers"}
    for key in known - {"parameters", "peers"}:
        if key not in read:
            raise ValueError(f"{path}: no {key!r}")
    if set(read) - known:
        raise ValueError(f"{path}: unknown {sorted(set(read) - known)}: expected {sorted(known)}")
    if read["group"] not in GROUPS:
        raise ValueError(f"{path}: group={read['group']!r}: expected one of {', '.join(GROUPS)}")
    peers = tuple(_peer(path, entry) for entry in read.get("peers", []))
    names = [peer.name for peer in peers]
    if len(set(names)) < len(names):
        raise ValueError(f"{path}: two peers of one name among {names}")
    return Workload(**(read | {"parameters": read.get("parameters", {}), "peers": peers}))


def load_workloads(folder: Path = FOLDER) -> list[Workload]:
    """Return every workload below a folder, in the order of groups and names."""
    found = [load_workload(path) for path in folder.rglob("*.toml")]
    return sorted(found, key=lambda workload: (GROUPS.index(workload.group), workload.name))


def _peer(path: Path, entry: dict[str, Any]) -> PeerEntry:
    try:
        return PeerEntry(**(entry | {"efforts": tuple(entry.get("efforts", ()))}))
    except TypeError as error:
        raise ValueError(f"{path}: peer {entry.get('name', entry)}: {error}") from error
