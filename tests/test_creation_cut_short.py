"""What a power cut may leave where a table, buffer, index or decoder was first made: it can be made there again."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from memhier import Tiered
from memhier.ann import LogitIndex, ZoomIndex
from memhier.recsys import EmbeddingBag
from memhier.recsys.replay import CarouselBuffer
from memhier.store.store import Store

VECTORS = np.random.default_rng(0).standard_normal((300, 8)).astype(np.float32)


def leave(path: Path, state: str) -> None:
    """Leave what there is at a moment of making a store; `test_crash.py` enumerates them all."""
    path.mkdir()
    if state == "a lock that is not written":
        (path / "lock.memhier-new").write_bytes(b"\0" * 8)
        return
    (path / "lock").write_bytes(b"memhier\n")
    if state == "a lock":
        return
    for name in ("segments", "tmp", "catalog"):
        (path / name).mkdir()
    if state == "a torn catalog":
        (path / "catalog" / "data.mdb").write_bytes(b"\xa5" * 5000)
    if state == "scratch":
        (path / "tmp" / "bucket").write_bytes(bytes(100))


def table(path: Path) -> None:
    with Tiered(path, "table", np.float32, 4, rows=100, dram="12MiB") as made:
        made.scatter([7], np.ones((1, 4), np.float32))
        made.checkpoint()
    with Tiered(path, "table", np.float32, 4, rows=100, dram="12MiB") as made:
        assert made.gather([7]).tolist() == [[1, 1, 1, 1]]


def buffer(path: Path) -> None:
    with CarouselBuffer(path, memory=4, schema={"x": "int64"}) as made:
        made.add({"x": np.arange(9)})
        made.checkpoint()
    with CarouselBuffer.open(path) as made:
        assert len(made.sample(3).ids) == 3


def tables(path: Path) -> None:
    bag = EmbeddingBag(100, 4, dram="12MiB", path=path)
    bag(torch.arange(10).view(2, 5)).sum().backward()
    bag.checkpoint()
    bag.close()
    EmbeddingBag(100, 4, dram="12MiB", path=path, resume=True).close()


def index(path: Path) -> None:
    with ZoomIndex.build(path, VECTORS, dram="16MiB") as made:
        assert made.search(VECTORS[3], k=1).ids.tolist() == [3]


@cache
def layer() -> LogitIndex:
    return LogitIndex.build(np.ascontiguousarray(np.tile(VECTORS, (1, 2))))


def decoder(path: Path) -> None:
    layer().save(path)
    assert LogitIndex.open(path).shape == (300, 16)


@pytest.mark.parametrize(
    "state", ["a lock that is not written", "a lock", "folders", "a torn catalog", "scratch", "an empty store"]
)
@pytest.mark.parametrize("make", [table, buffer, tables, index, decoder])
def test_it_can_be_made_again(make: Callable[[Path], None], state: str, tmp_path: Path) -> None:
    path = tmp_path / "made"
    if state == "an empty store":
        Store.create(path, kind="another").close()
    else:
        leave(path, state)
    make(path)
