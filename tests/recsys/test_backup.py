"""Backups of tables and buffers: training goes on from a pulled copy as it would have gone on here."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import memhier.remote.place
from memhier import FormatError, Store, Tiered, backups, check_backup
from memhier.ann import ZoomIndex
from memhier.benchmarks.simulated_store import Bucket, simulated
from memhier.recsys import EmbeddingBagCollection, EmbeddingBagConfig
from memhier.recsys.replay import CarouselBuffer, StoredSamples

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
    assert check_backup(URL) == []
    EmbeddingBagCollection.pull(URL, tmp_path / "before", generation=1)
    EmbeddingBagCollection.pull(URL, tmp_path / "after")
    with tables(tmp_path / "before") as before, tables(tmp_path / "after") as after:
        assert (before.extra["step"], after.extra["step"]) == (3, 6)
        train(before, 1)
        for model in (before, after):
            assert torch.equal(model.weights(np.arange(1000)), expected)


def test_tables_on_several_ranks(tmp_path: Path, training: Any) -> None:
    script, told = Path(__file__).with_name("push_in_ranks.py"), {}
    for way in ("first", "pulled"):
        ranks = [training(script, tmp_path, 2, rank, way) for rank in range(2)]
        ended = [rank.end() for rank in ranks]
        assert [status for status, _ in ended] == [0, 0]
        told[way] = ended[0][1].split()
    assert len(told["first"]) == 2
    assert told["pulled"] == told["first"][1:]
    for rank in range(2):
        assert check_backup(f"file://{tmp_path}/far/shard-{rank}-of-2-since-0") == []


def test_nothing_is_there_before_the_first_checkpoint(tmp_path: Path, bucket: Bucket) -> None:
    with tables(tmp_path / "here") as here, pytest.raises(FormatError, match="take a checkpoint"):
        here.push(URL)
    with (
        Tiered(tmp_path / "rows", "rows", np.int64, 2, rows=100, dram="8MiB") as tier,
        pytest.raises(FormatError, match="take a checkpoint"),
    ):
        tier.push(URL)
    assert bucket.objects == {}


def test_a_backup_is_no_folder_to_train_in(tmp_path: Path, bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with CarouselBuffer(tmp_path / "buffer", memory=8, schema={"x": ("float32", 4)}) as buffer:
        buffer.add({"x": np.ones((3, 4), np.float32)})
        buffer.checkpoint()
        buffer.push(URL)
    config = EmbeddingBagConfig(name="items", num_embeddings=1000, embedding_dim=8, feature_names=["items"])
    for make in (
        lambda: EmbeddingBagCollection([config], dram="8MiB", path=URL),
        lambda: EmbeddingBagCollection([config], dram="8MiB", path=URL, resume=True),
        lambda: CarouselBuffer(URL, memory=8, schema={"x": ("float32", 4)}),
        lambda: CarouselBuffer.open(URL),
    ):
        with pytest.raises(ValueError, match=r"pull|make it in a folder"):
            make()
    assert [path.name for path in tmp_path.iterdir()] == ["buffer"]
    with StoredSamples(URL, cache=tmp_path / "cache") as stored:
        assert stored.read([2, 0])["x"].tolist() == np.ones((2, 4)).tolist()
    assert (tmp_path / "cache").exists()


def test_a_buffer(tmp_path: Path, bucket: Bucket) -> None:
    schema = {"x": ("float32", 4)}
    with CarouselBuffer(tmp_path / "here", memory=8, schema=schema, seed=1) as here:
        for step in range(5):
            here.add({"x": np.full((10, 4), step, np.float32)}, labels=np.arange(10) % 3)
            here.checkpoint()
            here.push(URL, keep=2)
        assert check_backup(URL) == []
        assert len(backups(URL)) == 2
        CarouselBuffer.pull(URL, tmp_path / "copy")
        with CarouselBuffer.open(tmp_path / "copy") as copy:
            assert copy.check() == []
            assert np.array_equal(copy.stored_ids(), here.stored_ids())
            for _ in range(5):
                drawn, expected = copy.sample(4), here.sample(4)
                assert np.array_equal(drawn["x"], expected["x"])
                copy.feedback(drawn)
                here.feedback(expected)


def test_tables_tiers_buffers_and_indexes_repair_a_backup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memhier.remote.place, "FIRST_WAIT_S", 0.0)
    vectors = np.random.default_rng(0).normal(size=(300, 4)).astype(np.float32)
    with (
        tables(tmp_path / "tables") as table,
        Tiered(tmp_path / "rows", "rows", np.int64, 2, rows=100, dram="8MiB") as tier,
        CarouselBuffer(tmp_path / "buffer", memory=8, schema={"x": ("float32", 4)}) as buffer,
        ZoomIndex.build(tmp_path / "index", vectors, dram="4MiB") as index,
    ):
        train(table, 0)
        tier.scatter(np.arange(20), np.arange(40).reshape(20, 2))
        buffer.add({"x": np.ones((3, 4), np.float32)})
        for trained in (table, tier, buffer):
            trained.checkpoint()
        each: Any
        for each in (table, tier, buffer, index):
            with simulated("bucket") as bucket:
                each.push(URL)
                name = max(bucket.objects, key=lambda name: len(bucket.objects[name]))
                sound = bucket.objects[name]
                bucket.objects[name] = bytes([sound[0] ^ 1]) + sound[1:]
                assert len(check_backup(URL)) == 1
                assert each.push(URL).moved_objects == 0
                assert each.push(URL, verify=True).moved_objects == 1
                assert check_backup(URL) == []
                assert bucket.objects[name] == sound


def test_a_tier_beside_its_calls(tmp_path: Path, bucket: Bucket) -> None:
    with Tiered(tmp_path / "here", "rows", np.int64, 2, rows=1000, dram="8MiB") as here:
        here.scatter(np.arange(200), np.arange(400).reshape(200, 2))
        here.checkpoint({"step": b"1"})
        here.scatter([3], [[0, 0]])
        assert here.push(URL).generation == 1
    assert check_backup(URL) == []
    Tiered.pull(URL, tmp_path / "copy")
    with Tiered(tmp_path / "copy", "rows", np.int64, 2, rows=1000, dram="8MiB") as copy:
        assert copy.gather([3, 199, 500]).tolist() == [[6, 7], [398, 399], [0, 0]]
    with Store.open(URL, "tiered", cache=tmp_path / "cache") as store:
        assert store.get("step") == b"1"
