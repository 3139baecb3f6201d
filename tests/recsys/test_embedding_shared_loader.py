"""One rank reads for all: the bits of ranks that read for themselves, and one pass over the loader."""

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import distributed as dist

from memhier.recsys import CTRBatch, SharedLoader, split_samples

SCRIPT = Path(__file__).with_name("train_with_shared_loader.py")
BATCHES = 16


def train(training: Any, folder: Path, ranks: int, *arguments: Any) -> list[tuple[int, list[str]]]:
    """Return the exit status and the lines of every rank."""
    folder.mkdir(exist_ok=True)
    started = [training(SCRIPT, folder, ranks, rank, *arguments) for rank in range(ranks)]
    return [(status, output.splitlines()) for status, output in (one.end() for one in started)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, training: Any) -> str:
    """Return the hash of tables that one rank trained, reading for itself."""
    [(status, lines)] = train(training, tmp_path_factory.mktemp("alone"), 1, "own", "once")
    assert status == 0
    return lines[0].split()[0]


@pytest.mark.parametrize("trainers", [1, 3])
def test_trainers_get_the_bits_of_their_own_loader(tmp_path: Path, training: Any, alone: str, trainers: int) -> None:
    *trained, (status, served) = train(training, tmp_path, trainers + 1, "shared", "once")
    assert [status for status, _ in trained] == [0] * trainers
    assert status == 0
    found, ahead, deferred = trained[0][1][0].split()
    assert found == alone
    # Gradients travel beside steps as the plan says, and no ids travel among trainers: only whether all have rows.
    assert (int(deferred) > 0) == (trainers > 1)
    read = (tmp_path / "read").read_text().split()
    assert len(read) <= 2 * BATCHES
    assert served == [f"served {len(read)}"]
    assert int(ahead) < 8 * len(read) * trainers * 4


def test_ranks_that_read_for_themselves_have_the_same_bits(tmp_path: Path, training: Any, alone: str) -> None:
    ended = train(training, tmp_path, 2, "own", "once")
    assert ended[0][1][0].split()[0] == alone
    assert len((tmp_path / "read").read_text().split()) > 2 * BATCHES


def test_a_loader_that_fails_is_told_to_all(tmp_path: Path, training: Any, alone: str) -> None:
    ended = train(training, tmp_path, 3, "shared", "raises", 6)
    told = "RuntimeError: rank 2, which reads the loader: OSError: the file is gone"
    assert [(status, lines) for status, lines in ended] == [(0, [told])] * 2 + [(0, ["served 6"])]
    # Training goes on from the checkpoint after four batches, on fewer ranks.
    ended = train(training, tmp_path, 2, "shared", "again")
    assert ended[0][1][0].split()[0] == alone


def test_a_reader_that_dies_is_told_to_all(tmp_path: Path, training: Any, alone: str) -> None:
    ended = train(training, tmp_path, 3, "shared", "dies", 11)
    assert ended[2][0] == -signal.SIGKILL
    for status, lines in ended[:2]:
        assert status == 0
        assert lines[0].startswith("RuntimeError: rank 2, which reads the loader, has ended: start all ranks again")
    ended = train(training, tmp_path, 4, "shared", "again")
    assert ended[0][1][0].split()[0] == alone


@given(samples=st.integers(0, 9), ranks=st.integers(1, 5))
def test_samples_are_divided_in_order(samples: int, ranks: int) -> None:
    rows, labels = torch.arange(2 * samples).view(samples, 2), torch.arange(float(samples))
    parts = split_samples({"x": [rows], "y": CTRBatch(labels, rows, rows)}, ranks)
    assert len(parts) == ranks
    assert torch.equal(torch.cat([part["x"][0] for part in parts]), rows)
    assert torch.equal(torch.cat([part["y"].labels for part in parts]), labels)
    sizes = [len(part["y"].ids) for part in parts]
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1


def test_batches_that_cannot_be_divided_are_refused() -> None:
    with pytest.raises(ValueError, match=r"tensors of \[3, 4\] samples"):
        split_samples((torch.zeros(3), torch.zeros(4)), 2)
    with pytest.raises(TypeError, match="holds str"):
        split_samples([torch.zeros(3), "x"], 2)


@pytest.mark.usefixtures("one_rank")
def test_one_rank_cannot_read_for_others() -> None:
    assert dist.get_world_size() == 1
    for reader, told in ((0, "only rank"), (1, "reader=1")):
        with pytest.raises(ValueError, match=told):
            SharedLoader(reader=reader)
