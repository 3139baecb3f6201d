"""Ranks that torchrun starts again, as many as before or fewer, end with the bits of one that was not interrupted."""

import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("train_with_torchrun.py")


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return int(found.getsockname()[1])


def torchrun(folder: Path, *options: str, victim: str = "") -> "subprocess.Popen[str]":
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", *options, str(SCRIPT), str(folder)]
    there = {**os.environ, "OMP_NUM_THREADS": "1"} | ({"VICTIM": victim} if victim else {})
    return subprocess.Popen(command, env=there, stdout=subprocess.PIPE, text=True)


def lines_of(started: "subprocess.Popen[str]") -> list[str]:
    try:
        output, _ = started.communicate(timeout=800)
    finally:
        started.kill()
    return re.findall(r"(from \d+ \d+|end \w+)", output)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the last line of one rank, which was not interrupted."""
    lines = lines_of(torchrun(tmp_path_factory.mktemp("alone"), "--standalone", "--nproc-per-node=1"))
    assert lines[0] == "from 1 0"
    return lines[1]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_torchrun_starts_the_ranks_again(tmp_path: Path, alone: str) -> None:
    options = "--standalone", "--nproc-per-node=2", "--max-restarts=2"
    assert lines_of(torchrun(tmp_path / "two", *options, victim="rank")) == ["from 2 0", "from 2 4", alone]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_node_is_lost_and_the_other_goes_on(tmp_path: Path, alone: str) -> None:
    endpoint = f"localhost:{free_port()}"
    options = [
        "--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3", "--rdzv-id=tables", "--rdzv-backend=c10d",
        f"--rdzv-endpoint={endpoint}", "--rdzv-conf=last_call_timeout=30,join_timeout=600", "--local-addr=localhost",
    ]  # fmt: skip
    first = torchrun(tmp_path / "both", *options)
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline:  # the one that comes first keeps the store, which has to outlive the other
        with socket.socket() as tried:
            if tried.connect_ex(("localhost", int(endpoint.partition(":")[2]))) == 0:
                break
        time.sleep(0.5)
    second = torchrun(tmp_path / "both", *options, victim="node")
    try:
        lines = lines_of(first)
    finally:
        second.kill()
        second.communicate()
    assert lines[-2:] == ["from 1 4", alone]
    assert (tmp_path / "both" / "died").exists()
