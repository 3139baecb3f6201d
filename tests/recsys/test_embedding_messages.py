"""Errors speak of the arguments that the caller gave, and come before anything has changed."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from memhier.errors import BudgetError, ClosedError
from memhier.policies import Belady
from memhier.recsys import SGD, EmbeddingBag, EmbeddingBagCollection, EmbeddingBagConfig, lookahead

torch.set_num_threads(1)
torch.sparse.check_sparse_tensor_invariants.disable()

ROWS, DIM = 60, 3
INTERNAL = ("tier", "batch=", "keys", "slots", "announced", "ticket", "log", "pinned", "loan", " rows=")


def make(path: Path, **options: Any) -> EmbeddingBag:
    return EmbeddingBag(ROWS, DIM, mode="sum", **({"dram": "32MiB", "path": path} | options))


def said(error: BaseException) -> str:
    words = str(error)
    assert not any(word in words for word in INTERNAL), words
    return words


def test_rows_beyond_touched(tmp_path: Path) -> None:
    # So many rows that the index has room for some alone.
    options: dict[str, Any] = {"mode": "sum", "dram": "32MiB", "path": tmp_path, "optimizer": SGD(lr=1.0)}
    with EmbeddingBag(10**9, DIM, touched=10, **options) as bag:
        bag(torch.arange(8)[:, None]).sum().backward()
        before = bag.weights(np.arange(ROWS))
        with pytest.raises(BudgetError) as caught:
            bag(torch.arange(6, 14)[:, None]).sum().backward()
        assert "touched=10: 6 rows of this step were never trained before, beside 8 that were" in said(caught.value)
        assert "touched=14" in said(caught.value)
        assert torch.equal(bag.weights(np.arange(ROWS)), before)
        assert bag.steps == 1
        bag(torch.tensor([[8, 9]])).sum().backward()  # there is room for these
        assert torch.equal(bag.weights([8]), before[8:9] - 1)
        bag.checkpoint()
    with pytest.raises(BudgetError) as caught:
        EmbeddingBag(10**9, DIM, touched=9, resume=True, **options)
    assert "touched=9: 10 rows" in said(caught.value)


def test_rows_beyond_a_step(tmp_path: Path) -> None:
    with make(tmp_path / "a", step_rows=10) as bag:
        with pytest.raises(BudgetError, match="step_rows=12, which would be enough") as caught:
            bag(torch.arange(12)[:, None])
        said(caught.value)
        assert bag.weights(np.arange(ROWS)).shape == (ROWS, DIM)  # reading takes as many calls as it needs
        bag.load_state_dict({"weight": torch.zeros(ROWS, DIM)})
        assert not bag.weights(np.arange(ROWS)).any()
    with make(tmp_path / "b", policy=Belady(10)) as bag:
        kept = bag(torch.arange(6)[:, None])
        with pytest.raises(BudgetError, match="6 distinct rows at once, beside 6 of look-ups before it") as caught:
            bag(torch.arange(6, 12)[:, None])
        said(caught.value)
        kept.sum().backward()
        bag(torch.arange(6, 12)[:, None]).sum().backward()


@pytest.mark.parametrize(("name", "value"), [("touched", 0), ("touched", 1.5), ("step_rows", 0), ("step_rows", "ten")])
def test_unfit_sizes_are_named(tmp_path: Path, name: str, value: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=f"{name}=") as caught:
        make(tmp_path / "t", **{name: value})
    said(caught.value)
    assert not (tmp_path / "t").exists()


def test_ids_that_are_no_rows_are_named_by_their_argument(tmp_path: Path) -> None:
    with make(tmp_path / "a") as bag:
        for call, words in (
            (lambda: bag(torch.tensor([[ROWS]])), r"input\[0\]=60: expected a row of table 'weight', 0 to 59"),
            (lambda: bag.weights([3, -1]), r"rows\[1\]=-1"),
            (lambda: bag.optimizer_state([ROWS]), r"rows\[0\]=60"),
            (lambda: bag.initial_weights([ROWS]), r"rows\[0\]=60"),
        ):
            with pytest.raises(IndexError, match=words):
                call()
    config = EmbeddingBagConfig(name="item", num_embeddings=5, embedding_dim=2)
    with (
        EmbeddingBagCollection([config], dram="32MiB", path=tmp_path / "b") as tables,
        pytest.raises(IndexError, match=r"features of table 'item'\[1\]=5: expected a row .* 0 to 4"),
    ):
        tables(torch.tensor([[1], [5]]))


def test_other_calls_inside_of_a_lookahead_loop(tmp_path: Path) -> None:
    batches = [torch.tensor([[number, number + 1]]) for number in range(6)]
    with make(tmp_path) as bag:
        ahead = lookahead(batches, bag, ids=lambda batch: batch)
        for number, batch in enumerate(ahead):
            for call in (
                ()
                if number
                else (
                    lambda: bag(torch.tensor([[40]])),
                    lambda: bag.load_state_dict({"weight": torch.zeros(ROWS, DIM)}),
                )
            ):
                with pytest.raises(RuntimeError, match=r"close\(\)") as caught:
                    call()
                said(caught.value)
            bag(batch).sum().backward()
        ahead.close()
        bag.load_state_dict({"weight": torch.zeros(ROWS, DIM)})


def test_tables_that_were_closed_or_forked(tmp_path: Path) -> None:
    bag = make(tmp_path)
    bag(torch.tensor([[1]])).sum().backward()
    child = os.fork()
    if child == 0:
        try:
            bag.weights([1])
        except ClosedError as error:
            os._exit(0 if "which forked this one" in said(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    bag.close()
    for call in (
        lambda: bag(torch.tensor([[1]])),
        lambda: bag.eval()(torch.tensor([[1]])),
        lambda: bag.weights([1]),
        bag.checkpoint,
        bag.start_checkpoint,
        bag.stats,
        lambda: bag.load_state_dict({"weight": torch.zeros(ROWS, DIM)}),
    ):
        with pytest.raises(ClosedError, match="the tables were closed") as caught:
            call()
        said(caught.value)
