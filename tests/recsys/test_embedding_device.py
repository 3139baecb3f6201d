"""Tables whose outputs lie on a device: the bits of tables on the CPU, and few copies that nobody waits for too early.

Most tests have a device that is none; those with a CUDA device are skipped where there is none.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from memhier.policies import Belady
from memhier.recsys import (
    SGD,
    Embedding,
    EmbeddingBag,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    Hash64,
    ShardedEmbeddingBagCollection,
    lookahead,
)
from memhier.store.segments import FullError
from tests.recsys.fake_link import FakeLink, on_fake_device
from tests.recsys.rules import RULES

torch.set_num_threads(1)
torch.sparse.check_sparse_tensor_invariants.disable()

ROWS, DIM, STEPS = 60, 6, 7
OPTIONS: dict[str, Any] = {"dram": "32MiB", "seed": 3}


def ids_of(seed: int, *shape: int) -> Tensor:
    return torch.from_numpy((ROWS * np.random.default_rng(seed).random(shape) ** 2).astype(np.int64))


def bag(path: Path, **options: Any) -> EmbeddingBag:
    return EmbeddingBag(ROWS, DIM, path=path, policy=Belady(50), **OPTIONS, **options)


def embedding(path: Path, **options: Any) -> Embedding:
    return Embedding(ROWS, DIM, 2, path=path, policy=Belady(50), **OPTIONS, **options)


def mapped(path: Path, **options: Any) -> EmbeddingBag:
    return EmbeddingBag(ROWS, DIM, mode="sum", path=path, id_space=Hash64(), **OPTIONS, **options)


def bags(path: Path, kind: Any = EmbeddingBagCollection, **options: Any) -> Any:
    configs = [
        EmbeddingBagConfig(name="a", num_embeddings=ROWS, embedding_dim=DIM, feature_names=["a", "b"]),
        EmbeddingBagConfig(name="c", num_embeddings=ROWS, embedding_dim=3, pooling="mean"),
    ]
    return kind(configs, path=path, **OPTIONS, **options)


def sharded(path: Path, **options: Any) -> Any:
    return bags(path, ShardedEmbeddingBagCollection, **options)


def sequences(path: Path, **options: Any) -> EmbeddingCollection:
    configs = [
        EmbeddingConfig(name="a", num_embeddings=ROWS, embedding_dim=DIM, feature_names=["a", "b"]),
        EmbeddingConfig(name="c", num_embeddings=ROWS, embedding_dim=3),
    ]
    return EmbeddingCollection(configs, path=path, **OPTIONS, **options)


def matrix(seed: int) -> Tensor:
    return ids_of(seed, 8, 3)


def features(seed: int) -> dict[str, Any]:
    ids, offsets = ids_of(seed, 9), torch.tensor([0, 0, 4])
    return {"a": (ids, offsets), "b": ids_of(seed + 1, 3, 2), "c": (ids_of(seed + 2, 5), torch.tensor([0, 2, 5]))}


def of_one(output: Tensor) -> Tensor:
    return output.tanh().square().sum()


def of_all(output: Any) -> Tensor:
    return of_one(output.values())


def of_some(output: Any) -> Tensor:
    return of_one(output["b"].values()) + (output["c"].values() ** 2).sum()


CASES: dict[str, tuple[Callable[..., Any], Callable[[int], Any], Callable[[Any], Tensor], int]] = {
    "bag": (bag, matrix, of_one, 1),
    "embedding": (embedding, matrix, of_one, 1),
    "any ids": (mapped, matrix, of_one, 1),
    "collection": (bags, features, of_all, 1),
    "sequences": (sequences, features, of_some, 2),  # rows and lengths
}


def rows_of(module: Any) -> list[Tensor]:
    found = []
    for table in range(len(module.specs)):
        rows = torch.arange(ROWS)
        found += [module.weights(rows, table), module.optimizer_state(rows, table)]
    return found


def train(module: Any, make: Callable[[int], Any], loss_of: Callable[[Any], Tensor], *, ahead: bool) -> list[Tensor]:
    """Train a module; return losses, and then rows with their state."""
    batches: Any = [make(10 * step) for step in range(STEPS)]
    if ahead:
        batches = lookahead(batches, module, ids=lambda batch: batch, window=2)
    found = []
    for batch in batches:
        loss = loss_of(module(batch))
        loss.backward()
        found.append(loss.detach())
        module.optimizer.step()
    return [*found, *rows_of(module)]


def counts_of(module: Any) -> dict[str, Any]:
    return {name: value for name, value in module.stats().items() if not name.endswith("_s")}


def same(mine: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(map(torch.equal, mine, theirs))


@pytest.mark.parametrize("rule", ["sgd", "adam"])
@pytest.mark.parametrize("ahead", [False, True], ids=["now", "ahead"])
@pytest.mark.parametrize("update", ["backward", "step"])
@pytest.mark.parametrize("case", CASES)
def test_bits_and_copies(tmp_path: Path, case: str, update: Any, ahead: bool, rule: str) -> None:
    make, batch_of, loss_of, sends = CASES[case]
    with (
        make(tmp_path / "cpu", optimizer=RULES[rule][0], update=update) as theirs,
        make(tmp_path / "device", optimizer=RULES[rule][0], update=update) as mine,
    ):
        link = on_fake_device(mine)
        expected = train(theirs, batch_of, loss_of, ahead=ahead)
        assert same(train(mine, batch_of, loss_of, ahead=ahead), expected)
        if "any ids" not in case:
            assert counts_of(mine) == counts_of(theirs)  # the same rows were read and evicted
        link.check_sources()
        assert link.under_way == 0
        assert (len(link.sent), len(link.fetched)) == (sends * STEPS, STEPS)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("ahead", [False, True], ids=["now", "ahead"])
def test_tables_over_ranks(tmp_path: Path, ahead: bool) -> None:
    with sharded(tmp_path / "cpu") as theirs, sharded(tmp_path / "device") as mine:
        link = on_fake_device(mine)
        expected = train(theirs, features, of_all, ahead=ahead)
        assert same(train(mine, features, of_all, ahead=ahead), expected)
        assert (len(link.sent), len(link.fetched), link.under_way) == (STEPS, STEPS, 0)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("padding", [None, 1])
def test_bags_of_every_kind(tmp_path: Path, mode: Any, padding: int | None) -> None:
    found = []
    for name in ("cpu", "device"):
        with bag(tmp_path / name, mode=mode, padding_idx=padding) as module:
            link = on_fake_device(module) if name == "device" else None
            samples = torch.rand(8, 3, generator=torch.Generator().manual_seed(0)).requires_grad_()
            for step in range(4):
                arguments = (None, samples) if mode == "sum" and step % 2 else ()
                of_one(module(matrix(step), *arguments)).backward()
            found.append([*rows_of(module), *([] if samples.grad is None else [samples.grad])])
            assert link is None or (len(link.sent), len(link.fetched)) == (4, 4)
    assert same(*found)


def test_bytes_are_those_of_the_output(tmp_path: Path) -> None:
    with bags(tmp_path) as module:
        link = on_fake_device(module)
        output = module(features(0))
        of_all(output).backward()
        assert link.sent == link.fetched == [output.values().nbytes]


def test_outputs_lie_on_the_device(tmp_path: Path) -> None:
    meta = torch.device("meta")
    with bags(tmp_path / "bags") as module:
        on_fake_device(module, result="meta")
        pooled = module(features(0))
        assert {pooled.values().device, pooled["c"].device} == {meta}
        pooled.values().sum().backward()
    with sequences(tmp_path / "sequences") as module:
        on_fake_device(module, result="meta")
        found = module(features(0))["a"]
        assert {found.values().device, found.lengths().device, found.offsets().device} == {meta}
        found.values().sum().backward()
        assert module.weights([1]).device == torch.device("cpu")


# A gradient that is on its way.


def started(path: Path, **options: Any) -> tuple[EmbeddingBag, FakeLink]:
    module = bag(path, optimizer=SGD(lr=1.0), **options)
    return module, on_fake_device(module)


@pytest.mark.parametrize("update", ["backward", "step"])
def test_backward_and_the_step_of_the_dense_part_wait_for_nothing(tmp_path: Path, update: Any) -> None:
    module, link = started(tmp_path, update=update)
    with module:
        model = nn.Sequential(module, nn.Linear(DIM, 1))
        optimizer = torch.optim.Adam(model.parameters())
        for step in range(3):
            before = module.weights(torch.arange(ROWS))
            optimizer.zero_grad()
            model(matrix(step)).sum().backward()
            optimizer.step()
            assert link.under_way == 1
            module.optimizer.step()
            assert link.under_way == 0
            assert not torch.equal(module.weights(torch.arange(ROWS)), before)


@pytest.mark.parametrize(
    "use",
    [
        lambda module: module.weights([0]),
        lambda module: module.steps,
        lambda module: module.checkpoint(),
        lambda module: module.start_checkpoint().result(),
        lambda module: module(matrix(5)),
        lambda module: module.eval()(matrix(5)),
        lambda module: module.optimizer.zero_grad(),
        lambda module: module.load_state_dict({"weight": torch.zeros(ROWS, DIM)}),
    ],
)
def test_every_use_sees_the_update(tmp_path: Path, use: Any) -> None:
    module, link = started(tmp_path)
    with module:
        of_one(module(matrix(0))).backward()
        assert link.under_way == 1
        use(module)
        assert link.under_way == 0
        assert module.tables.record.steps == [1]


def test_closed_while_a_gradient_comes(tmp_path: Path) -> None:
    module, _ = started(tmp_path)
    with module:
        of_one(module(matrix(0))).backward()


def test_a_full_disk_while_a_gradient_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, _ = started(tmp_path)
    with module:
        before = module.weights(torch.arange(ROWS))
        of_one(module(matrix(0))).backward()

        def fail(*arguments: Any, **options: Any) -> Any:
            raise FullError(28, "no space")

        with monkeypatch.context() as broken:
            broken.setattr(module.tables, "changing", fail)
            with pytest.raises(FullError, match="no space"):
                module(matrix(1))
        module(matrix(1))
        assert module.tables.record.steps == [1]
        assert not torch.equal(module.weights(torch.arange(ROWS)), before)


def test_two_passes_are_two_updates(tmp_path: Path) -> None:
    found = []
    for name in ("cpu", "device"):
        with bag(tmp_path / name, optimizer=RULES["adam"][0]) as module:
            if name == "device":
                on_fake_device(module)
            outputs = [module(matrix(0)), module(matrix(1))]
            for output in outputs:
                of_one(output).backward()
            of_one(module(matrix(2)) + module(matrix(3))).backward()
            found.append(rows_of(module))
            assert module.steps == 2
            of_one(module(matrix(4))).backward()
            of_one(module(matrix(5))).backward()
            with pytest.raises(RuntimeError, match="have had 4 updates"):
                module.optimizer.step()
    assert same(*found)


def test_an_error_while_a_gradient_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is raised once; the update is lost, as that of a backward pass that fails."""
    module, _ = started(tmp_path)
    with module:
        before = module.weights(torch.arange(ROWS))
        of_one(module(matrix(0))).backward()

        def fail(*arguments: Any, **options: Any) -> Any:
            raise MemoryError("none left")

        with monkeypatch.context() as broken:
            broken.setattr(module.tables, "changing", fail)
            with pytest.raises(MemoryError, match="none left"):
                module.checkpoint()
        assert module.checkpoint() == 1
        assert torch.equal(module.weights(torch.arange(ROWS)), before)


def test_hyperparameters_that_are_unfit(tmp_path: Path) -> None:
    module, link = started(tmp_path)
    with module:
        before = module.weights(torch.arange(ROWS))
        module.optimizer.param_groups[0]["momentum"] = 0.9  # rows have no room for it
        with pytest.raises(ValueError, match="momentum"):
            of_one(module(matrix(0))).backward()
        assert torch.equal(module.weights(torch.arange(ROWS)), before)
        module.optimizer.param_groups[0]["momentum"] = 0.0
        of_one(module(matrix(0))).backward()
        assert link.under_way
        assert not torch.equal(module.weights(torch.arange(ROWS)), before)


def test_scaled_losses_are_refused(tmp_path: Path) -> None:
    module, _ = started(tmp_path)
    with module, pytest.raises(RuntimeError, match="update='step'"):
        torch.amp.GradScaler("cpu").scale(of_one(module(matrix(0))))


def test_a_rate_that_changes_while_a_gradient_comes(tmp_path: Path) -> None:
    found = []
    for name in ("cpu", "device"):
        with bag(tmp_path / name, optimizer=SGD(lr=1.0)) as module:
            if name == "device":
                on_fake_device(module)
            for step in range(3):
                of_one(module(matrix(step))).backward()
                module.optimizer.param_groups[0]["lr"] *= 0.5
            found.append(rows_of(module))
    assert same(*found)


def test_a_pass_that_fails(tmp_path: Path) -> None:
    module, _ = started(tmp_path)
    with module:
        dense = nn.Linear(DIM, 1)
        before = module.weights(torch.arange(ROWS))

        def fail(gradient: Tensor) -> None:
            raise ArithmeticError("fails")

        first = module(matrix(0))
        weights = torch.ones(1, requires_grad=True)
        weights.register_hook(fail)
        with pytest.raises(ArithmeticError):
            (dense(first).sum() + weights.sum()).backward()
        assert torch.equal(module.weights(torch.arange(ROWS)), before)
        of_one(module(matrix(0))).backward()
        assert not torch.equal(module.weights(torch.arange(ROWS)), before)


def test_refusals_and_habits(tmp_path: Path) -> None:
    module, _ = started(tmp_path)
    with module:
        with pytest.raises(RuntimeError, match=r"create_graph=True\) through a look-up"):
            module(matrix(0)).tanh().sum().backward(create_graph=True)
        loss = of_one(module(matrix(0)))
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="backward runs only once through a look-up"):
            loss.backward()
        with pytest.warns(UserWarning, match="Anomaly"), torch.autograd.detect_anomaly(check_nan=True):
            module(matrix(0)).sum().backward()
        with torch.no_grad():
            module(matrix(0))
        before = module.weights(torch.arange(ROWS))
        loss = of_one(module(matrix(1)))
        module.requires_grad_(False)
        loss.backward()
        assert torch.equal(module.weights(torch.arange(ROWS)), before)
        assert module(torch.empty(0, 3, dtype=torch.int64)).shape == (0, DIM)


def test_micro_batches(tmp_path: Path) -> None:
    found = []
    for name in ("cpu", "device"):
        with bag(tmp_path / name, optimizer=RULES["adagrad"][0], update="step") as module:
            if name == "device":
                on_fake_device(module)
            for step in range(3):
                for part in matrix(step).chunk(2):
                    (of_one(module(part)) * 8).backward()
                norm = module.gradient_norm()
                module.scale_gradients(1 / 8)
                module.optimizer.step()
            found.append([norm, *rows_of(module)])
    assert same(*found)


@pytest.mark.parametrize("device", ["meta", "xpu"])
def test_a_device_that_is_none(tmp_path: Path, device: str) -> None:
    with pytest.raises(ValueError, match="outputs go to the CPU or to CUDA"):
        bag(tmp_path / "tables", device=device)
    assert not (tmp_path / "tables").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_here(tmp_path: Path) -> None:
    with pytest.raises((AssertionError, RuntimeError), match=r"CUDA|NVIDIA"):
        bag(tmp_path / "tables", device="cuda")
    assert not (tmp_path / "tables").exists()


# A CUDA device.

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is here")


def to_cuda(batch: Any) -> Any:
    if isinstance(batch, Tensor):
        return batch.cuda()
    if isinstance(batch, tuple):
        return tuple(map(to_cuda, batch))
    return {name: to_cuda(value) for name, value in batch.items()}


@needs_cuda
@pytest.mark.parametrize("ids_there", [False, True], ids=["ids here", "ids there"])
@pytest.mark.parametrize("ahead", [False, True], ids=["now", "ahead"])
@pytest.mark.parametrize("update", ["backward", "step"])
@pytest.mark.parametrize("case", CASES)
def test_bits_on_cuda(tmp_path: Path, case: str, update: Any, ahead: bool, ids_there: bool) -> None:
    """A loss whose gradient is exact on any device."""
    make, batch_of, _, _ = CASES[case]

    def batches(step: int) -> Any:
        return to_cuda(batch_of(step)) if ids_there else batch_of(step)

    def loss_of(output: Any) -> Tensor:
        values = [output] if isinstance(output, Tensor) else [output[name] for name in output]
        values = [value if isinstance(value, Tensor) else value.values() for value in values]
        return torch.stack([value.sum() * 0.5 for value in values]).sum()

    options: dict[str, Any] = {"optimizer": RULES["adam"][0], "update": update}
    with make(tmp_path / "cpu", **options) as theirs, make(tmp_path / "cuda", device="cuda", **options) as mine:
        assert next(mine.parameters()).device == mine.device
        expected = train(theirs, batch_of, loss_of, ahead=ahead)[STEPS:]
        assert same(train(mine, batches, loss_of, ahead=ahead)[STEPS:], expected)


@needs_cuda
def test_outputs_on_cuda(tmp_path: Path) -> None:
    with bags(tmp_path / "cpu") as theirs, bags(tmp_path / "cuda") as mine:
        model = nn.ModuleList([mine, nn.Linear(DIM, 1)]).cuda()
        for step in range(20):
            found = model[0](features(step)).values()
            assert found.device == next(model.parameters()).device
            assert torch.equal(found.cpu(), theirs(features(step)).values())
