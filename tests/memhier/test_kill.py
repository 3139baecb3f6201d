"""kill -9 during commits: what had returned is there, and at most the one commit that was being made."""

import os
import random
import signal
import tempfile
import time
from pathlib import Path

import pytest

from memhier.store import Store

KIND = "test"
FAST = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def _commit_until_killed(root: Path, report: int) -> None:
    with Store.open(root, KIND, writable=True) as store:
        while True:
            number = store.generation + 1
            with store.begin() as tx:
                tx.put("number", b"%d" % number)
                tx.segment("data").append(b"%d " % number * (number * 997 % 20_000))
                if number % 3 == 0:
                    tx.segment(f"extra{number % 5}").append(b"%d" % number)
                tx.commit()
            os.write(report, number.to_bytes(8, "little"))


def _kill_rounds(root: Path, rounds: int, seed: int) -> None:
    rng = random.Random(seed)
    with Store.create(root, KIND) as store, store.begin() as tx:
        tx.put("number", b"1")
        tx.segment("data").append(b"1 " * 997)
        tx.commit()
    for _ in range(rounds):
        reports, report = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                _commit_until_killed(root, report)
            finally:
                os._exit(1)
        os.close(report)
        told = os.read(reports, 8)
        time.sleep(rng.random() * 0.02)
        os.kill(child, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        with open(reports, "rb") as pipe:
            told += pipe.read()
        returned = int.from_bytes(told[-8:], "little")
        with Store.open(root, KIND, verify="open") as store:
            number = store.generation
            assert number in (returned, returned + 1), "a commit that returned is lost, or a false one is found"
            assert store.get("number") == b"%d" % number
            assert store.read_segment("data").tobytes() == b"%d " % number * (number * 997 % 20_000)
            assert all(finding.harmless for finding in store.check())
    with Store.open(root, KIND, writable=True) as store:
        assert store.check() == []


def test_kill_during_commits() -> None:
    with tempfile.TemporaryDirectory(dir=FAST) as folder:
        _kill_rounds(Path(folder) / "store", 60, seed=1)


@pytest.mark.slow
def test_kill_during_commits_for_longer(tmp_path: Path) -> None:
    _kill_rounds(tmp_path / "store", 200, seed=2)
