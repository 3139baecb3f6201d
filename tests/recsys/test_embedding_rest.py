"""lookahead over tables that are all in DRAM: it does nothing, and begins again once rows have to be read."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from memhier.recsys import Adagrad, EmbeddingBag, lookahead

torch.set_num_threads(1)

ROWS, DIM, DRAM = 400, 8, "64MiB"


def batches(count: int, first: int = 0, stop: int = ROWS, seed: int = 0) -> list[Tensor]:
    rng = np.random.default_rng(seed)
    return [torch.from_numpy(rng.integers(first, stop, (16, 2))) for _ in range(count)]


def make(path: Path, **options: Any) -> EmbeddingBag:
    return EmbeddingBag(ROWS, DIM, mode="sum", optimizer=Adagrad(lr=0.1), dram=DRAM, path=path, **options)


def train(bag: EmbeddingBag, loader: Any) -> list[float]:
    losses = []
    for batch in loader:
        loss = bag(batch).sin().sum()
        loss.backward()
        losses.append(loss.item())
    return losses


def readers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "memhier-lookahead"]


def slowly(loader: list[Tensor], seconds: float) -> Iterator[Tensor]:
    for batch in loader:
        time.sleep(seconds)
        yield batch


@pytest.mark.parametrize("seconds", [0, 0.003])
def test_epochs_that_rest_have_the_same_bits(tmp_path: Path, seconds: float) -> None:
    with make(tmp_path / "plain") as plain, make(tmp_path / "ahead") as bag:
        for epoch, count in enumerate((0, 1, 8, 40, 40)):
            loader = batches(count, seed=epoch)
            ahead = lookahead(slowly(loader, seconds) if seconds else loader, bag, ids=lambda batch: batch)
            assert train(bag, ahead) == train(plain, loader)
            assert ahead.position == ahead.stats()["batches"] == count
            assert not readers()
        assert torch.equal(bag.weights(np.arange(ROWS)), plain.weights(np.arange(ROWS)))
        assert bag.stats()["first_touches"] == plain.stats()["first_touches"]


def test_rows_of_a_checkpoint_are_read_ahead_again(tmp_path: Path) -> None:
    loader = [*batches(60, stop=100), *batches(60, first=100), *batches(60, seed=1)]
    with make(tmp_path / "plain") as plain:
        train(plain, batches(100))
        expected = train(plain, loader)
    with make(tmp_path / "ahead") as bag:
        train(bag, batches(100))
        bag.checkpoint()
    with make(tmp_path / "ahead", resume=True) as bag:
        assert train(bag, lookahead(loader, bag, ids=lambda batch: batch)) == expected
        assert bag.stats()["refetches"] == len(np.unique(np.concatenate(batches(100))))


def test_an_epoch_at_rest_goes_on_from_its_position(tmp_path: Path) -> None:
    loader = batches(60)
    with make(tmp_path / "plain") as plain, make(tmp_path / "ahead") as bag:
        train(bag, lookahead(loader, bag, ids=lambda batch: batch))
        ahead = lookahead(loader, bag, ids=lambda batch: batch)
        for number, batch in enumerate(ahead, 1):
            bag(batch).sin().sum().backward()
            if number == 25:
                break
        state = ahead.state_dict()
        assert state["position"] == 25
        again = lookahead(loader, bag, ids=lambda batch: batch)
        again.load_state_dict(state)
        rest = train(bag, again)
        train(plain, loader)
        assert train(plain, loader)[25:] == rest


def test_errors_at_rest_are_those_of_the_loader(tmp_path: Path) -> None:
    def broken() -> Iterator[Tensor]:
        yield from batches(40)
        raise OSError("the data is gone")

    with make(tmp_path) as bag:
        train(bag, lookahead(batches(40), bag, ids=lambda batch: batch))
        ahead = lookahead(broken(), bag, ids=lambda batch: batch)
        with pytest.raises(OSError, match="the data is gone"):
            train(bag, ahead)
        assert ahead.position == 40
        first = iter(lookahead(batches(40), bag, ids=lambda batch: batch))
        next(first)
        train(bag, lookahead(batches(5), bag, ids=lambda batch: batch))
        with pytest.raises(RuntimeError, match="another epoch"):
            next(first)


def test_batches_are_not_read_before_their_turn_at_rest(tmp_path: Path) -> None:
    taken: list[int] = []

    def counted() -> Iterator[Tensor]:
        for number, batch in enumerate(batches(30)):
            taken.append(number)
            yield batch

    with make(tmp_path) as bag:
        train(bag, lookahead(batches(40), bag, ids=lambda batch: batch))
        epoch = iter(lookahead(counted(), bag, ids=lambda batch: batch))
        bag(next(epoch))
        assert taken == [0]
