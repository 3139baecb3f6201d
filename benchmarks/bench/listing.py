"""The output of ``memhier bench list``: one line each, or the details of the names given."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.padding import Padding
from rich.text import Text

from memhier.benchmarks.bench.workload import Workload
from memhier.benchmarks.peers import PEERS
from memhier.benchmarks.peers.base import SearchPeer
from memhier.benchmarks.peers.process import PeerError, find_python, peer_version
from memhier.benchmarks.peers.worker import make_peer

__all__ = ["describe_peer", "describe_workload", "peer_lines", "workload_lines"]

_READS = {
    "direct": "from the device, past the page cache",
    "buffered": "through the page cache",
    "mapped": "as the kernel pages its files in",
    "none": "nothing: all of it is in DRAM",
}


def workload_lines(workloads: list[Workload]) -> Iterator[str]:
    """Yield a line for each workload."""
    width = max(len(workload.name) for workload in workloads)
    for workload in workloads:
        yield f"{workload.name:{width}}  {workload.about}"


def peer_lines(environments: Path) -> Iterator[str]:
    """Yield a line for each adapter of search: name, version, and the source of its reads."""
    for name in PEERS:
        peer = make_peer(name)
        try:
            version = _version(peer, environments)
        except PeerError:
            version = "not installed"
        yield f"{name:{max(map(len, PEERS))}}  {version:17}  reads {_READS[peer.io]}"


def describe_workload(workload: Workload) -> Iterator[Text | Padding]:
    """Yield a workload's description, its parameters at both sizes, and its peers with their own parameters."""
    yield Text(workload.name, "bold") + Text(f" ({workload.group}, {workload.function})", "not bold")
    yield _under(workload.about)
    for size in ("quick", "full"):
        yield _under(f"{size}: {_words(workload.at(size))}")
    for peer in workload.peers:
        own = _words(peer.build | peer.open | ({"efforts": len(peer.efforts)} if peer.efforts else {}))
        yield _under(f"peer {peer.name}: {peer.adapter}" + (f", {own}" if own else ""))


def describe_peer(name: str, environments: Path) -> Iterator[Text | Padding]:
    """Yield an adapter's version or how to install it, its parameters, and its traps."""
    peer = make_peer(name)
    try:
        version = _version(peer, environments)
    except PeerError as error:
        version = str(error)
    yield Text(name, "bold") + Text(f": {version}", "not bold")
    yield _under(f"reads {_READS[peer.io]}")
    yield _under(f"build: {_words(peer.build_parameters) or 'as it comes'}")
    yield _under(f"efforts: {_words(peer.efforts[0])} to {_words(peer.efforts[-1])}, {len(peer.efforts)} of them")
    for trap in peer.traps:
        yield _under(f"trap: {trap}")


def _version(peer: SearchPeer, environments: Path) -> str:
    return f"{peer.package} {peer_version(peer, find_python(peer, environments))}"


def _words(parameters: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in parameters.items())


def _under(text: str) -> Padding:
    return Padding(text, (0, 0, 0, 2))
