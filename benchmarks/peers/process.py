"""Runs a peer's jobs in a process of its own, in the environment where the peer is installed."""

import json
import os
import site
import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import memhier
from memhier.benchmarks.peers.base import SearchPeer
from memhier.benchmarks.peers.child import run_child

__all__ = [
    "PeerError", "default_environments", "find_python", "group_python", "install_group", "install_peer", "peer_version",
    "run_job",
]  # fmt: skip

_TAIL = 400
_WORKER = "memhier.benchmarks.peers.worker"
# The name that a peer is imported by, if it is not the name of its distribution.
_IMPORTED = {"faiss-cpu": "faiss", "scalable-vs": "svs"}


class PeerError(RuntimeError):
    """A peer is not installed, or its process failed; the report shows the message."""


def default_environments() -> Path:
    """Return the folder of the peers' virtual environments."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "memhier" / "peers"


def find_python(peer: SearchPeer, environments: Path) -> Path:
    """Return the interpreter that has the peer: its own environment's, or else this one.

    Raises
    ------
    PeerError
        When neither has it; the message says how to install it.
    """
    own = environments / peer.package / "bin" / "python"
    if own.exists():
        return own
    if find_spec(_IMPORTED.get(peer.package, peer.package)) is not None:
        return Path(sys.executable)
    raise PeerError(f"{peer.package} is not installed: {_way(peer)}")


def install_peer(peer: SearchPeer, environments: Path) -> Path:
    """Make the environment of a peer of search, and return its interpreter."""
    python = _make_environment(environments / peer.package)
    _pip(python, ("numpy", *peer.install))
    return python


def group_python(group: str, environments: Path) -> Path:
    """Return the interpreter for the scripts of a group: that of :func:`install_group`, or else this one."""
    own = environments / group / "bin" / "python"
    return own if own.exists() else Path(sys.executable)


def install_group(group: str, requirements: Sequence[str], environments: Path) -> Path:
    """Make the environment of a group's scripts, and return its interpreter.

    It sees all packages of this one, torch and memhier above all, and adds the rivals. They are installed without their
    dependencies, so that they replace no package; a requirement names a dependency that is missing.
    """
    python = _make_environment(environments / group)
    (packages,) = (environments / group / "lib").glob("python*/site-packages")
    lines = [f"import site; site.addsitedir({path!r})" for path in site.getsitepackages()]
    (packages / "memhier-parent.pth").write_text("\n".join(lines) + "\n")
    _pip(python, ("--no-deps", *requirements))
    return python


def _make_environment(place: Path) -> Path:
    python = place / "bin" / "python"
    # pip comes last: without it the making of this one was cut short.
    if not (place / "bin" / "pip").exists():
        try:
            venv.create(place, with_pip=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise PeerError(f"no environment at {place}: {error}") from error
    return python


def _pip(python: Path, arguments: Sequence[str]) -> None:
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise PeerError(f"pip install {' '.join(arguments)}: {done.stderr.strip()[-_TAIL:]}")


def peer_version(peer: SearchPeer, python: Path) -> str:
    """Return the version of the peer's distribution.

    Raises
    ------
    PeerError
        When the interpreter does not run or does not have it, as after an installation that was cut short.
    """
    code = f"from importlib.metadata import version; print(version({peer.package!r}))"
    try:
        done = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=False)
    except OSError as error:
        raise PeerError(f"{python} does not run: {error}: {_way(peer)}") from error
    if done.returncode:
        raise PeerError(f"{python} has no {peer.package}: {_way(peer)}")
    return done.stdout.strip()


def run_job(python: Path, job: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    """Run a job of :mod:`memhier.benchmarks.peers.worker` and return its figures.

    Raises
    ------
    PeerError
        When the process fails, is killed or takes longer than `timeout_s`; the message ends with its last words.
    """
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        # Only memhier itself is shared with a foreign environment: the packages beside it need another numpy.
        (place / "memhier").symlink_to(Path(memhier.__file__).parent, target_is_directory=True)
        out = place / "out.json"
        (place / "job.json").write_text(json.dumps(job | {"out": str(out)}))
        shared = {} if python == Path(sys.executable) else {"PYTHONPATH": scratch}
        try:
            ended = run_child(python, _WORKER, [str(place / "job.json")], timeout_s, shared)
        except OSError as error:
            raise PeerError(f"{job['peer']}: {python} does not run: {error}") from error
        if ended.status is None:
            raise PeerError(f"{job['peer']}: {job['action']} took longer than {timeout_s:,.0f} s")
        if ended.status or not out.exists():
            raise PeerError(f"{job['peer']}: {job['action']} {ended.why}")
        result: dict[str, Any] = json.loads(out.read_text())
        return result


def _way(peer: SearchPeer) -> str:
    requirements = " ".join(f"'{requirement}'" for requirement in peer.install)
    return f"memhier bench install search, or pip install {requirements}"
