"""EmbeddingBag against torch.nn.EmbeddingBag in memory: outputs, gradients, rows and state by their bits."""

import copy
import hashlib
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from memhier.policies import LRU, Belady
from memhier.recsys.embedding import SGD, Adagrad, Adam, EmbeddingBag, RowWiseAdagrad, RowWiseAdam

torch.set_num_threads(1)
# torch warns once that nothing checks the tensors of its own optimizers; warnings are errors here.
torch.sparse.check_sparse_tensor_invariants.disable()

RULES: dict[str, tuple[Any, Any]] = {
    "sgd": (SGD(lr=0.1), lambda weights: torch.optim.SGD(weights, lr=0.1)),
    "adagrad": (
        Adagrad(lr=0.1, lr_decay=0.01, initial_accumulator_value=0.1),
        lambda weights: torch.optim.Adagrad(weights, lr=0.1, lr_decay=0.01, initial_accumulator_value=0.1),
    ),
    "adam": (Adam(lr=0.01), lambda weights: torch.optim.SparseAdam(weights, lr=0.01)),
}


def digest(*tensors: Tensor) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().contiguous().numpy().tobytes())
    return found.hexdigest()


def batches(seed: int, rows: int, steps: int, bags: int, longest: int) -> list[tuple[Tensor, Tensor]]:
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(steps):
        lengths = rng.integers(0, longest + 1, bags)
        # Skewed, so that rows repeat within a batch and among batches.
        ids = (rows * rng.random(int(lengths.sum())) ** 3).astype(np.int64)
        made.append((torch.from_numpy(ids), torch.from_numpy(np.cumsum(lengths) - lengths)))
    return made


def in_memory(mine: EmbeddingBag, rows: int, dim: int, mode: str, **options: Any) -> nn.EmbeddingBag:
    return nn.EmbeddingBag(rows, dim, mode=mode, sparse=True, _weight=mine.initial_weights(np.arange(rows)), **options)


def train(bag: Any, optimizer: Any, steps: list[tuple[Tensor, Tensor]], dim: int) -> list[Tensor]:
    torch.manual_seed(0)
    target = torch.randn(dim)
    losses = []
    for ids, offsets in steps:
        loss = (torch.sin(bag(ids, offsets)) * target).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


@pytest.mark.parametrize("share", [1.0, 0.1, 0.01])
@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("rule", [*RULES])
def test_training_has_the_bits_of_torch(tmp_path: Path, rule: str, mode: Any, share: float) -> None:
    rows, dim = 6000, 33
    steps = batches(1, rows, 40, 16, 3)
    spec, make = RULES[rule]
    policy = Belady(max(48, int(share * rows * 0.5) + 12 if share < 1 else rows))
    with EmbeddingBag(rows, dim, mode=mode, optimizer=spec, dram="1GiB", path=tmp_path, seed=3, policy=policy) as mine:
        theirs = in_memory(mine, rows, dim, mode)
        # Steps with sums over more than 16 ids, where torch's sort no longer keeps the order of equals.
        steps += batches(2, 40, 5, 60, 5) if share == 1 else []
        assert digest(*train(mine, mine.optimizer, steps, dim)) == digest(
            *train(theirs, make(theirs.parameters()), steps, dim)
        )
        assert digest(mine.weights(np.arange(rows))) == digest(theirs.weight)
        assert (mine.stats()["evictions"] > 0) == (share < 1)


@pytest.mark.parametrize("rule", [*RULES])
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_any_bags_have_the_bits_of_torch(
    rule: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    rows, dim = data.draw(st.sampled_from([(1, 1), (3, 3), (97, 16), (40, 97)]))
    spec, make = RULES[rule]
    mode = data.draw(st.sampled_from(["sum", "mean"]))
    padding = data.draw(st.none() | st.integers(-rows, rows - 1))
    last = data.draw(st.booleans())
    lengths = data.draw(st.lists(st.lists(st.integers(0, 30), min_size=1, max_size=5), min_size=1, max_size=4))
    path = tmp_path_factory.mktemp("bag")
    with EmbeddingBag(
        rows, dim, mode=mode, optimizer=spec, dram="64MiB", path=path, padding_idx=padding, include_last_offset=last
    ) as mine:
        theirs = in_memory(mine, rows, dim, mode, padding_idx=padding, include_last_offset=last)
        optimizer = make(theirs.parameters())
        for counts in lengths:
            ends = np.cumsum([0, *counts])
            ids = torch.from_numpy(np.random.default_rng(int(ends[-1])).integers(0, rows, ends[-1]))
            offsets = torch.from_numpy(ends if last else ends[:-1])
            outputs = []
            for bag in (mine, theirs):
                output = bag(ids, offsets)
                optimizer.zero_grad()
                (output * torch.arange(1, 1 + output.numel()).view(output.shape)).sum().backward()
                outputs.append(output)
            optimizer.step()
            assert digest(outputs[0]) == digest(outputs[1])
        assert digest(mine.weights(np.arange(rows))) == digest(theirs.weight)


def test_per_sample_weights_get_their_gradient(tmp_path: Path) -> None:
    rows, dim = 50, 32
    with EmbeddingBag(rows, dim, mode="sum", dram="64MiB", path=tmp_path) as mine:
        theirs = in_memory(mine, rows, dim, "sum")
        optimizer = torch.optim.SGD(theirs.parameters(), lr=0.01)
        for seed in range(5):
            ids, offsets = batches(seed, rows, 1, 8, 6)[0]
            found = []
            for bag in (mine, theirs):
                weights = torch.linspace(-1, 1, len(ids)).requires_grad_()
                optimizer.zero_grad()
                bag(ids, offsets, weights).square().sum().backward()
                assert weights.grad is not None
                found.append(weights.grad)
            optimizer.step()
            assert digest(found[0]) == digest(found[1])
        assert digest(mine.weights(np.arange(rows))) == digest(theirs.weight)


def test_bags_of_equal_length_and_int32(tmp_path: Path) -> None:
    with EmbeddingBag(20, 4, mode="max", dram="64MiB", path=tmp_path) as mine:
        theirs = nn.EmbeddingBag(20, 4, mode="max", _weight=mine.initial_weights(np.arange(20)))
        ids = torch.tensor([[1, 2, 2], [4, 1, 0]], dtype=torch.int32)
        output = mine(ids)
        assert digest(output) == digest(theirs(ids))
        output.sum().backward()
        theirs(ids).sum().backward()
        assert theirs.weight.grad is not None
        expected = theirs.weight - 0.01 * theirs.weight.grad
        assert torch.allclose(mine.weights(np.arange(20)), expected)
        assert mine(torch.zeros((0, 3), dtype=torch.int64)).shape == (0, 4)


@pytest.mark.parametrize(
    "rule", [RowWiseAdagrad(lr=0.1), RowWiseAdam(lr=0.1), SGD(lr=0.1, momentum=0.9, weight_decay=0.01)]
)
def test_rules_that_torch_lacks_equal_plain_formulas(tmp_path: Path, rule: Any) -> None:
    rows, dim = 12, 5
    with EmbeddingBag(rows, dim, mode="sum", optimizer=rule, dram="64MiB", path=tmp_path) as mine:
        weights = mine.initial_weights(np.arange(rows)).double().numpy()
        first, second = np.zeros((rows, dim)), np.zeros(rows)
        for step, (ids, offsets) in enumerate(batches(0, rows, 6, 4, 4), 1):
            (0.5 * mine(ids, offsets).square()).sum().backward()
            bag_of = np.searchsorted(offsets.numpy(), np.arange(len(ids)), side="right") - 1
            sums = np.zeros((len(offsets), dim))
            np.add.at(sums, bag_of, weights[ids.numpy()])
            gradient = np.zeros((rows, dim))
            np.add.at(gradient, ids.numpy(), sums[bag_of])
            for row in np.unique(ids.numpy()):
                g = gradient[row]
                if isinstance(rule, RowWiseAdagrad):
                    second[row] += (g**2).mean()
                    weights[row] -= rule.lr * g / (np.sqrt(second[row]) + rule.eps)
                elif isinstance(rule, RowWiseAdam):
                    first[row] += (g - first[row]) * (1 - rule.betas[0])
                    second[row] += ((g**2).mean() - second[row]) * (1 - rule.betas[1])
                    size = rule.lr * np.sqrt(1 - rule.betas[1] ** step) / (1 - rule.betas[0] ** step)
                    weights[row] -= size * first[row] / (np.sqrt(second[row]) + rule.eps)
                else:
                    first[row] = rule.momentum * first[row] + g + rule.weight_decay * weights[row]
                    weights[row] -= rule.lr * first[row]
        assert np.allclose(mine.weights(np.arange(rows)), weights, rtol=1e-4, atol=1e-5)


def test_evaluation_changes_nothing_and_needs_no_backward(tmp_path: Path) -> None:
    with EmbeddingBag(1000, 8, dram="64MiB", path=tmp_path, policy=Belady(4)) as mine:
        ids = torch.arange(4).view(2, 2)
        before = mine.weights(np.arange(1000))
        with torch.no_grad():
            assert not mine(ids).requires_grad
        mine.eval()
        assert digest(mine(ids)) == digest(before[ids].mean(1))
        mine.train()
        for start in range(0, 100, 2):  # outputs that are dropped let their rows go
            mine(torch.arange(start, start + 2).view(1, 2))
        assert digest(mine.weights(np.arange(1000))) == digest(before)


@pytest.mark.parametrize(
    ("ids", "offsets", "kind", "words"),
    [
        (
            torch.tensor([0, 10]),
            torch.tensor([0]),
            IndexError,
            r"input\[1\]=10: expected a row of table 'weight', 0 to 9",
        ),
        (torch.tensor([-1]), torch.tensor([0]), IndexError, r"input\[0\]=-1"),
        (torch.tensor([1.0]), torch.tensor([0]), TypeError, "int32 or int64"),
        (torch.tensor([1]), None, ValueError, "offsets"),
        (torch.tensor([[1]]), torch.tensor([0]), ValueError, "offsets"),
        (torch.tensor([1]), torch.tensor([1]), ValueError, "offsets"),
        (torch.tensor([1]), torch.tensor([0, 2]), ValueError, "offsets"),
        (torch.tensor(1), None, ValueError, "input"),
    ],
)
def test_unfit_input_is_refused(tmp_path: Path, ids: Tensor, offsets: Tensor | None, kind: Any, words: str) -> None:
    with EmbeddingBag(10, 2, dram="64MiB", path=tmp_path) as mine:
        with pytest.raises(kind, match=words):
            mine(ids, offsets)
        mine(torch.tensor([1]), torch.tensor([0])).sum().backward()


def test_a_module_is_neither_copied_nor_pickled(tmp_path: Path) -> None:
    with EmbeddingBag(10, 2, dram="32MiB", path=tmp_path) as bag:
        for attempt in (copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match=r"state_dict.*resume=True"):
                attempt(nn.Sequential(bag))
        bag(torch.tensor([[1, 2]])).sum().backward()


def test_unfit_arguments_are_named(tmp_path: Path) -> None:
    ids = torch.tensor([[1, 2]])
    with EmbeddingBag(10, 2, mode="sum", dram="32MiB", path=tmp_path) as bag:
        with pytest.raises(TypeError, match="rows: expected integers"):
            bag.weights([1.5])
        with pytest.raises(TypeError, match=r"input: expected a tensor.*numpy"):
            bag(ids.numpy())
        with pytest.raises(TypeError, match="per_sample_weights: expected float32"):
            bag(ids, None, torch.ones(1, 2, dtype=torch.float64))
        assert bag.stats()["accesses"] == 0


def test_rows_that_leave_together_are_read_together(tmp_path: Path) -> None:
    """Sixteen rows of 256 bytes to a page: rows that left together come back by the page."""
    with EmbeddingBag(512, 64, mode="sum", dram="32MiB", path=tmp_path, policy=LRU(128)) as bag:
        assert bag.stats()["rows_per_page"] == 0
        for start in (0, 128, 256, 0, 128):
            bag(torch.arange(start, start + 128)[None]).sum().backward()
            bag.checkpoint()  # so that rows come from the log, not from the queue
        assert bag.stats()["refetches"] == 256
        assert 8 < bag.stats()["rows_per_page"] <= 16


def test_a_compiled_model_leaves_the_tables_as_they_are(tmp_path: Path) -> None:
    ids = torch.tensor([[1, 2], [2, 3]])
    found = []
    for name in ("plain", "compiled"):
        torch.manual_seed(0)
        with EmbeddingBag(10, 2, mode="sum", dram="32MiB", path=tmp_path / name) as bag:
            model = nn.Sequential(bag, nn.Linear(2, 1))
            run = torch.compile(model, backend="eager") if name == "compiled" else model
            for _ in range(3):
                run(ids).square().sum().backward()
            found.append(bag.weights(np.arange(10)))
    assert torch.equal(*found)
