"""Steps however they are written: several look-ups, several backward passes, passes that fail; always torch's bits."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as recomputed

from memhier.policies import Belady
from memhier.recsys import (
    SGD,
    Adagrad,
    Adam,
    EmbeddingBag,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    RowWiseAdagrad,
    lookahead,
)

torch.set_num_threads(1)
torch.sparse.check_sparse_tensor_invariants.disable()

ROWS, DIM = 80, 5
RULES: dict[str, tuple[Any, Any]] = {
    "sgd": (SGD(lr=0.1), lambda weights: torch.optim.SGD(weights, lr=0.1)),
    "adagrad": (Adagrad(lr=0.1), lambda weights: torch.optim.Adagrad(weights, lr=0.1)),
    "adam": (Adam(lr=0.01), lambda weights: torch.optim.SparseAdam(weights, lr=0.01)),
}


def ids_of(seed: int, *shape: int) -> Tensor:
    return torch.from_numpy((ROWS * np.random.default_rng(seed).random(shape) ** 2).astype(np.int64))


def loss_of(output: Tensor) -> Tensor:
    return (output.sin() * torch.linspace(-1, 2, output.numel()).view(output.shape)).sum()


def two_calls(bag: Any, seed: int) -> None:
    (loss_of(bag(ids_of(seed, 6, 4))) + loss_of(bag(ids_of(seed + 1, 9, 2)))).backward()


def three_calls_of_which_one_feeds_another(bag: Any, seed: int) -> None:
    first = bag(ids_of(seed, 6, 4))
    second = bag(ids_of(seed + 1, 6, 2)) * first.tanh()
    (loss_of(second) + loss_of(bag(ids_of(seed, 6, 4)) * second)).backward()


def two_losses(bag: Any, seed: int) -> None:
    losses = [loss_of(bag(ids_of(seed + part, 6, 4))) for part in range(2)]
    for loss in losses:
        loss.backward()


def an_output_without_a_gradient(bag: Any, seed: int) -> None:
    kept = bag(ids_of(seed + 7, 3, 3))
    two_calls(bag, seed)
    assert kept.requires_grad


def a_detached_output(bag: Any, seed: int) -> None:
    target = bag(ids_of(seed + 7, 6, 3)).detach()
    ((bag(ids_of(seed, 6, 4)) - target).square().sum() + loss_of(bag(ids_of(seed, 6, 1)))).backward()


def evaluation_between(bag: Any, seed: int) -> None:
    first = bag(ids_of(seed, 6, 4))
    bag.eval()
    bag(ids_of(seed + 3, 6, 4))
    bag.train()
    with torch.no_grad():
        bag(ids_of(seed + 4, 6, 4))
    (loss_of(first) + loss_of(bag(ids_of(seed + 1, 9, 2)))).backward()


def a_graph_that_is_kept(bag: Any, seed: int) -> None:
    (loss_of(bag(ids_of(seed, 6, 4))) + loss_of(bag(ids_of(seed + 1, 9, 2)))).backward(retain_graph=True)


def activations_computed_again(bag: Any, seed: int, reentrant: bool = False) -> None:
    def part(start: Tensor, ids: Tensor) -> Tensor:
        return bag(ids).tanh() * start

    start = torch.ones(6, DIM, requires_grad=True)
    for number in range(3):
        start = recomputed(part, start, ids_of(seed + number, 6, 3), use_reentrant=reentrant)
    loss_of(start).backward()


def activations_computed_again_in_passes_of_their_own(bag: Any, seed: int) -> None:
    activations_computed_again(bag, seed, reentrant=True)


STEPS = [
    two_calls,
    three_calls_of_which_one_feeds_another,
    two_losses,
    an_output_without_a_gradient,
    a_detached_output,
    evaluation_between,
    a_graph_that_is_kept,
    activations_computed_again,
    activations_computed_again_in_passes_of_their_own,
]


@pytest.mark.long
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("rule", [*RULES])
@pytest.mark.parametrize("update", ["backward", "backward alone", "step"])
def test_look_ups_of_a_step_are_one_update(tmp_path: Path, step: Callable[..., None], rule: str, update: Any) -> None:
    spec, make = RULES[rule]
    mode = "mean" if step is two_calls else "sum"
    with EmbeddingBag(
        ROWS, DIM, mode=mode, optimizer=spec, dram="64MiB", path=tmp_path, update=update.split()[0], policy=Belady(70)
    ) as mine:
        theirs = nn.EmbeddingBag(ROWS, DIM, mode=mode, sparse=True, _weight=mine.initial_weights(np.arange(ROWS)))
        for bag, optimizer in ((mine, mine.optimizer), (theirs, make(theirs.parameters()))):
            for number in range(12):
                if bag is mine and update == "backward alone":
                    step(bag, 10 * number)
                    continue
                optimizer.zero_grad()
                step(bag, 10 * number)
                optimizer.step()
        assert torch.equal(mine.weights(np.arange(ROWS)), theirs.weight)
        assert mine.steps == 12


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("padding", [0, 7, -1])
def test_a_padding_row_changes_no_bit_whether_it_is_there_or_not(
    tmp_path: Path, mode: Any, last: bool, weighted: bool, padding: int
) -> None:
    if weighted and mode != "sum":
        return
    rows, dim = 60, 33 if padding else 32
    rng = np.random.default_rng(3)
    options: Any = {"mode": mode, "padding_idx": padding, "include_last_offset": last}
    with EmbeddingBag(rows, dim, dram="64MiB", path=tmp_path, optimizer=SGD(lr=0.1), **options) as mine:
        theirs = nn.EmbeddingBag(
            rows, dim, sparse=mode != "max", _weight=mine.initial_weights(np.arange(rows)), **options
        )
        plain = torch.optim.SGD(theirs.parameters(), lr=0.1)
        for number in range(8):
            lengths = rng.integers(0, 9, 7)
            ids = torch.from_numpy(rng.integers(1 if number % 2 else 0, rows - number % 2, lengths.sum()))
            if number % 4 == 1:
                ids[ids == padding % rows] = 3
            ends = np.cumsum([0, *lengths])
            offsets = torch.from_numpy(ends if last else ends[:-1])
            found = []
            for bag in (mine, theirs):
                weights = torch.linspace(-1, 2, len(ids)).requires_grad_() if weighted else None
                output = bag(ids, offsets, weights)
                plain.zero_grad()
                loss_of(output).backward()
                found.append((output, torch.zeros(0) if weights is None else weights.grad))
            plain.step()
            assert torch.equal(found[0][0], found[1][0])
            if dim % 4:  # the last bits of torch's own products depend on where in memory such rows lie
                torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-5, atol=1e-4)
            else:
                assert torch.equal(found[0][1], found[1][1])
        assert torch.equal(mine.weights(np.arange(rows)), theirs.weight)


def test_more_rows_than_a_call_takes_are_one_update(tmp_path: Path) -> None:
    for rule in RULES:
        spec, make = RULES[rule]
        with EmbeddingBag(
            ROWS, DIM, mode="sum", optimizer=spec, dram="64MiB", path=tmp_path / rule, step_rows=20
        ) as mine:
            theirs = nn.EmbeddingBag(ROWS, DIM, mode="sum", sparse=True, _weight=mine.initial_weights(np.arange(ROWS)))
            optimizer = make(theirs.parameters())
            for number in range(4):
                parts = [torch.arange(20)[:, None] % (19 + part) + 17 * part for part in range(4)]
                order = torch.randperm(20, generator=torch.Generator().manual_seed(number))
                optimizer.zero_grad()
                for bag in (mine, theirs):
                    torch.stack([loss_of(bag(part[order].repeat(1, 3))) for part in parts]).sum().backward()
                optimizer.step()
            assert torch.equal(mine.weights(np.arange(ROWS)), theirs.weight)
            assert mine.steps == 4


def test_a_collection_looked_up_twice_is_one_update(tmp_path: Path) -> None:
    configs = [
        EmbeddingBagConfig(name="a", num_embeddings=ROWS, embedding_dim=DIM),
        EmbeddingBagConfig(name="b", num_embeddings=9, embedding_dim=3, pooling="mean"),
    ]
    with EmbeddingBagCollection(configs, optimizer=Adam(lr=0.01), dram="64MiB", path=tmp_path) as mine:
        theirs = [
            nn.EmbeddingBag(
                config.num_embeddings, config.embedding_dim, mode=config.pooling, sparse=True,
                _weight=mine.initial_weights(np.arange(config.num_embeddings), number),
            )
            for number, config in enumerate(configs)
        ]  # fmt: skip
        optimizer = torch.optim.SparseAdam([bag.weight for bag in theirs], lr=0.01)
        rng = np.random.default_rng(0)
        batches = [torch.from_numpy(rng.integers(0, [ROWS, 9], (12, 2))) for _ in range(10)]
        for batch in lookahead(batches, mine, ids=lambda batch: batch):
            losses = []
            for look_up in (lambda ids: mine(ids).to_dict().values(), lambda ids: [
                bag(column[:, None]) for bag, column in zip(theirs, ids.t(), strict=True)
            ]):  # fmt: skip
                first, second = look_up(batch), look_up(batch)
                losses.append(torch.stack([loss_of(one) for one in (*first, *second)]).sum())
            optimizer.zero_grad()
            for loss in losses:
                loss.backward()
            optimizer.step()
        for number, bag in enumerate(theirs):
            assert torch.equal(mine.weights(np.arange(bag.num_embeddings), number), bag.weight)


def test_rules_that_torch_lacks_see_the_sum_too(tmp_path: Path) -> None:
    ids = ids_of(0, 6, 4)
    for rule in (RowWiseAdagrad(lr=0.1), SGD(lr=0.1, momentum=0.9)):
        found = []
        for calls in (1, 2):
            place = tmp_path / f"{type(rule).__name__}-{calls}"
            with EmbeddingBag(ROWS, DIM, mode="sum", optimizer=rule, dram="64MiB", path=place) as bag:
                for _ in range(5):
                    parts = [bag(some) for some in ids.chunk(calls)]
                    torch.cat(parts).sin().sum().backward()
                found.append(bag.weights(np.arange(ROWS)))
        torch.testing.assert_close(*found)
