"""SimpleX's loss and its tiled negatives, next to plain definitions and through tables of any budget."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from memhier.policies import Belady
from memhier.recsys import Adam, Embedding, TiledNegatives, cosine_contrastive_loss, lookahead


def plain_loss(
    users: Tensor, items: Tensor, own: Tensor, margin: float, weight: float, counted: Tensor | None = None
) -> Tensor:
    """Return the loss as the paper writes it; `own` is [n, k, dim], the negatives of each sample.

    `counted` is bool [n, k]: negatives without it have no loss.
    """
    losses = []
    counted = torch.ones(own.shape[:2], dtype=torch.bool) if counted is None else counted
    for user, item, others, some in zip(users, items, own, counted, strict=True):
        excess = (nn.functional.cosine_similarity(user[None], others) - margin).clamp(min=0) * some
        losses.append(1 - nn.functional.cosine_similarity(user, item, 0) + weight * excess.mean())
    return torch.stack(losses).mean()


@pytest.mark.parametrize("dim", [1, 3, 64])
@pytest.mark.parametrize("margin", [-1.0, 0.0, 0.6, 1.0])
@pytest.mark.parametrize("picked", [False, True])
def test_the_loss_is_that_of_the_paper(dim: int, margin: float, picked: bool) -> None:
    torch.manual_seed(dim)
    count, rows, width = 7, 11, 5
    tensors = [torch.randn(size, dim, dtype=torch.float64, requires_grad=True) for size in (count, count, rows)]
    users, items, negatives = tensors
    picks = torch.randint(rows, (count, width)) if picked else None
    own = negatives[picks] if picks is not None else negatives.expand(count, -1, -1)
    wanted = plain_loss(users, items, own, margin, 3.0)
    found = cosine_contrastive_loss(users, items, negatives, margin=margin, weight=3.0, picks=picks)
    torch.testing.assert_close(found, wanted)
    for mine, plain in zip(
        torch.autograd.grad(2 * found, tensors), torch.autograd.grad(2 * wanted, tensors), strict=True
    ):
        torch.testing.assert_close(mine, plain)
    with torch.no_grad():
        assert cosine_contrastive_loss(*tensors, margin=margin, weight=3.0, picks=picks) == found


@pytest.mark.parametrize("picked", [False, True])
@pytest.mark.parametrize("pairs", [0, 1, 40])
def test_known_pairs_have_no_loss(pairs: int, picked: bool) -> None:
    torch.manual_seed(pairs)
    count, rows, width = 7, 11, 5
    tensors = [torch.randn(size, 4, dtype=torch.float64, requires_grad=True) for size in (count, count, rows)]
    users, items, negatives = tensors
    known = torch.stack([torch.randint(count, (pairs,)), torch.randint(rows, (pairs,))], 1)  # some more than once
    counted = torch.ones(count, rows, dtype=torch.bool)
    counted[known[:, 0], known[:, 1]] = False
    picks = torch.randint(rows, (count, width)) if picked else torch.arange(rows).expand(count, rows)
    wanted = plain_loss(users, items, negatives[picks], -0.2, 3.0, counted.gather(1, picks))
    given = {"margin": -0.2, "weight": 3.0, "picks": picks if picked else None, "known": known}
    found = cosine_contrastive_loss(users, items, negatives, **given)  # type: ignore[arg-type]
    torch.testing.assert_close(found, wanted)
    for mine, plain in zip(torch.autograd.grad(found, tensors), torch.autograd.grad(wanted, tensors), strict=True):
        torch.testing.assert_close(mine, plain)


def test_picks_in_chunks_equal_picks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    users, items, negatives = torch.randn(9, 4), torch.randn(9, 4), torch.randn(6, 4, requires_grad=True)
    picks = torch.randint(6, (9, 5))
    found = []
    for chunk in (1, 45, 2**18):
        monkeypatch.setattr("memhier.recsys.contrastive._CHUNK", chunk)
        loss = cosine_contrastive_loss(users, items, negatives, margin=0.1, weight=2.0, picks=picks)
        found.append((loss.item(), *torch.autograd.grad(loss, [negatives])))
    for loss, gradient in found[1:]:
        assert loss == found[0][0]
        assert torch.equal(gradient, found[0][1])


def test_rows_of_zeros_and_parts_without_gradient() -> None:
    users = torch.zeros(2, 4, requires_grad=True)
    items, negatives = torch.ones(2, 4), torch.ones(3, 4, requires_grad=True)
    loss = cosine_contrastive_loss(users, items, negatives, margin=0.5, weight=1.0)
    assert loss.item() == 1  # a row without a direction has cosine 0
    loss.backward()
    assert negatives.grad is not None
    assert not negatives.grad.any()
    alone = cosine_contrastive_loss(torch.ones(2, 4), items, negatives, margin=0.5, weight=1.0)
    torch.testing.assert_close(alone.item(), 0.5)
    alone.backward()


A, B = torch.ones(2, 4), torch.ones(3, 4)


@pytest.mark.parametrize(
    ("given", "options", "error", "words"),
    [
        ((A[0], A, B), {}, TypeError, "users: expected floats"),
        ((A, A.long(), B), {}, TypeError, "items: expected floats"),
        ((A, A, B[:0]), {}, ValueError, "negatives: expected .* n of 1 or more"),
        ((A[:0], A, B), {}, ValueError, "users"),
        ((A, A, B.double()), {}, ValueError, "negatives"),
        ((A, A, B[:, :3]), {}, ValueError, "negatives"),
        ((A, B, B), {}, ValueError, "items: expected 2 rows"),
        ((A, A, B), {"picks": torch.zeros(3, 1).long()}, ValueError, "picks: expected int64"),
        ((A, A, B), {"picks": torch.zeros(2, 0).long()}, ValueError, "picks: expected int64"),
        ((A, A, B), {"picks": torch.full((2, 1), 3)}, ValueError, "picks: 3 is no row of the 3 negatives"),
        ((A, A, B), {"picks": torch.full((2, 1), -1)}, ValueError, "picks: -1 is no row"),
        ((A, A, B), {"known": torch.zeros(2).long()}, ValueError, "known: expected int64"),
        ((A, A, B), {"known": torch.tensor([[2, 0]])}, ValueError, "known: 2 is no row of the 2 samples"),
        ((A, A, B), {"known": torch.tensor([[0, -1]])}, ValueError, "known: -1 is no row of the 3 negatives"),
        ((A, A, B), {"margin": 1.5}, ValueError, "margin"),
        ((A, A, B), {"weight": -1}, ValueError, "weight"),
    ],
    ids=lambda part: part if isinstance(part, str) else "",
)
def test_unfit_arguments_are_named(given: Any, options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        cosine_contrastive_loss(*given, **{"margin": 0.5, "weight": 1.0} | options)


@pytest.mark.parametrize("steps", [1, 3])
def test_tiles_are_distinct_rows_that_stay(steps: int) -> None:
    negatives = TiledNegatives(rows=50, tile=20, steps=steps, seed=4)
    tiles = [negatives.at(step) for step in range(7 * steps)]
    for step, tile in enumerate(tiles):
        assert len(tile) == len(tile.unique()) == 20
        assert torch.equal(tile, tile.sort().values)
        assert torch.equal(tile, tiles[step - step % steps])
        assert torch.equal(tile, TiledNegatives(rows=50, tile=20, steps=steps, seed=4).at(step))
    assert len({tuple(tile.tolist()) for tile in tiles}) == 7
    assert not torch.equal(tiles[0], TiledNegatives(rows=50, tile=20, steps=steps, seed=5).at(0))


def test_every_row_is_drawn_alike_and_from_a_huge_table() -> None:
    negatives = TiledNegatives(rows=40, tile=10, steps=1)
    counts = np.bincount(torch.cat([negatives.at(step) for step in range(2000)]), minlength=40)
    assert abs(counts - 500).max() < 6 * (500 * 0.75) ** 0.5
    assert negatives.at(2**62 - 1).max() < 40
    huge = TiledNegatives(rows=2**60, tile=1000, steps=1).at(3)
    assert len(huge.unique()) == 1000
    assert huge.max() > 2**59


@pytest.mark.parametrize("change", [{"rows": 0}, {"tile": 0}, {"tile": 11}, {"steps": 0}, {"seed": -1}])
def test_unfit_tiles_are_refused(change: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(change))):
        TiledNegatives(**{"rows": 10, "tile": 3, "steps": 2} | change)
    with pytest.raises(ValueError, match="step"):
        TiledNegatives(rows=10, tile=3, steps=2).at(-1)


@pytest.mark.parametrize("picked", [False, True])
def test_training_has_the_same_bits_at_any_budget(tmp_path: Path, picked: bool) -> None:
    users, items, dim, batch = 300, 400, 8, 16
    rng = np.random.default_rng(0)
    pairs = torch.from_numpy(rng.integers(0, [users, items], (320, 2)))
    drawn = TiledNegatives(rows=items, tile=24, steps=4, seed=1)
    steps = []
    for number, some in enumerate(pairs.split(batch)):
        picks = torch.from_numpy(rng.integers(0, 24, (len(some), 5))) if picked else None
        steps.append((torch.cat([some[:, 0], users + some[:, 1], users + drawn.at(number)]), picks))
    rows = nn.Embedding(users + items, dim, sparse=True)
    results = []
    for slots in (None, 70, users + items):
        module: Any = rows if slots is None else Embedding(
            users + items, dim, optimizer=Adam(lr=0.05), dram="64MiB", path=tmp_path / str(slots), policy=Belady(slots)
        )  # fmt: skip
        if slots is None:
            first = Embedding(users + items, dim, dram="64MiB", path=tmp_path / "first")
            before = first.weights(range(users + items))
            rows.weight.data.copy_(before)
            first.close()
        optimizer = torch.optim.SparseAdam([rows.weight], lr=0.05)
        losses = []
        for ids, picks in steps if slots is None else lookahead(steps, module, ids=lambda step: step[0]):
            found = module(ids)
            parts = found.split([batch, batch, 24])
            loss = cosine_contrastive_loss(*parts, margin=0.2, weight=5.0, picks=picks)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step() if slots is None else None
            losses.append(loss.item())
        results.append(
            (losses, rows.weight.detach().clone() if slots is None else module.weights(range(users + items)))
        )
        if slots is not None:
            module.close()
    assert results[0][0] == results[1][0] == results[2][0]
    assert torch.equal(results[0][1], results[1][1])
    assert torch.equal(results[0][1], results[2][1])
    assert not torch.equal(results[0][1], before)
