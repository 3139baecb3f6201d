"""Several trainers: their tables have the bits of one trainer's."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import distributed as dist

from memhier.recsys import EmbeddingBagCollection, EmbeddingBagConfig, ShardedEmbeddingBagCollection

SCRIPT = Path(__file__).with_name("train_in_ranks.py")


def run(folder: Path, ranks: int, rule: str, window: int) -> str:
    folder.mkdir()
    commands = [
        [sys.executable, str(SCRIPT), str(folder), str(ranks), str(rank), rule, str(window)] for rank in range(ranks)
    ]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
    outputs = [process.communicate(timeout=100)[0] for process in processes]
    assert all(process.returncode == 0 for process in processes)
    return outputs[0].split()[0]


@pytest.mark.parametrize("rule", ["sgd", pytest.param("adam", marks=pytest.mark.slow)])
def test_ranks_give_the_bits_of_one(tmp_path: Path, rule: str) -> None:
    alone = run(tmp_path / "one", 1, rule, 0)
    assert run(tmp_path / "two", 2, rule, 3) == alone


@pytest.mark.slow
def test_three_ranks_without_looking_ahead(tmp_path: Path) -> None:
    assert run(tmp_path / "three", 3, "adam", 0) == run(tmp_path / "one", 1, "adam", 2)


def test_one_rank_is_a_collection(tmp_path: Path) -> None:
    configs = [
        EmbeddingBagConfig(name=name, num_embeddings=50, embedding_dim=3, feature_names=features)
        for name, features in (("a", ["x", "y"]), ("b", ["z"]))
    ]
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        with (
            ShardedEmbeddingBagCollection(configs, dram="64MiB", path=tmp_path / "a") as sharded,
            EmbeddingBagCollection(configs, dram="64MiB", path=tmp_path / "b") as plain,
        ):
            for seed in range(5):
                ids = torch.from_numpy(np.random.default_rng(seed).integers(0, 50, (8, 3)))
                outputs = [module(ids).values() for module in (sharded, plain)]
                assert torch.equal(*outputs)
                for output in outputs:
                    output.sin().sum().backward()
            for table in range(2):
                assert torch.equal(sharded.weights(np.arange(50), table), plain.weights(np.arange(50), table))
            sharded.eval()
            assert torch.equal(sharded(ids).values(), plain(ids).values())
            with pytest.raises(IndexError, match="table 'a', 0 to 49"):
                sharded(ids + 50)
        with pytest.raises(ValueError, match="one embedding_dim"):
            ShardedEmbeddingBagCollection(
                [*configs, EmbeddingBagConfig(name="c", num_embeddings=5, embedding_dim=4)], dram="64MiB", path=tmp_path
            )
    finally:
        dist.destroy_process_group()
