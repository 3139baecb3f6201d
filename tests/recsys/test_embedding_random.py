"""Trainings drawn at random have torch's bits: rule, mode, passes and look-ups of a step, weights, padding, ahead."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from memhier.policies import Belady
from memhier.recsys import EmbeddingBag, lookahead
from tests.recsys.rules import RULES

torch.set_num_threads(1)
torch.sparse.check_sparse_tensor_invariants.disable()

STEPS = 6


@dataclass(frozen=True)
class Training:
    """The shape of a training; `parts` are the micro-batches of a step, `look_ups` those of a part."""

    rule: str
    mode: str
    update: str
    ahead: bool
    parts: int
    look_ups: int
    passes: str
    ids: torch.dtype
    weighted: bool
    padding: int | None
    rows: int
    dim: int
    seed: int

    @classmethod
    def drawn(cls, seed: int) -> "Training":
        draw = np.random.default_rng(seed)

        def one(*values: Any) -> Any:
            return values[draw.integers(len(values))]

        mode = one("sum", "mean", "mean", "max")
        rule = one("sgd", "adagrad", "adam") if mode != "max" else "sgd"  # torch has no sparse gradient of max
        update, ahead, rows = one("backward", "step"), one(False, True), one(6, 40, 300)
        return cls(
            rule, mode, update, ahead,
            # With update="backward" a look-up ends the step before, unless that waits for its own pass.
            1 if update == "backward" and ahead else one(1, 2, 3),
            one(1, 2, 3), one("one", "of each part", "of each look-up"), one(torch.int32, torch.int64),
            mode == "sum" and one(False, True), one(None, None, 0, rows - 1), rows, one(1, 5, 16), seed,
        )  # fmt: skip

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield ids and offsets of every part of every step."""
        draw = np.random.default_rng(self.seed + 1)
        for _ in range(STEPS * self.parts):
            lengths = draw.integers(0, 7, 8)
            ids = torch.from_numpy((self.rows * draw.random(lengths.sum()) ** 2).astype(np.int64))
            yield ids.to(self.ids), torch.from_numpy(np.cumsum([0, *lengths[:-1]])).to(self.ids)

    def losses(self, bag: Any, batch: tuple[Tensor, Tensor]) -> list[Tensor]:
        """Return a loss of each look-up of a part, of the same ids, in another order or all."""
        found = []
        for number in range(self.look_ups):
            ids, offsets = batch
            if number and self.seed % 2:
                ids = ids.flip(0)
            weights = torch.linspace(-1, 2 + number, len(ids)) if self.weighted else None
            output = bag(ids, offsets, weights)
            found.append((output.sin() * torch.linspace(-1, 2 + number, output.numel()).view(output.shape)).sum())
        return found

    def train(self, bag: Any, optimizer: torch.optim.Optimizer, batches: Iterable[Any]) -> None:
        """Train, with all look-ups of a step before its first pass, or each part with its own."""
        together = self.update == "backward" and not self.ahead
        waiting: list[list[Tensor]] = []
        for number, batch in enumerate(batches):
            if number % self.parts == 0:
                optimizer.zero_grad()
            waiting.append(self.losses(bag, batch))
            if not together or len(waiting) == self.parts:
                self.backward(waiting)
                waiting = []
            if number % self.parts == self.parts - 1:
                optimizer.step()

    def backward(self, waiting: list[list[Tensor]]) -> None:
        if self.passes == "one":
            groups = [[loss for losses in waiting for loss in losses]]
        elif self.passes == "of each part":
            groups = waiting
        else:
            groups = [[loss] for losses in waiting for loss in losses]
        for losses in groups:
            torch.stack(losses).sum().backward()


def check(place: Path, training: Training) -> None:
    rule, make = RULES[training.rule]
    options: dict[str, Any] = {"mode": training.mode, "padding_idx": training.padding}
    with EmbeddingBag(
        training.rows, training.dim, optimizer=rule, dram="64MiB", path=place, update=training.update,
        policy="belady" if training.ahead else Belady(150), **options,
    ) as mine:  # fmt: skip
        every = np.arange(training.rows)
        first = mine.initial_weights(every)
        theirs = nn.EmbeddingBag(
            training.rows, training.dim, sparse=training.mode != "max", _weight=first, **options
        )  # fmt: skip
        training.train(theirs, make(theirs.parameters()), training.batches())
        batches: Iterable[Any] = [*training.batches()]
        if training.ahead:
            batches = lookahead(batches, mine, ids=lambda batch: batch)
        training.train(mine, mine.optimizer, batches)
        assert torch.equal(mine.weights(every), theirs.weight), training
        assert mine.steps == STEPS


@pytest.mark.parametrize("seed", range(40))
def test_a_training_has_torchs_bits(tmp_path: Path, seed: int) -> None:
    check(tmp_path, Training.drawn(seed))


def test_look_ups_of_a_pass_add_up_before_passes_do(tmp_path: Path) -> None:
    for seed, rule in enumerate(RULES):
        check(
            tmp_path / rule,
            Training(rule, "mean", "step", True, 2, 2, "of each part", torch.int64, False, None, 40, 5, seed),
        )


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40, 640))
def test_many_trainings_have_torchs_bits(tmp_path: Path, seed: int) -> None:
    check(tmp_path, Training.drawn(seed))
