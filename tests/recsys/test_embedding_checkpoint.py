"""Checkpoints: a training killed anywhere and resumed ends as an undisturbed one; faults; exports."""

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from memhier.errors import BudgetError, ClosedError, FormatError
from memhier.policies import Belady
from memhier.recsys import (
    SGD,
    Adagrad,
    Adam,
    EmbeddingBag,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    Normal,
    QuantisedTable,
    export_npy,
    export_parquet,
    export_quantised,
    export_safetensors,
    lookahead,
    to_embedding_bag,
)
from memhier.store.store import Store
from memhier.table.tiered import KIND

torch.set_num_threads(1)
torch.sparse.check_sparse_tensor_invariants.disable()

SCRIPT = Path(__file__).with_name("train_until_killed.py")
ROWS, DIM = 300, 5


def run(training: Any, folder: Path, rule: str, slots: int, kill_after: int | None) -> str | None:
    """Train to the end, and return the hash; or kill the training once it has saved so often."""
    started = training(SCRIPT, folder, 40, slots, rule)
    with started.stdout:
        for number, line in enumerate(started.stdout, 1):
            if line.startswith("end"):
                assert started.wait() == 0
                return str(line.split()[1])
            if number == kill_after:
                started.process.kill()
                break
    assert started.wait() == -signal.SIGKILL
    return None


@pytest.mark.parametrize("rule", ["adam", pytest.param("sgd", marks=pytest.mark.slow)])
def test_killed_and_resumed_training_ends_as_an_undisturbed_one(tmp_path: Path, training: Any, rule: str) -> None:
    undisturbed = run(training, tmp_path / "a", rule, 2000, None)
    assert undisturbed is not None
    # Resumed with another budget each time.
    assert run(training, tmp_path / "b", rule, 120, 1) is None
    assert run(training, tmp_path / "b", rule, 100, None) == undisturbed


def make(path: Path, **options: Any) -> EmbeddingBag:
    return EmbeddingBag(ROWS, DIM, mode="sum", **({"dram": "64MiB", "path": path, "policy": Belady(64)} | options))


def train(bag: Any, steps: int, seed: int = 0) -> None:
    for ids in np.random.default_rng(seed).integers(0, ROWS, (steps, 8, 3)):
        bag(torch.from_numpy(ids)).sin().sum().backward()


def test_a_checkpoint_has_weights_state_and_hyperparameters(tmp_path: Path) -> None:
    with make(tmp_path, optimizer=Adagrad(lr=0.1)) as bag:
        train(bag, 20)
        bag.optimizer.param_groups[0]["lr"] = 0.05
        bag.checkpoint({"position": 20})
        weights, state = bag.weights(np.arange(ROWS)), bag.optimizer_state(np.arange(ROWS))
        train(bag, 3)  # lost
    with make(tmp_path, optimizer=Adagrad(lr=0.1), resume=True, dram="48MiB", policy="belady") as bag:
        assert bag.steps == 20
        assert bag.extra == {"position": 20}
        assert bag.optimizer.param_groups[0]["lr"] == 0.05
        assert torch.equal(bag.weights(np.arange(ROWS)), weights)
        assert torch.equal(bag.optimizer_state(np.arange(ROWS)), state)


def test_a_checkpoint_beside_the_training_has_its_own_moment(tmp_path: Path) -> None:
    with make(tmp_path, optimizer=Adagrad(lr=0.1)) as bag:
        train(bag, 10)
        weights = bag.weights(np.arange(ROWS))
        future = bag.start_checkpoint({"position": 10})
        train(bag, 10, seed=1)
        assert future.result(60) == 1
        assert not torch.equal(bag.weights(np.arange(ROWS)), weights)
        assert json.loads(bytes(bag.state_dict()["weight"].tolist()))["steps"] == [10]
    with make(tmp_path, optimizer=Adagrad(lr=0.1), resume=True) as bag:
        assert (bag.steps, bag.extra) == (10, {"position": 10})
        assert torch.equal(bag.weights(np.arange(ROWS)), weights)


def test_a_checkpoint_is_not_overwritten_unasked(tmp_path: Path) -> None:
    with make(tmp_path) as bag:
        train(bag, 2)
        bag.checkpoint()
    with pytest.raises(FileExistsError, match="after 2 updates; pass resume=True"):
        make(tmp_path)
    for options, words in (
        ({"optimizer": Adam()}, "optimizer"),
        ({"seed": 1}, "seed"),
    ):
        with pytest.raises(FormatError, match=words):
            make(tmp_path, resume=True, **options)
    with pytest.raises(FormatError, match="tables"):
        EmbeddingBag(ROWS + 1, DIM, mode="sum", dram="64MiB", path=tmp_path, resume=True)


def test_state_dict_is_small_and_names_the_checkpoint(tmp_path: Path) -> None:
    with make(tmp_path / "a") as bag:
        train(bag, 4)
        bag.checkpoint()
        state = nn.Sequential(bag).state_dict()
        assert [*state] == ["0.weight"]
        assert state["0.weight"].nbytes < 4096
        assert json.loads(bytes(state["0.weight"].tolist()))["steps"] == [4]
        bag.load_state_dict(bag.state_dict())
        train(bag, 1)
        with pytest.raises(RuntimeError, match="resume=True"):
            bag.load_state_dict({"weight": state["0.weight"]})
        dense = to_embedding_bag(bag)
        assert torch.equal(dense.weight, bag.weights(np.arange(ROWS)))
        with make(tmp_path / "b") as other:
            other.load_state_dict(dense.state_dict())
            assert torch.equal(other.weights(np.arange(ROWS)), dense.weight)
            with pytest.raises(RuntimeError, match="expected"):
                other.load_state_dict({"weight": torch.zeros(3, 3)})
            with pytest.raises(RuntimeError, match="Missing"):
                other.load_state_dict({})


def test_tables_are_written_out_as_they_are(tmp_path: Path) -> None:
    configs = [
        EmbeddingBagConfig(name=name, num_embeddings=ROWS, embedding_dim=dim) for name, dim in (("a", 3), ("b", 5))
    ]
    with EmbeddingBagCollection(configs, dram="64MiB", path=tmp_path / "t", policy=Belady(50)) as tables:
        for seed in range(10):
            ids = torch.from_numpy(np.random.default_rng(seed).integers(0, ROWS, (16, 2)))
            tables(ids).values().sin().sum().backward()
        weights = [tables.weights(np.arange(ROWS), table).numpy() for table in range(2)]
        export_npy(tables, tmp_path / "b.npy", 1)
        assert np.array_equal(np.load(tmp_path / "b.npy"), weights[1])
        export_safetensors(tables, tmp_path / "all.safetensors")
        loaded = load_file(tmp_path / "all.safetensors")
        assert np.array_equal(loaded["a"].numpy(), weights[0])
        assert np.array_equal(loaded["b"].numpy(), weights[1])
        parquet = pytest.importorskip("pyarrow.parquet")
        export_parquet(tables, tmp_path / "b.parquet", 1)
        table = parquet.read_table(tmp_path / "b.parquet")
        assert np.array_equal(np.stack(table["embedding"].to_numpy()), weights[1])
        for dtype, allowed in (("int8", np.ptp(weights[1], axis=1) / 255 * 0.501), ("fp16", np.full(ROWS, 1e-3))):
            export_quantised(tables, tmp_path / dtype, 1, dtype)  # type: ignore[arg-type]
            served = QuantisedTable(tmp_path / dtype)
            assert served.shape == (ROWS, 5)
            assert (np.abs(served.rows(np.arange(ROWS)).numpy() - weights[1]).max(axis=1) <= allowed).all()
        with pytest.raises(IndexError):
            served.rows([ROWS])
        with pytest.raises(FormatError):
            QuantisedTable(tmp_path / "b.npy")
        with pytest.raises(ValueError, match="int4"):
            export_quantised(tables, tmp_path / "x", 1, "int4")  # type: ignore[arg-type]
        with pytest.raises(OSError, match="no such folder"):
            export_npy(tables, tmp_path / "no such folder" / "b.npy")
    assert not [*tmp_path.glob("*.part")]


def test_gradients_add_up_until_the_step(tmp_path: Path) -> None:
    with make(tmp_path, optimizer=SGD(lr=0.1), update="step") as bag:
        theirs = nn.EmbeddingBag(ROWS, DIM, mode="sum", sparse=True, _weight=bag.initial_weights(np.arange(ROWS)))
        optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1)
        for ids in np.random.default_rng(0).integers(0, ROWS, (6, 3, 4, 3)):
            for some in torch.from_numpy(ids):
                bag(some).sin().sum().backward()
                theirs(some).sin().sum().backward()
            with pytest.raises(RuntimeError, match=r"optimizer\.step"):
                bag.checkpoint()
            assert theirs.weight.grad is not None
            assert torch.allclose(bag.gradient_norm(), theirs.weight.grad.coalesce().values().norm())
            bag.scale_gradients(0.5)
            theirs.weight.grad = theirs.weight.grad * 0.5
            bag.optimizer.step()
            optimizer.step()
            optimizer.zero_grad()
        assert torch.equal(bag.weights(np.arange(ROWS)), theirs.weight)
        before = bag.weights(np.arange(ROWS))
        bag(some).sum().backward()
        bag.optimizer.zero_grad()
        bag.optimizer.step()
        assert torch.equal(bag.weights(np.arange(ROWS)), before)


@pytest.mark.parametrize("call", ["pwrite", "fsync"])
def test_a_disk_that_fails_leaves_the_last_checkpoint(
    tmp_path: Path, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make(tmp_path, optimizer=Adagrad()) as bag:
        train(bag, 6)
        bag.checkpoint()
        saved = bag.weights(np.arange(ROWS))
        train(bag, 6, seed=1)

        def fails(*_: Any) -> int:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        for name in ("pwrite", "pwritev", "write", "writev", "fsync", "fdatasync"):
            if (call == "fsync") == name.startswith("f") and hasattr(os, name):
                monkeypatch.setattr(os, name, fails)
        with pytest.raises((OSError, ClosedError), match=r"Input/output error|could not be written"):
            bag.checkpoint()
        monkeypatch.undo()
        with pytest.raises(ClosedError, match="reopen"):
            train(bag, 1)
    with make(tmp_path, optimizer=Adagrad(), resume=True) as bag:
        assert torch.equal(bag.weights(np.arange(ROWS)), saved)


@pytest.mark.parametrize("rule", ["sgd", "adagrad"])
def test_a_full_disk_loses_nothing(tmp_path: Path, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With room made, the same step or checkpoint succeeds, and the training ends as another run."""
    rows, write = 30_000, os.pwrite
    found = []

    def fails(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def open_bag(kind: str, **options: Any) -> EmbeddingBag:
        chosen = SGD(lr=0.1) if rule == "sgd" else Adagrad(lr=0.1)
        options |= {"optimizer": chosen, "dram": "16MiB", "path": tmp_path / kind, "policy": Belady(3000)}
        return EmbeddingBag(rows, 64, mode="sum", **options)

    for kind in ("roomy", "full"):
        with open_bag(kind) as bag:
            refused = 0
            for number, ids in enumerate(np.random.default_rng(0).integers(0, rows, (40, 500, 4))):
                calls: list[Any] = [lambda ids=ids, bag=bag: bag(torch.from_numpy(ids)).sin().sum().backward()]
                calls += [bag.checkpoint] if number % 10 == 4 else []
                calls += [lambda bag=bag: bag.start_checkpoint().result()] if number % 10 == 9 else []
                for call in calls:
                    monkeypatch.setattr(os, "pwrite", fails if kind == "full" and number % 5 else write)
                    try:
                        call()
                    except OSError as error:
                        if error.errno != errno.ENOSPC:
                            raise
                        refused += 1
                        monkeypatch.setattr(os, "pwrite", write)
                        call()
            assert (refused > 5) == (kind == "full")
            monkeypatch.undo()
            bag.checkpoint()
        with open_bag(kind, resume=True) as bag:
            assert bag.steps == 40
            found.append(bag.weights(np.arange(rows)))
    assert torch.equal(*found)


def test_a_loop_that_looks_ahead_goes_on_once_there_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, write = 30_000, os.pwrite
    batches = [*torch.from_numpy(np.random.default_rng(0).integers(0, rows, (30, 500, 4)))]
    found, refused = [], 0

    def fails(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for kind in ("roomy", "full"):
        rule, path = Adagrad(lr=0.1), tmp_path / kind
        with EmbeddingBag(rows, 64, mode="sum", optimizer=rule, dram="16MiB", path=path, policy=Belady(6000)) as bag:
            epoch, seen, batch = iter(lookahead(batches, bag, ids=lambda batch: batch, window=4)), 0, None
            full = {*range(4, len(batches), 5)} if kind == "full" else set()
            while seen < len(batches):
                if seen in full:
                    full.remove(seen)  # the disk has room again after the first refusal
                    monkeypatch.setattr(os, "pwrite", fails)
                try:
                    batch = next(epoch) if batch is None else batch
                    bag(batch).sin().sum().backward()
                    seen, batch = seen + 1, None
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                    refused += 1
                    monkeypatch.setattr(os, "pwrite", write)
            monkeypatch.undo()
            assert bag.steps == len(batches)
            found.append(bag.weights(np.arange(rows)))
    assert refused > 0
    assert torch.equal(*found)


def test_budgets_that_are_too_small_say_what_would_be_enough(tmp_path: Path) -> None:
    with pytest.raises(BudgetError, match="would be enough"):
        make(tmp_path / "a", dram=1000, policy="belady")
    with make(tmp_path / "b", policy=Belady(10)) as bag:
        with pytest.raises(BudgetError, match=r"a step needs 20 distinct rows at once, .* would be enough"):
            bag(torch.arange(20).view(10, 2))
        bag(torch.arange(10).view(5, 2)).sum().backward()


def test_a_table_of_a_trillion_bytes_is_made_at_once(tmp_path: Path) -> None:
    rows = 10**12 // 128
    with EmbeddingBag(rows, 32, dram="32MiB", path=tmp_path, touched=10_000, optimizer=Adagrad()) as bag:
        ids = torch.tensor([[0, rows - 1], [5, rows // 2]])
        bag(ids).sum().backward()
        bag.checkpoint()
        assert bag.stats()["first_touches"] == 4
    assert sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file()) < 2**20
    with EmbeddingBag(rows, 32, dram="32MiB", path=tmp_path, touched=10_000, optimizer=Adagrad(), resume=True) as bag:
        assert not torch.equal(bag.weights([rows - 1]), bag.initial_weights([rows - 1]))


def test_cold_rows_may_be_rounded(tmp_path: Path) -> None:
    found = {}
    for codec in ("none", "fp16", "int8ef"):
        with make(tmp_path / codec, codec=codec, policy=Belady(40)) as bag:
            train(bag, 20)
            bag.checkpoint()
            found[codec] = bag.weights(np.arange(ROWS))
    for codec, allowed in (("fp16", 0.01), ("int8ef", 0.001)):
        difference = (found[codec] - found["none"]).abs().max()
        assert 0 < difference < allowed
    with pytest.raises(ValueError, match='use "int8ef"'):
        make(tmp_path / "int8", codec="int8")


@pytest.mark.parametrize("codec", ["none", "fp16", "int8ef"])
def test_rows_that_are_no_numbers_leave_as_others_do(tmp_path: Path, codec: str) -> None:
    with make(tmp_path, codec=codec, policy=Belady(40)) as bag:
        bag(torch.tensor([[1, 2]])).mul(float("nan")).sum().backward()
        for start in range(100, 300, 40):
            bag(torch.arange(start, start + 40)[:, None]).sum().backward()
        assert bag.stats()["evictions"] > 100
        bag.checkpoint()
        assert bag.weights([1, 2]).isnan().all()
        assert not bag.weights(np.arange(3, 300)).isnan().any()


def test_a_row_that_outgrew_its_codec_is_named_and_the_last_commit_stays(tmp_path: Path) -> None:
    rule = SGD(lr=1.0)
    with make(tmp_path, codec="fp16", policy=Belady(40), optimizer=rule) as bag:
        bag(torch.tensor([[1, 2]])).sum().backward()
        bag.checkpoint()
        before = bag.weights([1, 2])
        bag(torch.tensor([[2]])).mul(1e5).sum().backward()
        for write in (bag.checkpoint, lambda: bag(torch.arange(10, 50)[:, None])):
            with pytest.raises(ValueError, match=r"row of key 2 cannot be written: .* largest number is 65504"):
                write()
    with make(tmp_path, codec="fp16", policy=Belady(40), optimizer=rule, resume=True) as bag:
        torch.testing.assert_close(bag.weights([1, 2]), before, rtol=0, atol=1e-3)


@pytest.mark.parametrize("codec", ["fp16", "bf16", "int8ef"])
def test_state_is_never_rounded(tmp_path: Path, codec: str) -> None:
    for rule in (Adagrad(), Adam(), SGD(lr=0.1, momentum=0.9)):
        with pytest.raises(ValueError, match="would round the state"):
            make(tmp_path, codec=codec, optimizer=rule)
        assert not (tmp_path / "catalog").exists()
    make(tmp_path, codec=codec, optimizer=SGD(lr=0.1)).close()


def test_numbers_of_numpy_are_numbers(tmp_path: Path) -> None:
    def open_bag(**options: Any) -> EmbeddingBag:
        options |= {"seed": np.int64(3), "initial": Normal(std=np.float32(0.1)), "policy": Belady(64)}  # type: ignore[arg-type]
        rule = SGD(lr=np.float32(0.1))  # type: ignore[arg-type]
        return EmbeddingBag(np.int64(ROWS), np.int32(DIM), optimizer=rule, dram="64MiB", path=tmp_path, **options)  # type: ignore[arg-type]

    with open_bag() as bag:
        train(bag, 2)
        bag.checkpoint()
        weights = bag.weights(np.arange(ROWS))
    with open_bag(resume=True) as bag:
        assert bag.steps == 2
        export_npy(bag, tmp_path / "weights.npy")
        assert np.array_equal(np.load(tmp_path / "weights.npy"), weights.numpy())


def test_a_step_beyond_the_working_memory_names_the_argument(tmp_path: Path) -> None:
    with make(tmp_path, step_rows=10) as bag:
        for loader in ([torch.arange(20)[None]], lookahead([torch.arange(20)[None]], bag, ids=lambda ids: ids)):
            with pytest.raises(BudgetError, match=r"a step needs 20 distinct rows.* step_rows=20"):
                list(map(bag, loader))
        bag(torch.arange(10)[None]).sum().backward()


@pytest.mark.parametrize("content", [bytes(100), b"\x02" + bytes(7) + b"[]", b"short", None])
def test_what_is_no_quantised_table_is_said_to_be_none(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "table"
    if content is None:  # one that was cut short
        with make(tmp_path / "t") as bag:
            export_quantised(bag, path)
        content = path.read_bytes()[:-1]
    path.write_bytes(content)
    with pytest.raises(FormatError, match="table"):
        QuantisedTable(path)


def test_memory_counts_the_store_and_goes_with_the_tables(tmp_path: Path) -> None:
    bag = EmbeddingBag(4000, 256, dram="32MiB", path=tmp_path)
    bag(torch.arange(4000).reshape(8, -1)).sum().backward()
    before = bag.memory_bytes
    bag.checkpoint()
    with Store.open(tmp_path, KIND) as store:
        assert store.memory_bytes > 4 * 1000  # checksums of the pages of rows
        assert bag.memory_bytes >= before + sum(info.memory_bytes for info in store.segments().values())
    bag.close()
    assert bag.memory_bytes == 0


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the kernel does not count private memory")
@pytest.mark.parametrize("kind", ["start_checkpoint", pytest.param("checkpoint", marks=pytest.mark.slow)])
def test_private_memory_stays_within_the_budget_with_a_checkpoint_a_step(tmp_path: Path, kind: str) -> None:
    script = SCRIPT.with_name("train_within_memory.py")
    command = [sys.executable, str(script), str(tmp_path), "64MiB", "140", kind]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=800, check=True)
    most, held = map(int, ended.stdout.split())
    # The last eighth is for the working memory of a step.
    assert 32 * 2**20 < held < 56 * 2**20
    assert most < 60 * 2**20


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the kernel does not count private memory")
@pytest.mark.parametrize("ids", ["rows", "hash64"])
def test_a_million_rows_in_use_of_a_billion_take_256_mib(tmp_path: Path, ids: str) -> None:
    script = SCRIPT.with_name("train_within_memory.py")
    command = [sys.executable, str(script), str(tmp_path), "256MiB", "500", "checkpoint", str(10**9), "256", "10", ids]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=800, check=True)
    most, held = map(int, ended.stdout.split())
    assert held <= most < 240 * 2**20
