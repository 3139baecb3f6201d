"""Embedding against torch.nn.Embedding in memory: outputs and rows by their bits, whatever the shape of the ids."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from memhier.policies import Belady
from memhier.recsys import SGD, Adagrad, Embedding, EmbeddingBag, lookahead
from tests.recsys.rules import RULES

torch.set_num_threads(1)
torch.sparse.check_sparse_tensor_invariants.disable()


def bits(*tensors: Any) -> bytes:
    return b"".join(tensor.detach().contiguous().numpy().tobytes() for tensor in tensors)


def in_memory(mine: Embedding) -> nn.Embedding:
    return nn.Embedding(
        mine.num_embeddings, mine.embedding_dim, mine.padding_idx, sparse=True,
        _weight=mine.weights(np.arange(mine.num_embeddings)),
    )  # fmt: skip


def loss_of(output: Tensor, number: int = 0) -> Any:
    return (output.sin() * torch.linspace(-1, 2 + number, output.numel()).view(output.shape)).sum()


@pytest.mark.parametrize("rule", [*RULES])
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_any_training_has_the_bits_of_torch(
    rule: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    rows, dim = data.draw(st.sampled_from([(1, 1), (3, 3), (97, 16), (300, 33)]))
    padding = data.draw(st.none() | st.integers(-rows, rows - 1))
    update: Any = data.draw(st.sampled_from(["backward", "step"]))
    kind = data.draw(st.sampled_from([torch.int32, torch.int64]))
    few = data.draw(st.booleans())
    # torch refuses the gradient of a single id with a padding.
    shapes = st.lists(st.lists(st.integers(0, 6), min_size=padding is not None, max_size=3), min_size=1, max_size=3)
    spec, make = RULES[rule]
    with Embedding(
        rows, dim, padding, optimizer=spec, dram="64MiB", path=tmp_path_factory.mktemp("rows"), update=update,
        policy=Belady(min(rows, 216)) if few else "belady",
    ) as mine:  # fmt: skip
        theirs = in_memory(mine)
        optimizer = make(theirs.parameters())
        for step, look_ups in enumerate(data.draw(st.lists(shapes, min_size=1, max_size=4))):
            draw = np.random.default_rng(step)
            ids = [torch.from_numpy(np.asarray(rows * draw.random(shape) ** 2).astype(np.int64)) for shape in look_ups]
            found: list[list[Tensor]] = []
            for module, its in ((mine, mine.optimizer), (theirs, optimizer)):
                its.zero_grad()
                outputs = [module(some.to(kind)) for some in ids]
                sum(loss_of(output, number) for number, output in enumerate(outputs)).backward()
                its.step()
                found.append(outputs)
            assert [output.shape for output in found[0]] == [output.shape for output in found[1]]
            assert bits(*found[0]) == bits(*found[1])
        assert bits(mine.weights(np.arange(rows))) == bits(theirs.weight)


def test_rows_keep_the_sign_of_a_zero(tmp_path: Path) -> None:
    with Embedding(4, 3, dram="32MiB", path=tmp_path) as mine:
        mine.load_state_dict({"weight": torch.tensor([[-0.0, 0.0, 1.0]] * 4)})
        for trains in (True, False):
            assert bits(mine.train(trains)(torch.tensor([1, 1, 2]))) == bits(torch.tensor([[-0.0, 0.0, 1.0]] * 3))


def test_a_padding_row_is_zeros_and_then_as_it_was_set(tmp_path: Path) -> None:
    ids = torch.tensor([[2, 1], [1, 1]])
    with Embedding(4, 3, -3, dram="32MiB", path=tmp_path) as mine:
        assert mine.padding_idx == 1
        assert not mine(ids)[ids == 1].any()
        mine.load_state_dict({"weight": torch.ones(4, 3)})
        loss_of(mine(ids)).backward()
        assert torch.equal(mine.weights([1]), torch.ones(1, 3))
        assert not torch.equal(mine.weights([2]), torch.ones(1, 3))
        mine.checkpoint()
    with Embedding(4, 3, 1, dram="32MiB", path=tmp_path, resume=True) as mine:
        assert torch.equal(mine.weights([1]), torch.ones(1, 3))


@pytest.mark.parametrize("padding", [None, 0])
def test_a_sequence_model_with_lookahead_has_the_bits_of_torch(tmp_path: Path, padding: int | None) -> None:
    rows, dim, steps = 3000, 8, 20
    draw = np.random.default_rng(1)
    batches = [torch.from_numpy((rows * draw.random((16, 12)) ** 3).astype(np.int64)) for _ in range(steps)]
    spec, make = RULES["adagrad"]
    with Embedding(rows, dim, padding, optimizer=spec, dram="64MiB", path=tmp_path, policy=Belady(400)) as mine:
        theirs = in_memory(mine)
        dense = nn.GRU(dim, dim, batch_first=True)
        found = []
        for table, its, fed in (
            (mine, mine.optimizer, lookahead(batches, mine, ids=lambda batch: batch)),
            (theirs, make(theirs.parameters()), batches),
        ):
            model = copy.deepcopy(dense)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            losses = []
            for batch in fed:
                its.zero_grad()
                optimizer.zero_grad()
                loss = loss_of(model(table(batch))[0])
                loss.backward()
                its.step()
                optimizer.step()
                losses.append(loss)
            found.append(bits(*losses, *model.parameters()))
        assert found[0] == found[1]
        assert bits(mine.weights(np.arange(rows))) == bits(theirs.weight)
        assert mine.stats()["evictions"] > 0


@pytest.mark.parametrize("update", ["backward", "step"])
@pytest.mark.parametrize("rule", [*RULES])
def test_several_look_ups_of_a_batch_read_ahead_have_the_bits_of_torch(tmp_path: Path, rule: str, update: Any) -> None:
    rows, dim = 3000, 8
    draw = np.random.default_rng(2)

    def drawn(*shape: int) -> Tensor:
        return torch.from_numpy((rows * draw.random(shape) ** 3).astype(np.int64))

    batches = [(drawn(16, 12), drawn(16), drawn(16, 5)) for _ in range(20)]
    spec, make = RULES[rule]
    with Embedding(rows, dim, optimizer=spec, dram="64MiB", path=tmp_path, update=update, policy=Belady(600)) as mine:
        theirs = in_memory(mine)
        for table, its, fed in (
            (mine, mine.optimizer, lookahead(batches, mine, ids=list)),
            (theirs, make(theirs.parameters()), batches),
        ):
            for histories, bought, others in fed:
                its.zero_grad()
                users = table(histories).mean(1)
                # Part of a look-up that was said is known as well.
                (
                    loss_of(users * table(bought) - table(others[:, 1:]).sum(1)) + loss_of(table(bought[:3]), 1)
                ).backward()
                its.step()
        assert bits(mine.weights(np.arange(rows))) == bits(theirs.weight)
        assert mine.stats()["evictions"] > 0


class TwoTowers(nn.Module):
    """Users and items in tables of their own, and their tags in a third."""

    def __init__(self, users: nn.Module, items: nn.Module, tags: nn.Module) -> None:
        super().__init__()
        self.users = users
        self.items = items
        self.more = nn.ModuleDict({"tags": tags})

    def forward(self, batch: dict[str, Tensor]) -> Any:
        return self.users(batch["user"]) * (self.items(batch["item"]) + self.more["tags"](batch["tags"]))


@pytest.mark.parametrize("window", ["auto", 0, 3])
def test_lookahead_over_all_tables_of_a_model_has_the_bits_of_torch(tmp_path: Path, window: Any) -> None:
    draw = np.random.default_rng(3)

    def drawn(rows: int, *shape: int) -> Tensor:
        return torch.from_numpy((rows * draw.random(shape) ** 3).astype(np.int64))

    batches = [{"user": drawn(500, 16), "item": drawn(3000, 16), "tags": drawn(90, 16, 4)} for _ in range(25)]
    batches[7] = {name: ids[:0] for name, ids in batches[7].items()}
    with (
        Embedding(500, 8, optimizer=SGD(lr=0.1), dram="32MiB", path=tmp_path / "users", policy=Belady(60)) as users,
        Embedding(
            3000, 8, optimizer=Adagrad(lr=0.1), dram="64MiB", path=tmp_path / "items", policy=Belady(60)
        ) as items,
        EmbeddingBag(90, 8, mode="sum", optimizer=SGD(lr=0.1), dram="32MiB", path=tmp_path / "tags") as tags,
    ):
        mine, theirs = (
            TwoTowers(users, items, tags),
            TwoTowers(
                in_memory(users),
                in_memory(items),
                nn.EmbeddingBag(90, 8, mode="sum", sparse=True, _weight=tags.initial_weights(np.arange(90))),
            ),
        )
        slow, fast = (
            torch.optim.SGD([*theirs.users.parameters(), *theirs.more["tags"].parameters()], lr=0.1),
            torch.optim.Adagrad(theirs.items.parameters(), lr=0.1),
        )
        ahead = lookahead(
            batches, mine, window=window,
            ids=lambda batch: {"users": batch["user"], "items": batch["item"], "more.tags": batch["tags"]},
        )  # fmt: skip
        for batch, same in zip(ahead, batches, strict=True):
            slow.zero_grad()
            fast.zero_grad()
            loss_of(mine(batch)).backward()
            loss_of(theirs(same)).backward()
            slow.step()
            fast.step()
        for table, plain in ((users, theirs.users), (items, theirs.items), (tags, theirs.more["tags"])):
            assert bits(table.weights(np.arange(table.num_embeddings))) == bits(plain.weight)
        assert items.stats()["evictions"] > 0
        assert ahead.stats()["batches"] == len(batches)


def test_ids_have_to_name_all_tables_of_a_model(tmp_path: Path) -> None:
    with (
        Embedding(50, 2, dram="32MiB", path=tmp_path / "a") as users,
        Embedding(50, 2, dram="32MiB", path=tmp_path / "b") as items,
    ):
        model = nn.ModuleDict({"user": users, "item": items})
        for ids in ({"user": torch.arange(3)}, torch.arange(3)):
            with pytest.raises(ValueError, match=r"\['item', 'user'\]"):
                next(iter(lookahead([ids], model, ids=lambda batch: batch)))


@pytest.mark.parametrize(
    ("ids", "named"), [(lambda _: [], "at least one look-up"), (lambda batch: [batch[:1]], "a list of the arguments")]
)
def test_look_ups_that_were_not_said_are_named(tmp_path: Path, ids: Any, named: str) -> None:
    def train(mine: Embedding) -> None:
        for batch in lookahead([torch.arange(8)], mine, ids=ids):
            mine(batch[:1])
            mine(batch[4:])

    with (
        Embedding(50, 2, dram="32MiB", path=tmp_path) as mine,
        pytest.raises((ValueError, RuntimeError), match=named),
    ):
        train(mine)


def test_frozen_rows_stay_and_eval_trains_none(tmp_path: Path) -> None:
    ids = torch.tensor([0, 3])
    with Embedding(5, 2, dram="32MiB", path=tmp_path) as mine:
        before = mine.weights(np.arange(5))
        with torch.no_grad():
            assert not mine(ids).requires_grad
        mine.requires_grad_(False)
        assert not mine(ids).requires_grad
        mine.requires_grad_(True)
        with pytest.raises(RuntimeError, match="eval"):
            loss_of(mine.eval()(ids)).backward()
        assert torch.equal(before, mine.weights(np.arange(5)))


@pytest.mark.parametrize(
    ("input", "error", "named"),
    [
        (torch.tensor([0, 5]), IndexError, r"input\[1\]=5"),
        (torch.tensor([[-1]]), IndexError, r"input\[0\]=-1"),
        (torch.tensor([0.0]), TypeError, "int32 or int64"),
        ([0], TypeError, "int32 or int64"),
    ],
)
def test_unfit_ids_are_named(tmp_path: Path, input: Any, error: type[Exception], named: str) -> None:
    with Embedding(5, 2, dram="32MiB", path=tmp_path) as mine, pytest.raises(error, match=named):
        mine(input)


@pytest.mark.parametrize("padding", [5, -6])
def test_an_unfit_padding_is_named(tmp_path: Path, padding: int) -> None:
    with pytest.raises(ValueError, match="padding_idx"):
        Embedding(5, 2, padding, dram="32MiB", path=tmp_path)
