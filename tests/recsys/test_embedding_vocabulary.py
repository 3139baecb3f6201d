"""Tables for any ids: with enough rows torch's bits on a table that knew its ids; with fewer, the stated rules."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from memhier import BudgetError, FormatError
from memhier.policies import Belady
from memhier.recsys import (
    SGD,
    Adam,
    Embedding,
    EmbeddingBag,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    Hash64,
    ShardedEmbeddingBagCollection,
    lookahead,
)
from tests.recsys.rules import RULES

torch.set_num_threads(1)
torch.sparse.check_sparse_tensor_invariants.disable()

DIM, ROWS, PADDING = 5, 200, -7
rng = np.random.default_rng(0)
NAMES = np.concatenate([[PADDING, 2**63 - 1, -(2**63), 0, -1], rng.integers(-(2**63), 2**63 - 1, 120)])


def ids_of(seed: int, *shape: int) -> Tensor:
    return torch.from_numpy(NAMES[(len(NAMES) * np.random.default_rng(seed).random(shape) ** 2).astype(int)])


def loss_of(output: Tensor) -> Tensor:
    return (output.sin() * torch.linspace(-1, 2, output.numel()).view(output.shape)).sum()


class Known:
    """torch's table of rows that are numbered as their ids come."""

    def __init__(self, module: Any, rule: str, mode: str, padding: int | None, kind: Any = nn.EmbeddingBag) -> None:
        self.rows: dict[int, int] = {}
        self.padding = padding
        weight = torch.zeros(ROWS + 2, DIM)
        self.initial = module.initial_weights
        options: dict[str, Any] = {"mode": mode} if kind is nn.EmbeddingBag else {}
        if padding is not None:
            options["padding_idx"] = ROWS + 1
        self.table = kind(ROWS + 2, DIM, sparse=mode != "max", _weight=weight, **options)
        self.table.train()
        self.optimizer = RULES[rule][1](self.table.parameters())

    def row(self, name: int) -> int:
        if name == self.padding:
            return ROWS + 1
        if name not in self.rows:
            self.rows[name] = len(self.rows)
            with torch.no_grad():
                self.table.weight[self.rows[name]] = self.initial([name])[0]
        return self.rows[name]

    def __call__(self, ids: Tensor, *others: Any) -> Tensor:
        rows = torch.tensor([self.row(name) for name in ids.reshape(-1).tolist()], dtype=torch.int64)
        output: Tensor = self.table(rows.view(ids.shape), *others)
        return output

    def check(self, module: Any) -> None:
        names = [*self.rows]
        assert torch.equal(module.weights(names), self.table.weight.detach()[: len(names)])
        assert torch.cat([*module.ids()]).tolist() == names


def plain(ids: Tensor) -> list[tuple[Any, ...]]:
    return [(ids,)]


def in_bags(ids: Tensor) -> list[tuple[Any, ...]]:
    flat = ids.reshape(-1)
    return [(flat, torch.tensor([0, 3, 3, len(flat) // 2]))]


def weighted(ids: Tensor) -> list[tuple[Any, ...]]:
    return [(ids, None, torch.linspace(-1, 1, ids.numel()).view(ids.shape))]


def twice(ids: Tensor) -> list[tuple[Any, ...]]:
    return [(ids,), (ids[:, :2].contiguous() // 3,)]


CASES: list[tuple[str, Any, int | None]] = [
    ("sum", plain, None), ("mean", in_bags, None), ("max", plain, None), ("sum", weighted, None), ("sum", twice, None),
    ("mean", plain, PADDING), ("sum", in_bags, PADDING), ("mean", twice, PADDING),
]  # fmt: skip


def steps_of(module: Callable[..., Tensor], batches: Any, calls: Callable[[Tensor], Any]) -> Iterator[Tensor]:
    for ids in batches:
        loss = sum((loss_of(module(*arguments)) for arguments in calls(ids)), torch.zeros(()))
        loss.backward()
        yield loss.detach()


def train_known(known: Known, batches: Any, calls: Callable[[Tensor], Any]) -> list[float]:
    losses = []
    for loss in steps_of(known, batches, calls):
        known.optimizer.step()
        known.optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train(bag: Any, batches: Any) -> None:
    for ids in batches:
        loss_of(bag(ids)).backward()


BATCHES = [ids_of(seed, 6, 4) for seed in range(14)]


@pytest.mark.parametrize("rule", [*RULES])
@pytest.mark.parametrize("case", range(len(CASES)))
@pytest.mark.parametrize("way", [pytest.param("alone", marks=pytest.mark.long), "ahead"])
def test_a_table_with_room_has_the_bits_of_one_that_knew_its_ids(
    tmp_path: Path, rule: str, case: int, way: str
) -> None:
    mode, calls, padding = CASES[case]
    if mode == "max" and rule != "sgd":
        pytest.skip("torch's gradients of this mode are dense, and other optimizers then round in another way")
    with EmbeddingBag(
        ROWS, DIM, mode=mode, optimizer=RULES[rule][0], dram="64MiB", path=tmp_path, padding_idx=padding,
        policy=Belady(90), id_space="hash64",
    ) as bag:  # fmt: skip
        known = Known(bag, rule, mode, padding)
        read = lookahead(BATCHES, bag, ids=calls) if way == "ahead" else BATCHES
        losses = [loss.item() for loss in steps_of(bag, read, calls)]
        assert losses == train_known(known, BATCHES, calls)
        known.check(bag)


@pytest.mark.parametrize("rule", [*RULES])
def test_rows_one_by_one_have_the_bits_of_torch(tmp_path: Path, rule: str) -> None:
    with Embedding(
        ROWS, DIM, PADDING, optimizer=RULES[rule][0], dram="64MiB", path=tmp_path, id_space="hash64"
    ) as table:
        known = Known(table, rule, "rows", PADDING, nn.Embedding)
        losses = [loss.item() for loss in steps_of(table, lookahead(BATCHES, table, ids=lambda ids: ids), plain)]
        assert losses == train_known(known, BATCHES, plain)
        known.check(table)


def collection(path: Path, **options: Any) -> EmbeddingBagCollection:
    configs = [
        EmbeddingBagConfig(name="known", num_embeddings=50, embedding_dim=3),
        EmbeddingBagConfig(name="any", num_embeddings=40, embedding_dim=DIM, id_space=Hash64(admit_after=2)),
        EmbeddingBagConfig(
            name="words", num_embeddings=20, embedding_dim=DIM, feature_names=["seen", "bought"], pooling="mean",
            id_space=Hash64(expire_after=5, evict="lfu"),
        ),
    ]  # fmt: skip
    return EmbeddingBagCollection(configs, dram="64MiB", path=path, optimizer=Adam(lr=0.01), **options)


def features_of(seed: int) -> dict[str, Any]:
    return {
        "known": torch.from_numpy(np.random.default_rng(seed).integers(0, 50, (6, 2))),
        "any": ids_of(seed + 100, 6, 3), "seen": ids_of(seed + 200, 6, 2), "bought": ids_of(seed + 300, 6, 1),
    }  # fmt: skip


def state_of(module: Any) -> list[Any]:
    found: list[Any] = []
    for table, spec in enumerate(module.specs):
        ids = torch.arange(spec.rows) if spec.id_space is None else torch.cat([*module.ids(table)])
        found += [ids.tolist(), module.weights(ids, table).tolist(), module.optimizer_state(ids, table).tolist()]
        if spec.id_space is not None:
            found.append(module.weights([2**60 + 1], table).tolist())  # the row of unknown ids
    return found


def step(tables: Any, features: Any) -> None:
    loss_of(tables(features).values()).backward()


def test_nothing_depends_on_lookahead_rows_in_dram_or_where_a_training_was_resumed(tmp_path: Path) -> None:
    batches = [features_of(seed) for seed in range(40)]
    with collection(tmp_path / "plain") as tables:
        for batch in batches:
            step(tables, batch)
        wanted = state_of(tables)
        assert [len(torch.cat([*tables.ids(table)])) for table in (1, 2)] == [40, 20]  # both are full
    for number, (window, policy) in enumerate([(None, None), (3, Belady(95)), (0, None), ("auto", Belady(80))]):
        path = tmp_path / str(number)
        options: dict[str, Any] = {} if policy is None else {"policy": policy}
        done, taken = 0, 0
        for stop in (7, 8, 23, 40):
            with collection(path, resume=done > 0, **options) as tables:
                assert done == 0 or tables.extra["at"]["position"] == taken
                ahead = lookahead(batches, tables, ids=lambda batch: batch, window=window)
                if done:
                    ahead.load_state_dict(tables.extra["at"])
                saving = None
                for at, batch in enumerate(ahead, taken):
                    step(tables, batch)
                    if at + 1 == stop:
                        # Later steps are lost, as in a crash.
                        saving, taken = tables.start_checkpoint({"at": ahead.state_dict()}), stop
                    if at + 1 == stop + 2:
                        break
                assert saving is not None
                saving.result()
                done += 1
                if stop == 40:
                    assert state_of(tables) == wanted
            if isinstance(policy, Belady):
                options["policy"] = Belady(policy.capacity)


def test_evaluation_amid_batches_read_ahead_sees_the_rows_of_the_training(tmp_path: Path) -> None:
    batches = [features_of(seed) for seed in range(30)]
    questions = [features_of(seed + 1000) for seed in range(3)]

    def evaluated(path: Path, ahead: bool) -> list[Any]:
        found = []
        with collection(path) as tables:
            for batch in lookahead(batches, tables, ids=lambda batch: batch) if ahead else batches:
                with torch.no_grad():
                    found.append(tables(batch).values().tolist())  # before its turn: nothing is admitted
                step(tables, batch)
                tables.eval()
                found += [tables(question).values().tolist() for question in questions]
                tables.train()
                found.append([[*part.tolist()] for part in tables.ids(2)])
                found.append(tables.contains(questions[0]["any"], 1).tolist())
        return found

    assert evaluated(tmp_path / "ahead", True) == evaluated(tmp_path / "plain", False)


def test_a_look_up_that_admits_nothing_gives_unknown_ids_zeros(tmp_path: Path) -> None:
    with EmbeddingBag(10, DIM, dram="64MiB", path=tmp_path, id_space="hash64") as bag:
        bag(torch.tensor([[1, 2]]))
        with torch.no_grad():
            assert not bag(torch.tensor([[3, -9]])).any()
        bag.eval()
        assert not bag(torch.tensor([[3, -9]])).any()
        assert torch.equal(bag(torch.tensor([[2]])), bag.initial_weights([2]))
        assert torch.cat([*bag.ids()]).tolist() == [1, 2]
        assert bag.contains([[1], [3]]).tolist() == [[True], [False]]
        bag.train()
        bag.requires_grad_(False)
        assert not bag(torch.tensor([[3]])).any()
        assert not bag.contains([3]).item()


@pytest.mark.parametrize("evict", [pytest.param("lru", marks=pytest.mark.long), "lfu"])
def test_a_row_that_changes_hands_begins_anew(tmp_path: Path, evict: Any) -> None:
    """Each id is trained by one a step, so its weights tell how often that was since it last got a row."""
    capacity, lr = 64, 0.5
    random = np.random.default_rng(1)
    with EmbeddingBag(
        capacity, DIM, mode="sum", optimizer=SGD(lr=lr, momentum=0), dram="64MiB", path=tmp_path, policy=Belady(80),
        id_space=Hash64(evict=evict, pending=2),
    ) as bag:  # fmt: skip
        batches = [torch.from_numpy(random.choice(700, 20, replace=False) - 350)[:, None] for _ in range(120)]
        expected: dict[int, Tensor] = {}
        forgotten = 0
        for ids in lookahead(batches, bag, ids=lambda ids: ids):
            names = ids.reshape(-1).tolist()
            was = [*expected]
            output = bag(ids)
            held = bag.contains(was).tolist() if was else []
            for name, is_held in zip(was, held, strict=True):
                if not is_held:
                    del expected[name]
                    forgotten += 1
            for at, name in enumerate(names):
                assert bag.contains([name]).item()
                if name not in expected:
                    expected[name] = bag.initial_weights([name])[0]
                assert torch.equal(output[at], expected[name])
                expected[name] = expected[name] - lr
            output.sum().backward()
            assert len(expected) <= capacity
        assert forgotten > 500
        assert torch.equal(bag.weights([*expected]), torch.stack([*expected.values()]))
        assert bag.memory_bytes <= 64 * 2**20


def test_ids_ten_times_the_rows_take_constant_memory(tmp_path: Path) -> None:
    space = Hash64(admit_after=2, expire_after=40)
    with EmbeddingBag(500, DIM, mode="sum", dram="64MiB", path=tmp_path, id_space=space) as bag:
        maps = bag.tables.vocabularies
        assert maps is not None
        before = maps.memory_bytes
        for seed in range(150):
            ids = torch.from_numpy((5000 * np.random.default_rng(seed).random((50, 4)) ** 3).astype(np.int64))
            loss_of(bag(ids)).backward()
            assert maps.memory_bytes == before
        held = torch.cat([*bag.ids()])
        assert len(held) == len(set(held.tolist())) <= 500
        rows = bag.tables.rows_of_ids(0, held.numpy())
        assert len(set(rows.tolist())) == len(rows)
        assert bag.memory_bytes <= 64 * 2**20


def test_a_step_that_fails_admits_nothing(tmp_path: Path) -> None:
    with EmbeddingBag(
        100, DIM, dram="64MiB", path=tmp_path, id_space="hash64", policy=Belady(10), optimizer=SGD(lr=0.1)
    ) as bag:
        loss_of(bag(torch.tensor([[4, 5]]))).backward()
        with pytest.raises(BudgetError):
            bag(torch.arange(20)[None])
        assert torch.cat([*bag.ids()]).tolist() == [4, 5]
        ahead = lookahead([torch.tensor([[6]]), torch.arange(20)[None]], bag, ids=lambda ids: ids)
        with pytest.raises(BudgetError):
            train(bag, ahead)
        assert torch.cat([*bag.ids()]).tolist() == [4, 5, 6]


def test_a_loop_that_is_left_forgets_what_it_read_ahead(tmp_path: Path) -> None:
    batches = [ids_of(seed, 6, 4) for seed in range(20)]
    with (
        EmbeddingBag(60, DIM, dram="64MiB", path=tmp_path / "a", id_space="hash64") as left,
        EmbeddingBag(60, DIM, dram="64MiB", path=tmp_path / "b", id_space="hash64") as plain_bag,
    ):
        ahead = lookahead(batches, left, ids=lambda ids: ids, window=None)
        for number, ids in enumerate(ahead):
            if number == 4:
                break  # handed out, so it counts as looked up
            loss_of(left(ids)).backward()
        ahead.close()
        for number, ids in enumerate(batches[:5]):
            output = plain_bag(ids)
            if number < 4:
                loss_of(output).backward()
            del output
        assert state_of(left) == state_of(plain_bag)
        for ids in batches[5:]:
            loss_of(left(ids)).backward()
            loss_of(plain_bag(ids)).backward()
        assert state_of(left) == state_of(plain_bag)


def test_a_loop_that_was_ended_by_another_leaves_no_trace_when_it_is_forgotten(tmp_path: Path) -> None:
    batches = [ids_of(seed, 6, 4) for seed in range(20)]
    with (
        EmbeddingBag(60, DIM, dram="64MiB", path=tmp_path / "a", id_space="hash64") as bag,
        EmbeddingBag(60, DIM, dram="64MiB", path=tmp_path / "b", id_space="hash64") as plain_bag,
    ):
        ended = iter(lookahead(batches, bag, ids=lambda ids: ids))
        train(bag, [next(ended)])
        for number, ids in enumerate(lookahead(batches[::-1], bag, ids=lambda ids: ids)):
            if number == 2:
                del ended
            train(bag, [ids])
        train(plain_bag, [batches[0], *batches[::-1]])
        assert state_of(bag) == state_of(plain_bag)


@pytest.mark.parametrize("ahead", [False, True])
def test_gradients_that_wait_keep_the_rows_of_their_ids(tmp_path: Path, ahead: bool) -> None:
    batches = [torch.arange(start, start + 4)[:, None] for start in range(0, 80, 4)]
    options: dict[str, Any] = {"mode": "sum", "dram": "64MiB", "update": "step"}
    with EmbeddingBag(16, DIM, path=tmp_path / "a", id_space=Hash64(evict="lfu", pending=2), **options) as bag:
        for number, ids in enumerate(lookahead(batches, bag, ids=lambda ids: ids) if ahead else batches):
            before = bag.initial_weights(ids.reshape(-1))
            bag(ids).sum().backward()
            if number % 2:
                bag.optimizer.step()
                assert torch.allclose(bag.weights(ids.reshape(-1)), before - 0.01)
    with EmbeddingBag(4, DIM, path=tmp_path / "b", id_space=Hash64(evict="lru", pending=1), **options) as bag:
        bag(batches[0]).sum().backward()
        with pytest.raises(RuntimeError, match="pending"):
            bag(batches[1])
        bag.optimizer.step()
        bag(batches[1]).sum().backward()
        bag.optimizer.step()


def test_an_epoch_of_evaluation_admits_nothing(tmp_path: Path) -> None:
    with EmbeddingBag(100, DIM, dram="64MiB", path=tmp_path, id_space="hash64") as bag:
        loss_of(bag(BATCHES[0])).backward()
        held = torch.cat([*bag.ids()]).tolist()
        bag.eval()
        wanted = [bag(ids) for ids in BATCHES]
        for ids, output in zip(lookahead(BATCHES, bag, ids=lambda ids: ids), wanted, strict=True):
            assert torch.equal(bag(ids), output)
        bag.train()
        with torch.no_grad():
            for ids, output in zip(lookahead(BATCHES, bag, ids=lambda ids: ids), wanted, strict=True):
                assert torch.equal(bag(ids), output)
            ahead = iter(lookahead(BATCHES, bag, ids=lambda ids: ids))
            ids = next(ahead)
        with pytest.raises(RuntimeError, match="train"):
            bag(ids)
        del ahead
        assert torch.cat([*bag.ids()]).tolist() == held


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    options: dict[str, Any] = {"dram": "64MiB", "path": tmp_path / "bag"}
    with pytest.raises(ValueError, match="id_space"):
        EmbeddingBag(10, DIM, id_space="hash", **options)  # type: ignore[arg-type]
    with EmbeddingBag(10, DIM, id_space="hash64", **options) as bag:
        with pytest.raises(RuntimeError, match="any ids"):
            bag.load_state_dict({**bag.state_dict(), "weight": torch.zeros(12, DIM)})
        with pytest.raises(ValueError, match="pending=5"):
            next(iter(lookahead(BATCHES, bag, ids=lambda ids: [ids] * 5)))
        bag.checkpoint()
    with pytest.raises(FormatError, match="tables"):
        EmbeddingBag(10, DIM, resume=True, **options)
    with EmbeddingBag(10, DIM, dram="64MiB", path=tmp_path / "rows") as bag:
        for call in (bag.ids, lambda: bag.contains([1])):
            with pytest.raises(ValueError, match="hash64"):
                call()


def test_tables_over_ranks_are_refused(tmp_path: Path, one_rank: None) -> None:
    small = EmbeddingBagConfig(name="a", num_embeddings=10, embedding_dim=DIM, id_space="hash64")
    with pytest.raises(ValueError, match="any ids"):
        ShardedEmbeddingBagCollection([small], dram="64MiB", path=tmp_path / "shards")
    assert not (tmp_path / "shards").exists()


@pytest.mark.parametrize("update", ["backward", "step"])
def test_a_look_up_without_its_backward_pass_keeps_the_rows_of_its_ids(tmp_path: Path, update: Any) -> None:
    options: dict[str, Any] = {"mode": "sum", "dram": "64MiB", "path": tmp_path, "update": update}
    with EmbeddingBag(2, DIM, id_space=Hash64(pending=1), **options) as bag:
        first = bag(torch.tensor([[1], [2]]))
        with pytest.raises(RuntimeError, match="pending"):
            bag(torch.tensor([[3], [4]]))
        before = bag.initial_weights([1, 2])
        first.sum().backward()
        bag.optimizer.step()
        assert torch.allclose(bag.weights([1, 2]), before - 0.01)
        bag(torch.tensor([[3], [4]])).sum().backward()
        assert bag.contains([1, 2, 3, 4]).tolist() == [False, False, True, True]
        bag(torch.tensor([[5], [6]])) if update == "backward" else bag.optimizer.step()
        del first


@pytest.mark.parametrize("admit_after", [1, 2, 3])
def test_look_ups_of_one_batch_with_the_same_ids_are_mapped_one_by_one(tmp_path: Path, admit_after: int) -> None:
    space, found = Hash64(admit_after=admit_after), []
    for name in ("alone", "ahead"):
        with EmbeddingBag(ROWS, DIM, mode="sum", dram="64MiB", path=tmp_path / name, id_space=space) as bag:
            batches = BATCHES if name == "alone" else lookahead(BATCHES, bag, ids=lambda ids: [ids, ids[:3], ids])
            losses = steps_of(bag, batches, lambda ids: [(ids,), (ids[:3],), (ids,)])
            found.append(([loss.item() for loss in losses], state_of_ids(bag)))
    assert found[0] == found[1]


def state_of_ids(bag: EmbeddingBag) -> list[Any]:
    names = torch.cat([*bag.ids()])
    return [names.tolist(), bag.weights(names).tolist()]


def test_a_frozen_table_admits_nothing(tmp_path: Path) -> None:
    options: dict[str, Any] = {"dram": "64MiB", "path": tmp_path, "id_space": Hash64(pending=1)}
    with EmbeddingBag(24, DIM, mode="sum", **options) as bag:
        train(bag, BATCHES[:1])
        before = state_of_ids(bag)
        bag.requires_grad_(False)
        for ids in BATCHES:
            bag(ids)
        for ids in lookahead(BATCHES, bag, ids=lambda ids: ids):
            bag(ids)
        assert state_of_ids(bag) == before
        ahead = iter(lookahead(BATCHES, bag, ids=lambda ids: ids))
        ids = next(ahead)
        bag.requires_grad_(True)
        with pytest.raises(RuntimeError, match="frozen"):
            bag(ids)
        del ahead
        train(bag, BATCHES)
        assert state_of_ids(bag)[0] != before[0]
