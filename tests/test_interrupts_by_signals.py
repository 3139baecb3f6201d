"""What a signal interrupts, at whatever instruction, is right, goes on, and does not wait for ever."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("interrupted_by_signals.py")
SYSTEMS = ["tier", "replay", "index", "tables"]


def interrupted(system: str, rounds: int, seed: int, place: Path) -> dict[str, int]:
    """Return how many rounds there were in a child, and what came of the interrupts."""
    arguments = [sys.executable, "-X", "faulthandler", str(SCRIPT), system, str(rounds), str(seed), str(place)]
    child = subprocess.run(arguments, capture_output=True, text=True, timeout=100 + 2 * rounds, check=False)
    print(child.stdout, child.stderr)
    assert child.returncode == 0, child.stderr[-4000:]
    return {name: int(count) for name, count in (pair.split("=") for pair in child.stdout.split())}


@pytest.mark.long
@pytest.mark.parametrize("system", SYSTEMS)
def test_signals_leave_nothing_wrong(system: str, tmp_path: Path) -> None:
    seen = interrupted(system, 40, 1, tmp_path / system)
    assert seen["rounds"] == seen["interrupts"] == 40
    assert seen.get("refused", 0) <= 1  # an interrupt on the way to the end of a change: seldom


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("seed", [2, 3])
@pytest.mark.parametrize("system", SYSTEMS)
def test_many_signals_leave_nothing_wrong(system: str, seed: int, tmp_path: Path) -> None:
    seen = interrupted(system, 500, seed, tmp_path / system)
    assert seen["rounds"] == 500
    assert seen.get("refused", 0) <= 5
