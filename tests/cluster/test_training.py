"""Tables over the workers of Ray Train: a worker that dies, another number of workers, a worker that reads for all."""

import hashlib
import os
import signal
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("ray.util", reason="needs the extra ray; `make test-cluster` installs it")

import torch
from torch import distributed as dist

from memhier.recsys import (
    Adam,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    ShardedEmbeddingBagCollection,
    SharedLoader,
    lookahead,
    split_samples,
)

CONFIGS = [
    EmbeddingBagConfig(name="a", num_embeddings=300, embedding_dim=4),
    EmbeddingBagConfig(name="b", num_embeddings=41, embedding_dim=6),
]
STEPS, EVERY = 12, 4


def batches():
    random = np.random.default_rng(0)
    return [torch.from_numpy((np.array([300, 41]) * random.random((9, 2)) ** 2).astype(np.int64)) for _ in range(STEPS)]


def hash_of(tables):
    found = hashlib.sha256()
    for table, config in enumerate(CONFIGS):
        found.update(tables.weights(np.arange(config.num_embeddings), table).numpy().tobytes())
    return found.hexdigest()


def step(tables, batch):
    tables(batch).values().sin().sum().backward()


def work(config):
    """Train as one worker, from the last checkpoint to a step; with `reads` the last worker reads for the others."""
    rank, ranks, folder = dist.get_rank(), dist.get_world_size(), Path(config["folder"])
    torch.set_num_threads(1)
    shared = SharedLoader(reader=ranks - 1) if config["reads"] else None
    if shared is not None and shared.is_reader:
        assert shared.serve(batches(), CONFIGS, ids=lambda batch: batch)["batches"] > 0
        return
    group = None if shared is None else shared.trainers
    trainers, resume = ranks - (shared is not None), any((folder / "tables").glob("*"))
    dist.barrier(group)  # all have looked before tables are made
    with ShardedEmbeddingBagCollection(
        CONFIGS, optimizer=Adam(lr=0.01), dram="16MiB", path=folder / "tables", average=False, group=group,
        resume=resume,
    ) as tables:  # fmt: skip
        own = [split_samples(batch, trainers)[rank] for batch in batches()]
        ahead = lookahead(shared or own, tables, ids=shared.plan if shared else lambda batch: batch)
        if resume:
            ahead.load_state_dict(tables.extra)
        if rank == 0:
            with (folder / "begun").open("a") as file:
                print(ranks, ahead.position, file=file)
        for batch in ahead:
            step(tables, batch)
            if ahead.position % EVERY == 0:
                tables.checkpoint(ahead.state_dict())
            if ahead.position == 6 and rank == trainers - 1 and not (folder / "died").exists():
                (folder / "died").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            if ahead.position == config["until"]:
                break
        ahead.close()
        found = hash_of(tables)
        if rank == 0:
            (folder / "hash").write_text(found)
    if shared is not None:
        shared.close()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.filterwarnings("ignore")  # Ray warns of what it does itself
@pytest.mark.parametrize("reads", [False, True])
def test_a_worker_dies_and_others_go_on_in_another_number(ray, tmp_path, reads):
    from ray import cloudpickle
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers do not find the tests
    with EmbeddingBagCollection(CONFIGS, optimizer=Adam(lr=0.01), dram="16MiB", path=tmp_path / "alone") as tables:
        for batch in batches():
            step(tables, batch)
        expected = hash_of(tables)
    for workers, until in ((2 + reads, 10), (1 + reads, STEPS)):
        TorchTrainer(
            work,
            train_loop_config={"folder": str(tmp_path), "reads": reads, "until": until},
            torch_config=TorchConfig(backend="gloo"),
            scaling_config=ScalingConfig(num_workers=workers, resources_per_worker={"CPU": 0.5}),
            run_config=RunConfig(storage_path=str(tmp_path / "ray"), failure_config=FailureConfig(max_failures=2)),
        ).fit()
    assert (tmp_path / "hash").read_text() == expected
    begun = (tmp_path / "begun").read_text().splitlines()
    assert begun == [f"{2 + reads} 0", f"{2 + reads} 4", f"{1 + reads} 8"]
