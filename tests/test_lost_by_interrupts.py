"""What an interrupt has kept from its owner lets go of everything by itself, and at once."""

import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from memhier.ann import ZoomIndex
from memhier.ann.decoder import TopKSoftmax
from memhier.errors import LockedError
from memhier.io.reader import Reader
from memhier.recsys import EmbeddingBag
from memhier.recsys.replay import CarouselBuffer
from memhier.store.store import Store
from memhier.table.tiered import Tiered


def index_at(place: Path) -> Callable[[], Any]:
    vectors = np.random.default_rng(0).normal(size=(300, 8)).astype(np.float32)
    names = [f"name {row}" for row in range(300)]
    ZoomIndex.build(place, vectors, ids=names, attributes={"a": np.arange(300)}, dram="16MiB", grow_to=2000).close()

    def opened() -> ZoomIndex:
        index = ZoomIndex.open(place, writable=True)
        index.search(vectors[0], 3, where="a < 100")
        index.add(vectors[:1], ids=[f"other {index.stats()['reads']}"], attributes={"a": [1]})
        return index

    return opened


def store_at(place: Path) -> Callable[[], Any]:
    with Store.create(place, "test") as store, store.begin() as tx:
        tx.segment("data").append(np.arange(5000))
        tx.commit()
    return lambda: Store.open(place, "test", writable=True)


def tier_at(place: Path) -> Callable[[], Any]:
    def opened() -> Tiered:
        tier = Tiered(place, "t", np.float32, 4, rows=100, dram="8MiB")
        tier.scatter([1], np.ones((1, 4), np.float32))
        return tier

    return opened


def replay_at(place: Path) -> Callable[[], Any]:
    buffer = CarouselBuffer(place, memory=10, schema={"x": "int64"})
    buffer.add({"x": np.arange(40)})
    buffer.checkpoint()
    buffer.close()

    def opened() -> CarouselBuffer:
        buffer = CarouselBuffer.open(place)
        buffer.sample(4)
        return buffer

    return opened


def tables_at(place: Path) -> Callable[[], Any]:
    def opened() -> EmbeddingBag:
        bag = EmbeddingBag(500, 4, dram="16MiB", path=place, resume=place.exists(), mode="sum")
        bag(torch.tensor([[1, 2]])).sum().backward()
        return bag

    opened().checkpoint()
    return opened


def decoder_at(place: Path) -> Callable[[], Any]:
    torch.manual_seed(0)
    TopKSoftmax.from_linear(torch.nn.Linear(8, 200), k=3).save(place)
    return lambda: TopKSoftmax.open(place, dram="4MiB")


def reader_at(place: Path) -> Callable[[], Any]:
    place.write_bytes(bytes(8192))

    def opened() -> Reader:
        reader = Reader()
        reader.add(place)
        return reader

    return opened


KINDS = {
    "index": index_at, "store": store_at, "tier": tier_at, "replay": replay_at, "tables": tables_at,
    "decoder": decoder_at, "reader": reader_at,
}  # fmt: skip


@pytest.fixture
def no_collections() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.long
@pytest.mark.usefixtures("no_collections")
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_lost_holds_no_lock_and_no_file(tmp_path: Path, kind: str) -> None:
    opened = KINDS[kind](tmp_path / "p")
    files = []
    for _ in range(4):
        opened()  # and nobody has it
        Reader().close()  # comes after what closes files beside this thread
        files.append(len(os.listdir("/proc/self/fd")))
    assert files[1] == files[3], "the files of each stay open"


def test_a_lock_that_is_held_stays_held(tmp_path: Path) -> None:
    opened = store_at(tmp_path / "p")
    with opened(), pytest.raises(LockedError, match="has it open for writing"):
        opened()
