"""Collaborative filtering on Gowalla: SimpleX's loss with HEAT's tiled negatives, or BPR, and Recall@20.

``python -m memhier.benchmarks.workloads.embedding.models.filtering --dir /path/on/the/device``: matrix factorization on
LightGCN's split, rows of 64 floats, Adam whose rate falls to 0 in a straight line, one thread. Users and items are rows
of one table. ``tiled`` negatives are a tile of items that stays for some steps and serves all samples; ``untiled`` ones
are drawn for each sample among all items, as many of them. Tables are memhier's with a share of the rows in DRAM, with
all of them, or torch's in memory; ways of the same negatives take the same steps, so their losses have the same bits,
and the count of others is a figure. Recall@20 is the mean over users of the share of held-out items among the 20 best
that the user does not have yet.

HEAT (arXiv 2304.07334) has Recall@20 of .1836 with this loss, SimpleX (arXiv 2109.12613) .1837 for its matrix
factorization, NGCF's paper (arXiv 1905.08108) .1291 for BPR. Negatives that the user has count in BPR alone. With
``--dropout`` each step leaves out some coordinates of its users, drawn from the number of the step.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from rich.console import Console
from torch import Tensor, nn

from memhier.benchmarks.bench.figures import Figure, Record
from memhier.benchmarks.datasets import data_set_folder, gowalla
from memhier.benchmarks.workloads.embedding.common import Ints, TableKind
from memhier.benchmarks.workloads.embedding.speed import Memhier, Torch, Way
from memhier.benchmarks.workloads.harness import Outcome, workload
from memhier.policies import Belady
from memhier.recsys import Normal, TiledNegatives, cosine_contrastive_loss, read_lightgcn

__all__ = ["main", "recall"]

BEST = 20
WAYS = ("tiled, some", "tiled, all", "tiled, torch", "untiled, all", "untiled, torch")


@dataclass(frozen=True, slots=True)
class Settings:
    """A training: `tile` negatives that stay for `keep` steps, epochs of at most `most` steps (0 for all)."""

    loss: str
    epochs: int
    most: int
    batch: int
    tile: int
    keep: int
    rate: float
    betas: tuple[float, float]
    margin: float
    weight: float
    decay: float
    dropout: float
    dim: int


@dataclass(frozen=True, slots=True)
class Step:
    """Rows to look up: `count` users, as many items, then negatives.

    `picks` are the places of each sample's negatives; `known` pairs of sample and place are items that the user has.
    `kept` is 0 for the coordinates of users that are dropped, and 1 for the others.
    """

    ids: Tensor
    count: int
    picks: Tensor | None
    known: Tensor | None
    kept: Tensor | None


class Known:
    """The items of each user."""

    def __init__(self, pairs: Ints, users: int, items: int) -> None:
        ordered = pairs[np.argsort(pairs[:, 0], kind="stable")]
        self._items = ordered[:, 1]
        self._starts = np.searchsorted(ordered[:, 0], np.arange(users + 1))
        self._places = np.full(items, -1)

    def among(self, users: Tensor, negatives: Tensor) -> Tensor:
        """Return int64 [p, 2]: samples, and places of negatives that their users have."""
        of, drawn = users.numpy(), negatives.numpy()
        counts = self._starts[of + 1] - self._starts[of]
        samples = np.repeat(np.arange(len(of)), counts)
        within = np.arange(len(samples)) - np.repeat(np.cumsum(counts) - counts, counts)
        self._places[drawn] = np.arange(len(drawn))
        places = self._places[self._items[self._starts[of][samples] + within]]
        self._places[drawn] = -1
        return torch.from_numpy(np.stack([samples, places], 1)[places >= 0])


class Steps:
    """The steps of a training; they depend on the settings and the number of the epoch alone."""

    def __init__(self, settings: Settings, tiled: bool) -> None:
        pairs, self.users, self.items = gowalla()
        self._pairs = torch.from_numpy(pairs)
        self._known = Known(pairs, self.users, self.items)
        self._settings = settings
        self._tiled = tiled
        self._tiles = TiledNegatives(rows=self.items, tile=settings.tile, steps=settings.keep, seed=0)
        whole = len(pairs) // settings.batch
        self.count: int = min(settings.most or whole, whole)

    def epoch(self, number: int) -> Iterator[Step]:
        """Yield the steps of an epoch."""
        order = torch.from_numpy(np.random.default_rng([0, number]).permutation(len(self._pairs)))
        for step, places in enumerate(torch.split(order, self._settings.batch)[: self.count], number * self.count):
            some = self._pairs[places]
            negatives, picks = self._negatives(step, len(some))
            ids = torch.cat([some[:, 0], self.users + some[:, 1], self.users + negatives])
            known = None if self._settings.loss == "bpr" else self._known.among(some[:, 0], negatives)
            yield Step(ids, len(some), picks, known, self._kept(step, len(some)))

    def _kept(self, step: int, count: int) -> Tensor | None:
        if not self._settings.dropout:
            return None
        drawn = np.random.default_rng([2, step]).random((count, self._settings.dim), np.float32)
        return torch.from_numpy((drawn >= self._settings.dropout).astype(np.float32))

    def _negatives(self, step: int, count: int) -> tuple[Tensor, Tensor | None]:
        rng = np.random.default_rng([1, step])
        of_each = 1 if self._settings.loss == "bpr" else self._settings.tile
        if self._tiled:
            tile = self._tiles.at(step)
            if self._settings.loss != "bpr":
                return tile, None
            return tile, torch.from_numpy(rng.integers(0, len(tile), (count, of_each)))
        drawn = torch.from_numpy(rng.integers(0, self.items, (count, of_each)))
        seen = torch.zeros(self.items, dtype=torch.bool)
        seen[drawn.view(-1)] = True
        return seen.nonzero()[:, 0], (seen.cumsum(0) - 1)[drawn]


def loss_of(settings: Settings, step: Step, rows: Tensor) -> Tensor:
    """Return the loss of a step."""
    users, items, negatives = torch.tensor_split(rows, [step.count, 2 * step.count])
    users = users if step.kept is None else users * step.kept
    if settings.loss == "ccl":
        return cosine_contrastive_loss(
            users, items, negatives, margin=settings.margin, weight=settings.weight, picks=step.picks, known=step.known
        )
    assert step.picks is not None
    others = negatives[step.picks[:, 0]]
    size = users.square().sum() + items.square().sum() + others.square().sum()
    ranked: Tensor = nn.functional.logsigmoid((users * (items - others)).sum(1)).mean()
    return settings.decay * size / step.count - ranked


def recall(users: Tensor, items: Tensor, train: Ints, test: Ints) -> float:
    """Return Recall@20 of inner products: the mean, over users with pairs in `test`, of those among the 20 best.

    Pairs are int64 [n, 2] of user and item; items of a user in `train` are left out.
    """
    found = []
    held, known = _by_user(test, len(users)), _by_user(train, len(users))
    some = [user for user in range(len(users)) if len(held[user])]
    for start in range(0, len(some), 128):
        part = some[start : start + 128]
        scores = users[part] @ items.T
        for at, user in enumerate(part):
            scores[at, known[user]] = -torch.inf
        best = scores.topk(min(BEST, len(items)), 1).indices.numpy()
        found += [np.isin(held[user], best[at]).mean() for at, user in enumerate(part)]
    return float(np.mean(found))


def _by_user(pairs: Ints, users: int) -> list[Ints]:
    ordered = pairs[np.argsort(pairs[:, 0], kind="stable")]
    return np.split(ordered[:, 1], np.searchsorted(ordered[:, 0], np.arange(1, users)))


class Training:
    """One way of training, with its losses and its seconds of processor time by epoch."""

    def __init__(self, folder: Path, name: str, share: float, settings: Settings) -> None:
        negatives, place = name.split(", ")
        self._settings = settings
        self._steps = Steps(settings, negatives == "tiled")
        rows = self._steps.users + self._steps.items
        start = Normal(0, 0.01)
        options = {"betas": settings.betas}
        kind = TableKind(
            settings.dim, "adam", settings.rate, sequences=True, same_start=True, initial=start, options=options
        )
        slots = int(share * rows) if place == "some" else rows
        self._way: Way = (
            Torch([rows], kind)
            if place == "torch"
            else Memhier(folder, [rows], np.arange(rows), Belady(slots), 8, kind)
        )
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def run_epoch(self, number: int) -> None:
        """Train for an epoch."""
        total = self._settings.epochs * self._steps.count
        started = time.process_time()
        steps: Any = self._steps.epoch(number)
        step: Any
        for step in self._way.batches(steps):
            self._way.set_rate(self._settings.rate * (1 - len(self.losses) / total))
            loss = loss_of(self._settings, step, self._way.look(step.ids))
            torch.autograd.backward(loss)
            self._way.step()
            self.losses.append(loss.item())
        self.seconds.append(time.process_time() - started)

    def recall(self) -> float:
        """Return Recall@20 on the held-out pairs."""
        rows = self._way.weights()
        if self._settings.loss == "ccl":
            rows = nn.functional.normalize(rows)
        train, users, _ = gowalla()
        test = np.concatenate([part.numpy() for part in read_lightgcn(data_set_folder("gowalla") / "test.txt.xz")])
        return recall(rows[:users], rows[users:], train, test)

    def close(self) -> None:
        """Free the table."""
        self._way.close()


@workload
@click.option("--way", "ways", multiple=True, type=click.Choice(WAYS), default=WAYS[:3], show_default=True)
@click.option("--share", default=0.05, show_default=True, help="Of the rows in DRAM, where some are.")
@click.option("--loss", type=click.Choice(["ccl", "bpr"]), default="ccl", show_default=True)
@click.option("--epochs", default=20, show_default=True)
@click.option("--most", default=0, show_default=True, help="Steps of an epoch; 0 for all.")
@click.option("--batch", default=1024, show_default=True)
@click.option("--tile", default=1024, show_default=True, help="Negatives in a tile, or of each sample.")
@click.option("--keep", default=8, show_default=True, help="Steps that a tile stays.")
@click.option("--rate", default=5e-3, show_default=True)
@click.option("--betas", nargs=2, type=float, default=(0.9, 0.999), show_default=True, help="Of Adam.")
@click.option("--margin", default=0.4, show_default=True)
@click.option("--weight", default=150.0, show_default=True, help="Of the negatives.")
@click.option("--decay", default=1e-4, show_default=True, help="Of the rows, in BPR.")
@click.option("--dropout", default=0.0, show_default=True, help="Share of a user's coordinates that a step leaves out.")
@click.option("--dim", default=64, show_default=True)
@click.option("--recall/--no-recall", "ranks", default=True, show_default=True, help="Rank items for all users.")
def main(scratch: Path, ways: tuple[str, ...], share: float, ranks: bool, **settings: Any) -> Outcome:
    """Train by each way, epoch by epoch in turn, and measure recall at the end."""
    chosen = Settings(**settings)
    torch.sparse.check_sparse_tensor_invariants.disable()  # type: ignore[no-untyped-call]
    console = Console(stderr=True)
    trainings = {name: Training(scratch / name, name, share, chosen) for name in ways}
    for number in range(chosen.epochs):
        for name, training in trainings.items():
            training.run_epoch(number)
            loss = np.mean(training.losses[-(len(training.losses) // (number + 1)) :])
            console.print(f"{name}: epoch {number + 1}, loss {loss:.4f}, {training.seconds[-1]:.1f} s", highlight=False)
    figures: list[Figure] = []
    for name, training in trainings.items():
        title = name.replace("some", f"{share:.0%} in DRAM").replace("all", "all in DRAM")
        if ranks:
            figures.append(Figure.of(f"Recall@20, {title}", training.recall(), "share", "more"))
        figures.append(Figure.of(f"epoch, {title}, processor time", training.seconds, "s", "less", clock=True))
        first = trainings[next(other for other in ways if other.split(",")[0] == name.split(",")[0])]
        others = int(np.sum(np.array(first.losses) != np.array(training.losses)))
        figures.append(Figure.of(f"losses of other bits, {title}", others, "steps", "less"))
    details = {name: {"losses": each.losses, "seconds": each.seconds} for name, each in trainings.items()}
    for training in trainings.values():
        training.close()
    scale = f"Gowalla, rows of {chosen.dim} floats, {chosen.epochs} epochs, batches of {chosen.batch}"
    return Outcome(Record(figures, scale=scale), details={"ways": details})


if __name__ == "__main__":
    main()
