"""The buffer inside other libraries: torch's loader, and helpers of the adapters to others."""

import importlib
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from memhier.recsys.replay import Batch, CarouselBuffer, RandomSwap
from memhier.recsys.replay.adapters.common import SeenIds, UsedSlots, fitted
from memhier.recsys.replay.loader import ReplayBatchSampler, ReplayDataset, beside

LOADER_NOISE = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")


def filled(place: Path, **options: Any) -> CarouselBuffer:
    schema = {"image": ("uint8", (4, 4, 3))}
    buffer = CarouselBuffer(place, **{"memory": 30, "schema": schema, "swap": RandomSwap(1.0), "seed": 2, **options})
    numbers = np.arange(100)
    images = np.repeat(numbers.astype(np.uint8), 48).reshape(100, 4, 4, 3)
    buffer.add({"image": images}, labels=numbers % 5)
    return buffer


def sums(batch: Batch) -> tuple[list[int], list[int]]:
    return batch.ids.tolist(), batch["image"].reshape(len(batch), -1).astype(np.int64).sum(1).tolist()


def as_it_is(batch: Any) -> Any:
    return batch


@LOADER_NOISE
@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_any_number_of_workers_sees_the_same_batches(tmp_path: Path, context: str) -> None:
    runs = []
    for workers in (0, 2):
        with filled(tmp_path / f"{workers}") as buffer:
            sampler = ReplayBatchSampler(buffer, 6, steps=10, ahead=4)
            loader = torch.utils.data.DataLoader(
                ReplayDataset(sums), batch_sampler=sampler, num_workers=workers, collate_fn=as_it_is,
                multiprocessing_context=context if workers else None,
            )  # fmt: skip
            run = []
            for ids, totals in loader:
                assert totals == [48 * id for id in ids]
                run.append(ids)
                buffer.feedback(np.unique(np.array(buffer.occupied()[:6])))
            runs.append(run)
            assert len(run) == len(sampler) == 10
    assert runs[0] == runs[1]


def test_a_loader_that_reads_too_far_ahead_is_told(tmp_path: Path) -> None:
    with filled(tmp_path / "b") as buffer:
        batches = iter(ReplayBatchSampler(buffer, 6, steps=10, ahead=1))
        next(batches)
        next(batches)
        with pytest.raises(ValueError, match="ahead=1"):
            next(batches)
        with pytest.raises(TypeError, match="batch_sampler"):
            ReplayDataset()[0]


def test_memory_beside_a_stream(tmp_path: Path) -> None:
    with filled(tmp_path / "b") as buffer:
        pairs = []
        for new, old in beside(range(3), buffer, 4):
            pairs.append((new, len(old)))
            buffer.feedback(old)
        assert pairs == [(0, 4), (1, 4), (2, 4)]


@given(sizes=st.lists(st.integers(0, 9), max_size=30), most=st.integers(1, 20))
def test_slots_that_nobody_takes_are_dropped(sizes: list[int], most: int) -> None:
    used, every = UsedSlots(), np.arange(sum(sizes))
    for part in np.split(every, np.cumsum(sizes)[:-1]) if sizes else []:
        used.add(part, most)
        assert len(used) < most + max(sizes)
    dropped, taken = used.dropped, used.take()
    assert [dropped, used.dropped] == [len(every) - len(taken), 0]
    assert taken.tolist() == every[len(every) - len(taken) :].tolist()
    assert len(taken) >= min(most, len(every))
    assert len(used) == len(used.take()) == 0


@given(batches=st.lists(st.lists(st.integers(-5, 40), max_size=12), max_size=12), before=st.sets(st.integers(-5, 40)))
def test_earlier_ids_are_known(batches: list[list[int]], before: set[int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("memhier.recsys.replay.adapters.common._RECENT", 7)
        seen, came = SeenIds(np.array([*before], np.int64)), set(before)
        for ids in batches:
            expected = [id not in came and id not in ids[:index] for index, id in enumerate(ids)]
            assert seen.first(np.array(ids, np.int64)).tolist() == expected
            assert seen.first(np.array(ids, np.int64)).tolist() == expected  # to ask is not to say
            seen.add(np.array(ids, np.int64))
            came |= set(ids)
        assert seen.memory_bytes <= 8 * len(came) + 700


@pytest.mark.parametrize(("values", "dtype", "fits"), [
    (torch.tensor([0.0, 0.5, 1.0]), "uint8", False), (torch.tensor([0.0, 255.0]), "uint8", True),
    (torch.tensor([256.0]), "uint8", False), (torch.tensor([-1.0]), "uint8", False),
    (torch.tensor([float("nan")]), "uint8", False), (torch.tensor([float("nan"), 1.5]), "float64", True),
    (torch.tensor([0.1], dtype=torch.float64), "float32", False),
    (torch.tensor([1e300], dtype=torch.float64), "float32", False),
    (torch.tensor([0.5, float("inf"), float("nan")], dtype=torch.float64), "float32", True),
    (torch.tensor([2**31]), "int32", False), (torch.tensor([2**31 - 1]), "int32", True),
    (np.array([200], np.uint8), "int8", False), (np.array([-1], np.int8), "uint64", False),
    (np.array([2**64 - 1], np.uint64), "int64", False), (torch.tensor([2**53 + 1]), "float64", False),
    (torch.tensor([2**24 + 1]), "float32", False), (torch.tensor([7]), "float16", True),
    (torch.tensor([True, False]), "uint8", True), (torch.tensor([2]), "bool", False),
    (torch.tensor([1.5, -3.0]).bfloat16(), "float32", True), (torch.tensor([0.1]).bfloat16(), "uint8", False),
    (torch.tensor([1.5], requires_grad=True), "float64", True), (torch.zeros(0), "uint8", True),
])  # fmt: skip
def test_casts_keep_every_value_or_raise(values: Any, dtype: str, fits: bool) -> None:
    if not fits:
        with pytest.raises(ValueError, match=f"image: .* do not fit the schema's {dtype}: .* would become"):
            fitted("image", values, np.dtype(dtype))
        return
    found = fitted("image", values, np.dtype(dtype))
    assert found.dtype == dtype
    plain = values.detach().double().numpy() if isinstance(values, torch.Tensor) else values
    assert np.array_equal(found.astype(np.float64), plain, equal_nan=True)


@pytest.mark.parametrize(("module", "name", "package"), [
    ("avalanche", "CarouselExemplars", "avalanche-lib"), ("avalanche", "CarouselPlugin", "avalanche-lib"),
    ("torchrl", "CarouselStorage", "torchrl"), ("torchrl", "ReservoirWriter", "torchrl"),
])  # fmt: skip
def test_a_package_that_is_missing_is_named(module: str, name: str, package: str) -> None:
    if importlib.util.find_spec(module) is not None:
        pytest.skip(f"{module} is installed")
    kind = getattr(importlib.import_module(f"memhier.recsys.replay.adapters.{module}"), name)
    with pytest.raises(ImportError, match=f"pip install {package}"):
        kind(None)
