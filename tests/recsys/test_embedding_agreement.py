"""Shards go on from a checkpoint that all of them have, wherever one was killed."""

import signal
from pathlib import Path
from typing import Any

import pytest

from memhier.errors import FormatError
from memhier.recsys.embedding.records import KEY, checkpoint_of
from memhier.store.agreement import agree, last_commits
from memhier.table.tiered import KIND

SCRIPT = Path(__file__).with_name("train_until_a_rank_dies.py")


def train(
    training: Any,
    folder: Path,
    ranks: int,
    how: str,
    run: str,
    victim: int = -1,
    when: str = "-",
    number: int = 3,
    disks: str = "",
) -> list[tuple[int, str]]:
    """Return the exit status and the output of every rank; those left over when one has died are killed."""
    folder.mkdir(exist_ok=True)
    started = [training(SCRIPT, folder, ranks, rank, how, run, victim, when, number, disks) for rank in range(ranks)]
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
def alone(tmp_path_factory: pytest.TempPathFactory, training: Any) -> str:
    """Return the hash of tables that one rank trained without interruption."""
    [(status, output)] = train(training, tmp_path_factory.mktemp("alone") / "folder", 1, "waits", "once")
    assert status == 0
    return output.split()[-1]


@pytest.mark.parametrize(
    ("how", "victim", "when"),
    [
        ("widths", 1, "before"),
        ("beside", 0, "after"),
        pytest.param("waits", 1, "before", marks=pytest.mark.slow),
        pytest.param("widths", 0, "after", marks=pytest.mark.slow),
        pytest.param("waits", 0, "before", marks=pytest.mark.slow),
        pytest.param("waits", 1, "after", marks=pytest.mark.slow),
        pytest.param("beside", 0, "before", marks=pytest.mark.slow),
        pytest.param("beside", 1, "after", marks=pytest.mark.slow),
    ],
)
def test_a_rank_is_killed_amid_a_checkpoint(
    tmp_path: Path, training: Any, alone: str, how: str, victim: int, when: str
) -> None:
    ended = train(training, tmp_path / "folder", 2, how, "first", victim, when)
    assert ended[victim][0] == -signal.SIGKILL
    tables = tmp_path / "folder" / "tables"
    shards = [last_commits(tables / f"shard-{rank}-of-2-since-0", KIND, KEY, checkpoint_of) for rank in range(2)]
    assert shards[victim] == ((2, 1) if when == "before" else (3, 2))
    assert shards[1 - victim] in ((2, 1), (3, 2))
    again = train(training, tmp_path / "folder", 2, how, "second")
    common = 4 * min(last for last, _ in shards)
    assert [(status, output.split()[1:3]) for status, output in again] == [(0, [str(common), str(common)])] * 2
    assert again[0][1].split()[-1] == alone


@pytest.mark.parametrize(
    ("how", "last", "runs"),
    [
        # Ranks, and how one of them ends: in a checkpoint, in a step, in the move of its rows, before and after.
        ("widths", 4, [(2, "before", 2), (3, "step", 6), (1, "after", 1), (4, "-", 0)]),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (
                ("waits", 12, [(1, "after", 3), (4, "before", 1), (2, "before", 1), (3, "-", 0)]),
                ("waits", 8, [(4, "step", 9), (2, "after", 1), (1, "after", 1), (2, "-", 0)]),
                ("widths", 12, [(3, "before", 1), (2, "after", 2), (3, "step", 13), (1, "-", 0)]),
            )
        ),
    ],
)
@pytest.mark.timeout(1800)
def test_a_training_goes_on_with_another_number_of_ranks(
    tmp_path: Path, training: Any, alone: str, how: str, last: int, runs: list[tuple[int, str, int]]
) -> None:
    for run, (ranks, when, number) in enumerate(runs):
        victim = -1 if when == "-" else ranks - 1
        ended = train(training, tmp_path / "folder", ranks, how, str(run), victim, when, number)
        assert ended[victim][0] == (0 if when == "-" else -signal.SIGKILL)
    assert [(status, output.split()[:3]) for status, output in ended] == [(0, ["from", str(last), str(last)])] * ranks
    assert ended[0][1].split()[-1] == alone
    # Nothing is left of other divisions.
    names = {place.name.split("-since-")[0] for place in (tmp_path / "folder" / "tables").iterdir()}
    assert names == {f"shard-{rank}-of-{ranks}" for rank in range(ranks)}


def test_shards_lie_on_the_disks_of_ranks(tmp_path: Path, training: Any, alone: str) -> None:
    folder = tmp_path / "folder"
    # The ranks change places, then there are three. Each run ends in its second commit, the first being the move.
    for run, (disks, first) in enumerate((("ab", 0), ("ba", 4), ("bca", 4))):
        ended = train(training, folder, len(disks), "waits", str(run), 0, "before", 2, disks)
        assert [output.split()[1:2] for _, output in ended] == [[str(first)]] * len(disks)
    # Without disk b no training begins, neither from the checkpoint nor anew, and nothing is lost.
    ended = train(training, folder, 2, "waits", "less", disks="ca")
    assert [(status, output) for status, output in ended] == [(1, "")] * 2
    ended = train(training, folder, 3, "waits", "all", disks="acb")
    assert ended[0][1].split() == ["from", "4", "4", "end", alone]
    assert [len([*(folder / "tables" / disk).iterdir()]) for disk in "abc"] == [1, 1, 1]


@pytest.mark.parametrize("checkpoints", [[(5, 4), (3, 2)], [(5, 5), (4, 3)], [(1, 1), (0, 0)]])
def test_shards_of_different_trainings_are_refused(tmp_path: Path, checkpoints: Any) -> None:
    with pytest.raises(FormatError, match="expected shards of one training"):
        agree(tmp_path / "shard-0", KIND, checkpoints[0], checkpoints)
