"""Habits that a buffer does not take: each is told its cause, in words of the call, before anything changes."""

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from memhier.errors import ClosedError
from memhier.recsys.replay import CarouselBuffer, Field

SCHEMA = {"x": ("float32", 3), "logits": Field("float32", (4,), mutable=True)}


def filled(place: Path, **options: Any) -> CarouselBuffer:
    buffer = CarouselBuffer(place, **{"memory": 8, "schema": SCHEMA, "seed": 1, **options})
    buffer.add(fields(20), labels=np.arange(20) % 4)
    return buffer


def fields(count: int) -> dict[str, Any]:
    return {"x": torch.arange(3.0 * count).reshape(count, 3), "logits": torch.zeros(count, 4)}


def raised_elsewhere(call: Callable[[], Any]) -> BaseException | None:
    """Return the error of a call on another thread."""
    found: list[BaseException | None] = [None]

    def run() -> None:
        try:
            call()
        except BaseException as error:
            found[0] = error

    thread = threading.Thread(target=run, name="helper")
    thread.start()
    thread.join()
    return found[0]


def test_another_thread_is_told_which_one_it_belongs_to(tmp_path: Path) -> None:
    with filled(tmp_path / "b") as buffer:
        batch = buffer.sample(3)
        before = buffer.stats()
        for call in (
            lambda: buffer.add(fields(2), labels=[0, 1]), lambda: buffer.sample(3), lambda: buffer.feedback(batch),
            lambda: buffer.refresh(batch, {}), lambda: buffer.hold([1]), buffer.checkpoint,
            lambda: buffer.forget({"id": 1}), lambda: buffer.resize(memory=4),
        ):  # fmt: skip
            error = raised_elsewhere(call)
            assert isinstance(error, RuntimeError)
            assert "thread 'MainThread'" in str(error)
            assert "'helper'" in str(error)
            assert "reader()" in str(error)
        assert buffer.stats() == before
        reader = buffer.reader()
        assert raised_elsewhere(lambda: reader.read(batch.slots)) is None
        assert raised_elsewhere(buffer.stats) is None
        buffer.feedback(batch)
    assert raised_elsewhere(buffer.close) is None


def test_a_buffer_made_by_another_thread_belongs_to_that(tmp_path: Path) -> None:
    made: list[CarouselBuffer] = []

    def make_and_use() -> None:
        made.append(filled(tmp_path / "b"))
        made[0].feedback(made[0].sample(3))
        made[0].checkpoint()

    assert raised_elsewhere(make_and_use) is None
    with made[0] as buffer, pytest.raises(RuntimeError, match=r"thread 'helper'.* by thread 'MainThread'"):
        buffer.sample(3)


def test_a_forked_child_is_told_the_process_of_a_buffer(tmp_path: Path) -> None:
    with filled(tmp_path / "b") as buffer:
        child = os.fork()
        if child == 0:
            try:
                buffer.sample(2)
                buffer.checkpoint()
            except ClosedError as error:
                os._exit(7 if "process" in str(error) else 1)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        buffer.feedback(buffer.sample(3))


@pytest.mark.parametrize("n", [True, False, np.True_, np.False_])
def test_a_bool_is_no_number_of_samples(tmp_path: Path, n: Any) -> None:
    with filled(tmp_path / "b") as buffer, pytest.raises(TypeError, match=r"n=.*: expected an int"):
        buffer.sample(n)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_values_that_numpy_does_not_have_are_named(tmp_path: Path, dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    for schema in ({"x": dtype}, {"x": (dtype, 3)}, {"x": name}):
        with pytest.raises(TypeError, match=rf"{name}.*float32"):
            CarouselBuffer(tmp_path / "a", memory=4, schema=schema)
    with pytest.raises(TypeError, match=f"{name}.*float32"):
        Field(dtype, (3,))  # type: ignore[arg-type]
    with filled(tmp_path / "b") as buffer:
        before = buffer.stats()
        with pytest.raises(TypeError, match=rf"batch\['x'\]: got a tensor of {name}.*float\(\)"):
            buffer.add({**fields(5), "x": torch.zeros(5, 3).to(dtype)}, labels=range(5))
        with pytest.raises(TypeError, match=f"logits.*{name}"):
            buffer.feedback(buffer.sample(5), update={"logits": torch.zeros(5, 4).to(dtype)})
        assert buffer.stats() == before
    with (
        CarouselBuffer(tmp_path / "c", memory=4, schema={"x": Field("float32", (None,), longest=3)}) as buffer,
        pytest.raises(TypeError, match=rf"batch\['x'\]\[1\]: got a tensor of {name}"),
    ):
        buffer.add({"x": [torch.zeros(2), torch.zeros(2).to(dtype)]})


def test_bfloat16_is_kept_without_loss_as_it_says(tmp_path: Path) -> None:
    values = torch.randn(40, 6, generator=torch.Generator().manual_seed(0)).bfloat16()
    with CarouselBuffer(tmp_path / "b", memory=8, schema={"x": ("float32", 6)}, codec={"x": "bf16"}) as buffer:
        buffer.add({"x": values.float()})
        for _ in range(6):
            batch = buffer.sample(8)
            assert torch.equal(torch.from_numpy(batch["x"]).bfloat16(), values[batch.ids])
            buffer.feedback(batch)


@pytest.mark.parametrize("schema", [{"x": torch.float32}, {"x": (torch.int64, 2)}])
def test_dtypes_of_torch_are_told_apart(tmp_path: Path, schema: Any) -> None:
    with pytest.raises(TypeError, match=r"one of numpy's, such as '(float32|int64)'"):
        CarouselBuffer(tmp_path / "b", memory=4, schema=schema)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("swap", ["gate", "loss"])
def test_scores_of_any_floating_dtype_are_taken(tmp_path: Path, dtype: torch.dtype, swap: str) -> None:
    runs = []
    scores = torch.randn(6, 4, generator=torch.Generator().manual_seed(3)).to(dtype)
    scores = scores if swap == "gate" else scores[:, 0]
    for place, given in (("a", scores.clone().requires_grad_()), ("b", scores.double().numpy())):
        with filled(tmp_path / place, swap=swap, delay=0) as buffer:
            buffer.feedback(buffer.sample(6), scores=given)
            runs.append(buffer.sample(8).ids.tolist())
    assert runs[0] == runs[1]


def test_labels_beyond_the_gates_logits_are_named(tmp_path: Path) -> None:
    with filled(tmp_path / "b", swap="gate") as buffer:
        batch = buffer.sample(8)
        assert batch.labels.max() == 3
        before = buffer.stats()
        for wrong in (batch, batch.slots):
            with pytest.raises(ValueError, match=r"logits of 3 classes, but the batch has the label 3"):
                buffer.feedback(wrong, scores=np.zeros((8, 3)))
        assert buffer.stats() == before
        buffer.feedback(batch, scores=np.zeros((8, 4)))
        # One whose place a sample of a new class has taken is not judged by its scores.
        batch = buffer.sample(8)
        buffer.add(fields(200), labels=[9] * 200)
        assert 9 in buffer.sample(8).labels
        buffer.feedback(batch, scores=np.zeros((8, 4)))
    with CarouselBuffer(tmp_path / "c", memory=8, schema=SCHEMA, swap="gate") as buffer:
        buffer.add(fields(20))
        with pytest.raises(ValueError, match=r"scores: .* labels, and samples of the batch have none"):
            buffer.feedback(buffer.sample(4), scores=np.zeros((4, 3)))


@pytest.mark.parametrize(("batch", "options", "words"), [
    ({"x": None}, {}, r"batch\['x'\]"),
    ({"x": ["a", "b"]}, {}, r"batch\['x'\]: .*<U1"),
    ({"x": [[1.0, 2.0, 3.0], [1.0]]}, {}, r"batch\['x'\]"),
    ({"x": torch.zeros(2, 3, dtype=torch.float64)}, {}, "float64"),
    ({"x": torch.zeros(2, 3, dtype=torch.float16)}, {}, "float16"),
    ({"x": torch.zeros(2, 3, dtype=torch.int64)}, {}, "int64"),
    ({"x": torch.zeros(2, 3, 1)}, {}, r"shape \[n, 3\], got \[2, 3, 1\]"),
    ({"x": torch.zeros(3)}, {}, r"shape \[n, 3\], got \[3\]"),
    ({"x": torch.zeros(2, 3, requires_grad=True)}, {}, r"batch\['x'\].*detach"),
    ({"x": torch.zeros(2, 3, device="meta")}, {}, r"batch\['x'\].*meta"),
    ({"other": torch.zeros(2)}, {}, "fields"),
    ({}, {"labels": None}, "labels"),
    ({}, {"labels": ["a", "b"]}, "labels"),
    ({}, {"labels": [True, False]}, "labels"),
    ({}, {"labels": torch.zeros(2).bfloat16()}, "labels: .*bfloat16"),
    ({}, {"labels": np.array([0, 2**31])}, r"labels\[1\]=2147483648"),
    ({}, {"labels": np.array([0, 2**63], np.uint64)}, "labels"),
    ({}, {"labels": [[0], [1]]}, "labels"),
    ({}, {"labels": [0, 1], "ids": [True, False]}, "ids"),
    ({}, {"labels": [0, 1], "ids": np.array([0, 2**63], np.uint64)}, "ids"),
])  # fmt: skip
def test_values_that_do_not_fit_change_nothing(tmp_path: Path, batch: Any, options: Any, words: str) -> None:
    with filled(tmp_path / "b") as buffer:
        before = buffer.stats()
        with pytest.raises((TypeError, ValueError, RuntimeError), match=words):
            buffer.add({**fields(2), **batch}, **{"labels": [0, 1], **options})
        assert buffer.stats() == before


def test_more_that_does_not_fit_is_named(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"schema\['x'\]=None"):
        CarouselBuffer(tmp_path / "a", memory=4, schema={"x": None})
    with filled(tmp_path / "b") as buffer, pytest.raises(TypeError, match="update: expected a dict"):
        buffer.feedback(buffer.sample(2), update=[1])  # type: ignore[arg-type]
    with (
        CarouselBuffer(tmp_path / "c", memory=4, schema={"x": Field("float32", (None,), longest=3)}) as buffer,
        pytest.raises(ValueError, match=r"batch\['x'\]\[0\]: 3 bytes"),
    ):
        buffer.add({"x": [b"abc"]})


def test_nothing_is_a_batch_too(tmp_path: Path) -> None:
    with filled(tmp_path / "b") as buffer:
        assert buffer.add(fields(0), labels=[]).shape == (0,)
        buffer.feedback(buffer.sample(0))
        assert buffer.hold([]) == 0


@pytest.mark.parametrize("offsets", [[8, 0], [0, 2]], ids=["another order", "overlap"])
def test_members_that_cannot_be_stored_are_refused_before_a_folder_is_made(tmp_path: Path, offsets: list[int]) -> None:
    kind = np.dtype({"names": ["a", "b"], "formats": ["u4", "f4"], "offsets": offsets, "itemsize": 16})
    with pytest.raises(ValueError, match=r"members in the order of their names .*repack_fields"):
        CarouselBuffer(tmp_path / "b", memory=4, schema={"x": kind})
    assert not [*tmp_path.iterdir()]
