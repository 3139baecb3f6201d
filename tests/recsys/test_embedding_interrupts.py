"""An interrupt at any line of a call leaves tables as before the call or as after it, and never in between."""

import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from memhier.errors import MemhierError
from memhier.recsys import EmbeddingBag, EmbeddingBagConfig, ShardedEmbeddingBagCollection, lookahead
from memhier.recsys.embedding.optimizers import Adagrad
from memhier.recsys.embedding.sharding.collectives import Collectives

ROWS, DIM = 400, 4


class Trained:
    """Tables, and of all rows the weights that they should have."""

    def __init__(self, place: Path, **options: Any) -> None:
        self.place, self.options = place, options
        self.bag = self.opened(resume=False)
        self.turn = 0
        self.step(self.batch())
        self.commit()

    def opened(self, resume: bool = True) -> EmbeddingBag:
        return EmbeddingBag(
            ROWS, DIM, dram="16MiB", path=self.place, optimizer=Adagrad(lr=0.1), resume=resume, mode="sum",
            **self.options,
        )  # fmt: skip

    def batch(self) -> torch.Tensor:
        self.turn += 1
        return torch.from_numpy(np.random.default_rng(self.turn).integers(0, ROWS, (8, 3)))

    def step(self, batch: torch.Tensor) -> None:
        self.bag(batch).square().sum().backward()
        self.bag.optimizer.step()

    def rows(self) -> tuple[torch.Tensor, torch.Tensor, int]:
        every = np.arange(ROWS)
        return self.bag.weights(every), self.bag.optimizer_state(every), self.bag.steps

    def commit(self) -> None:
        self.bag.checkpoint({"turn": self.turn})
        self.committed = self.rows()

    def reopen(self) -> None:
        self.bag.close()
        self.bag = self.opened()
        assert same(self.rows(), self.committed)

    def twin(self, work: Any, place: Path) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Return the rows that the same work makes of the same tables without an interrupt."""
        raise NotImplementedError


def same(some: Any, others: Any) -> bool:
    return all(bool(np.array_equal(one, other)) for one, other in zip(some, others, strict=True))


@pytest.fixture(params=["backward", "step"])
def trained(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Trained]:
    trained = Trained(tmp_path / "t", update=request.param)
    yield trained
    trained.bag.close()


def test_an_interrupted_step_changes_all_of_its_rows_or_none(trained: Trained, interrupts: Any) -> None:
    batch = trained.batch()
    for _ in range(2):  # the result of a step on these tables
        before = trained.rows()
        trained.step(batch)
        after = trained.rows()
        trained.reopen()
        assert same(before, trained.rows()), "a step without a checkpoint leaves no trace"
    for _ in interrupts.every(lambda: trained.step(batch)):
        trained.bag.optimizer.zero_grad()
        try:
            found = trained.rows()
        except MemhierError:
            interrupts.seen["refused"] += 1
        else:
            was_made = same(found, after)
            assert was_made or same(found, before)
            interrupts.settled(was_made)
            trained.bag.checkpoint()
            trained.bag.close()
            trained.bag = trained.opened()
            assert same(trained.rows(), found)
            if was_made:  # go back to the tables before the step
                trained.bag.close()
                trained.place = trained.place.with_name(trained.place.name + "x")
                trained.bag, trained.turn = trained.opened(resume=False), 0
                trained.step(trained.batch())
                trained.commit()
                trained.turn += 1
        assert same(trained.rows(), before)


def test_interrupted_reads_of_tables_change_nothing(trained: Trained, interrupts: Any) -> None:
    batch = trained.batch()
    calls = [
        lambda: trained.bag(batch),
        lambda: [trained.bag.eval()(batch), trained.bag.train()],
        lambda: [trained.bag.stats(), trained.bag.memory_bytes, trained.bag.state_dict()],
        lambda: trained.bag.weights([1, 2]),
    ]
    before = trained.rows()
    for call in calls:
        for point in interrupts.every(call):
            interrupts.settled(was_made=False)
            trained.bag.train()
            if point % 5 == 0:
                assert same(trained.rows(), before)
                trained.bag(trained.batch())
    assert same(trained.rows(), before)


@pytest.mark.parametrize("way", ["checkpoint", "start_checkpoint"])
def test_an_interrupted_checkpoint_of_tables_is_taken_or_not(trained: Trained, interrupts: Any, way: str) -> None:
    def call() -> None:
        if way == "checkpoint":
            trained.bag.checkpoint({"turn": trained.turn})
        else:
            trained.bag.start_checkpoint({"turn": trained.turn}).result()

    trained.step(trained.batch())
    for _ in interrupts.every(call):
        now = trained.rows()
        trained.bag.close()
        trained.bag = trained.opened()
        found = trained.rows()
        was_made = same(found, now)
        assert was_made or same(found, trained.committed)
        assert was_made == (trained.bag.extra["turn"] == trained.turn)
        interrupts.settled(was_made)
        trained.committed = found
        trained.step(trained.batch())


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("interrupts", [60], indirect=True)
@pytest.mark.parametrize("way", ["checkpoint", "start_checkpoint"])
def test_an_interrupted_rank_says_all_that_the_others_wait_for_or_nothing(
    tmp_path: Path, interrupts: Any, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    said, tell = Counter[str](), Collectives.all

    def counted(ranks: Collectives, numbers: Any) -> Any:
        said["times"] += 1
        return tell(ranks, numbers)

    monkeypatch.setattr(Collectives, "all", counted)
    config = EmbeddingBagConfig(name="a", num_embeddings=ROWS, embedding_dim=DIM, feature_names=["x"])
    with ShardedEmbeddingBagCollection([config], dram="16MiB", path=tmp_path / "t") as tables:
        save = tables.checkpoint if way == "checkpoint" else lambda: tables.start_checkpoint().result()
        said.clear()
        save()
        expected = said["times"]
        assert expected > 0
        said.clear()
        for _ in interrupts.every(save):
            assert said["times"] in (0, expected)
            interrupts.settled(said["times"] > 0)
            said.clear()


def test_an_interrupted_loop_with_lookahead_can_be_begun_anew(trained: Trained, interrupts: Any) -> None:
    batches = [trained.batch() for _ in range(6)]

    def loop() -> None:
        for batch in lookahead(batches, trained.bag, ids=lambda batch: batch, window=2, prefetch=1):
            trained.bag(batch)

    before = trained.rows()
    for _ in interrupts.every(loop):
        interrupts.settled(was_made=False)
        for batch in lookahead(batches[:2], trained.bag, ids=lambda batch: batch):
            trained.bag(batch)
    assert same(trained.rows(), before)


def test_interrupted_numbers_of_a_loop_hold_nothing_up(trained: Trained, interrupts: Any) -> None:
    interrupts.roots += (threading.__file__,)  # whose conditions are lines of Python
    batches = [trained.batch() for _ in range(3)]
    loop = lookahead(batches, trained.bag, ids=lambda batch: batch, window=2, prefetch=1)
    for number, batch in enumerate(loop, 1):
        for _ in interrupts.every(loop.stats):
            interrupts.settled(was_made=False)
        assert loop.stats()["batches"] == number
        trained.bag(batch)


def test_interrupted_closing_and_opening_of_tables(trained: Trained, interrupts: Any) -> None:
    def closed() -> None:
        trained.bag.close()

    for _ in interrupts.every(closed):
        trained.reopen()
        interrupts.settled(was_made=True)

    made: list[EmbeddingBag] = []

    def opened() -> None:
        made.append(trained.opened())

    for point in range(0, 4000, 53):
        if not interrupts.strike(opened, point):
            break
        interrupts.seen["points"] += 1
        assert not made
        trained.bag = trained.opened()
        trained.reopen()
        trained.bag.close()
    made.pop().close()


def test_an_interrupted_growth_of_a_table_for_any_ids_keeps_every_row(tmp_path: Path, interrupts: Any) -> None:
    def opened(resume: bool = True) -> EmbeddingBag:
        return EmbeddingBag(rows, DIM, dram="16MiB", path=tmp_path / "t", id_space="hash64", mode="sum", resume=resume)

    def of(bag: EmbeddingBag) -> tuple[torch.Tensor, ...]:
        every = torch.cat([*bag.ids()])
        return every, bag.weights(every), bag.optimizer_state(every), bag.weights([-1])

    rows = 16
    with opened(resume=False) as bag:
        bag(torch.arange(12).view(4, 3) - 2**62).square().sum().backward()
        bag.checkpoint()
        before = of(bag)
    rows += 16
    for _ in interrupts.every(lambda: opened().close()):
        with opened() as bag:
            was_made = same(of(bag), before)
            assert was_made
        interrupts.settled(was_made=False)
        rows += 16  # the next one grows again
