"""Backups of tables and buffers: training goes on from a pulled copy as it would have gone on here."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from memhier import Store, Tiered
from memhier.benchmarks.simulated_store import Bucket, simulated
from memhier.recsys import EmbeddingBagCollection, EmbeddingBagConfig
from memhier.recsys.replay import CarouselBuffer

URL = "simulated://bucket/state"


@pytest.fixture
def bucket() -> Iterator[Bucket]:
    with simulated("bucket") as bucket:
        yield bucket


def tables(path: Path) -> EmbeddingBagCollection:
    config = EmbeddingBagConfig(name="items", num_embeddings=1000, embedding_dim=8, feature_names=["items"])
    return EmbeddingBagCollection([config], dram="8MiB", path=path, resume=path.exists())


def train(model: EmbeddingBagCollection, seed: int) -> None:
    random = np.random.default_rng(seed)
    for _ in range(3):
        ids = torch.from_numpy(random.integers(0, 1000, (20, 4)))
        model({"items": ids})["items"].square().sum().backward()


def test_a_table(tmp_path: Path, bucket: Bucket) -> None:
    with tables(tmp_path / "here") as here:
        train(here, 0)
        here.checkpoint({"step": 3})
        assert here.push(URL).moved_bytes > 0
        train(here, 1)
        expected = here.weights(np.arange(1000))
        here.checkpoint({"step": 6})
        assert here.push(URL, keep=2).generation > 1
    EmbeddingBagCollection.pull(URL, tmp_path / "before", generation=1)
    EmbeddingBagCollection.pull(URL, tmp_path / "after")
    with tables(tmp_path / "before") as before, tables(tmp_path / "after") as after:
        assert (before.extra["step"], after.extra["step"]) == (3, 6)
        train(before, 1)
        for model in (before, after):
            assert torch.equal(model.weights(np.arange(1000)), expected)


def test_a_buffer(tmp_path: Path, bucket: Bucket) -> None:
    schema = {"x": ("float32", 4)}
    with CarouselBuffer(tmp_path / "here", memory=8, schema=schema, seed=1) as here:
        for step in range(5):
            here.add({"x": np.full((10, 4), step, np.float32)}, labels=np.arange(10) % 3)
            here.checkpoint()
            here.push(URL)
        CarouselBuffer.pull(URL, tmp_path / "copy")
        with CarouselBuffer.open(tmp_path / "copy") as copy:
            assert copy.check() == []
            assert np.array_equal(copy.stored_ids(), here.stored_ids())
            for _ in range(5):
                drawn, expected = copy.sample(4), here.sample(4)
                assert np.array_equal(drawn["x"], expected["x"])
                copy.feedback(drawn)
                here.feedback(expected)


def test_a_tier_beside_its_calls(tmp_path: Path, bucket: Bucket) -> None:
    with Tiered(tmp_path / "here", "rows", np.int64, 2, rows=1000, dram="8MiB") as here:
        here.scatter(np.arange(200), np.arange(400).reshape(200, 2))
        here.checkpoint({"step": b"1"})
        here.scatter([3], [[0, 0]])
        assert here.push(URL).generation == 1
    Tiered.pull(URL, tmp_path / "copy")
    with Tiered(tmp_path / "copy", "rows", np.int64, 2, rows=1000, dram="8MiB") as copy:
        assert copy.gather([3, 199, 500]).tolist() == [[6, 7], [398, 399], [0, 0]]
    with Store.open(URL, "tiered", cache=tmp_path / "cache") as store:
        assert store.get("step") == b"1"
