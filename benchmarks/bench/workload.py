"""A workload: a TOML file that names data, parameters, budgets and peers, and the function that runs it.

A file with ``like = "sift"`` starts from ``sift.toml`` beside it: its own tables and peers go over those, key by key.
The parameter `code_bytes` goes over that of every peer's build.
"""

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
    read = _read(path)
    known = {"name", "group", "about", "function", "quick", "full", "parameters", "peers"}
    for key in known - {"parameters", "peers"}:
        if key not in read:
            raise ValueError(f"{path}: no {key!r}")
    if set(read) - known:
        raise ValueError(f"{path}: unknown {sorted(set(read) - known)}: expected {sorted(known)}")
    if read["group"] not in GROUPS:
        raise ValueError(f"{path}: group={read['group']!r}: expected one of {', '.join(GROUPS)}")
    code_bytes = {key: value for key, value in read.get("parameters", {}).items() if key == "code_bytes"}
    peers = tuple(_peer(path, entry, code_bytes) for entry in read.get("peers", []))
    names = [peer.name for peer in peers]
    if len(set(names)) < len(names):
        raise ValueError(f"{path}: two peers of one name among {names}")
    return Workload(**(read | {"parameters": read.get("parameters", {}), "peers": peers}))


def load_workloads(folder: Path = FOLDER) -> list[Workload]:
    """Return every workload below a folder, in the order of groups and names."""
    found = [load_workload(path) for path in folder.rglob("*.toml")]
    return sorted(found, key=lambda workload: (GROUPS.index(workload.group), workload.name))


def _read(path: Path) -> dict[str, Any]:
    with reading(path):
        read = tomllib.loads(path.read_text(encoding="utf-8"))
    if "like" not in read:
        return read
    base = _read(path.with_name(f"{read.pop('like')}.toml"))
    peers = {peer["name"]: peer for peer in base.get("peers", [])}
    for peer in read.get("peers", []):
        peers[peer["name"]] = peers.get(peer["name"], {}) | peer
    return _merged(base, read) | {"peers": [*peers.values()]}


def _merged(base: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    both = {key: _merged(base[key], own[key]) for key in own if isinstance(own[key], dict) and key in base}
    return base | own | both


def _peer(path: Path, entry: dict[str, Any], code_bytes: dict[str, int]) -> PeerEntry:
    if "code_bytes" in entry.get("build", {}):
        entry = entry | {"build": entry["build"] | code_bytes}
    try:
        return PeerEntry(**(entry | {"efforts": tuple(entry.get("efforts", ()))}))
    except TypeError as error:
        raise ValueError(f"{path}: peer {entry.get('name', entry)}: {error}") from error
