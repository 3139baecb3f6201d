"""What the tests of the tiers share."""

import os
import random
import signal
import time
from collections.abc import Callable

import pytest

Work = Callable[[int], None]
"""Works until it is killed, and writes the number of each commit that returned, 8 bytes, to a descriptor."""


@pytest.fixture
def work_until_killed() -> Callable[[Work, random.Random], int]:
    """Return a function that runs work in a forked child, kills it at a random moment, and returns its last number.

    The moment is after the first number, so that every round makes progress, and within the next few.
    """

    def run(work: Work, rng: random.Random) -> int:
        reports, report = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.close(reports)
                work(report)
            finally:
                os._exit(1)
        os.close(report)
        told = os.read(reports, 8)
        time.sleep(rng.random() * 0.02)
        os.kill(child, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        with open(reports, "rb") as pipe:
            told += pipe.read()
        return int.from_bytes(told[-8:], "little")

    return run
