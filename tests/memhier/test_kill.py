"""kill -9 during commits: those that returned are there, and at most the one that was being made."""

import os
import random
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from memhier.store.store import Store

KIND = "test"
Killer = Callable[[Callable[[int], None], random.Random], int]
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


def _kill_rounds(root: Path, rounds: int, seed: int, work_until_killed: Killer) -> None:
    rng = random.Random(seed)
    with Store.create(root, KIND) as store, store.begin() as tx:
        tx.put("number", b"1")
        tx.segment("data").append(b"1 " * 997)
        tx.commit()
    for _ in range(rounds):
        returned = work_until_killed(lambda report: _commit_until_killed(root, report), rng)
        with Store.open(root, KIND, verify="open") as store:
            number = store.generation
            assert number in (returned, returned + 1), "a commit that returned is lost, or a false one is found"
            assert store.get("number") == b"%d" % number
            assert store.read_segment("data").tobytes() == b"%d " % number * (number * 997 % 20_000)
            assert all(finding.harmless for finding in store.check())
    with Store.open(root, KIND, writable=True) as store:
        assert store.check() == []


@pytest.mark.long
def test_kill_during_commits(work_until_killed: Killer) -> None:
    with tempfile.TemporaryDirectory(dir=FAST) as folder:
        _kill_rounds(Path(folder) / "store", 60, 1, work_until_killed)


@pytest.mark.slow
def test_kill_during_commits_for_longer(tmp_path: Path, work_until_killed: Killer) -> None:
    _kill_rounds(tmp_path / "store", 200, 2, work_until_killed)
