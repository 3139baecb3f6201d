"""The workload of prioritised replay: a peer takes part where it is installed, and is named where it is not."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from memhier.benchmarks.workloads.replay import prioritised

RUN = ["--capacity", "4000", "--batch", "8", "--rounds", "1"]
RATIO = "rate by that of cpprb"


class Peer:
    """Stand in for cpprb's buffer: it checks that it gets the same transitions, and its own numbers back."""

    def __init__(self, size: int, fields: dict[str, Any], alpha: float) -> None:
        self.columns = {name: np.empty((0, *field.get("shape", ()))) for name, field in fields.items()}
        self.size = size
        self.given = 0

    def add(self, **columns: Any) -> None:
        self.columns = {name: np.concatenate([values, columns[name]]) for name, values in self.columns.items()}

    def sample(self, batch: int, beta: float) -> dict[str, Any]:
        wanted = [prioritised.transitions("mujoco-376", first, 500) for first in range(0, 4000, 500)]
        for name, values in self.columns.items():
            assert np.array_equal(values, np.concatenate([part[name] for part in wanted]))
        self.drawn = np.random.default_rng(self.given).integers(0, self.size, batch)
        return {"indexes": self.drawn, "rew": self.columns["rew"][self.drawn, None]}

    def update_priorities(self, indexes: Any, priorities: Any) -> None:
        assert np.array_equal(indexes, self.drawn)
        assert priorities.shape == indexes.shape
        self.given += 1


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("cpprb", "torchrl.data"):
        monkeypatch.setitem(sys.modules, name, None)


def test_a_peer_that_is_not_installed_is_named(tmp_path: Path) -> None:
    result = CliRunner().invoke(prioritised.main, ["--dir", str(tmp_path), *RUN])
    assert result.exit_code == 0, result.output
    assert "skipped: cpprb, all in DRAM:" in result.output
    assert "skipped: TorchRL, memory-mapped:" in result.output
    assert RATIO not in result.output


def test_a_peer_takes_turns_with_the_same_transitions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Peer] = []

    def make(*arguments: Any, **options: Any) -> Peer:
        made.append(Peer(*arguments, **options))
        return made[-1]

    monkeypatch.setitem(sys.modules, "cpprb", SimpleNamespace(PrioritizedReplayBuffer=make))
    result = CliRunner().invoke(prioritised.main, ["--dir", str(tmp_path), *RUN])
    assert result.exit_code == 0, result.output
    assert RATIO in result.output
    assert made[0].given == 20
