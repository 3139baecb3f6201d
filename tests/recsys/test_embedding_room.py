"""Tables far larger than their rows in use: they open in a small budget, train, resume, and say when room ends."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from memhier import backend
from memhier.errors import BudgetError
from memhier.recsys import SGD, Adagrad, EmbeddingBag, lookahead

DIM = 4


def make(path: Path, rows: int, **options: Any) -> EmbeddingBag:
    given: dict[str, Any] = {"mode": "sum", "optimizer": Adagrad(lr=0.1), "path": path, **options}
    return EmbeddingBag(rows, DIM, **given)


def test_a_billion_rows_train_as_few_do(tmp_path: Path) -> None:
    # The same rows of both tables begin with the same values.
    rng = np.random.default_rng(0)
    used = rng.integers(0, 10**9, 3000)
    batches = [torch.from_numpy(used[rng.integers(0, len(used), (64, 5))]) for _ in range(10)]
    trained = []
    for name, options in (("a", {}), ("b", {"touched": len(used)})):
        with make(tmp_path / name, 10**9, dram="32MiB", **options) as bag:
            for batch in lookahead(batches[:5], bag, ids=lambda batch: batch):
                bag(batch).square().sum().backward()
            bag.checkpoint()
        with make(tmp_path / name, 10**9, dram="32MiB", resume=True, **options) as bag:
            for batch in batches[5:]:
                bag(batch).square().sum().backward()
            assert bag.memory_bytes < 32 * 2**20
            trained.append((bag.weights(used), bag.optimizer_state(used)))
    assert torch.equal(trained[0][0], trained[1][0])
    assert torch.equal(trained[0][1], trained[1][1])


def test_the_index_takes_half_of_the_budget_at_most(tmp_path: Path) -> None:
    least = 20_000 if backend.core is not None else 8_000  # policies and maps of Python take more for a row
    for number, rows in enumerate((1000, 10**6, 3 * 10**6, 10**9, 2**40)):
        with make(tmp_path / str(number), rows, dram="32MiB") as bag:
            assert bag.tables.touched == rows if rows <= 10**6 else 10**5 < bag.tables.touched < rows
            assert bag.tables.capacity > least or bag.tables.capacity == rows


def test_room_for_rows_in_use_ends_with_words_and_grows_at_a_resume(tmp_path: Path) -> None:
    with make(tmp_path, 10**9, dram="16MiB", optimizer=SGD(lr=1.0)) as bag:
        room = bag.tables.touched
        keys = np.arange(room) * 997
        bag.tables.write(0, keys, np.ones((room, DIM), np.float32))
        with pytest.raises(BudgetError, match=f"has room for {room} of them, of which {room} were trained") as caught:
            bag(torch.tensor([[1, 2]])).sum().backward()
        assert "resume=True" in str(caught.value)
        assert not bag.steps
        bag(torch.tensor([[0, 997]])).sum().backward()  # there is room for these
        assert bag.weights([0]).tolist() == [[0.0] * DIM]
        bag.checkpoint()
    with make(tmp_path, 10**9, dram="16MiB", optimizer=SGD(lr=1.0), resume=True) as bag:
        assert bag.tables.touched == room + room // 2
        before = bag.weights([1])
        bag(torch.tensor([[1, 2]])).sum().backward()
        assert torch.equal(bag.weights([1]), before - 1)
        assert bag.weights(keys[2:]).eq(1).all()


@pytest.mark.long
def test_the_way_out_of_an_index_without_room_helps_each_time(tmp_path: Path) -> None:
    dram, filled, said = 12 * 2**20, 0, []
    for life in range(6):
        with make(tmp_path, 10**9, dram=dram, resume=life > 0) as bag:
            room = bag.tables.touched
            assert room > filled + 1
            assert bag.tables.capacity > (1000 if backend.core is not None else 800)
            bag(torch.tensor([[10**9 - 1, filled]])).sum().backward()  # the step that had no room
            bag.tables.write(0, np.arange(filled + 1, room - 1), np.ones((room - filled - 2, DIM), np.float32))
            with pytest.raises(BudgetError) as caught:
                bag(torch.tensor([[10**9 - 2, 10**9 - 3]])).sum().backward()
            bag.checkpoint()
        filled = room - 1
        with make(tmp_path, 10**9, dram=dram, resume=True) as bag:
            assert bag.tables.touched >= room  # trained rows open in the same budget
        found = re.search(r"resume=True(?: and dram=(\d+))?,", str(caught.value))
        assert found is not None
        said.append(found[1])
        dram = int(found[1] or dram)
    assert None in said
    assert str(24 * 2**20) in said
