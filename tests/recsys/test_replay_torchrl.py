"""The buffer as a storage of TorchRL, tried with the real library (``make test-plugins``)."""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from memhier.recsys.replay import CarouselBuffer, Field, RandomSwap

pytestmark = pytest.mark.filterwarnings("ignore")


def as_it_is(batch: Any) -> Any:
    return batch


@pytest.fixture
def torchrl(plugin: Callable[[str, str], Any]) -> Any:
    return plugin("torchrl.data", "torchrl")


def replayed(torchrl: Any, buffer: CarouselBuffer, label_key: str | None = None, **options: Any) -> Any:
    """Return TorchRL's buffer over a buffer of ours."""
    from memhier.recsys.replay.adapters.torchrl import CarouselStorage, ReservoirWriter

    return torchrl.TensorDictReplayBuffer(
        storage=CarouselStorage(buffer, label_key=label_key), writer=ReservoirWriter(), batch_size=6,
        collate_fn=as_it_is, **options,
    )  # fmt: skip


def transitions(numbers: torch.Tensor, **more: Any) -> Any:
    make = importlib.import_module("tensordict").TensorDict
    value = numbers[:, None].float()
    following = make({"obs": (value + 1).expand(-1, 3), "reward": value / 2, "done": numbers[:, None] % 5 == 0,
                      "info": make({"lives": numbers}, [len(numbers)])}, [len(numbers)])  # fmt: skip
    return make({"obs": value.expand(-1, 3), "action": numbers % 3, "next": following, **more}, [len(numbers)])


NESTED = {
    "obs": ("float32", 3), "action": "int64", "next__obs": ("float32", 3), "next__reward": ("float32", 1),
    "next__done": ("bool", 1), "next__info__lives": "int64",
}  # fmt: skip


def test_torchrl(tmp_path: Path, torchrl: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from memhier.recsys.replay.adapters.torchrl import CarouselStorage, ReservoirWriter

    make = importlib.import_module("tensordict").TensorDict
    schema = {"obs": ("float32", 3), "value": Field("float32", mutable=True)}
    with CarouselBuffer(tmp_path / "b", memory=20, schema=schema, swap=RandomSwap(1.0)) as buffer:
        storage = CarouselStorage(buffer, label_key="action")
        replay = torchrl.TensorDictReplayBuffer(
            storage=storage, writer=ReservoirWriter(), batch_size=6, collate_fn=as_it_is
        )
        for start in range(0, 100, 10):
            numbers = torch.arange(start, start + 10)
            fields = {"obs": numbers[:, None].float().expand(10, 3), "action": numbers % 3, "value": -torch.ones(10)}
            data = make(fields, batch_size=[10])
            index = replay.extend(data)
            assert index.shape == (10,)
            batch = replay.sample()
            assert (batch["action"] == batch["obs"][:, 0] % 3).all()
            storage.end_step()
        assert len(replay) == 20
        assert buffer.stats()["storage_samples"] == 100
        assert buffer.stats()["swapped"] > 20
        for _ in range(50):
            replay.sample()
        used: list[np.ndarray] = []
        feedback = CarouselBuffer.feedback

        def recorded(self: CarouselBuffer, slots: Any, **options: Any) -> None:
            used.append(slots)
            feedback(self, slots, **options)

        monkeypatch.setattr(CarouselBuffer, "feedback", recorded)
        storage.end_step(update={"value": torch.arange(300.0)})  # of all, of which the last count
        last = used[0]
        assert 20 <= len(last) < 20 + 6
        expected = dict(zip(last.tolist(), range(300 - len(last), 300), strict=True))
        found = dict(zip(last.tolist(), buffer.reader().read(last)["value"].tolist(), strict=True))
        assert any(found[slot] == expected[slot] for slot in found)
        assert all(found[slot] in (expected[slot], -1) for slot in found)  # -1: swapped in by this step
        with pytest.raises(TypeError, match="ReservoirWriter"):
            storage.set(0, data)


@pytest.mark.parametrize("prefetch", [None, 2])
def test_nested_keys_come_back(tmp_path: Path, torchrl: Any, prefetch: int | None) -> None:
    with CarouselBuffer(tmp_path / "b", memory=20, schema=NESTED, swap=RandomSwap(1.0)) as buffer:
        replay = replayed(torchrl, buffer, prefetch=prefetch)
        for start in range(0, 60, 10):
            data = transitions(torch.arange(start, start + 10))
            replay.extend(data)
            batch = replay.sample()
            number = batch["action"], batch["obs"][:, 0]
            assert torch.equal(number[0], number[1].long() % 3)
            assert torch.equal(batch["next", "obs"], batch["obs"] + 1)
            assert torch.equal(batch["next", "reward"][:, 0], batch["obs"][:, 0] / 2)
            assert torch.equal(batch["next", "done"][:, 0], batch["obs"][:, 0] % 5 == 0)
            assert torch.equal(batch["next", "info", "lives"], batch["obs"][:, 0].long())
        replay.extend(data)  # TorchRL has put "index" into it
        assert buffer.stats()["storage_samples"] == 70


def test_nothing_is_left_out_in_silence(tmp_path: Path, torchrl: Any) -> None:
    make = importlib.import_module("tensordict").TensorDict
    numbers = torch.arange(4)
    with CarouselBuffer(tmp_path / "b", memory=20, schema=NESTED) as buffer:
        replay = replayed(torchrl, buffer)
        for more, words in [
            ({"logits": torch.zeros(4, 3)}, "no field for the keys .'logits'"),
            ({"collector": make({"mask": torch.ones(4)}, [4])}, "collector__mask"),
            ({"a__b": torch.zeros(4)}, "has '__' in it"),
        ]:
            with pytest.raises(ValueError, match=words):
                replay.extend(transitions(numbers, **more))
        data = transitions(numbers)
        with pytest.raises(ValueError, match="fields"):
            replay.extend(data.exclude(("next", "reward")))
        assert buffer.stats()["storage_samples"] == 0
        replay.extend(data)
        assert buffer.stats()["storage_samples"] == 4
    with (
        CarouselBuffer(tmp_path / "c", memory=20, schema={"obs": ("float32", 3)}) as buffer,
        pytest.raises(ValueError, match="next__obs"),
    ):
        replayed(torchrl, buffer, label_key="action").extend(transitions(numbers))


def test_casts_that_lose_values_raise(tmp_path: Path, torchrl: Any) -> None:
    make = importlib.import_module("tensordict").TensorDict
    with CarouselBuffer(tmp_path / "b", memory=20, schema={"pixels": ("uint8", 3)}) as buffer:
        replay = replayed(torchrl, buffer)
        with pytest.raises(ValueError, match=r"data\['pixels'\]: float32 values do not fit the schema's uint8"):
            replay.extend(make({"pixels": torch.full((4, 3), 0.5)}, [4]))
        replay.extend(make({"pixels": torch.full((4, 3), 255.0)}, [4]))
        assert (replay.sample()["pixels"] == 255).all()


def test_labels_of_a_nested_key(tmp_path: Path, torchrl: Any) -> None:
    schema = {name: field for name, field in NESTED.items() if name != "next__info__lives"}
    with CarouselBuffer(tmp_path / "b", memory=20, schema=schema) as buffer:
        replay = replayed(torchrl, buffer, label_key="next__info__lives")
        replay.extend(transitions(torch.arange(30)))
        batch = replay.sample()
        assert torch.equal(batch["next", "info", "lives"], batch["obs"][:, 0].long())
        with pytest.raises(ValueError, match="expected the key 'next__info__lives'"):
            replay.extend(transitions(torch.arange(3)).exclude(("next", "info")))


def stored(torchrl: Any, place: Path, **options: Any) -> Any:
    from memhier.recsys.replay.adapters.torchrl import TieredStorage

    return TieredStorage(1000, place, dram="24MiB", **options)


def test_tiered_items_are_those_of_a_tensor_storage(torchrl: Any, tmp_path: Path) -> None:
    """Written at any place, read by any index, as TorchRL's own storage in DRAM."""
    ours, theirs = stored(torchrl, tmp_path / "items"), torchrl.LazyTensorStorage(1000)
    buffers = [torchrl.TensorDictReplayBuffer(storage=storage, batch_size=6) for storage in (ours, theirs)]
    for first in range(0, 2300, 100):
        for buffer in buffers:
            buffer.extend(transitions(torch.arange(first, first + 100)))
    ours[torch.tensor([5, 900])] = transitions(torch.tensor([77, 78]))
    theirs[torch.tensor([5, 900])] = transitions(torch.tensor([77, 78]))
    assert len(ours) == len(theirs) == 1000
    for index in (3, -1, slice(2, 30, 3), torch.tensor([5, 900, 5]), [1, 2], range(4), torch.tensor([[0, 1], [5, 2]])):
        one, other = ours[index], theirs[index]
        assert one.batch_size == other.batch_size
        for key in other.keys(include_nested=True, leaves_only=True):
            assert one[key].dtype == other[key].dtype
            assert torch.equal(one[key], other[key]), key
    assert torch.equal(ours[:]["next", "reward"], theirs[:]["next", "reward"])
    with pytest.raises(IndexError, match="0 to 999"):
        ours[1000]
    ours.close()


def test_tiered_items_are_there_again(torchrl: Any, tmp_path: Path) -> None:
    from memhier.errors import FormatError, LockedError
    from memhier.recsys.replay.adapters.torchrl import TieredStorage

    storage = stored(torchrl, tmp_path / "items")
    storage.set(range(100), transitions(torch.arange(100)))
    state = storage.state_dict()
    for _ in range(2):
        storage.dumps(tmp_path / "dumped")
    storage.set(range(50), transitions(torch.arange(50) + 500))
    with pytest.raises(LockedError):
        stored(torchrl, tmp_path / "items")
    storage.close()
    with pytest.raises(FormatError, match="max_size=1000, expected 7"):
        TieredStorage(7, tmp_path / "items")
    again, copied, loaded = (stored(torchrl, tmp_path / name) for name in ("items", "copied", "loaded"))
    copied.load_state_dict(state)
    loaded.loads(tmp_path / "dumped")
    for each in (again, copied, loaded):
        assert len(each) == 100
        assert each[:]["next", "info", "lives"].tolist() == list(range(100))
        each.close()
    with pytest.raises(ValueError, match="expected that of a TieredStorage"):
        again.load_state_dict({"_storage": 1})


@pytest.mark.parametrize("data", [torch.arange(12.0).reshape(4, 3), (torch.arange(4), {"a": torch.ones(4, 2)})])
def test_tiered_items_may_be_tensors_and_trees(torchrl: Any, tmp_path: Path, data: Any) -> None:
    storage = stored(torchrl, tmp_path / "items")
    storage.set(range(4), data)
    found = storage[torch.tensor([3, 1])]
    if isinstance(data, torch.Tensor):
        assert torch.equal(found, data[[3, 1]])
    else:
        assert found[0].tolist() == [3, 1]
        assert found[1]["a"].shape == (2, 2)
    storage.close()
