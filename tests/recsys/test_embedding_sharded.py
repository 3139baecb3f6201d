"""Several trainers: their tables have the bits of one trainer's."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import distributed as dist

from memhier.errors import FormatError
from memhier.recsys import (
    Adam,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    ShardedEmbeddingBagCollection,
    reshard,
)

SCRIPT = Path(__file__).with_name("train_in_ranks.py")


def run(folder: Path, ranks: int, rule: str, window: int, first: int = 0, last: int = 20) -> str:
    return start(SCRIPT, folder, ranks, rule, window, first, last)


def start(script: Path, folder: Path, ranks: int, *arguments: Any) -> str:
    """Run a script once for each rank; return the hash that the first one prints."""
    folder.mkdir(exist_ok=True)
    commands = [[sys.executable, str(script), *map(str, (folder, ranks, rank, *arguments))] for rank in range(ranks)]
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


def test_the_dense_part_under_ddp(tmp_path: Path) -> None:
    script = SCRIPT.with_name("train_with_ddp.py")
    assert start(script, tmp_path, 2) == start(script, tmp_path, 1)


CONFIGS = [
    EmbeddingBagConfig(name="a", num_embeddings=300, embedding_dim=4),
    EmbeddingBagConfig(name="b", num_embeddings=41, embedding_dim=4, pooling="mean"),
]


@pytest.mark.slow
def test_a_training_goes_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    alone = run(tmp_path / "alone", 1, "adam", 0)
    moved = tmp_path / "moved"
    run(moved, 1, "adam", 0, 0, 8)
    assert reshard(moved / "tables-1", moved / "tables-2", CONFIGS, 2, optimizer=Adam(lr=0.01), dram="64MiB") > 100
    run(moved, 2, "adam", 2, 8, 13)
    reshard(moved / "tables-2", moved / "tables-3", CONFIGS, 3, optimizer=Adam(lr=0.01), dram="64MiB")
    assert run(moved, 3, "adam", 0, 13, 20) == alone


def test_shards_are_divided_anew_with_all_that_they_hold(tmp_path: Path) -> None:
    options: dict[str, Any] = {"optimizer": Adam(lr=0.01), "dram": "64MiB", "seed": 5}
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        with ShardedEmbeddingBagCollection(CONFIGS, path=tmp_path / "1", **options) as tables:
            for seed in range(4):
                ids = torch.from_numpy(np.random.default_rng(seed).integers(0, 41, (9, 2)))
                tables(ids).values().sin().sum().backward()
            tables.checkpoint({"at": 4})
            rows = np.arange(41)
            expected = [tables.weights(rows, table) for table in range(2)]
            state = tables.optimizer_state(rows)
        touched = reshard(tmp_path / "1", tmp_path / "3", CONFIGS, 3, **options)
        assert sorted(place.name for place in (tmp_path / "3").iterdir()) == ["shard-0", "shard-1", "shard-2"]
        assert reshard(tmp_path / "3", tmp_path / "back", CONFIGS, 1, **options) == touched
        with ShardedEmbeddingBagCollection(CONFIGS, path=tmp_path / "back", resume=True, **options) as tables:
            assert (tables.steps, tables.extra) == (4, {"at": 4})
            assert all(torch.equal(tables.weights(rows, table), expected[table]) for table in range(2))
            assert torch.equal(tables.optimizer_state(rows), state)
        with pytest.raises(FileExistsError, match="is there already"):
            reshard(tmp_path / "1", tmp_path / "3", CONFIGS, 2, **options)
        with pytest.raises(FormatError):
            reshard(tmp_path / "1", tmp_path / "4", CONFIGS[:1], 2, **options)
        assert not (tmp_path / "4").exists()
        with pytest.raises(FileNotFoundError, match="shard-0"):
            reshard(tmp_path, tmp_path / "5", CONFIGS, 2, **options)
    finally:
        dist.destroy_process_group()


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
