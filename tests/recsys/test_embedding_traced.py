"""trace_ids: the look-ups of a model, learned from one step, and used by lookahead."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from memhier.policies import Belady
from memhier.recsys import Embedding, EmbeddingBag, EmbeddingBagCollection, EmbeddingBagConfig, lookahead, trace_ids

torch.set_num_threads(1)

ROWS, DIM = 300, 4


@dataclass
class Batch:
    user: Tensor
    history: dict[str, Tensor]
    label: Tensor


def batches(count: int) -> list[Batch]:
    rng = np.random.default_rng(0)

    def ids(*shape: int) -> Tensor:
        return torch.from_numpy(rng.integers(0, ROWS, shape))

    return [Batch(ids(8), {"seen": ids(8, 5), "bought": ids(8, 2)}, torch.ones(8)) for _ in range(count)]


class Model(nn.Module):
    def __init__(self, folder: Path, slots: int) -> None:
        super().__init__()
        folder.mkdir()

        def options() -> dict[str, Any]:
            return {"policy": Belady(slots), "dram": "64MiB"}

        self.users = Embedding(ROWS, DIM, path=folder / "users", **options())
        self.items = EmbeddingBag(ROWS, DIM, path=folder / "items", mode="sum", **options())
        configs = [EmbeddingBagConfig(name=name, num_embeddings=ROWS, embedding_dim=DIM) for name in ("a", "b")]
        self.both = EmbeddingBagCollection(configs, path=folder / "both", **options())
        self.dropped = nn.Dropout(0.5)

    def forward(self, batch: Batch) -> Tensor:
        user = self.users(batch.user)
        seen = self.items(batch.history["seen"])
        bought = self.items(input=batch.history["bought"], per_sample_weights=None)
        both = self.both({"a": batch.history["seen"], "b": batch.history["bought"]}).values()
        return torch.cat([user + seen + bought, both], 1).sin().sum(1)

    def close(self) -> None:
        for table in (self.users, self.items, self.both):
            table.close()


def train(model: Model, loader: Any) -> list[float]:
    losses = []
    for batch in loader:
        loss = model(batch).sum()
        loss.backward()
        losses.append(loss.item())
    return losses


def test_traced_look_ups_are_read_ahead(tmp_path: Path) -> None:
    loader = batches(30)
    plain, model = Model(tmp_path / "plain", 2 * ROWS), Model(tmp_path / "ahead", 120)
    try:
        expected = train(plain, loader)
        model.users.eval()
        ids = trace_ids(model, loader[0])
        training = [module.training for module in (model, model.users, model.items, model.dropped)]
        assert training == [True, False, True, True]
        assert model.users.steps == model.items.steps == 0
        model.users.train()
        found = ids(loader[3])
        assert found["users"][0][0] is loader[3].user
        assert found["items"][0][0] is loader[3].history["seen"]
        assert found["items"][1][0] is loader[3].history["bought"]
        assert train(model, lookahead(loader, model, ids=ids)) == expected
    finally:
        plain.close()
        model.close()


class Features(NamedTuple):
    """Ids and offsets of a feature."""

    ids: Tensor
    offsets: Tensor


def test_parts_of_other_kinds_stand_beside(tmp_path: Path) -> None:
    def step(batch: Any) -> Any:
        return bags({"a": Features(batch["ids"].clone(), batch["offsets"])})

    configs = [EmbeddingBagConfig(name="a", num_embeddings=ROWS, embedding_dim=DIM)]
    ids = torch.tensor([[1, 2], [4, 7]])
    batch = {
        "graph": ids.to_sparse(), "wide": torch.empty((4,), dtype=torch.int64, device="meta"),
        "nested": torch.nested.nested_tensor([ids[0], ids[1]], layout=torch.jagged),
        "ids": ids.reshape(4), "offsets": torch.tensor([0, 3]),
    }  # fmt: skip
    with EmbeddingBagCollection(configs, dram="64MiB", path=tmp_path / "a") as bags:
        ((arguments,),) = trace_ids(bags, batch, step)(batch)
        assert arguments["a"] == Features(batch["ids"], batch["offsets"])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is here")
def test_ids_that_the_step_moves_to_a_device(tmp_path: Path) -> None:
    batch = {"ids": torch.tensor([[1, 2]])}
    with EmbeddingBag(ROWS, DIM, dram="64MiB", path=tmp_path / "a", device="cuda") as bag:
        assert trace_ids(bag, batch, lambda batch: bag(batch["ids"].cuda()))(batch)[0][0] is batch["ids"]


def test_unfit_steps_say_so(tmp_path: Path) -> None:
    ids = torch.arange(6).view(2, 3)
    with EmbeddingBag(ROWS, DIM, mode="sum", dram="64MiB", path=tmp_path) as bag:
        with pytest.raises(ValueError, match="input: Tensor is no part of the batch"):
            trace_ids(bag, ids, lambda batch: bag(batch[:, :2]))
        with pytest.raises(ValueError, match="equals 2 parts"):
            trace_ids(bag, (ids, ids.clone()), lambda batch: bag(ids.clone()))
        with pytest.raises(ValueError, match="equals 2 parts"):
            trace_ids(bag, {"seen": ids, "bought": [ids]}, lambda batch: bag(batch["bought"][0]))
        with pytest.raises(ValueError, match="no look-up of"):
            trace_ids(bag, ids, lambda batch: None)
        with pytest.raises(ValueError, match="has no tables"):
            trace_ids(nn.Linear(3, 1), ids.float())
        traced = trace_ids(bag, (ids, 3), lambda batch: bag(batch[0]))
        assert bag.training
        assert torch.equal(traced((ids + 1, 3))[0][0], ids + 1)
