"""Mammoth's interface. The library is not on PyPI: `epochs` is a stand-in that calls a buffer as its models do.

ER (``models/er.py``) draws, learns and hands over the batch; DER++ (``models/derpp.py``) draws twice, and hands over
logits as well.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from memhier.recsys.replay import CarouselBuffer, Field, GateSwap, RandomSwap
from memhier.recsys.replay.adapters.mammoth import MammothBuffer


def mammoth(place: Path) -> MammothBuffer:
    schema = {"examples": ("float32", (3, 4)), "logits": Field("float32", (5,), mutable=True), "task_labels": "int64"}
    return MammothBuffer(CarouselBuffer(place, memory=20, schema=schema, swap=RandomSwap(1.0), seed=1))


def test_mammoths_interface(tmp_path: Path) -> None:
    buffer = mammoth(tmp_path / "b")
    assert buffer.is_empty()
    for start in range(0, 60, 10):
        numbers = torch.arange(start, start + 10)
        examples = numbers[:, None, None].float().expand(10, 3, 4)
        logits = numbers[:, None].float().expand(10, 5)
        buffer.add_data(examples, labels=numbers % 4, logits=logits, task_labels=numbers % 4 // 2)
        buffer.get_data(5)
    assert buffer.is_full()
    assert len(buffer) == buffer.buffer_size == 20
    assert buffer.num_seen_examples == 60
    assert buffer.used_attributes == ["examples", "labels", "logits", "task_labels"]
    index, examples, labels, logits, tasks = buffer.get_data(8, return_index=True)
    assert examples.shape == (8, 3, 4)
    assert (labels == examples[:, 0, 0] % 4).all()
    assert (logits[:, 2] == examples[:, 1, 1]).all()
    assert (tasks == labels // 2).all()
    assert (buffer.get_data_by_index(index)[0] == examples).all()
    plain, moved, *_ = buffer.get_data(4, transform=lambda one: one + 1, return_not_aug=True)
    assert (moved == plain + 1).all()
    assert (buffer.get_data(20, mask_task_out=0, cpt=2)[1] >= 2).all()
    assert (buffer.get_data(20, mask_task_out=1)[3] == 0).all()
    balanced = buffer.get_balanced_data(8)[1]
    assert torch.bincount(balanced, minlength=4).max() <= 2
    two = torch.bincount(buffer.get_balanced_data(6, n_classes=2)[1])
    assert sorted(two[two > 0].tolist()) in ([3, 3], [2, 4], [1, 5])
    items = [*buffer]
    assert [len(items), *items[3][0].shape] == [20, 3, 4]
    for name, values in zip(buffer.used_attributes, zip(*items, strict=True), strict=True):
        assert torch.equal(torch.stack(values), getattr(buffer, name))
    assert torch.equal(buffer[torch.tensor([4, 2])][0], buffer.examples[[4, 2]])
    assert buffer.examples.shape == (20, 3, 4)
    assert buffer.labels.shape == (20,)
    with pytest.raises(AttributeError):
        buffer.true_labels  # noqa: B018
    assert sum(len(batch[0]) for batch in buffer.get_dataloader(batch_size=7)) == 20
    assert buffer.serialize()["step"] == 6
    buffer.empty()
    assert buffer.is_empty()
    assert buffer.num_seen_examples == 0
    buffer.carousel.close()


def test_mammoth_refuses_policies_that_need_scores(tmp_path: Path) -> None:
    schema = {"examples": ("float32", 3)}
    with (
        CarouselBuffer(tmp_path / "b", memory=4, schema=schema, swap=GateSwap(0.5)) as buffer,
        pytest.raises(ValueError, match="GateSwap"),
    ):
        MammothBuffer(buffer)


def test_mammoth_that_only_draws_holds_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = mammoth(tmp_path / "b")
    numbers = torch.arange(30)
    data = {"labels": numbers % 4, "logits": torch.zeros(30, 5), "task_labels": numbers}
    buffer.add_data(numbers[:, None, None].float().expand(30, 3, 4), **data)
    for _ in range(50):
        buffer.get_data(7)
    used: list[int] = []
    monkeypatch.setattr(CarouselBuffer, "feedback", lambda _, slots: used.append(len(slots)))
    buffer.add_data(numbers[:, None, None].float().expand(30, 3, 4), **data)
    assert 20 <= used[0] < 20 + 7
    buffer.carousel.close()


def epochs(buffer: Any, count: int, examples: torch.Tensor, labels: torch.Tensor, logits: bool = False) -> None:
    """Stand in for a model of Mammoth's: the same samples come in every epoch, in another order."""
    for epoch in range(count):
        order = torch.randperm(len(examples), generator=torch.Generator().manual_seed(epoch))
        for some in order.split(8):
            if not buffer.is_empty():
                buffer.get_data(8, transform=None, device="cpu")
                if logits:
                    buffer.get_data(8)
            extra = {"logits": torch.full((len(some), 5), float(epoch))} if logits else {}
            buffer.add_data(examples=examples[some], labels=labels[some], **extra)


def test_a_sample_is_stored_once_however_many_epochs(tmp_path: Path) -> None:
    examples, labels = torch.randn(50, 3, 4, generator=torch.Generator().manual_seed(1)), torch.arange(50) % 5
    schema = {"examples": ("float32", (3, 4))}
    with CarouselBuffer(tmp_path / "b", memory=20, schema=schema, swap=RandomSwap(1.0)) as carousel:
        buffer = MammothBuffer(carousel)
        epochs(buffer, 4, examples, labels)
        assert (carousel.stats()["storage_samples"], buffer.num_seen_examples) == (50, 50)
        assert len({tuple(one.reshape(-1).tolist()) for one in buffer.examples}) == 20
        twice = torch.cat([examples[:3], torch.ones(1, 3, 4), torch.ones(1, 3, 4)])
        buffer.add_data(twice, labels=torch.zeros(5, dtype=torch.int64))
        # Two of the three have another label now, and so are others; ones came twice.
        assert carousel.stats()["storage_samples"] == 50 + 2 + 1
        buffer.serialize()
    with CarouselBuffer.open(tmp_path / "b") as carousel:
        buffer = MammothBuffer(carousel)
        epochs(buffer, 1, examples, labels)
        assert carousel.stats()["storage_samples"] == 53
        buffer.empty()
        epochs(buffer, 2, examples, labels)
        assert carousel.stats()["storage_samples"] == 50


def test_logits_of_a_sample_that_comes_again_are_the_newest(tmp_path: Path) -> None:
    examples, labels = torch.arange(12.0)[:, None, None].expand(12, 3, 4), torch.arange(12) % 4
    schema = {"examples": ("float32", (3, 4)), "logits": Field("float32", (5,), mutable=True)}
    with CarouselBuffer(tmp_path / "b", memory=20, schema=schema) as carousel:
        buffer = MammothBuffer(carousel)
        epochs(buffer, 3, examples, labels, logits=True)
        assert len(buffer) == carousel.stats()["storage_samples"] == 12
        assert (buffer.logits == 2).all()


def test_nothing_is_left_out_in_silence(tmp_path: Path) -> None:
    schema = {"examples": ("uint8", (3, 4))}
    with CarouselBuffer(tmp_path / "b", memory=20, schema=schema) as carousel:
        buffer = MammothBuffer(carousel)
        images, labels = torch.randint(0, 256, (6, 3, 4), generator=torch.Generator().manual_seed(0)), torch.arange(6)
        before = carousel.stats()
        given: list[tuple[dict[str, Any], str]] = [
            ({"logits": torch.zeros(6, 5)}, "logits: the buffer's schema .* has no such field"),
            ({"task_labels": torch.zeros(6)}, "task_labels: .* no such field"),
            ({"true_labels": labels}, "true_labels: .* no such field"),
            ({"attention_maps": [1]}, "attention_maps"),
            ({"sample_selection_scores": torch.zeros(6)}, "sample_selection_scores: not kept"),
            ({"examples": images / 255}, "examples: float32 values do not fit the schema's uint8: .* would become 0"),
            ({"examples": images - 256}, "examples: int64 values do not fit"),
            ({"examples": images[:, :2]}, "shape"),
            ({"labels": labels + 0.5}, "labels: float32 values do not fit"),
            ({"labels": labels - 1}, "labels"),
            ({"labels": labels[:4]}, "labels"),
        ]
        for wrong, words in given:
            with pytest.raises((ValueError, TypeError), match=words):
                buffer.add_data(**{"examples": images, "labels": labels, **wrong})
            assert carousel.stats() == before
        # A refused sample did not come: it is taken once it comes in the right form.
        buffer.add_data(images.float(), labels=labels.float())
        assert carousel.stats()["storage_samples"] == 6
        assert {tuple(one.reshape(-1).tolist()) for one in buffer.examples} == {
            tuple(one.reshape(-1).tolist()) for one in images
        }
    with CarouselBuffer(tmp_path / "c", memory=20, schema={**schema, "logits": ("float32", 5)}) as carousel:
        with pytest.raises(ValueError, match="expected the fields"):
            MammothBuffer(carousel).add_data(images, labels=labels)
        MammothBuffer(carousel).add_data(images.bfloat16(), labels=labels, logits=torch.zeros(6, 5).bfloat16())
        assert carousel.stats()["storage_samples"] == 6
