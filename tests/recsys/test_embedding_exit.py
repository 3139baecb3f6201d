"""A program that ends while threads work for it: Python goes down only once they have stopped."""

import subprocess
import sys
from pathlib import Path

import pytest

from memhier.recsys import EmbeddingBag

EPOCH = """
import torch
from memhier.recsys import EmbeddingBag, lookahead
bag = EmbeddingBag(1000, 3, mode="sum", dram="64MiB", path={path!r})
batches = [torch.randint(0, 1000, (2000, 20)) for _ in range(1500)]
epoch = iter(lookahead(batches, bag, ids=lambda batch: batch, window=1400))
bag(next(epoch)).sum().backward()
"""

CHECKPOINT = """
import torch
from memhier.recsys import EmbeddingBag
bag = EmbeddingBag(200_000, 64, mode="sum", dram="128MiB", path={path!r})
bag(torch.arange(20_000).view(-1, 20)).sum().backward()
bag.checkpoint({{"epoch": 1}})
bag(torch.arange(20_000).view(-1, 20)).sum().backward()
saved = bag.start_checkpoint({{"epoch": 2}})
"""


def ends_in_silence(script: str) -> None:
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=800, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.long
@pytest.mark.parametrize("_", range(2))
def test_an_epoch_is_read_while_the_program_ends(tmp_path: Path, _: int) -> None:
    ends_in_silence(EPOCH.format(path=str(tmp_path)))


@pytest.mark.long
def test_a_checkpoint_is_written_before_the_program_ends(tmp_path: Path) -> None:
    ends_in_silence(CHECKPOINT.format(path=str(tmp_path)))
    with EmbeddingBag(200_000, 64, mode="sum", dram="128MiB", path=tmp_path, resume=True) as bag:
        assert bag.extra == {"epoch": 2}
