"""Shards go on from a checkpoint that all of them have, wherever one was killed."""

import signal
from pathlib import Path
from typing import Any

import pytest

from memhier.errors import FormatError
from memhier.recsys.embedding.sharding.agreement import agree, last_checkpoints

SCRIPT = Path(__file__).with_name("train_until_a_rank_dies.py")


def train(
    training: Any, folder: Path, ranks: int, how: str, run: str, victim: int = -1, when: str = "-"
) -> list[tuple[int, str]]:
    """Return the exit status and the output of every rank; those left over when one has died are killed."""
    folder.mkdir(exist_ok=True)
    started = [training(SCRIPT, folder, ranks, rank, how, run, victim, when) for rank in range(ranks)]
    try:
        if victim >= 0:
            started[victim].wait()
            # gloo tells ranks that wait for the dead one, sooner or later; their reaction is not tested.
            for one in started:
                one.wait(3)
                one.process.kill()
        return [one.end() for one in started]
    finally:
        for one in started:
            one.process.kill()


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, training: Any) -> dict[int, str]:
    """Return the hash of tables that were trained without interruption, by number of ranks."""
    found: dict[int, str] = {}
    for ranks in (2,):
        ended = train(training, tmp_path_factory.mktemp("alone") / "folder", ranks, "waits", "once")
        assert [status for status, _ in ended] == [0] * ranks
        found[ranks] = ended[0][1].split()[-1]
    return found


@pytest.mark.parametrize(
    ("how", "victim", "when"),
    [
        ("waits", 1, "before"),
        ("beside", 0, "after"),
        pytest.param("waits", 0, "before", marks=pytest.mark.slow),
        pytest.param("waits", 1, "after", marks=pytest.mark.slow),
        pytest.param("beside", 0, "before", marks=pytest.mark.slow),
        pytest.param("beside", 1, "after", marks=pytest.mark.slow),
    ],
)
def test_a_rank_is_killed_amid_a_checkpoint(
    tmp_path: Path, training: Any, alone: dict[int, str], how: str, victim: int, when: str
) -> None:
    ended = train(training, tmp_path / "folder", 2, how, "first", victim, when)
    assert ended[victim][0] == -signal.SIGKILL
    shards = [last_checkpoints(tmp_path / "folder" / "tables" / f"shard-{rank}") for rank in range(2)]
    assert shards[victim] == ((2, 1) if when == "before" else (3, 2))
    assert shards[1 - victim] in ((2, 1), (3, 2))
    again = train(training, tmp_path / "folder", 2, how, "second")
    common = 4 * min(last for last, _ in shards)
    assert [(status, output.split()[1:3]) for status, output in again] == [(0, [str(common), str(common)])] * 2
    assert again[0][1].split()[-1] == alone[2]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("when", ["before", "after"])
def test_one_of_three_ranks_is_killed(tmp_path: Path, training: Any, when: str) -> None:
    expected = train(training, tmp_path / "alone", 3, "waits", "once")[0][1].split()[-1]
    assert train(training, tmp_path / "folder", 3, "waits", "first", 1, when)[1][0] == -signal.SIGKILL
    again = train(training, tmp_path / "folder", 3, "waits", "second")
    assert len({output.split()[1] for _, output in again}) == 1
    assert again[0][1].split()[-1] == expected


@pytest.mark.parametrize("checkpoints", [[(5, 4), (3, 2)], [(5, 5), (4, 3)], [(1, 1), (0, 0)]])
def test_shards_of_different_trainings_are_refused(tmp_path: Path, checkpoints: Any) -> None:
    with pytest.raises(FormatError, match="expected shards of one training"):
        agree(tmp_path / "shard-0", checkpoints)
