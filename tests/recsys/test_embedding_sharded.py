"""Several trainers: their tables have the bits of one trainer's."""

import contextlib
import io
import re
import runpy
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import distributed as dist

from memhier.recsys import (
    Adam,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    ShardedEmbeddingBagCollection,
    lookahead,
    to_embedding_bag,
)
from memhier.recsys.embedding.sharding import shard_look_ups
from memhier.recsys.embedding.sharding.exchange import ask

SCRIPT = Path(__file__).with_name("train_in_ranks.py")


def run(training: Any, folder: Path, ranks: int, rule: str, window: int, first: int = 0, last: int = 20) -> str:
    return start(training, SCRIPT, folder, ranks, rule, window, first, last)[0]


def start(training: Any, script: Path, folder: Path, ranks: int, *arguments: Any) -> list[str]:
    """Run a script once for each rank; return the words that the first one prints."""
    return run_all(training, script, folder, ranks, *arguments)[0].split()


def run_all(training: Any, script: Path, folder: Path, ranks: int, *arguments: Any) -> list[str]:
    """Run a script once for each rank; return their outputs. One rank alone needs no process of its own."""
    folder.mkdir(exist_ok=True)
    if ranks == 1:
        told = io.StringIO()
        words = [str(script), *map(str, (folder, 1, 0, *arguments))]
        with mock.patch.object(sys, "argv", words), contextlib.redirect_stdout(told):
            runpy.run_path(str(script), run_name="__main__")
        return [told.getvalue()]
    started = [training(script, folder, ranks, rank, *arguments) for rank in range(ranks)]
    ended = [one.end() for one in started]
    assert all(status == 0 for status, _ in ended)
    return [output for _, output in ended]


@pytest.mark.long
@pytest.mark.parametrize("rule", ["sgd", pytest.param("adam", marks=pytest.mark.slow)])
def test_ranks_give_the_bits_of_one(tmp_path: Path, training: Any, rule: str) -> None:
    alone, *sent = start(training, SCRIPT, tmp_path / "one", 1, rule, 0, 0, 20)
    assert sent == ["0", "0", "{}"]
    together, critical, deferred, _ = start(training, SCRIPT, tmp_path / "two", 2, rule, 3, 0, 20)
    assert together == alone
    # Some gradients have not kept the training waiting.
    assert int(critical) > int(deferred) > 0


@pytest.mark.parametrize("rule", ["sgd", pytest.param("adagrad", marks=pytest.mark.slow)])
def test_features_of_one_table_add_up_as_on_one_rank(tmp_path: Path, training: Any, rule: str) -> None:
    alone, together = (
        start(training, SCRIPT, tmp_path / str(ranks), ranks, rule, window, 0, 20, "shared")[0]
        for ranks, window in ((1, 0), (2, 3))
    )
    assert together == alone


@pytest.mark.parametrize(
    ("ranks", "poolings", "rules"),
    [
        (4, "sum", "sgd"),
        *(
            pytest.param(ranks, "sum,mean", rule, marks=pytest.mark.slow)
            for ranks in (2, 3, 4)
            for rule in ("sgd,momentum,decay", "adagrad,row-wise adagrad", "adam,row-wise adam")
        ),
    ],
)
def test_every_rule_has_the_same_bits_on_any_ranks(
    tmp_path: Path, training: Any, ranks: int, poolings: str, rules: str
) -> None:
    alone, together = (
        run_all(training, SCRIPT.with_name("train_every_rule.py"), tmp_path / str(some), some, poolings, rules)[0]
        for some in (1, ranks)
    )
    assert together == alone
    hashes = [line.split()[-1] for line in alone.splitlines()]
    assert len(set(hashes)) >= len(hashes) // 2  # kinds differ, so that equal hashes say something


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["adagrad", "adam"])
def test_look_ups_of_a_step_are_one_update_on_any_ranks(tmp_path: Path, training: Any, rule: str) -> None:
    together, plain = (
        start(training, SCRIPT, tmp_path / str(window), 2, rule, window, 0, 20, "twice")[0] for window in (3, 0)
    )
    assert together == plain


def test_ranks_read_in_step_however_unlike_their_batches(tmp_path: Path, training: Any) -> None:
    alone = run(training, tmp_path / "one", 1, "sgd", 0)
    assert run(training, tmp_path / "two", 2, "sgd", -1) == alone


@pytest.mark.slow
def test_three_ranks_without_looking_ahead(tmp_path: Path, training: Any) -> None:
    assert run(training, tmp_path / "three", 3, "adam", 0) == run(training, tmp_path / "one", 1, "adam", 2)


def test_little_room_and_checkpoints_that_fail(tmp_path: Path, training: Any) -> None:
    # Rows of one step were held back for others' gradients while those of the next found no room.
    assert int(start(training, SCRIPT.with_name("train_in_little_room.py"), tmp_path, 2)[0]) > 0


def test_a_batch_that_one_rank_refuses_is_refused_by_all(tmp_path: Path, training: Any) -> None:
    outputs = run_all(training, SCRIPT.with_name("train_with_unfit_batches.py"), tmp_path, 2)
    (*told, first), (*own, second) = (output.splitlines() for output in outputs)
    faults = ["range", "shape", "large", "range", "shape", "large", "raises", "ends"]
    assert [line.split(": ")[0] for line in told] == [f"{fault} after 4" for fault in faults]
    for fault, line in zip(faults, told, strict=True):
        # All ranks together ask too much of one rank.
        large = "BudgetError: a step needs 4[0-9] distinct rows at once, .*step_rows=4[0-9], which would be enough"
        assert re.search(large if fault == "large" else r"RuntimeError: ranks \[1\] have no batch for this step", line)
    reasons = {
        "range": r": IndexError: features of table 'a'\[0\]=69: expected a row of table 'a', 0 to 39",
        "shape": r": ValueError: features: expected integers \[samples, 2\].*",
        "large": r": RuntimeError: ranks \[0\] cannot hold the rows .*",
        "raises": ": OSError: the file is gone",
        "ends": "",
    }
    for fault, line in zip(faults, own, strict=True):
        assert re.fullmatch(f"{fault} after 4{reasons[fault]}", line)
    # Training before and after is the same on all ranks.
    assert first == second
    assert first.startswith("40 ")


def test_the_dense_part_under_ddp(tmp_path: Path, training: Any) -> None:
    script = SCRIPT.with_name("train_with_ddp.py")
    assert start(training, script, tmp_path, 2) == start(training, script, tmp_path, 1)


CONFIGS = [
    EmbeddingBagConfig(name="a", num_embeddings=300, embedding_dim=4),
    EmbeddingBagConfig(name="b", num_embeddings=41, embedding_dim=6, pooling="mean"),
]


def test_rows_move_with_all_that_belongs_to_them(tmp_path: Path, training: Any) -> None:
    alone = run(training, tmp_path / "alone", 1, "adam", 0)
    moved = tmp_path / "moved"
    run(training, moved, 1, "adam", 0, 0, 8)
    assert start(training, SCRIPT, moved, 2, "adam", 2, 8, 13)[3] == '{"at":8,"rank":0}'
    # Neither the wrong optimizer nor other tables harm the checkpoint, nor does a training from the beginning.
    for rule, first, kind in (("sgd", 13, "plain"), ("adam", 13, "shared"), ("adam", 0, "plain")):
        (moved / "meet-3").unlink(missing_ok=True)
        started = [training(SCRIPT, moved, 3, rank, rule, 0, first, 20, kind) for rank in range(3)]
        assert [one.end()[0] for one in started] == [1] * 3
    (moved / "meet-3").unlink()
    found, *_, begun = start(training, SCRIPT, moved, 3, "adam", 0, 13, 20)
    assert found == alone
    assert begun == '{"shards":[{"at":13,"rank":0},{"at":13,"rank":1}]}'


def test_one_rank_is_a_collection(tmp_path: Path) -> None:
    configs = [
        EmbeddingBagConfig(name=name, num_embeddings=50, embedding_dim=dim, feature_names=features)
        for name, dim, features in (("a", 3, ["x", "y"]), ("b", 5, ["z"]))
    ]
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        with (
            ShardedEmbeddingBagCollection(configs, dram="64MiB", path=tmp_path / "a") as sharded,
            EmbeddingBagCollection(configs, dram="64MiB", path=tmp_path / "b") as plain,
        ):
            for seed in range(5):
                ids = torch.from_numpy(np.random.default_rng(seed).integers(0, 50, (8, 3)))
                outputs = [module(ids).values() for module in (sharded, plain)]
                assert torch.equal(*outputs)
                for output in outputs:
                    output.sin().sum().backward()
            for table in range(2):
                assert torch.equal(sharded.weights(np.arange(50), table), plain.weights(np.arange(50), table))
                assert torch.equal(to_embedding_bag(sharded, table).weight, plain.weights(np.arange(50), table))
            sharded.eval()
            assert torch.equal(sharded(ids).values(), plain(ids).values())
            with pytest.raises(IndexError, match="table 'a', 0 to 49"):
                sharded(ids + 50)
            for read in (sharded.weights, sharded.optimizer_state, sharded.initial_weights):
                with pytest.raises(IndexError, match="table 'a', 0 to 49"):
                    read([50])
    finally:
        dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_an_epoch_that_was_left_is_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batches = [torch.from_numpy(np.random.default_rng(seed).integers(0, 41, (9, 2))) for seed in range(8)]
    groups = []
    with ShardedEmbeddingBagCollection(CONFIGS, dram="64MiB", path=tmp_path / "t") as tables:

        def noted(ids: Any, bases: Any, ranks: Any) -> Any:
            groups.append(ranks)
            return ask(ids, bases, ranks)

        monkeypatch.setattr(shard_look_ups, "ask", noted)
        for some in (batches, batches[::-1]):
            for number, batch in enumerate(lookahead(some, tables, ids=lambda batch: batch, window=2)):
                tables(batch).values().sum().backward()
                if some is batches and number == 2:
                    break
        ahead = tables.look_ups.ahead
    # Training itself exchanges no ids: all were exchanged ahead, in a group of the thread's own.
    assert set(groups) == {ahead}


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("passes", [1, 3])
def test_gradients_wait_for_a_step(tmp_path: Path, passes: int) -> None:
    found = []
    for kind in (EmbeddingBagCollection, ShardedEmbeddingBagCollection):
        with kind(
            CONFIGS, optimizer=Adam(lr=0.01), dram="64MiB", path=tmp_path / kind.__name__, update="step"
        ) as tables:
            norms = []
            for step in range(4):
                for part in range(passes):
                    ids = torch.from_numpy(np.random.default_rng((step, part)).integers(0, 41, (9, 2)))
                    tables(ids).values().sin().sum().backward()
                before = tables.weights(np.arange(41), 1)
                tables.scale_gradients(0.5)
                norms.append(tables.gradient_norm())
                with pytest.raises(RuntimeError, match=f"{passes} backward passes wait"):
                    tables.checkpoint()
                tables.optimizer.step()
                assert not torch.equal(tables.weights(np.arange(41), 1), before)
            found.append([torch.stack(norms), *(tables.weights(np.arange(41), table) for table in range(2))])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)
        # Of one pass the sums are in one trainer's order.
        assert passes > 1 or one.dim() == 1 or torch.equal(one, other)


@pytest.mark.usefixtures("one_rank")
def test_weights_of_samples_get_their_gradient(tmp_path: Path) -> None:
    found = []
    for kind in (EmbeddingBagCollection, ShardedEmbeddingBagCollection):
        with kind(CONFIGS[:1], dram="64MiB", path=tmp_path / kind.__name__) as tables:
            weights = torch.linspace(-1, 1, 5).requires_grad_()
            pooled = tables({"a": (torch.tensor([1, 2, 1, 7, 9]), torch.tensor([0, 2, 3]), weights)})
            pooled.values().square().sum().backward()
            found.append(weights.grad)
            found.append(tables.weights(np.arange(10)))
    assert found[0] is not None
    assert found[2] is not None
    assert torch.equal(found[0], found[2])
    assert torch.allclose(found[1], found[3])
