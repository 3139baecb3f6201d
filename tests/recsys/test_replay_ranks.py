"""Replay by several trainers, in processes of their own."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="trainers meet by torch.distributed")

SCRIPT = Path(__file__).parent / "replay_in_ranks.py"


def in_ranks(scenario: str, folder: Path, ranks: int, argument: str = "", dies: bool = False) -> list[Any]:
    """Return the result of each rank; None for one that died, and for those that it took along."""
    begun = [
        subprocess.Popen(
            [sys.executable, SCRIPT, scenario, folder, str(ranks), str(rank), argument],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    told = [process.communicate(timeout=800) for process in begun]
    if dies:
        assert begun[1].returncode == -9
        return [None] * ranks
    assert [process.returncode for process in begun] == [0] * ranks, told
    return [json.loads(out) for out, _ in told]


@pytest.mark.long
def test_trainers_that_share_a_buffer_draw_as_one_does(tmp_path: Path) -> None:
    (expected,) = in_ranks("plain", tmp_path, 1)
    for ranks in (2, 3):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        assert in_ranks("shared", folder, ranks) == [expected] * ranks


def test_a_call_that_one_rank_refuses_changes_nothing(tmp_path: Path) -> None:
    found = in_ranks("refused", tmp_path, 3)
    (first, *_), (second, *_), (third, *_) = found
    assert [rest for _, *rest in found] == [[18, 8]] * 3
    assert "TypeError" in second[0]
    assert "expected an array of int64" in second[0]
    assert "rank 1: TypeError" in first[0]
    assert "rank 1: TypeError" in third[0]
    assert "ValueError: labels: 2 of 3 ranks" in first[1]
    assert "labels: 2 of 3 ranks" in third[1]
    assert "needs a label" in first[2]
    assert "rank 0: ValueError" in second[2]
    assert "ValueError: n=-1" in third[3]
    assert "rank 2: ValueError: n=-1" in second[3]
    assert "slot of memory" in second[4]
    assert "rank 1" in first[4]
    assert "BudgetError" in first[5]
    assert "rank 0: BudgetError" in third[5]


def test_a_call_that_all_ranks_refuse_leaves_the_shards_open(tmp_path: Path) -> None:
    found = in_ranks("refused_shards", tmp_path, 2)
    for told, arrivals, step in found:
        memory, kind, where, value, taken, values, number, _, closed = told
        assert memory.startswith("ValueError: memory=-1")
        assert kind.startswith("TypeError: memory=[1]")
        assert "nothing" in where
        assert value.startswith("TypeError: values")
        assert "'ranks' is taken" in taken
        assert values.startswith("TypeError: values")
        assert number == 3  # the second was that of forget
        assert closed.startswith("ClosedError: a change failed on some rank")
        assert (arrivals, step) == (12, "1")
    assert found[0][0][7].startswith("RuntimeError: rank 1: ValueError: memory=-1")
    assert found[1][0][7].startswith("ValueError: memory=-1")


@pytest.mark.long
def test_shards_of_adjacent_seeds_draw_apart(tmp_path: Path) -> None:
    drawn = []
    for seed in (3, 4):
        (tmp_path / str(seed)).mkdir()
        drawn += in_ranks("first_draw", tmp_path / str(seed), 2, str(seed))
    assert len({tuple(slots) for slots in drawn}) == 4


@pytest.mark.long
def test_shards_are_uniform_samples_of_all_streams(tmp_path: Path) -> None:
    found = in_ranks("dealt", tmp_path, 3)
    total = found[0][0]
    assert [arrivals for arrivals, _ in found] == [88] * 3
    for place in range(2):
        counts = np.zeros(total)
        for _, seeds in found:
            for sets in seeds:
                counts[sets[place]] += 1
        drawn = counts.sum()
        # Without replacement the counts vary a little less than this chi-square says.
        share = drawn / total
        statistic = ((counts - share) ** 2).sum() / (share * (1 - share / 60))
        assert abs(statistic - (total - 1)) < 5 * math.sqrt(2 * (total - 1)), (place, statistic)
        # Each shard holds its part of each stream.
        for _, seeds in found:
            own = np.zeros(total)
            for sets in seeds:
                own[sets[place]] += 1
            assert own[:5].sum() + own[6:36].sum() == pytest.approx(own.sum() * 35 / 44 * 0.5, rel=0.25)


@pytest.mark.long
@pytest.mark.parametrize("moment", ["before", "after"])
def test_shards_go_on_from_the_newest_checkpoint_that_all_have(tmp_path: Path, moment: str) -> None:
    for name in ("killed", "straight"):
        (tmp_path / name).mkdir()
    straight = in_ranks("resumed", tmp_path / "straight", 2, "straight")
    in_ranks("resumed", tmp_path / "killed", 2, moment, dies=True)
    resumed = in_ranks("resumed", tmp_path / "killed", 2, "open")
    assert {begin for begin, *_ in resumed} <= {2, 4}
    assert resumed[0][0] == resumed[1][0]
    assert [rest for _, *rest in resumed] == [rest for _, *rest in straight]
    _, _, arrivals, forgotten, left, findings = straight[0]
    assert arrivals == 64
    assert forgotten["samples"] > 0
    assert all(number % 8 < 3 for number in left)  # the first three of a step are those of rank 0, label 0
    assert findings == 0


@pytest.mark.long
def test_shards_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    found = in_ranks("at_odds", tmp_path, 2)
    assert all("FileNotFoundError" in told[0] for told in found)
    assert all("expected the same schema, memory" in told[1] for told in found)
    assert "memory=-1" in found[0][2]
    assert "rank 0" in found[1][2]
    assert all("ValueError: seed=-1" in told[3] for told in found)
    assert [told[4] for told in found] == ["", ""]
    assert all("FileExistsError" in told[5] for told in found)
    (told,) = in_ranks("fewer", tmp_path, 1)
    assert "has the shards of 2 ranks, and 1 ranks opened it" in told
