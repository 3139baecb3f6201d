"""Batches as torch tensors: handed out in place, and filled where the caller has them."""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memhier.recsys.replay import Batch, CarouselBuffer, Field

SCHEMA = {
    "image": ("uint8", (3, 4, 5)), "text": Field("uint8", (None,), longest=3), "mask": ("bool", 7), "half": "float16",
    "logits": Field("float32", (2,), mutable=True),
}  # fmt: skip


def samples(ids: np.ndarray) -> dict[str, Any]:
    return {
        "image": np.repeat(ids.astype(np.uint8), 60).reshape(len(ids), 3, 4, 5),
        "text": [b"abc"[: id % 4] for id in ids.tolist()],
        "mask": (ids[:, None] >> np.arange(7) & 1).astype(bool),
        "half": ids.astype(np.float16),
        "logits": np.stack([ids, -ids], 1).astype(np.float32),
    }


def filled(place: Path) -> CarouselBuffer:
    buffer = CarouselBuffer(place, memory=30, schema=SCHEMA, seed=4)
    buffer.add(samples(np.arange(80)), labels=np.arange(80) % 3)
    return buffer


@pytest.fixture(scope="module")
def buffer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with filled(tmp_path_factory.mktemp("tensors") / "b") as made:
        yield made


def is_right(data: Mapping[str, Any], ids: np.ndarray) -> None:
    expected = samples(ids)
    for name in ("image", "mask", "half", "logits"):
        np.testing.assert_array_equal(np.asarray(data[name]), expected[name])
    assert np.asarray(data["text.length"]).tolist() == [len(text) for text in expected["text"]]


def tensors(count: int, with_labels: bool) -> dict[str, torch.Tensor]:
    room = {
        "image": torch.empty(count, 3, 4, 5, dtype=torch.uint8),
        "text": torch.empty(count, 3, dtype=torch.uint8), "text.length": torch.empty(count, dtype=torch.int32),
        "mask": torch.empty(count, 7, dtype=torch.bool), "half": torch.empty(count, dtype=torch.float16),
        "logits": torch.empty(count, 2),
    }  # fmt: skip
    return room | ({"labels": torch.empty(count, dtype=torch.int64)} if with_labels else {})


@settings(max_examples=30, deadline=None)
@given(n=st.integers(0, 31), more=st.integers(0, 3), with_labels=st.booleans())
def test_tensors_are_filled_where_they_are(buffer: CarouselBuffer, n: int, more: int, with_labels: bool) -> None:
    room = tensors(n + more, with_labels)
    places = {name: tensor.data_ptr() for name, tensor in room.items()}
    batch = buffer.sample(n, out=room)
    assert len(batch) == min(n, 30)
    filled = {name: tensor[: len(batch)] for name, tensor in room.items()}
    is_right(filled, batch.ids)
    found = batch.tensors()
    assert set(found) == {*tensors(0, True), "ids"}
    is_right(found, found["ids"].numpy())
    assert found["labels"].tolist() == (batch.ids % 3).tolist()
    if len(batch):
        assert all(found[name].data_ptr() == place for name, place in places.items())
    buffer.reader().read(batch.slots, out=room)
    is_right(filled, batch.ids)


def test_a_batch_over_tensors_is_used_again_and_again(buffer: CarouselBuffer) -> None:
    room = tensors(6, True)
    batch = Batch.over(buffer.schema, room)
    for _ in range(5):
        assert buffer.sample(6, batch) is batch
        is_right(room, batch.ids)
        buffer.feedback(batch, update={"logits": batch.tensors()["logits"]})
    assert room["labels"].tolist() == (batch.ids % 3).tolist()


@pytest.mark.parametrize(("change", "error", "words"), [
    (lambda room: room.pop("mask"), ValueError, "out: expected the columns"),
    (lambda room: room.update(other=torch.empty(4)), ValueError, "out: expected the columns"),
    (lambda room: room.update(half=torch.empty(4)), TypeError, r"out\['half'\]: expected float16, got float32"),
    (lambda room: room.update(mask=torch.empty(4, 6, dtype=torch.bool)), ValueError, r"shape \[n, 7\], got \[4, 6\]"),
    (lambda room: room.update(half=torch.empty((), dtype=torch.float16)), ValueError, r"shape \[n\], got \[\]"),
    (lambda room: room.update(half=torch.empty(3, dtype=torch.float16)), ValueError, "has room for"),
    (lambda room: room.update(mask=torch.empty(7, 4, dtype=torch.bool).T), ValueError, "contiguous"),
    (lambda room: room.update(logits=torch.empty(4, 2, requires_grad=True)), ValueError, "needs no gradient"),
    (lambda room: room.update(logits=torch.empty(4, 2, device="meta")), ValueError, "on the CPU"),
    (lambda room: room.update(logits=[[0.0, 1.0]] * 4), TypeError, "an array or a torch tensor, got list"),
])  # fmt: skip
def test_memory_that_does_not_fit_is_refused(tmp_path: Path, change: Any, error: Any, words: str) -> None:
    room: dict[str, Any] = tensors(4, False)
    change(room)
    with filled(tmp_path / "b") as buffer, filled(tmp_path / "twin") as twin:
        with pytest.raises(error, match=words):
            buffer.sample(4, out=room)
        with pytest.raises(ValueError, match="holds 4 samples, expected at least n=5"):
            buffer.sample(5, out=tensors(4, False))
        with pytest.raises(TypeError, match="a dict of arrays or tensors, got list"):
            buffer.sample(4, out=[1])  # type: ignore[arg-type]
        # Nothing was drawn for them.
        assert buffer.sample(4).slots.tolist() == twin.sample(4).slots.tolist()


def test_fields_may_have_the_names_of_labels(tmp_path: Path) -> None:
    with CarouselBuffer(tmp_path / "b", memory=3, schema={"labels": "float32", "word": "S4"}) as buffer:
        words = np.array([b"a", b"b", b"c"], "S4")
        buffer.add({"labels": np.ones(3, np.float32), "word": words}, labels=[4, 5, 6])
        out = {"labels": np.empty(3, np.float32), "word": np.empty(3, "S4"), "buffer.labels": np.empty(3, np.int64)}
        batch = buffer.sample(3, out)
        assert sorted(out["buffer.labels"].tolist()) == [4, 5, 6]
        assert out["labels"].tolist() == [1, 1, 1]
        with pytest.raises(TypeError, match=r"'word': torch has no tensors of \|S4"):
            batch.tensors()


def test_torch_is_imported_for_tensors_only() -> None:
    code = """
import sys, tempfile, numpy as np
from memhier.recsys.replay import CarouselBuffer
with CarouselBuffer(tempfile.mkdtemp() + "/b", memory=3, schema={"x": ("float32", 2)}) as buffer:
    buffer.add({"x": np.zeros((9, 2), np.float32)}, labels=[0] * 9)
    batch = buffer.sample(2, out={"x": np.empty((2, 2), np.float32)})
    buffer.feedback(batch)
    buffer.checkpoint()
    assert "torch" not in sys.modules
    assert batch.tensors()["x"].shape == (2, 2)
    assert "torch" in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=800)
